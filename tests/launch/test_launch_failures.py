"""However a job fails, its root cause is shown and in result.json, and no process remains."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from titanlike.core.config.groups.jobs import Launch
from titanlike.core.config.imports import import_object
from titanlike.core.config.schema import Config
from titanlike.core.launch.failures import (
    Failure,
    JobFailed,
    clear_failures,
    describe,
    peer_failed,
    root_cause,
    write_failure,
)
from titanlike.core.launch.signals import StopRequest
from titanlike.core.launch.worker import Job
from titanlike.run import local


def test_an_error_of_a_model_is_shown_and_the_next_run_trains_on_the_same_ranks(
    tmp_path: Path,
) -> None:
    """Rank 1 alone fails, within a step of a sweep's first run; its peer is in a collective."""
    (tmp_path / "moody.py").write_text(
        "import os\n"
        "from titanlike.core.models.llama import Block, Llama\n"
        "class BadBlock(Block):\n"
        "    def forward(self, x, *others):\n"
        "        if not x.is_meta and os.environ.get('RANK') == '1':\n"
        "            raise RuntimeError('bad, job')\n"
        "        return super().forward(x, *others)\n"
        "def moody(*, vocab_size: int, hidden_size: int, bad: bool, **sizes):\n"
        "    model = Llama(vocab_size=vocab_size, hidden_size=hidden_size, **sizes)\n"
        "    if bad:\n"
        "        model.model.layers[3].__class__ = BadBlock\n"
        "    return model\n"
    )
    words = "dp=2 model.name=moody.moody model.hidden_size=32 model.intermediate_size=64 "
    words += "model.num_hidden_layers=4 seq_len=16 "
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


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mistake_that_a_rank_finds_is_shown_as_the_one_in_the_config(
    seed: int, tmp_path: Path
) -> None:
    launched = Launched("rank_1_refuses", "pp=2", f"seed={seed}", f"run_dir={tmp_path}")
    code, _, err = launched.wait()
    problem = f"seed={seed}: is not wanted; write seed=7"
    assert code == 2 and f"nothing was trained\n  {problem}\n" in err
    assert not any(word in err for word in ("rank ", "log: ", "Traceback")), err
    assert result(tmp_path)["status"] == "invalid"
    assert {*result(tmp_path)["error"].splitlines()} == {problem}
    assert launched.all_exit()


def test_a_rank_that_is_ended_while_it_reports_an_error_adds_no_traceback(tmp_path: Path) -> None:
    job = "rank_0_fails_while_rank_1_tells_its_error"
    launched = Launched(job, "pp=2", f"run_dir={tmp_path}")
    code, _, err = launched.wait(30)
    assert code == 1 and "rank 1 failed: LongError: a long story" in err
    assert "Interrupted" not in err and "Traceback" not in err
    assert launched.all_exit()


def test_a_failed_peer_is_noticed_without_reading_every_ranks_files(tmp_path: Path) -> None:
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
FAILED = JobFailed("rank 1 failed: killed by SIGKILL", "killed by SIGKILL")
DIED = replace(FAILURE, rank=2, error="killed by SIGSEGV", time=9.0)
TAKEN = replace(FAILURE, error="taken over", taken_over=True, time=9.0)


@pytest.mark.parametrize(
    ("failures", "deaths", "named"),
    [
        ([LOST, replace(FAILURE, rank=1, time=2.0), replace(FAILURE, rank=2, time=3.0)], [], 1),
        ([LOST, replace(LOST, rank=1, time=0.5)], [], 1),
        ([LOST], [DIED], 2),
        ([LOST], [replace(DIED, transport=True)], 0),  # its error could not be written
        ([replace(DIED, error="its process ended", by_peer=True)], [DIED], 2),
        ([LOST, replace(FAILURE, rank=1, time=2.0), replace(DIED, by_peer=True)], [], 1),
        # a start that takes over removes files of the other's unfinished save
        ([replace(FAILURE, rank=1, error="FileNotFoundError: step-00000007"), TAKEN], [], 0),
    ],
)
def test_the_root_cause_is_the_first_failure_not_caused_by_a_peer(
    failures: list[Failure], deaths: list[Failure], named: int, tmp_path: Path
) -> None:
    for failure in failures:
        write_failure(tmp_path, failure)
    cause = root_cause(tmp_path, deaths)
    assert cause is not None and (cause.rank, cause.by_peer) == (named, False)


