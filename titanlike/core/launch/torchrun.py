"""Run jobs on ranks launched by torchrun or srun, one process each; rank 0 leads.

1. All ranks connect to the rendezvous store.
2. Only rank 0 reads the command line; it publishes each job (a sweep has several) in the store.
3. The others wait for the next job, run it with its own store prefix, and wait again.
4. A rank that fails closes the job's process groups, so that peers waiting in them fail, too.
5. After a job all ranks report how it ended. If some failed and all have left the job, a sweep
   continues; if some are stuck in it, all others exit, and the launcher kills the stuck ones.
6. At the end all ranks exit with the exit code of rank 0.

torchrun may restart the ranks, with more or fewer machines:
- Its process on one machine is killed: the ranks there outlive it (`die_with_parent`) until the end
  of the step, and all ranks save. The others then fail, so that their torchrun restarts them.
- A machine is lost: the ranks on the others fail within a step, and are restarted.
- A machine joins: each torchrun notices that in its own time and sends its ranks SIGTERM, a stop
  request. Ranks that stopped by a peer's request wait for their own: exiting earlier ends the job.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from titanlike.core.config.groups.jobs import Launch
from titanlike.core.launch import failures
from titanlike.core.launch.environment import RestartState, compiler_environment, will_restart
from titanlike.core.launch.rendezvous import FIRST_WAIT, LONGER, LONGEST_WAIT, barrier, in_words
from titanlike.core.launch.signals import (
    GRACE,
    MAX_TIME,
    Interrupted,
    StopRequest,
    die_with_parent,
    exit_now,
    handled_signals,
    interruptible,
    stop_reason,
)
from titanlike.core.launch.worker import Job, Worker, run_job

_POLL = timedelta(seconds=10)  # timeout of one wait for the next job
_ALL_SIGNALLED = 5.0  # seconds until every machine's torchrun has noticed that a machine joined
_HELLO = "titanlike/hello"


class TorchrunRanks:
    """This process as one of the ranks that an outer launcher started."""

    def __init__(self, callbacks: tuple[Any, ...] = ()) -> None:
        """Connect to the other ranks; callbacks: see Worker. Raises RuntimeError if some do not
        start in time."""
        import torch.distributed as dist

        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if "TORCHELASTIC_RUN_ID" in os.environ:  # under srun each task has its own cores
            os.environ |= compiler_environment(here) | os.environ
        self._callbacks = callbacks
        self.result: dict[str, Any] = {}  # this rank's, of the last job that did not fail
        timeout = Launch().timeout
        self._parent = os.getppid()
        connected = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        store, self.rank, self.world_size = connected
        start = start_id(store, self.rank, self.world_size, timeout)
        self._store = dist.PrefixStore(f"titanlike/{start}", store)
        self._jobs = 0
        self._stuck = False  # whether ranks are stuck in a job
        self.restart_state = RestartState.load()
        self._store.set(f"restart_state/{self.rank}", self.restart_state.to_json())
        if self.rank == 0:
            keys = [f"restart_state/{rank}" for rank in range(1, self.world_size)]
            self.restart_state.adopt_newest(text.decode() for text in self._store.multi_get(keys))

    def run(
        self, job: Job, stop: StopRequest, report_failure: Callable[[failures.Failure], None]
    ) -> dict[str, Any]:
        """Run a job on all ranks; called on rank 0. Returns and raises like `run_local`."""
        failures.clear_failures(job.run_dir)
        self.restart_state.count_start()
        task = [job.to_json(), self.restart_state.to_json()]
        self._store.set(f"job{self._jobs}", json.dumps(task))
        return self._run(job, stop, report_failure)

    def shutdown(self, code: int) -> None:
        """Tell the followers to exit with `code`; called on rank 0 after the last job."""
        with contextlib.suppress(RuntimeError):  # without the store there are no followers
            self._store.set(f"job{self._jobs}", str(code))
            # without torchrun this process hosts the store, so it must wait until they have read it
            read = [f"released/{rank}" for rank in range(1, self.world_size)]
            self._store.wait([] if self._stuck else read, timedelta(seconds=GRACE))

    def run_follower(self) -> int:
        """Run jobs until rank 0 has no more, or is gone; on ranks other than 0. Returns the exit
        code."""
        die_with_parent(os.getppid(), signal.SIGTERM)  # during a run this is a stop request
        for signum in handled_signals():
            signal.signal(signum, signal.SIG_DFL)  # exit immediately; rank 0 reports
        while not isinstance(task := self._next_task(), int):
            job, restart_state = task
            self.restart_state.adopt_newest([restart_state])
            job, stop = Job.from_json(job), StopRequest()
            interrupted = partial(self._interrupted, job.run_dir)
            try:
                with interruptible(interrupted, stop, grace=0):
                    self._run(job, stop)
            except failures.JobFailed as failed:
                if failed.ends_sweep:
                    exit_now(1)
            except Interrupted as ended:
                interrupted(ended)
                raise
        with contextlib.suppress(RuntimeError):
            self._store.set(f"released/{self.rank}", "")
        return task

    def _interrupted(self, run_dir: Path, interrupted: Interrupted) -> None:
        """Report that a signal ended this rank, marked as a consequence: a rank that ends without a
        report would be taken for the root cause."""
        failure = failures.Failure(self.rank, str(interrupted), "", True, time.time())
        with contextlib.suppress(OSError):
            failures.write_failure(run_dir, failure)

    def _next_task(self) -> Any:
        """Wait for the next (job as JSON, restart state), or the exit code if there are no more."""
        import torch.distributed as dist

        key = f"job{self._jobs}"
        while True:
            try:
                self._store.wait([key], _POLL)
                return json.loads(self._store.get(key))
            except dist.DistNetworkError:
                exit_now(1)
            except dist.DistStoreError:
                continue  # timeout: rank 0 is composing the config, or closing its last job

    def _run(
        self,
        job: Job,
        stop: StopRequest,
        report_failure: Callable[[failures.Failure], None] | None = None,
    ) -> dict[str, Any]:
        import torch.distributed as dist

        # 1. run the job's function on this rank
        worker = Worker(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)),
            one_machine=os.environ.get("LOCAL_WORLD_SIZE") == str(self.world_size),
            run_dir=job.run_dir,
            store=dist.PrefixStore(f"job{self._jobs}", self._store),
            overrides=job.overrides,
            stop_request=stop,
            report_failure=report_failure,
            callbacks=self._callbacks,
        )
        self._jobs += 1
        result: dict[str, Any] = {}
        failure = None
        try:
            result = self.result = run_job(job, worker)
            outcome = "orphaned" if self._is_orphan() else ""
        except Exception as error:
            failure = failures.describe(self.rank, error)
            if failure.transport:
                stop.peer_failed()  # writes the errors of peers that ended silently
            cause = failures.root_cause(job.run_dir) or failure
            failures.record_for_torchrun(cause.to_job_failed(job.run_dir, self.world_size).error)
        # 2. release peers that wait for this rank; only now, as the error's frames held the process
        #    groups
        if failure is not None:
            outcome = "failed" if leave_groups(GRACE) else "stuck"
        # 3. exchange how the job ended on each rank
        signalled = False  # whether a signal arrived while waiting for the others
        try:
            timeout = job.config.launch.timeout if failure is None else GRACE
            outcomes = barrier(worker, "end", timeout, outcome, True, failed_come=True)
        except (RuntimeError, Interrupted) as error:
            signalled = isinstance(error, Interrupted)
            if failure is None and signalled:
                raise
            if "stopped" in result:  # torchrun ended, and the store with it
                return result
            missing = getattr(error, "missing", ())
            if failure is not None and failure.transport and missing and not stop.received:
                text = f"rank {in_words(missing)} ended or does not respond: its peers have lost "
                text += f"it, and it did not report an error within {GRACE:g} s"
                failure = failures.Failure(self.rank, text, "", False, time.time(), names_rank=True)
            failure = failure or failures.describe(self.rank, error)
            with contextlib.suppress(OSError):
                failures.write_failure(job.run_dir, failure)
            cause = failures.root_cause(job.run_dir) or failure
            failures.record_for_torchrun(cause.to_job_failed(job.run_dir, self.world_size).error)
            outcomes = {self.rank: "stuck"}
        ends = {*outcomes.values()}
        if not {"failed", "stuck"} & ends:
            self._check_why_stopped(result, outcomes, stop)
            return result
        # 4. agree on whether all have left the job. The outcomes that a late rank reads may lack
        #    "stuck" though others have stopped waiting, so the first answer counts
        assert worker.store is not None
        answer = "no"  # if the store is gone
        with contextlib.suppress(RuntimeError):
            vote = "no" if "stuck" in ends else "yes"
            answer = worker.store.compare_set("all left", "", vote).decode()
        stuck = signalled or answer == "no"
        if not stuck and dist.is_initialized():
            dist.destroy_process_group()  # does not block, as every rank has left it
        cause = failures.root_cause(job.run_dir) or failure
        assert cause is not None, "a rank reported a failure without writing its error"
        if cause.transport and stop.received:  # the signal has ended torchrun, and its store
            raise Interrupted(stop.code())
        failed = cause.to_job_failed(job.run_dir, self.world_size)
        failed.ends_sweep = self._stuck = stuck
        raise failed

    def _is_orphan(self) -> bool:
        return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self._parent

    def _check_why_stopped(
        self, result: dict[str, Any], outcomes: dict[int, str], stop: StopRequest
    ) -> None:
        """Raise JobFailed if the run stopped as a torchrun was killed, and will be restarted."""
        if "stopped" not in result or self._is_orphan():
            return
        orphans = sorted(rank for rank, outcome in outcomes.items() if outcome == "orphaned")
        if orphans and will_restart():
            ranks = f"rank{'s' * (len(orphans) > 1)} {in_words(orphans)}"
            text = f"the torchrun of {ranks} was killed; the run has stopped with a checkpoint"
            failed = failures.JobFailed(text, text)
            failed.ends_sweep = self._stuck = True
            raise failed
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        if result["stopped"] != stop_reason(MAX_TIME) and machines > 1:
            deadline = time.monotonic() + _ALL_SIGNALLED
            with contextlib.suppress(Interrupted):  # the signal arrives now, after the run
                while not stop.received and time.monotonic() < deadline:
                    time.sleep(0.05)


def leave_groups(timeout: float) -> bool:
    """Close this process' connections, so that peers waiting for it get an error immediately.

    Returns whether that took less than `timeout` seconds: a collective in flight keeps gloo's
    connections open until its peers have left, too. NCCL groups are aborted: destroying them may
    wait for queued kernels, and so for peers, which are not notified (see `watchdog`).
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    backends = {pair.rpartition(":")[2] for pair in dist.get_backend_config().split(",")}

    def leave() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            if backends == {"gloo"}:
                dist.destroy_process_group()
            else:
                from titanlike.core.torch_private.process_groups import abort_groups

                abort_groups()
        gc.collect()  # modules are reference cycles; gloo closes with the last reference
        # loaded by every job that has meshes; importing it now would take seconds
        if (groups := sys.modules.get("titanlike.core.torch_private.process_groups")) is not None:
            groups.forget_groups_of_meshes()

    thread = threading.Thread(target=leave, daemon=True, name="leave groups")
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


