"""The command line as a whole: showing, completing, where it writes, launching again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from support.cells import slow
from support.command_lines import examined
from support.commands import TINY, command
from support.launched import Launched
from support.paths import ROOT
from support.run_files import config_of, result
from titanlike import cli
from titanlike.cli import JOBS, LISTED, TOOLS
from titanlike.core.config.files import make_new_folder
from titanlike.core.config.groups.optimization import DecayLr
from titanlike.core.config.groups.pipeline import LoopedSchedule
from titanlike.core.config.parse import to_plain, write_config
from titanlike.core.config.schema import Config

TRAIN = str(ROOT / "train.py")
RUN = [*TINY, "model.num_hidden_layers=2", "steps=1", "data=synthetic"]


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """With every import on stderr."""
    line = [sys.executable, "-X", "importtime", TRAIN, *arguments]
    settings = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return subprocess.run(line, cwd=cwd, env={**os.environ, **env}, **settings)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "line, offered",
    [
        ("train.py schedule=inter", "schedule=interleaved1f1b"),
        ("titanlike verify -m pp=2 fsdp.z", "fsdp.zero="),
    ],
)
def test_tab_completes_groups_choices_and_keys_without_torch(
    tmp_path: Path, line: str, offered: str
) -> None:
    done = run("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert offered in done.stdout.split() and "torch" not in imported(done)


def test_help_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert "titanlike" in imported(done)
    assert not imported(done) & {"torch", "hydra", "omegaconf", "wandb"}


def test_every_command_is_in_a_group_of_help_and_in_the_documentation() -> None:
    listed = [name for names in LISTED.values() for name in names]
    assert sorted(listed) == sorted([*JOBS, *TOOLS])
    table = (ROOT / "docs/configuration.md").read_text()
    assert [name for name in listed if f"`titanlike {name}`" not in table] == []


def test_versions_are_those_of_titanlike_and_of_what_it_runs_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["--version"], ["plan", "--version"]):
        monkeypatch.setattr(sys, "argv", ["titanlike", *words])
        cli.main()
        said = capsys.readouterr().out
        names = dict(line.split(None, 1) for line in said.splitlines())
        assert [*names] == ["titanlike", "torch", "CUDA", "NCCL", "Hydra", "Python"]
        commit = re.fullmatch(r".+ \(commit ([0-9a-f]{12}|unknown)(-dirty)?\)", names["titanlike"])
        assert commit if (ROOT / ".git").exists() else "commit" not in names["titanlike"]
        assert names["torch"] == torch.__version__


@pytest.mark.slow
def test_packages_that_a_command_does_not_use_are_not_imported(tmp_path: Path) -> None:
    """Those of extras, and what draws: `--check` and the default data take none of them."""
    heavy = {"transformers", "datasets", "jinja2", "pyarrow", "tokenizers", "wandb", "matplotlib"}
    assert not imported(run("--check", "logger=none", cwd=tmp_path)) & heavy


def test_the_config_can_be_shown_from_any_folder_without_its_secrets(tmp_path: Path) -> None:
    words = ["data.path=https://me:sesame@host/x"]
    shown = yaml.safe_load(run("pp=4", *words, "--cfg", "job", cwd=tmp_path).stdout)
    assert shown["pp"] == 4 and "hydra" not in shown
    assert shown["data"]["path"] == "https://***@host/x" and "sesame" not in str(shown)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_launched_again_from_its_config(tmp_path: Path) -> None:
    """The command is the one that the file itself names; every value survives the way."""
    first = Launched("hello", "seed=3", "optimizer.eps=1e-12", "data.text_key='1e5'", cwd=tmp_path)
    assert first.wait()[0] == 0
    (config,) = tmp_path.rglob("config.yaml")
    before = config.read_text()
    assert f"--config-path {shlex.quote(str(config.parent))}" in before.splitlines()[1]
    again = Launched("hello", "--config-path", config.parent, cwd=tmp_path / "outputs")
    assert again.wait()[0] == 0
    assert config.read_text() == before
    assert len(list(tmp_path.rglob("result.json"))) == 1, "it goes on in its own run directory"


def test_an_installed_package_adds_choices_by_an_entry_point(tmp_path: Path) -> None:
    """The package `mine` is installed as far as Python can tell: code and metadata on its path."""
    (tmp_path / "mine" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("CONF = __path__[0] + '/conf'\n")
    (tmp_path / "mine" / "conf" / "model" / "mine.yaml").write_text("name: mine.Model\nwidth: 3\n")
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[titanlike.plugins]\nmine = mine\n")
    done = run("model=mine", "--cfg", "job", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert yaml.safe_load(done.stdout)["model"] == {"name": "mine.Model", "width": 3}


@pytest.mark.slow
def test_commands_that_start_nothing_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("from titanlike.does_not_exist import x\n")
    (tmp_path / "raising.py").write_text("def Model(**words):\n    raise RuntimeError('no')\n")
    (tmp_path / "file").write_text("")
    given = {path.name for path in tmp_path.iterdir()}
    for line in (
        "--help",
        "--check checkpoint.folder=outputs/new/checkpoints",
        "pp=300",
        "model=own model.name=failing.Model",
        "model=own model.name=raising.Model",
        "checkpoint.folder=file/in/a/file",
        "run_dir=file/in/a/file",
        "run_dir=outputs/given steps=0",
        "-m seed=1,2 steps=0",
        "-m seed=1,2 --check",
        "-m seed=1,2 hydra.sweep.dir=${no_such_key}",
        "hydra.run.dir=${no_such_key}",
    ):
        done = command(*RUN, *line.split(), cwd=tmp_path)
        assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
        left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
        assert left == given, (line, done.stdout, done.stderr)


def test_a_run_writes_to_hydras_folder_and_resumes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run of one process it listens on loopback alone, whatever the cluster has set."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    words = ["schedule=interleaved1f1b", "hydra.run.dir=mine/at-${now:%H-%M-%S}"]
    done = command(*RUN, *words, "checkpoint.last=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (path.parent for path in tmp_path.glob("mine/at-*/result.json"))
    assert not (tmp_path / "outputs").exists()
    words = ["schedule=gpipe", "optimizer.lr=1e-4", "steps=2"]
    again = command("--config-path", str(run_dir), *words, cwd=tmp_path)
    assert again.returncode == 0 and "resuming from step 1" in again.stdout, again.stderr
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["schedule"] == {"name": "gpipe", "microbatches": None}


def test_runs_started_in_the_same_second_have_separate_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(10) as pool:
        made = [*pool.map(make_new_folder, [tmp_path / "outputs" / "day" / "12-00-00"] * 10)]
    assert len({*made}) == 10 and all(folder.is_dir() for folder in made)


@pytest.mark.grid
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_completes_though_its_streams_are_closed(closed: str, tmp_path: Path) -> None:
    line = f"{shlex.join([sys.executable, TRAIN, *RUN, 'pp=2', 'run_dir=run'])} {closed}"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=120).returncode == 0
    assert result(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("optimizer.lr=${seed}e-4", 3e-4),
        ("batch_size=${oc.env:NUMBER}", 32),
        ("data.text_key=${oc.env:NUMBER}", "32"),  # a text remains one
        *slow(
            ("optimizer.clip=${oc.env:NOTHING}", None),
            ("logger.tags=['${seed}0',b]", ["30", "b"]),
            ("model.hidden_size=${seed}2", 32),
        ),
    ],
)
def test_an_interpolated_value_is_checked_like_a_typed_one(
    word: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBER", "32")
    monkeypatch.setenv("NOTHING", "null")
    checked = examined("seed=3", word)
    assert checked.problems == []
    found = to_plain(checked.config)
    for name in word.partition("=")[0].split("."):
        found = found[name]
    assert found == value and type(found) is type(value)
    (wrong,) = examined("seed=3", "optimizer.lr=${seed}e-4x").problems
    assert str(wrong).startswith("optimizer.lr=3e-4x: must be a number")


@pytest.mark.slow
def test_interpolations_work_in_sweep_jobs(tmp_path: Path) -> None:
    done = command(*TINY, "-m", "seed=1,2", "optimizer.lr=${seed}e-4", "run_dir=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [config_of(tmp_path / "s" / job).optimizer.lr for job in "01"] == [1e-4, 2e-4]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    schedule = LoopedSchedule(microbatches=8, stages_per_rank=4)
    config = Config(run_dir=str(tmp_path), seed=7, schedule=schedule, lr=DecayLr(final=0.5))
    write_config(config, tmp_path)
    return tmp_path


def test_a_choice_replaces_the_groups_keys_and_leaves_the_rest(run_folder: Path) -> None:
    words = ["schedule=gpipe", "logger=none", "optimizer=sgd", "optimizer.momentum=0.5"]
    checked = examined("--config-path", str(run_folder), *words)
    assert checked.problems == []
    config = checked.config
    assert to_plain(config.schedule) == {"name": "gpipe", "microbatches": None}
    assert (config.logger.name, config.optimizer.momentum) == ("none", 0.5)
    assert (config.seed, config.lr) == (7, DecayLr(final=0.5))
    assert config.run_dir == str(run_folder)
    # without a choice the keys of the run are kept
    checked = examined("--config-path", str(run_folder), "schedule.microbatches=4")
    assert checked.problems == []
    assert checked.config.schedule == LoopedSchedule(microbatches=4, stages_per_rank=4)


def test_the_folder_is_named_where_a_file_or_another_folder_is_given(run_folder: Path) -> None:
    (run_folder / "checkpoints").mkdir()
    for part in ("config.yaml", "checkpoints"):
        (problem,) = examined("--config-path", str(run_folder / part)).problems
        assert problem.fix == f"give --config-path {run_folder}"
    (problem,) = examined("--config-path", str(run_folder / "nothing")).problems
    assert "no such folder" in str(problem)


def test_a_wrong_choice_is_an_error(run_folder: Path) -> None:
    words = ["schedule=gpipee", "experiment=gpt2_124m"]
    nearest, experiment = examined("--config-path", str(run_folder), *words).problems
    assert "write schedule=gpipe" in str(nearest)
    assert "complete config of a run" in str(experiment)
