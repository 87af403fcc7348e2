"""The driver's side of a job: starts its workers on this machine, watches them, reports.

torch's elastic agent starts and watches the processes; their errors are read from their own files
(`failures`), since the agent would often blame a peer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlike.launch.environment import import_path, workers_environment
from titanlike.launch.failures import clear_failures, describe, root_cause
from titanlike.launch.job import Job
from titanlike.launch.signals import Interrupted, handled_signals
from titanlike.launch.worker import Worker, run_job

_SHUTDOWN = 15  # seconds between asking workers to end and killing them


def run_local(job: Job) -> dict[str, Any]:
    """Run a job on this machine: in this process where one is enough, else in workers.

    Returns what rank 0's function returned. Raises JobFailed with the error that caused the
    failure, or Interrupted.
    """
    clear_failures(job.run_dir)
    if job.config.world_size > 1:
        return _run_workers(job)
    worker = Worker(0, 1, 0, 1, job.run_dir, None, job.overrides)
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


def _run_workers(job: Job) -> dict[str, Any]:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = job.config.world_size
    with tempfile.TemporaryDirectory(prefix="titanlike-") as scratch:
        (Path(scratch) / "job.json").write_text(job.to_json(), encoding="utf-8")
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=Path(scratch).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle=",".join(signum.name for signum in handled_signals()),
            **_optional_settings(LaunchConfig),
        )
        program = (
            f"import sys; sys.path[:] = {import_path()!r}; "
            f"from titanlike.launch.worker import main; main({scratch!r}, {os.getpid()})"
        )
        try:
            with workers_environment(count), _quiet_agent(), _handlers_kept():
                elastic_launch(launch, sys.executable)("-u", "-c", program)
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        except ChildFailedError as error:
            deaths = {rank: failure.exitcode for rank, failure in error.failures.items()}
            cause = root_cause(job.run_dir, deaths)
            assert cause is not None, "the agent reported a failure without a failed rank"
            raise cause.to_job_failed(job.run_dir, count) from None
        return json.loads((Path(scratch) / "result.json").read_text(encoding="utf-8"))


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


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """The agent installs signal handlers and leaves them behind."""
    before = {signum: signal.getsignal(signum) for signum in handled_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            with contextlib.suppress(ValueError):  # not the main thread: the agent set none
                signal.signal(signum, handler)