def start_id(store: Any, rank: int, world_size: int, timeout: float) -> str:
    """Agree on an id of this launch among all ranks, through a store that outlives restarts. Raises
    RuntimeError with the ranks that did not start in time.

    The store keeps the keys of all earlier launches, and torchrun counts restarts per machine. So
    each rank publishes a new id; rank 0 answers every id that it sees with its own (dead ranks
    never read theirs) until all ranks have confirmed. Rank 0 answers many ranks per request and
    polls with increasing intervals: tens of requests whatever the number of ranks, and six by each
    other rank.
    """
    start = own_id = uuid.uuid4().hex
    if rank > 0:
        store.append(_HELLO, f"{own_id}\n")
        answer = f"titanlike/answer/{own_id}"
        store.wait([answer], timedelta(seconds=timeout))
        start = store.get(answer).decode()
    else:
        store.append(_HELLO, "\n")  # create the key: reading a missing one blocks
    confirmed = f"titanlike/confirmed/{start}"
    store.append(confirmed, f"{rank}\n")
    if store.add(f"{confirmed}/count", 1) == world_size:
        store.set(f"{confirmed}/all", "")
    if rank > 0:
        return start
    answered: set[str] = set()
    deadline, wait = time.monotonic() + timeout, FIRST_WAIT
    while True:
        seen = store.get(_HELLO)
        new = {*seen.decode().split()} - answered
        if new:
            store.multi_set([f"titanlike/answer/{other}" for other in new], [own_id] * len(new))
            answered |= new
        # not a wait with a timeout, which torch reports on stderr
        if store.check([f"{confirmed}/all"]):
            # empty the list for the next launch, unless one of its ranks is there already
            store.compare_set(_HELLO, seen.decode(), "\n")
            return own_id
        if time.monotonic() > deadline:
            there = map(int, store.get(confirmed).decode().split())
            missing = sorted({*range(world_size)} - {*there})
            raise RuntimeError(f"rank {in_words(missing)} did not start in {timeout:g} s")
        time.sleep(wait)
        wait = min(wait * LONGER, LONGEST_WAIT)
