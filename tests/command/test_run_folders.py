"""outputs/ has a folder for each run that began, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.forked import ForkedProgram
from support.paths import ROOT

RUN = [*TINY, "steps=1", "data=synthetic"]
FAILING = """
from torch import nn
from titanlike.does_not_exist import x
"""


@pytest.mark.slow
def test_commands_that_start_nothing_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "raising.py").write_text("def Model(**words):\n    raise RuntimeError('no')\n")
    (tmp_path / "file").write_text("")
    given = {path.name for path in tmp_path.iterdir()}
    for words in (
        ["--help"],
        ["--check"],
        ["--cfg", "job"],
        ["--check", "checkpoint.folder=outputs/new/checkpoints"],
        ["pp=300"],
        ["stepz=3"],
        ["model=own", "model.name=failing.Model"],
        ["model=own", "model.name=raising.Model"],
        ["checkpoint.folder=file/in/a/file"],
        ["run_dir=file/in/a/file"],
        ["run_dir=outputs/given", "steps=0"],
        ["-m", "seed=1,2", "steps=0"],
        ["-m", "seed=1,2", "--check"],
        ["-m", "seed=1,2", "hydra.sweep.dir=${no_such_key}"],
        ["hydra.run.dir=${no_such_key}"],
    ):
        done = command(*RUN, *words, cwd=tmp_path)
        assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
        assert not (tmp_path / "outputs").exists(), (words, done.stdout, done.stderr)
        assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == given


def test_a_run_writes_where_hydra_is_told_to_also_if_the_time_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run of one process it listens on loopback alone: what the cluster has set is not used."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    done = command(*RUN, "hydra.run.dir=mine/at-${now:%H-%M-%S}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len([*tmp_path.glob("mine/at-*/result.json")]) == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    starts = [
        ForkedProgram([str(ROOT / "train.py"), *RUN], tmp_path, dict(os.environ)) for _ in range(10)
    ]
    try:
        ends = [(start.communicate(timeout=240), start.poll()) for start in starts]
    finally:
        for start in starts:
            start.kill()
    assert [code for _, code in ends] == [0] * 10, ends
    folders = [path.parent for path in tmp_path.glob("outputs/*/*/result.json")]
    assert len(folders) == 10
    assert sorted(tmp_path.glob("outputs/*/*")) == sorted(folders)
    for folder in folders:
        assert json.loads((folder / "result.json").read_text())["status"] == "completed"
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