def test_nccl_errors_caused_by_a_peer_are_not_the_root_cause() -> None:
    for text in (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "NCCL communicator was aborted on rank 1.",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
        "NCCL error: remote process exited or there was a network error",
    ):
        assert describe(0, RuntimeError(text)).transport, text
    for text in ("CUDA out of memory", "CUDA error: an illegal memory access was encountered"):
        assert not describe(0, RuntimeError(text)).transport, text


def test_a_save_error_after_a_lost_peer_is_not_the_root_cause() -> None:
    program = (
        "try:\n    raise RuntimeError('Connection closed by peer')\n"
        "except RuntimeError as error:\n    raise OSError('step-7 could not be written') from error"
    )
    with pytest.raises(OSError) as error:  # of titanlike's own
        exec(compile(program, str(ROOT / "titanlike" / "checkpoint" / "saves.py"), "exec"))
    failure = describe(0, error.value)
    assert (
        failure.transport and not failure.users and failure.error == "step-7 could not be written"
    )


def test_what_an_exception_says_moves_no_cursor() -> None:
    """Neither on a terminal nor in result.json."""
    assert describe(0, RuntimeError("a\x1b[2J")).error == r"RuntimeError: a\x1b[2J"
    failed = JobFailed("a\x1b[2J", "b\x1b[2J")
    assert (str(failed), failed.error) == (r"a\x1b[2J", r"b\x1b[2J")


def test_a_message_of_megabytes_is_shortened(tmp_path: Path) -> None:
    failure = describe(1, RuntimeError("begin " + "x" * 5_000_000 + " end"))
    text = failure.to_job_failed(tmp_path, 2).error
    assert len(text) < 10_000 and text.startswith("rank 1 failed: RuntimeError: begin xxx")
    assert "characters left out" in text and text.endswith("xxx end")


@pytest.mark.parametrize(
    ("ends", "stopped", "launches"),
    [
        ([FAILED, FAILED, None], False, 3),
        ([FAILED] * 4, False, 3),
        ([JobFailed("", "no.such", permanent=True)] * 4, False, 1),
        ([FAILED] * 4, True, 1),
    ],
)
def test_workers_that_fail_are_restarted_as_often_as_allowed(
    ends: list[JobFailed | None],
    stopped: bool,
    launches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after what a restart would repeat, nor after a stop request."""
    numbers, workers, stop = [], MagicMock(), StopRequest()
    stop._signum = int(stopped)

    def again(failed: JobFailed, number: int) -> Config:
        numbers.append(number)
        return job.config

    def run_workers(*_: Any) -> dict[str, Any]:
        assert root_cause(tmp_path) is None, "the failure of an earlier launch is still there"
        write_failure(tmp_path, FAILURE)
        if (end := ends[workers.__enter__().adopt.call_count - 1]) is not None:
            raise end
        return {"value": 3.0}

    monkeypatch.setattr(local, "run_workers", run_workers)
    job = Job("some.job", Config(pp=2, launch=Launch(max_restarts=2)), tmp_path, [])
    with contextlib.nullcontext() if None in ends else pytest.raises(JobFailed):
        assert local.run_local(job, stop, again, workers) == {"value": 3.0}
    assert workers.__enter__().adopt.call_count == launches and numbers == [*range(1, launches)]


def test_a_user_error_has_no_traceback_and_is_not_retried() -> None:
    with pytest.raises(ValueError) as error:
        import_object("no.such.module")
    failure = describe(1, error.value)
    assert failure.error.startswith("importing no.such failed")
    assert failure.users and not failure.frames and not failure.transport
    with pytest.raises(ValueError) as error:
        int("x")
    failure = describe(1, error.value)
    assert failure.frames or not failure.users, "not titanlike's own"
