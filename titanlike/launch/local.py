"""The driver's side of a job: starts its workers on this machine, watches them, reports.

torch's elastic agent starts and watches the processes; their errors are read from their own files
(`failures`), since the agent would often blame a peer. It takes no signals: the driver passes a
first one on to the workers, which end by themselves, and a second one ends the agent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlike.config.schema import Config
from titanlike.launch.environment import import_path, workers_environment
from titanlike.launch.failures import Failure, JobFailed, clear_failures, describe, root_cause
from titanlike.launch.job import Job
from titanlike.launch.scratch_folder import scratch_folder
from titanlike.launch.signals import Interrupted
from titanlike.launch.stop_request import StopRequest
from titanlike.launch.worker import Worker, run_job

_SHUTDOWN = 15  # seconds between asking workers to end and killing them

# (what failed, which restart this is) -> the config to start again with
Restarted = Callable[[JobFailed, int], Config]
ReportFailure = Callable[[Failure], None]


def run_local(
    job: Job, stop: StopRequest, report_failure: ReportFailure, restarted: Restarted | None = None
) -> dict[str, Any]:
    """Run a job on this machine: in this process where one is enough, else in workers.

    Where workers fail, they are started again up to `launch.max_restarts` times, each time after a
    call of `restarted`; without that, never. Not after a mistake of the user's, nor once a stop was
    asked for. Returns what rank 0's function returned. Raises JobFailed with the error that caused
    the (last) failure, or Interrupted. `report_failure`: see Worker.
    """
    clear_failures(job.run_dir)
    restarts = job.config.launch.max_restarts if restarted is not None else 0
    if job.config.world_size == 1 and not restarts:
        return _run_here(job, stop, report_failure)
    with scratch_folder() as scratch:
        number = 0
        while True:
            try:
                return _run_workers(job, stop, scratch / str(number))
            except JobFailed as failed:
                if failed.users or stop.received or number == restarts or restarted is None:
                    raise
                number += 1
                job = replace(job, config=restarted(failed, number))
            clear_failures(job.run_dir)


def _run_here(job: Job, stop: StopRequest, report_failure: ReportFailure) -> dict[str, Any]:
    worker = Worker(0, 1, 0, 1, job.run_dir, None, job.overrides, stop, report_failure)
    try:
        return run_job(job, worker)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    except Exception as error:
        raise describe(0, error).to_job_failed(job.run_dir, 1) from error
    finally:
        _leave_group()  # of a job that failed inside it: the next one of a sweep opens its own


def _leave_group() -> None:
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _run_workers(job: Job, stop: StopRequest, folder: Path) -> dict[str, Any]:
    """Run a job once; `folder` is for this alone, and new."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = job.config.world_size
    folder.mkdir()
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"{folder.parent.name}-{folder.name}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="",  # none: ours stay
        **_optional_settings(LaunchConfig),
    )
    program = (
        f"import sys; sys.path[:] = {import_path()!r}; "
        f"from titanlike.launch.worker import main; main({str(folder)!r}, {os.getpid()})"
    )
    try:
        with workers_environment(count), _quiet_agent(), stop.forwarding(folder):
            elastic_launch(launch, sys.executable)("-u", "-c", program)
    except ChildFailedError as error:
        deaths = {rank: failure.exitcode for rank, failure in error.failures.items()}
        cause = root_cause(job.run_dir, deaths)
        assert cause is not None, "the agent reported a failure without a failed rank"
        raise cause.to_job_failed(job.run_dir, count) from None
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def _optional_settings(launch_config: type) -> dict[str, Any]:
    """Settings that not every supported torch knows."""
    known = launch_config.__dataclass_fields__
    return {"shutdown_timeout": _SHUTDOWN} if "shutdown_timeout" in known else {}


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Without the agent's own account of failures; ours is the one that is shown."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
