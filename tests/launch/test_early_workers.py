"""Workers start while the driver checks the config, and never outlive a start that is given up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.cells import slow
from support.launched import Launched
from support.waiting import until

MODEL = """
import pathlib, time
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size: int = 256):
        super().__init__()
        pathlib.Path("checking").touch()
        while not pathlib.Path("go on").exists():
            time.sleep(0.05)
        {then}
"""


def started(folder: Path, then: str) -> Launched:
    """A job of two ranks whose config is being checked, which takes as long as `go on` is missing."""
    (folder / "slow_model.py").write_text(MODEL.format(then=then))
    words = ["data=synthetic", "model=own", "model.name=slow_model.Model", "pp=2", "seq_len=16"]
    launched = Launched("hello", *words, f"run_dir={folder / 'run'}", cwd=folder)
    until((folder / "checking").exists)
    return launched


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def workers_wait(scratch: Path) -> bool:
    return any(scratch.glob("titanlike-*/0"))


def test_an_error_in_the_config_ends_the_workers_that_wait_for_it(
    scratch: Path, tmp_path: Path
) -> None:
    launched = started(tmp_path, 'raise ValueError("vocab_size: is odd")')
    until(lambda: workers_wait(scratch) and len(launched.alive()) >= 3)
    (tmp_path / "go on").touch()
    code, out, err = launched.wait()
    assert code == 2 and "vocab_size" in err and "hello" not in out
    assert launched.all_exit(1) and not workers_wait(scratch)


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9), *slow((signal.SIGINT, 130))]
)
def test_a_signal_while_the_config_is_checked_leaves_no_process(
    scratch: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    launched = started(tmp_path, "")
    until(lambda: workers_wait(scratch))
    launched.process.send_signal(signum)
    assert launched.wait(30)[0] == code
    assert launched.all_exit(5)
    assert not (tmp_path / "run" / "logs").exists()


def test_a_worker_that_dies_before_its_job_is_named(scratch: Path, tmp_path: Path) -> None:
    then = "self.first, self.last = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)\n    "
    forward = "def forward(self, tokens): return self.last(self.first(tokens))"
    launched = started(tmp_path, then + forward)
    driver = launched.process.pid
    leaders = [p for p in launched.alive() if p.pid != driver and os.getsid(p.pid) == p.pid]
    leaders[0].kill()  # each worker has a session of its own
    (tmp_path / "go on").touch()
    code, _, err = launched.wait()
    assert code == 1 and "killed by SIGKILL" in err, err
    assert launched.all_exit()


@pytest.mark.parametrize("key, value", [("hydra.job.env_set.MINE", "7")])
def test_workers_have_the_environment_that_the_config_sets(
    scratch: Path, tmp_path: Path, key: str, value: str
) -> None:
    words = ["pp=2", f"+{key}={value}", f"run_dir={tmp_path / 'run'}"]
    launched = Launched("tells_mine", *words)
    code, _, err = launched.wait()
    assert code == 0, err
    logs = [(tmp_path / "run" / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert all("MINE=7" in log for log in logs)
