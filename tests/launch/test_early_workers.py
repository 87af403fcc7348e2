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


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def started(scratch: Path, then: str) -> Launched:
    """A job of two ranks whose config is being checked, which takes as long as `go on` is missing;
    its workers wait."""
    folder = scratch.parent
    (folder / "slow_model.py").write_text(MODEL.format(then=then))
    words = ["data=synthetic", "model=own", "model.name=slow_model.Model", "pp=2", "seq_len=16"]
    launched = Launched("hello", *words, f"run_dir={folder / 'run'}", cwd=folder)
    until((folder / "checking").exists)
    until(lambda: workers_wait(scratch) and len(launched.alive()) >= 3)
    return launched


def workers_wait(scratch: Path) -> bool:
    return any(scratch.glob("titanlike-*/0"))


def test_an_error_in_the_config_ends_the_workers_that_wait_for_it(scratch: Path) -> None:
    launched = started(scratch, 'raise ValueError("vocab_size: is odd")')
    (scratch.parent / "go on").touch()
    code, out, err = launched.wait()
    assert code == 2 and "vocab_size" in err and "hello" not in out
    assert launched.all_exit(1) and not workers_wait(scratch)


@pytest.mark.parametrize("signum, code", [(signal.SIGKILL, -9), *slow((signal.SIGTERM, 143))])
def test_a_signal_while_the_config_is_checked_leaves_no_process(
    scratch: Path, signum: signal.Signals, code: int
) -> None:
    launched = started(scratch, "")
    launched.process.send_signal(signum)
    assert launched.wait(30)[0] == code
    assert launched.all_exit(5)
    assert not (scratch.parent / "run" / "logs").exists()


def test_a_worker_that_dies_before_its_job_is_named(scratch: Path) -> None:
    then = "self.first, self.last = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)\n    "
    launched = started(
        scratch, then + "def forward(self, tokens): return self.last(self.first(tokens))"
    )
    driver = launched.process.pid
    leaders = [p for p in launched.alive() if p.pid != driver and os.getsid(p.pid) == p.pid]
    leaders[0].kill()  # each worker has a session of its own
    (scratch.parent / "go on").touch()
    code, _, err = launched.wait()
    assert code == 1 and "killed by SIGKILL" in err, err
    assert launched.all_exit()
