"""However a job fails, its root cause is shown and in result.json, and no process remains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from titanlike.config.imports import import_object
from titanlike.config.schema import Config
from titanlike.config.schema import Launch as Settings
from titanlike.launch.failures import (
    Failure,
    JobFailed,
    clear_failures,
    describe,
    peer_failed,
    root_cause,
    write_failure,
)
from titanlike.launch.job import Job
from titanlike.launch.local import run_local
from titanlike.launch.stop_request import StopRequest


def test_an_error_of_a_model_is_shown_and_the_next_run_trains_on_the_same_ranks(
    tmp_path: Path,
) -> None:
    """Rank 1 alone fails, within a step of a sweep's first run; its peer is in a collective."""
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
    words = "dp=2 model.name=moody.moody model.dim=32 model.ffn_dim=64 model.layers=4 seq_len=16 "
    words += "batch_size=8 steps=2 data=synthetic validation.every=0 logger=none device=cpu"
    sweep = ["-m", "model.bad=true,false", f"run_dir={tmp_path}/s", *words.split()]
    launched = Launched(*sweep, torchrun=2, program=ROOT / "train.py", cwd=tmp_path)
    code, _, err = launched.wait()
    ends = [result(tmp_path / "s" / job) for job in "01"]
    assert [end["status"] for end in ends] == ["failed", "completed"], err
    assert code == 1 and ends[0]["error"] == "rank 1 failed: RuntimeError: bad, job"
    assert "moody.py" in err and "raise RuntimeError('bad, job')" in err
    log = (tmp_path / "s" / "0" / "logs" / "rank1.log").read_text()
    assert "failed to run forward" in log, "the error that wraps it is in the log"
    assert launched.all_exit()


def test_a_rank_that_was_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    launched = Launched("rank_1_dies", "pp=2", f"run_dir={tmp_path}")
    code, _, err = launched.wait()
    assert code == 1 and "rank 1 failed: killed by SIGSEGV" in err and "Traceback" not in err
    assert f"log: {tmp_path}/logs/rank1.log" in err
    assert result(tmp_path)["status"] == "failed"
    assert result(tmp_path)["error"] == "rank 1 failed: killed by SIGSEGV"
    assert launched.all_exit()


def test_a_rank_that_is_ended_while_it_reports_an_error_adds_no_traceback(tmp_path: Path) -> None:
    job = "rank_0_fails_while_rank_1_tells_its_error"
    launched = Launched(job, "pp=2", f"run_dir={tmp_path}")
    code, _, err = launched.wait(30)
    assert code == 1 and "rank 1 failed: LongError: a long story" in err
    assert "Interrupted" not in err and "Traceback" not in err
    assert launched.all_exit()


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


FAILURE = Failure(0, "", "", False, 1.0)
LOST = replace(FAILURE, error="Connection closed by peer", transport=True)
TAKEN = replace(FAILURE, error="taken over", taken_over=True, time=9.0)


@pytest.mark.parametrize(
    ("failures", "deaths", "named"),
    [
        ([LOST, replace(FAILURE, rank=1, time=2.0), replace(FAILURE, rank=2, time=3.0)], {}, 1),
        ([LOST, replace(LOST, rank=1, time=0.5)], {}, 1),
        ([LOST], {0: 1, 2: -11}, 2),  # by a signal, and without a word
        ([LOST], {2: 1}, 0),
        # a start that takes over removes files of the other's unfinished save
        ([replace(FAILURE, rank=1, error="FileNotFoundError: step-00000007"), TAKEN], {}, 0),
    ],
)
def test_the_cause_is_the_first_failure_that_no_peer_made(
    failures: list[Failure], deaths: dict[int, int], named: int, tmp_path: Path
) -> None:
    for failure in failures:
        write_failure(tmp_path, failure)
    cause = root_cause(tmp_path, deaths)
    assert cause is not None and cause.rank == named


def test_errors_that_nccl_raises_because_of_a_peer_are_no_root_cause() -> None:
    for text in (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "NCCL communicator was aborted on rank 1.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "NCCL error: remote process exited or there was a network error",
    ):
        assert describe(0, RuntimeError(text)).transport, text
    for text in ("CUDA out of memory", "CUDA error: an illegal memory access was encountered"):
        assert not describe(0, RuntimeError(text)).transport, text


class Workers:
    """Stand in for EarlyWorkers: each launch ends with these deaths of its ranks, which have
    written `failure`."""

    def __init__(self, run_dir: Path, deaths: list[dict[int, int]], failure: Failure) -> None:
        self.run_dir, self.deaths, self.failure = run_dir, deaths, failure
        self.launches = 0
        self.folder, self.count = run_dir / "scratch", 2
        self.folder.mkdir()
        (self.folder / "result.json").write_text('{"value": 3.0}')

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def take(self, count: int, function: str) -> Workers:
        self.launches += 1
        return self

    def run(self, job: str) -> dict[int, int]:
        assert root_cause(self.run_dir) is None, "the failure of an earlier launch is still there"
        if dead := self.deaths.pop(0):
            write_failure(self.run_dir, self.failure)
        return dead


def user_error() -> Failure:
    """What a restart would repeat."""
    try:
        import_object("no.such.module")
    except ValueError as error:
        return describe(1, error)
    raise AssertionError


@pytest.mark.parametrize(
    ("deaths", "failure", "launches", "ends"),
    [
        ([{1: -9}, {1: -9}, {}], FAILURE, 3, 3.0),
        ([{1: -9}] * 4, FAILURE, 3, "it broke"),
        ([{1: 1}] * 4, user_error, 1, "importing no.such failed"),
    ],
)
def test_workers_that_fail_are_restarted_as_often_as_allowed(
    deaths: list[dict[int, int]],
    failure: Failure | Callable[[], Failure],
    launches: int,
    ends: Any,
    tmp_path: Path,
) -> None:
    written = failure() if callable(failure) else replace(failure, rank=1, error="it broke")
    workers, numbers = Workers(tmp_path, [*deaths], written), []

    def again(failed: JobFailed, number: int) -> Config:
        numbers.append(number)
        return job.config

    job = Job("some.job", Config(pp=2, launch=Settings(max_restarts=2)), tmp_path, [])
    early: Any = workers
    if isinstance(ends, str):
        with pytest.raises(JobFailed, match=f"rank 1 failed: .*{ends}"):
            run_local(job, StopRequest(), print, again, early)
    else:
        assert run_local(job, StopRequest(), print, again, early) == {"value": ends}
    assert workers.launches == launches and numbers == [*range(1, launches)]
    stopped: Any = SimpleNamespace(received=True, forwarding=StopRequest().forwarding)
    workers.deaths, workers.launches = [{1: -9}], 0
    clear_failures(tmp_path)
    with pytest.raises(JobFailed):  # after a stop request nothing is restarted
        run_local(job, stopped, print, again, early)
    assert workers.launches == 1
