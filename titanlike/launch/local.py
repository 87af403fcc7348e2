"""The driver of a job: runs it here, or starts its workers on this machine and watches them.

torch's elastic agent starts and watches the processes; errors are read from the workers' own files
(`failures`), since the agent would often blame a peer. The agent handles no signals: the driver
forwards a first one to the workers, which stop by themselves, and a second one ends the agent.
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

_SHUTDOWN_TIMEOUT = 15  # seconds between SIGTERM and SIGKILL to the workers

RestartedConfig = Callable[[JobFailed, int], Config]  # (the failure, number of the restart)
ReportFailure = Callable[[Failure], None]


def run_local(
    job: Job,
    stop: StopRequest,
    report_failure: ReportFailure,
    restarted_config: RestartedConfig | None = None,
) -> dict[str, Any]:
    """Run a job on this machine: in this process if one rank suffices, else in workers.

    Workers that fail are restarted up to `launch.max_restarts` times with the config that
    `restarted_config` returns; not without it, after a permanent failure, or after a stop request.
    Returns the result of rank 0's function. Raises JobFailed with the root cause of the (last)
    failure, or Interrupted. report_failure: see Worker.
    """
    clear_failures(job.run_dir)
    restarts = job.config.launch.max_restarts if restarted_config is not None else 0
    if job.config.world_size == 1 and not restarts:
        return _run_here(job, stop, report_failure)
    with scratch_folder() as scratch:
        restart = 0
        while True:
            try:
                return _run_workers(job, stop, scratch / str(restart))
            except JobFailed as failed:
                no_more = restart == restarts or restarted_config is None
                if no_more or failed.permanent or stop.received:
                    raise
                restart += 1
                job = replace(job, config=restarted_config(failed, restart))
            clear_failures(job.run_dir)


def _run_here(job: Job, stop: StopRequest, report_failure: ReportFailure) -> dict[str, Any]:
    worker = Worker(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        one_machine=True,
        run_dir=job.run_dir,
        store=None,
        overrides=job.overrides,
        stop_request=stop,
        report_failure=report_failure,
    )
    try:
        return run_job(job, worker)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    except Exception as error:
        raise describe(0, error).to_job_failed(job.run_dir, 1) from error
    finally:
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():  # the job failed; a sweep's next one initializes its own
                dist.destroy_process_group()


def _run_workers(job: Job, stop: StopRequest, folder: Path) -> dict[str, Any]:
    """Run a job once. `folder`: new, for this start alone."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from titanlike.launch import local_rendezvous

    count = job.config.world_size
    folder.mkdir()
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    # torch 2.11 has no such setting
    known = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    optional = {"shutdown_timeout": _SHUTDOWN_TIMEOUT} if known else {}
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"{folder.parent.name}-{folder.name}",
        rdzv_backend=local_rendezvous.register(),
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="",  # none: keep our handlers
        **optional,
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
        cause = root_cause(job.run_dir, deaths, scratch=folder)
        assert cause is not None, "the agent reported a failure without a failed rank"
        raise cause.to_job_failed(job.run_dir, count) from None
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Within it, the agent does not log failures; JobFailed is shown instead."""
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
