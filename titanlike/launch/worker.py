"""What one process does for one job, whoever started it.

1. Its output goes to run_dir/logs/rankN.log.
2. It waits until all ranks of the job are there; those that are not are named.
3. It calls the job's function.
4. If that raises, it leaves the error in a file before anything is torn down.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config.credentials import redact
from titanlike.launch.failures import Failure, describe, peer_failed, write_failure
from titanlike.launch.job import Job
from titanlike.launch.rank_log import logged
from titanlike.launch.signals import Interrupted, die_with_parent, exit_now, interruptible
from titanlike.launch.stop_request import StopRequest

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Worker:
    """This process' place in a job."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this machine
    local_world_size: int
    run_dir: Path  # absolute
    store: Store | None  # of this job alone; None where one process is the whole job
    overrides: list[str]
    stop_request: StopRequest = field(default_factory=StopRequest)
    # in the process that reports the job: reports it, where no exception can leave the job any more
    report_failure: Callable[[Failure], None] | None = None


class BarrierTimeout(RuntimeError):
    """Some ranks never came to a job."""


def run_job(job: Job, worker: Worker) -> dict[str, Any]:
    """Call the job's function on this rank. What it raises is in the rank's log and error file."""
    environment = dict(os.environ)
    with logged(job.run_dir, worker.rank, console=worker.rank == 0) as log:
        try:
            places = barrier(worker, "start", job.config.launch.timeout, _place())
            neighbours = _neighbours(places, worker.rank)
            worker.stop_request.started = job.started
            worker.stop_request.watch_peers(
                partial(_peer_gone, job.run_dir, worker.rank, neighbours)
            )
            return job.load()(job.config, worker) or {}
        except (Interrupted, KeyboardInterrupt):
            raise
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide the error
                write_failure(job.run_dir, describe(worker.rank, error))
                log.write(redact(traceback.format_exc()))
            raise
        finally:
            os.environ.clear()
            os.environ.update(environment)


def _place() -> str:
    """Where this process is, and its process id there: containers on a machine count their own."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino} {os.getpid()}"
    return f"{socket.gethostname()} {os.getpid()}"


def _neighbours(places: list[str], rank: int) -> list[int]:
    """Process ids of the ranks that are where `rank` is."""
    here = places[rank].split()[0]
    return [int(pid) for where, pid in map(str.split, places) if where == here]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's: not to be touched, but there
        pass
    return True


def _peer_gone(run_dir: Path, rank: int, neighbours: list[int]) -> bool:
    """Whether another rank failed or was killed. None ends otherwise before all have ended."""
    return not all(map(_lives, neighbours)) or peer_failed(run_dir, rank)


def barrier(worker: Worker, name: str, timeout: float, message: str = "") -> list[str]:
    """Wait for all ranks at a point of a job, at most `timeout` seconds; every rank's message.

    Raises BarrierTimeout with the ranks that did not come.
    """
    if worker.store is None:
        return [message]
    keys = [f"{name}/{rank}" for rank in range(worker.world_size)]
    worker.store.set(keys[worker.rank], message)
    try:
        worker.store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        absent = [rank for rank, key in enumerate(keys) if not worker.store.check([key])]
        if not absent:
            raise
        ranks = ", ".join(map(str, absent))
        raise BarrierTimeout(
            f"rank {ranks} did not reach the job's {name} in {timeout:g} s (launch.timeout); "
            "see their logs, or whether their machine is up"
        ) from None
    return [worker.store.get(key).decode() for key in keys]


def first_answer(worker: Worker, name: str, answer: str) -> str:
    """The answer that the first of all ranks has given; "no" where they cannot be asked any more."""
    if worker.store is None:
        return answer
    try:
        return worker.store.compare_set(name, "", answer).decode()
    except RuntimeError:
        return "no"


def main(scratch: str, driver: int) -> None:
    """A worker process of the local launcher; `scratch` holds job.json and takes result.json.

    A signal that is no wish ends it at once: the driver is the one that reports.
    """
    die_with_parent(driver, signal.SIGKILL)  # nothing of value is lost: checkpoints are atomic
    folder = Path(scratch)
    stop = StopRequest(folder)
    with interruptible(stop=stop, grace=0):
        job = Job.from_json((folder / "job.json").read_text(encoding="utf-8"))
        try:
            import torch.distributed as dist

            store, rank, world_size = next(dist.rendezvous("env://"))
            worker = Worker(
                rank=rank,
                world_size=world_size,
                local_rank=int(os.environ["LOCAL_RANK"]),
                local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
                run_dir=job.run_dir,
                store=dist.PrefixStore("job", store),
                overrides=job.overrides,
                stop_request=stop,
            )
            result = run_job(job, worker)
            if rank == 0:
                (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
        except Interrupted as interrupted:
            exit_now(interrupted.exit_code)
        except BaseException:
            exit_now(1)  # a process group destroyed here would look like the cause to its peers
        # no process is missed by its peers before all have ended: see `_peer_gone`
        with contextlib.suppress(RuntimeError):  # the driver sees who has failed
            barrier(worker, "end", job.config.launch.timeout)
    sys.stdout.flush()
