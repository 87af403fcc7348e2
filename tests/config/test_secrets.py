"""Nothing secret is written: the run directory of commands with planted secrets is searched."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.paths import ROOT
from titanlike.config.errors import quoted

PLANTED = {
    "MY_DB_PASSWORD": "correct-horse-99",
    "HF_TOKEN": "a-token-of-hugging-face",
    "WANDB_API_KEY": "0123456789" * 4,
}
# by the ends of their names; each has a mark that is searched for everywhere
NAMED = {
    "DB_PASS": "mark-of-pass",
    "SIGNING_KEY": "mark-of-key",
    "SERVER_PWD": "mark-of-pwd",
    "PROXY_AUTH": "me:mark-of-auth",
    "CLOUD_CREDENTIALS": '{"id": "mark-of-credentials"}',
    "PGPASSWORD": "mark-7",
}
SUBMIT = (
    "--export=ALL,API_KEY=mark-of-export,N=5 -H 'Authorization: Bearer mark-of-header' "
    "--token mark-of-flag --password=mark-of-password -p mark-of-p https://me:mark-of-url@host/x "
    "--time 1:00"
)
DATA = """
import os
from titanlike.data.sources import Data, SyntheticSource

class Failing:
    def __init__(self, source):
        self.source, self.reads = source, 0

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > 20:
            password = os.environ["MY_DB_PASSWORD"]
            print("logging in with", password, flush=True)
            raise RuntimeError(f"https://me:{password}@db and {password!r} were refused")
        return self.source[index]

def data(seq_len, vocab_size):
    parts = (SyntheticSource(vocab_size, seq_len, 0, part) for part in (0, 1))
    about = "fails in the second batch"
    return Data(*map(Failing, parts), vocab_size, about, fingerprint="failing")
"""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "leaky.py").write_text(DATA)


def leaks(folder: Path, *more: str) -> list[str]:
    """Files, or names of files, that hold a planted secret."""
    secrets = [*PLANTED.values(), *more]
    found = []
    for path in folder.rglob("*"):
        text = str(path.relative_to(folder)).encode()
        if path.is_file():
            text += path.read_bytes()
        found += [f"{path}: {secret}" for secret in secrets if secret.encode() in text]
    return found


@pytest.mark.slow
def test_an_error_that_quotes_a_secret_leaves_it_nowhere(tmp_path: Path) -> None:
    """Not in any rank's log, error file or result, events, checkpoint or W&B's files."""
    words = ["data=synthetic", "data.name=leaky.data", "pp=2", "run_dir=run"]
    words += ["logger=wandb", "checkpoint.every=1"]
    done = command(*TINY, *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "https://***@db and '***' were refused" in done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in PLANTED.values())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["error"].endswith("RuntimeError: https://***@db and '***' were refused")
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "COMMITTED").exists()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    logs = [(tmp_path / "run" / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert all("logging in with ***" in log for log in logs)
    assert any("'***' were refused" in log for log in logs)  # one may be ended before it raises
    assert leaks(tmp_path / "run") == []


def test_a_command_that_holds_secrets_writes_nothing(tmp_path: Path) -> None:
    done = command(
        "-m",
        *TINY,
        "data=synthetic",
        "data.name=leaky.data",
        "run_dir=runs/${oc.env:HF_TOKEN}",
        "+data.nested.path=x/${oc.env:MY_DB_PASSWORD}/y",
        "+data.password=sesame",
        "checkpoint.folder=s3://me:sesame@bucket/x",
        "checkpoint.start_from='https://host/x?sig=sesame'",
        "data.path=https://me:sesame@host/x",
        "sede=hf_" + "sesame" * 5,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    text = done.stdout + done.stderr
    assert "7 errors in the config; nothing was started" in text
    assert not any(secret in text for secret in [*PLANTED.values(), "sesame"])
    assert os.listdir(tmp_path) == ["leaky.py"]


@pytest.mark.slow
def test_a_sweeps_submit_command_runs_with_its_secrets_which_are_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it prints them or fails; the resume asks for them."""
    for name, value in NAMED.items():
        monkeypatch.setenv(name, value)
    scheduler, got = tmp_path / "scheduler", tmp_path / "got"
    scheduler.write_text(
        f'#!/bin/bash\necho "$*" >> {got}\necho "$* $DB_PASS $PROXY_AUTH"\n'
        'case "$*" in *seed=3*) exit 1;; esac\n'
        f'cd {ROOT} && {sys.executable} train.py "${{@: {len(shlex.split(SUBMIT)) + 1}}}"\n'
    )
    scheduler.chmod(0o755)
    submit = f"sweep.submit={quoted(f'{scheduler} {SUBMIT}')}"
    words = ["-m", *TINY, "steps=1", "logger=wandb", "logger.mode=offline", "seed=2,3"]
    done = command(*words, submit, "run_dir=sweep", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "job 0: seed=2 submitted: --export=ALL,API_KEY=***,N=5" in done.stdout
    assert "ended with 1: --export=ALL,API_KEY=***,N=5" in done.stderr
    assert "mark-" not in done.stdout + done.stderr and leaks(tmp_path / "sweep", "mark-") == []
    result = json.loads((tmp_path / "sweep" / "0" / "result.json").read_text())
    assert result["status"] == "completed"
    assert "--token ***" in (tmp_path / "sweep" / "0" / "config.yaml").read_text()
    assert got.read_text().count("mark-of-p https://me:mark-of-url@host/x --time 1:00") == 2
    submit = f"sweep.submit={quoted('x --export=API_KEY=*** --token ***')}"
    done = command(*words, submit, "run_dir=sweep", "sweep.resume=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "secrets are not written down; give them again" in done.stderr
    assert "--export=API_KEY=***, --token ***" in done.stderr


def test_an_error_names_a_variable_of_the_environment_and_does_not_show_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where another key quotes it; whatever the variable's name."""
    monkeypatch.setenv("ANYTHING", "mark-of-anything")
    monkeypatch.setenv("SHORT", "m1")
    values = ["value=${oc.env:ANYTHING}", "data.path=x/${oc.env:ANYTHING}/y", "pp=${oc.env:SHORT}"]
    done = command(*TINY, *values, "loss.name=${value}", "run_dir=run", cwd=tmp_path)
    assert done.returncode == 2
    for shown in (*values, "loss.name=${oc.env:ANYTHING}"):
        assert f"  {shown}: " in done.stderr
    assert "mark-" not in done.stdout + done.stderr and "m1" not in done.stderr
