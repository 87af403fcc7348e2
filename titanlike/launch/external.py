"""Ranks that torchrun or srun started, one process each: rank 0 leads, the others follow.

1. All meet at the rendezvous store.
2. Rank 0 alone reads the command line; it publishes each job (a sweep has several) in the store.
3. The others wait for the next job, run it with a store of its own, and wait again.
4. A rank that fails leaves the job's process groups, so that its peers come out of them, too.
5. After a job all ranks say how it ended. Where one failed and all came out of it, a sweep goes
   on; where some are stuck in it, all the others end, and whoever started the ranks ends the stuck.
6. At the end all end with the exit code of rank 0.

torchrun may start them again, with more or fewer machines:
- Its process on one machine is killed: the ranks there outlive it (`die_with_parent`) until the end
  of the step, and all save. The others then fail, so that their torchrun starts them again.
- A machine is gone: the ranks on the others fail in the midst of a step, and are started again.
- A machine comes: each torchrun sees that at a moment of its own, and sends its ranks SIGTERM, a
  wish to stop. Those that stop because others were asked to wait until they are, too: an end
  without that would be the end of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from titanlike.config.schema import Launch
from titanlike.launch.environment import is_multi_machine, will_restart
from titanlike.launch.failures import Failure, JobFailed, clear_failures, describe, root_cause
from titanlike.launch.job import Job
from titanlike.launch.process_groups import leave_groups
from titanlike.launch.restart_state import RestartState
from titanlike.launch.signals import (
    GRACE,
    Interrupted,
    die_with_parent,
    exit_now,
    handled_signals,
    interruptible,
)
from titanlike.launch.stop_request import MAX_TIME, StopRequest, stop_reason
from titanlike.launch.worker import Worker, barrier, first_answer, run_job

_POLL = timedelta(seconds=10)  # of a follower's wait for the next job
_ALL_ASKED = 5.0  # seconds in which each machine's torchrun has seen that a machine has come


class ExternalRanks:
    """This process among the ranks that somebody else started."""

    def __init__(self) -> None:
        """Meet the other ranks. Raises RuntimeError if they do not come in time."""
        import torch.distributed as dist

        timeout = timedelta(seconds=Launch().timeout)
        self._parent = os.getppid()
        store, self.rank, self.world_size = next(dist.rendezvous("env://", timeout=timeout))
        start = start_id(store, self.rank, self.world_size, timeout.total_seconds())
        self._store = dist.PrefixStore(f"titanlike/{start}", store)
        self._jobs = 0
        self._lost = False  # whether ranks are stuck in a job
        self.restart_state = RestartState.load()
        self._store.set(f"restart_state/{self.rank}", self.restart_state.to_json())
        if self.rank == 0:
            keys = [f"restart_state/{rank}" for rank in range(1, self.world_size)]
            self.restart_state.adopt_newest(text.decode() for text in self._store.multi_get(keys))

    def run(
        self, job: Job, stop: StopRequest, report_failure: Callable[[Failure], None]
    ) -> dict[str, Any]:
        """Run a job on all ranks; what this rank's function returned. Raises like `run_local`."""
        clear_failures(job.run_dir)
        self.restart_state.count_start()
        self._store.set(f"restart_state of job{self._jobs}", self.restart_state.to_json())
        self._store.set(f"job{self._jobs}", job.to_json())
        return self._run(job, stop, report_failure)

    def release(self, code: int) -> None:
        """Tell the followers that there are no more jobs, and how this process will end."""
        with contextlib.suppress(RuntimeError):  # a store that is gone has no followers
            self._store.set(f"job{self._jobs}", str(code))
            # without torchrun the store is this process', and must not end before they have read it
            heard = [f"heard/{rank}" for rank in range(1, self.world_size)]
            self._store.wait([] if self._lost else heard, timedelta(seconds=GRACE))

    def follow(self) -> int:
        """Run jobs until rank 0 has no more, or is gone; the exit code."""
        die_with_parent(os.getppid(), signal.SIGTERM)  # in a run, a wish to stop
        for signum in handled_signals():
            signal.signal(signum, signal.SIG_DFL)  # at once; rank 0 says what happened
        while not (text := self._next_job()).isdigit():
            self.restart_state.adopt_newest(
                [self._store.get(f"restart_state of job{self._jobs}").decode()]
            )
            stop = StopRequest()
            try:
                with interruptible(stop=stop, grace=0):
                    self._run(Job.from_json(text), stop)
            except JobFailed as failed:
                if failed.ends_sweep:
                    exit_now(1)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heard/{self.rank}", "")
        return int(text)

    def _next_job(self) -> str:
        import torch.distributed as dist

        key = f"job{self._jobs}"
        while True:
            try:
                self._store.wait([key], _POLL)
                return self._store.get(key).decode()
            except dist.DistNetworkError:
                exit_now(1)
            except dist.DistStoreError:
                continue  # rank 0 is composing, or its last job is still closing

    def _run(
        self, job: Job, stop: StopRequest, report_failure: Callable[[Failure], None] | None = None
    ) -> dict[str, Any]:
        import torch.distributed as dist

        worker = Worker(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)),
            run_dir=job.run_dir,
            store=dist.PrefixStore(f"job{self._jobs}", self._store),
            overrides=job.overrides,
            stop_request=stop,
            report_failure=report_failure,
        )
        self._jobs += 1
        own = None
        result: dict[str, Any] = {}
        try:
            result = run_job(job, worker)
        except Exception as error:
            own = describe(self.rank, error)
            record_for_torchrun(error)
        # not before the error is dropped: its frames hold the job's process groups
        left = own is None or leave_groups(GRACE)
        asked_out = False  # by a signal, while it waited for the others
        try:
            timeout = job.config.launch.timeout if own is None else GRACE
            ends = barrier(worker, "end", timeout, self._own_end(own, left))
        except (RuntimeError, Interrupted) as error:
            if own is None and isinstance(error, Interrupted):
                raise
            if "stopped" in result:  # by torchrun's own end, which takes the store with it
                return result
            own = own or describe(self.rank, error)
            ends, asked_out = ["stuck"], isinstance(error, Interrupted)
        if not {"failed", "stuck"}.intersection(ends):
            self._see_why_stopped(result, ends, stop)
            return result
        # who comes out late finds every rank's end here, but maybe of ranks that wait no longer
        out = first_answer(worker, "out", "no" if "stuck" in ends else "yes")
        stuck = asked_out or out == "no"
        if not stuck and dist.is_initialized():
            dist.destroy_process_group()  # nobody is inside any more
        failure = root_cause(job.run_dir) or own
        assert failure is not None, "a rank reported a failure without leaving its error"
        failed = failure.to_job_failed(job.run_dir, self.world_size)
        failed.ends_sweep = self._lost = stuck
        raise failed

    def _own_end(self, failure: Failure | None, left: bool) -> str:
        if failure is not None:
            return "failed" if left else "stuck"
        return "orphaned" if self._is_orphan() else "completed"

    def _is_orphan(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent

    def _see_why_stopped(self, result: dict[str, Any], ends: list[str], stop: StopRequest) -> None:
        """Raises JobFailed where a run was stopped by the end of a torchrun, and goes on."""
        if "stopped" not in result or self._is_orphan():
            return
        orphans = [rank for rank, end in enumerate(ends) if end == "orphaned"]
        if orphans and will_restart():
            ranks = f"rank{'s' * (len(orphans) > 1)} {', '.join(map(str, orphans))}"
            text = f"the torchrun of {ranks} was killed; the run has stopped with a checkpoint"
            failed = JobFailed(text, text)
            failed.ends_sweep = self._lost = True
            raise failed
        if result["stopped"] != stop_reason(MAX_TIME) and is_multi_machine():
            deadline = time.monotonic() + _ALL_ASKED
            with contextlib.suppress(Interrupted):  # asked now, after the run
                while not stop.received and time.monotonic() < deadline:
                    time.sleep(0.05)


def start_id(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """A name that all ranks of this start agree on, and no earlier start had.

    The store outlives restarts, with every key of theirs, and torchrun's count of them is each
    machine's own. So each rank shows a new name; rank 0 answers every name that it sees with its
    own, to those of dead ranks in vain, until all ranks have taken it. Raises RuntimeError naming
    the ranks that did not come.
    """
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"titanlike/hello/{rank}", name)
        answer = f"titanlike/answer/{name}"
        store.wait([answer], timedelta(seconds=timeout))
        start = store.get(answer).decode()
        store.set(f"titanlike/here/{start}/{rank}", "")
        return start
    absent, answered = set(range(1, world_size)), set()
    deadline = time.monotonic() + timeout
    while absent:
        for other in sorted(absent):
            if store.check([f"titanlike/here/{name}/{other}"]):
                absent.remove(other)
            elif store.check([f"titanlike/hello/{other}"]):
                seen = store.get(f"titanlike/hello/{other}").decode()
                if seen not in answered:
                    store.set(f"titanlike/answer/{seen}", name)
                    answered.add(seen)
        if absent and time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(absent)))
            raise RuntimeError(f"rank {ranks} did not start in {timeout:g} s")
        time.sleep(0.02 if absent else 0)
    return name


def record_for_torchrun(error: BaseException) -> None:
    """Let an outer torchrun's report show this error."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            # the handler formats the exception being handled
            raise RuntimeError(describe(0, error).error) from None
        except BaseException:
            get_error_handler().record_exception(error)
