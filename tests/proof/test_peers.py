"""No rank of a comparison waits for one that has left: docs/decisions.md lists the places.

On GPUs a collective does not end when a peer does. Its stand-in here is a lock, which the watchdog
releases where it would abort the groups; gloo's own collectives end as connections close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.bench import bench
from benchmarks.speed.waits import waits
from support.cells import slow
from support.models import tiny
from support.waiting import until
from support.world import run_world
from titanlike.core.config.groups.computation import Numerics, Precision
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.launch import rendezvous, watchdog
from titanlike.core.launch.device_queue import DeviceQueue
from titanlike.core.launch.failures import describe, peer_failed, write_failure
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.core.training import session
from titanlike.proof import localization, verification
from titanlike.proof.exact import first_difference
from titanlike.proof.localization import Attempts
from titanlike.proof.recorder import Recorder
from titanlike.proof.verify import verify


class Done:
    """An event of a device that has done all."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def as_on_a_gpu(worker: Worker, times: int = 1) -> Callable[[], None]:
    """From now on rank 1 fails in so many steps, and the others wait in one until they are let out.
    Returns what leaves the groups as NCCL's ranks do: unseen by the others."""
    waiting, right, left = threading.Lock(), Pipeline.forward_backward, [times]
    waiting.acquire()
    mark = worker.run_dir / "waits"

    def step(self: Pipeline, *args: Any) -> Any:
        if not left[0] or self._mesh.world_size == 1:
            return right(self, *args)
        left[0] -= 1
        if worker.rank == 1:
            until(mark.exists)
            raise RuntimeError("CUDA out of memory")
        mark.touch()
        waiting.acquire()
        raise AssertionError("what an aborted collective returns is used")

    Pipeline.forward_backward = step
    session.device_queue = lambda device: DeviceQueue(Done)
    session.abort_groups = waiting.release
    watchdog._PATIENCE = watchdog._PEER_INTERVAL = 0.2


def attempted(config: Config, worker: Worker, gpu: bool) -> list[Any]:
    """What rank 0 says of an attempt that fails on rank 1, and the answers of it and another."""
    attempts, lines = Attempts(config, worker), list[str]()
    localization.Console.line = lambda self, text: lines.append(text)
    attempts.prepare(config, Recorder())
    if gpu:
        as_on_a_gpu(worker)
    else:
        right = Pipeline.forward_backward

        def step(self: Pipeline, *args: Any) -> Any:
            result = right(self, *args)
            if worker.rank == 1:
                raise RuntimeError("CUDA out of memory")
            return result

        Pipeline.forward_backward = step
    first = attempts.fails(config)
    if not gpu:
        Pipeline.forward_backward = right
    return [lines, first, attempts.fails(config)]


@pytest.mark.parametrize("gpu", [False, True])
def test_an_attempt_that_fails_on_a_rank_ends_on_all_and_the_next_one_runs(
    gpu: bool, tmp_path: Path
) -> None:
    config = tiny(pp=2, layers=2, schedule=Schedule("1f1b", 2))
    every = run_world(attempted, config, tmp_path, gpu)
    assert [answers for _, *answers in every] == [[None, False]] * 2
    [line] = every[0][0]
    assert "pp=2 schedule=1f1b" in line and "CUDA out of memory" in line, line
    assert every[1][0] == []


def exact_bits(config: Config, worker: Worker) -> None:
    first_difference(config, open_data(config), worker)


JOBS: dict[str, Callable[[Config, Worker], object]] = {
    "verify": verify,
    "verify numerics=exact": exact_bits,
    "bench": bench,
    "waits": waits,
}


def failed(worker: Worker, job: Callable[[], object], rank: int) -> str:
    """Do a job as `run_job` does, in which a rank fails; what this one raises."""
    worker.stop_request.peer_failed = partial(peer_failed, worker.run_dir, worker.rank)
    (worker.run_dir / "logs").mkdir(exist_ok=True)
    try:
        job()
    except Exception as error:
        write_failure(worker.run_dir, describe(worker.rank, error))
        return type(error).__name__
    return "nothing"


def one_fails(config: Config, worker: Worker, name: str) -> str:
    as_on_a_gpu(worker)
    return failed(worker, partial(JOBS[name], config, worker), 1)


@pytest.mark.parametrize("name", JOBS)
def test_a_rank_in_a_collective_is_let_out_when_another_has_failed(
    name: str, tmp_path: Path
) -> None:
    numerics = Numerics("exact", grain=8) if "exact" in name else Numerics()
    config = tiny(dp=2, layers=2, steps=2, numerics=numerics)
    assert run_world(one_fails, config, tmp_path, name) == ["PeerFailed", "RuntimeError"]


def report(config: Config, worker: Worker) -> None:
    """Of a layout that fails."""
    verification.Comparison.agrees = False
    verify(config, worker)


ALONE = {
    "the reference": (verification, "reference_steps", verify),
    "the rounding of one process": (verification, "rounding_of_one_process", report),
    "the report of a first difference": (localization, "first_place", report),
}


def alone_fails(config: Config, worker: Worker, name: str) -> str:
    place, function, job = ALONE[name]

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    setattr(place, function, fail)
    rendezvous._PATIENCE = 0.2
    return failed(worker, partial(job, config, worker), 0)


@pytest.mark.parametrize("name", [*[*ALONE][:2], *slow(*[*ALONE][2:])])
def test_ranks_do_not_wait_for_what_rank_0_has_failed_to_do_alone(
    name: str, tmp_path: Path
) -> None:
    config = tiny(dp=2, layers=2, precision=Precision("bf16"))
    assert run_world(alone_fails, config, tmp_path, name) == ["OSError", "PeerFailed"]
