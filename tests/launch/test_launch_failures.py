"""However a job fails, its root cause is shown and in result.json, and no process remains."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from support.cells import slow
from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from titanlike.launch.failures import clear_failures, describe, peer_failed, write_failure

TRAIN = ROOT / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [0, 4])
def test_of_four_ranks_the_one_that_crashed_is_named(tmp_path: Path, torchrun: int) -> None:
    launched = Launched("rank_2_crashes", "pp=2", "dp=2", f"run_dir={tmp_path}", torchrun=torchrun)
    code, _, err = launched.wait()
    assert code == 1
    assert "rank 2 failed: RuntimeError: the real error" in err
    assert f"log: {tmp_path}/logs/rank2.log" in err
    assert "the real error" in (tmp_path / "logs" / "rank2.log").read_text()
    assert result(tmp_path)["status"] == "failed"
    assert result(tmp_path)["error"] == "rank 2 failed: RuntimeError: the real error"
    assert launched.all_exit()


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("pp=2", marks=pytest.mark.slow)])
def test_an_error_of_a_model_is_shown_and_the_next_run_trains_on_the_same_ranks(
    tmp_path: Path, mesh: str
) -> None:
    """Rank 1 alone fails, within a step of a sweep's first run."""
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "from titanlike.models.llama import Block, Llama\n"
        "class BadBlock(Block):\n"
        "    def forward(self, x, *others):\n"
        "        if not x.is_meta and os.environ.get('RANK') == '1':\n"
        "            raise RuntimeError('bad, job')\n"
        "        return super().forward(x, *others)\n"
        "def moody(*, vocab_size: int, dim: int, bad: bool, **sizes):\n"
        "    model = Llama(vocab_size=vocab_size, dim=dim, **sizes)\n"
        "    if bad:\n"
        "        model.layers[3].__class__ = BadBlock\n"
        "    return model\n"
    )
    words = "model.name=moody.moody model.dim=32 model.ffn_dim=64 model.layers=4 seq_len=16 "
    words += "batch_size=8 steps=2 data=synthetic validation.every=0 logger=none device=cpu"
    sweep = ["-m", "model.bad=true,false", mesh, f"run_dir={tmp_path}/s", *words.split()]
    launched = Launched(*sweep, torchrun=2, program=TRAIN, cwd=tmp_path)
    code, _, err = launched.wait()
    ends = [result(tmp_path / "s" / job) for job in "01"]
    assert [end["status"] for end in ends] == ["failed", "completed"], err
    assert code == 1 and ends[0]["error"] == "rank 1 failed: RuntimeError: bad, job"
    assert "moody.py" in err and "raise RuntimeError('bad, job')" in err
    log = (tmp_path / "s" / "0" / "logs" / "rank1.log").read_text()
    assert "failed to run forward" in log, "the error that wraps it is in the log"
    assert launched.all_exit()


def test_a_rank_that_was_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    launched = Launched("rank_1_dies", "pp=2", f"run_dir={tmp_path}", real=True)
    code, _, err = launched.wait()
    assert code == 1 and "rank 1 failed: killed by SIGSEGV" in err and "Traceback" not in err
    assert result(tmp_path)["error"] == "rank 1 failed: killed by SIGSEGV"
    assert launched.all_exit()


def test_a_rank_that_is_ended_while_it_reports_an_error_adds_no_traceback(tmp_path: Path) -> None:
    job = "rank_0_fails_while_rank_1_tells_its_error"
    launched = Launched(job, "pp=2", f"run_dir={tmp_path}")
    code, _, err = launched.wait(30)
    assert code == 1 and "rank 1 failed: LongError: a long story" in err
    assert "Interrupted" not in err and "Traceback" not in err
    assert launched.all_exit()


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGTERM, 143), *slow((signal.SIGINT, 130), (signal.SIGKILL, -9))]
)
def test_a_signal_to_the_driver_ends_all_workers(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    launched = Launched("hangs", "pp=2", f"run_dir={tmp_path}", real=True)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    launched.process.send_signal(signum)
    assert launched.wait(30)[0] == code
    assert launched.all_exit()
    if signum != signal.SIGKILL:
        assert result(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_ends_all_ranks_and_is_in_the_result(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """Rank 0 is inside a collective, in C, where Python's handlers wait."""
    launched = Launched("hangs", "pp=2", f"run_dir={tmp_path}", real=True, torchrun=2)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    launched.process.send_signal(signum)
    launched.wait(30)
    assert launched.all_exit()
    assert result(tmp_path)["status"] == "interrupted"


@pytest.mark.slow
def test_a_process_that_is_stuck_in_c_ends_soon_and_leaves_its_result(tmp_path: Path) -> None:
    launched = Launched("deadlocks_in_c", f"run_dir={tmp_path}", real=True)
    until(lambda: (tmp_path / "ready0").exists())
    launched.process.send_signal(signal.SIGTERM)
    assert launched.wait(15)[0] == 143
    assert result(tmp_path)["status"] == "interrupted"


def test_that_a_peer_has_failed_is_seen_without_a_look_at_the_files_of_all(tmp_path: Path) -> None:
    """A thousand ranks ask twice a second while a run is to stop."""
    listings: list[str] = []

    def hook(event: str, arguments: tuple) -> None:
        if event in ("os.listdir", "os.scandir") and str(arguments[0]).startswith(str(tmp_path)):
            listings.append(str(arguments[0]))

    (tmp_path / "logs").mkdir()
    sys.addaudithook(hook)
    assert not any(peer_failed(tmp_path, rank) for rank in range(8)) and not listings
    write_failure(tmp_path, describe(3, RuntimeError("it broke")))
    assert [rank for rank in range(8) if not peer_failed(tmp_path, rank)] == [3] and listings
    clear_failures(tmp_path)
    assert not any(peer_failed(tmp_path, rank) for rank in range(8))
