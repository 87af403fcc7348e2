"""The driver of a job: runs it here, or starts its workers on this machine and watches them.

The root cause of an error is read from the workers' own files (`failures`): the first process that
ends is often a peer. The driver forwards a first signal to the workers, which stop by themselves; a
second one ends them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titanlike.config.schema import Config
from titanlike.launch.failures import Failure, JobFailed, clear_failures, describe, root_cause
from titanlike.launch.job import Job
from titanlike.launch.signals import Interrupted
from titanlike.launch.stop_request import StopRequest
from titanlike.launch.worker import Worker, run_job
from titanlike.launch.worker_processes import EarlyWorkers, WorkerProcesses

RestartedConfig = Callable[[JobFailed, int], Config]  # (the failure, number of the restart)
ReportFailure = Callable[[Failure], None]


def run_local(
    job: Job,
    stop: StopRequest,
    report_failure: ReportFailure,
    restarted_config: RestartedConfig | None = None,
    early: EarlyWorkers | None = None,
) -> dict[str, Any]:
    """Run a job on this machine: in this process if one rank suffices, else in workers.

    Workers that fail are restarted up to `launch.max_restarts` times with the config that
    `restarted_config` returns; not without it, after a permanent failure, or after a stop request.
    Returns the result of rank 0's function. Raises JobFailed with the root cause of the (last)
    failure, or Interrupted. report_failure: see Worker. early: may have the workers already.
    """
    clear_failures(job.run_dir)
    restarts = job.config.launch.max_restarts if restarted_config is not None else 0
    if job.config.world_size == 1 and not restarts:
        return _run_here(job, stop, report_failure)
    with early or EarlyWorkers() as workers:
        restart = 0
        while True:
            try:
                started = workers.take(job.config.world_size, job.function)
                return _run_workers(job, stop, started)
            except JobFailed as failed:
                no_more = restart == restarts or failed.permanent or stop.received
                if no_more or restarted_config is None:
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


def _run_workers(job: Job, stop: StopRequest, workers: WorkerProcesses) -> dict[str, Any]:
    """Run a job once, in workers that wait for it."""
    with stop.forwarding(workers.folder):
        deaths = workers.run(job.to_json())
    if deaths:
        cause = root_cause(job.run_dir, deaths, scratch=workers.folder)
        assert cause is not None, "a rank failed without a cause"
        raise cause.to_job_failed(job.run_dir, workers.count)
    return json.loads((workers.folder / "result.json").read_text(encoding="utf-8"))
