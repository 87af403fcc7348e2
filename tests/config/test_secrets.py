"""Keys, tokens and passwords: refused in a config, *** wherever a text might show them, and written
nowhere: the run directory of commands with planted secrets is searched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commands import TINY, command
from titanlike.core.config.credentials import (
    find_secrets,
    is_secret_name,
    redact,
    redact_override,
    redact_value,
)
from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import VARIANTS, Config
from titanlike.run.checks import problems, secret_problems

TEXTS = {  # with a credential -> how it may be shown
    "s3://me:sesame@bucket/runs": "s3://***@bucket/runs",
    "simplecache::https://me:se@same@host/x": "simplecache::https://***@host/x",
    "redis://:sesame@host": "redis://***@host",
}
HARMLESS = [
    "ssh://git@github.com/a/b",
    "abfs://container@account.dfs.core.windows.net/x",
    "hf://datasets/user/name@revision/x",
    "http://host:8080/a@b",
    "step  1/1  loss 5.5423  grad_norm 0.78  lr 1.5e-04  476 tok/s  mem 328 MiB",
    "sbatch --time 1:00 --partition=gpu --max-tokens 5 --tokenizer bytes -p gpu",
]


def test_passwords_in_urls_are_redacted_and_lookalikes_are_not() -> None:
    for text, shown in TEXTS.items():
        assert redact(text) == redact(redact(text)) == shown
    for text in HARMLESS:
        assert redact(text) == text and not list(find_secrets({"key": text}))


def test_secret_names_are_distinguished_from_token_and_key_names() -> None:
    for name in (
        *("password", "db_pwd", "api_key", "apiKey", "token", "hf_token", "authToken", "secret"),
        *("access_key", "aws_secret_access_key", "client_secret", "private_key", "credentials"),
    ):
        assert is_secret_name(name), name
    for name in (
        *("max_tokens", "tokens", "tokenizer", "pad_token", "eos_token_id", "text_key", "key"),
        *("keep", "keep_every", "vocab_size", "token_file", "password_path", "secret_name"),
    ):
        assert not is_secret_name(name), name
    # and no shipped key or default counts as one
    for group, variants in VARIANTS.items():
        for variant in variants.values():
            assert not [*filter(is_secret_name, variant.__dataclass_fields__)], group
    assert not secret_problems(Config())


def test_values_of_secret_environment_variables_are_redacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But no short ones, no words that switch something, and no places of files."""
    harmless = {"SHORT_TOKEN": "short", "TOKENIZERS_PARALLELISM": "disabled"}
    harmless |= {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/hosts"}
    named = {"DB_PASS": "mark-of-pass", "SIGNING_KEY": "mark-of-key", "SERVER_PWD": "mark-of-pwd"}
    named |= {"PROXY_AUTH": "me:mark-of-auth", "PGPASSWORD": "mark of 7 words"}
    named |= {"CLOUD_CREDENTIALS": '{"id": "mark-of-credentials"}'}
    for name, value in (named | harmless).items():
        monkeypatch.setenv(name, value)
    for value in named.values():
        assert redact(f"run --with {value}, then") == "run --with ***, then"
        assert [key for key, _ in find_secrets({"a": [f"x{value}y"]})] == ["a[0]"]
    assert redact("short, disabled, /etc/hosts") == "short, disabled, /etc/hosts"


def test_a_config_with_a_secret_is_refused_without_printing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is; told alone, for another room might quote it."""
    monkeypatch.setenv("HF_TOKEN", "sesame-from-the-environment")
    arguments = {
        "storage_options": {"secret": "sesame1", "key": "x"},
        "urls": ["https://h/x", "https://me:sesame2@h/x"],
        "password": 12345678,
        "token": 5,
        "pad_token": "<pad>",
        "under": "x/sesame-from-the-environment/y",
        "credentials": "/etc/hosts",
        "api_key": "HF_TOKEN",
    }
    folders = Checkpoint(folder="s3://me:sesame3@b/x", start_from="https://me:sesame4@h/x")
    told = problems(Config(data=Custom("no.such.function", arguments), checkpoint=folders))
    keys = "data.storage_options.secret data.urls[1] data.password data.under checkpoint.folder "
    assert [problem.key for problem in told] == (keys + "checkpoint.start_from").split()
    text = "\n".join(map(str, told))
    assert "sesame" not in text and "12345678" not in text
    assert text.count("keep it in the environment") == 6
    assert "data.under=***: it contains the value of the environment variable HF_TOKEN" in text


def test_a_command_line_is_checked_for_secrets_before_it_is_parsed() -> None:
    """All values of a sweep, keys that do not exist, and Hydra's own."""
    words = ["seed=1", "data.path=a,https://me:sesame@h/x", "+nonsense.password=a,b", "~data.path"]
    words += ["hydra.sweep.dir=s3://me:sesame@b", "data.tokenizer=x", "data.text_key=y"]
    told = secret_problems(None, words)
    keys = ["data.path", "nonsense.password", "hydra.sweep.dir"]
    assert [problem.key for problem in told] == keys
    assert "sesame" not in "\n".join(map(str, told))
    assert redact_override("data.password=open sesame,x") == "data.password=***"
    assert redact_override("data.password=null") == "data.password=null"


def test_a_mistake_at_a_secrets_key_does_not_show_it() -> None:
    for problem in (
        Problem("optimizer.password", "open sesame", "no such key as 'open sesame'", "x=sesame"),
        Problem("data", {"name": "x", "api_key": "sesame"}, "no such choice"),
        Problem("seed", "https://me:sesame@h", "must be an integer"),
        Problem("--config-name https://me:sesame@h", "", "not found"),
    ):
        assert "sesame" not in str(problem) and "***" in str(problem)
    assert str(Problem("pp", 3, "too many", "pp=2")) == "pp=3: too many; write pp=2"


@given(value=st.recursive(st.text() | st.integers() | st.none() | st.floats(), st.lists))
@settings(max_examples=20)
def test_non_secrets_are_not_redacted(value) -> None:
    if not list(find_secrets(value, "key")):
        assert [redact_value("key", value)] == [value]


PLANTED = {
    "MY_DB_PASSWORD": "correct-horse-99",
    "HF_TOKEN": "a-token-of-hugging-face",
    "WANDB_API_KEY": "0123456789" * 4,
}
DATA = """
import os
from titanlike.core.data.sources import Data
from titanlike.core.data.synthetic import SyntheticSource

class Failing:
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        if os.path.exists("run/checkpoints/step-00000001/COMMITTED"):
            password = os.environ["MY_DB_PASSWORD"]
            print("logging in with", password, flush=True)
            raise RuntimeError(f"https://me:{password}@db and {password!r} were refused")
        return self.source[index]

def data(seq_len, vocab_size):
    parts = (SyntheticSource(vocab_size, seq_len, 0, part) for part in (0, 1))
    about = "fails after the first checkpoint"
    return Data(*map(Failing, parts), vocab_size, about, fingerprint="failing")
"""


@pytest.fixture
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
def test_an_error_that_quotes_a_secret_is_redacted_in_every_file(
    planted: None, tmp_path: Path
) -> None:
    """Not in any rank's log, error file or result, events, checkpoint or W&B's files."""
    words = ["data=synthetic", "data.name=leaky.data", "pp=2", "run_dir=run"]
    words += ["logger=wandb", "checkpoint.every=1", "verify=off"]  # else it is the first to fail
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


def test_a_command_that_holds_secrets_writes_nothing(planted: None, tmp_path: Path) -> None:
    words = ["data=synthetic", "data.name=leaky.data", "run_dir=runs/${oc.env:HF_TOKEN}"]
    words += ["+data.nested.path=x/${oc.env:MY_DB_PASSWORD}/y", "+data.password=sesame"]
    words += ["checkpoint.folder=s3://me:sesame@bucket/x", "api_key=sesame"]
    words += ["data.path=https://me:sesame@h/x", "checkpoint.start_from=https://me:sesame@h/x"]
    done = command("-m", *TINY, *words, cwd=tmp_path)
    assert done.returncode == 2
    text = done.stdout + done.stderr
    assert "7 errors in the config; nothing was started" in text
    assert not any(secret in text for secret in [*PLANTED.values(), "sesame"])
    assert os.listdir(tmp_path) == ["leaky.py"]


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
