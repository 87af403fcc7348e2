"""Open and close the resources of a training run: data, model, checkpoints, watchdog, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from titanlike.core.checkpoint.checkpointer import Checkpointer
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.checkpoint.storage import Moved
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.data import ChatData
from titanlike.core.config.groups.watching import MemoryProfile, TensorBoard, Wandb
from titanlike.core.config.parse import to_plain, write_config
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import Data, Stream
from titanlike.core.device.accelerator import kernels
from titanlike.core.device.choose import choose_device, near_device
from titanlike.core.distributed.async_reads import device_queue
from titanlike.core.distributed.mesh import Mesh, close_mesh, open_mesh
from titanlike.core.distributed.places import compare_places
from titanlike.core.launch.failures import clear_failures
from titanlike.core.launch.rendezvous import DATA_TIMEOUT, barrier
from titanlike.core.launch.run_dir_lock import RunDirOwner, lock_as_rank
from titanlike.core.launch.signals import stop_reason
from titanlike.core.launch.watchdog import MOVING, READING, Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.metrics.run_files import Events, RunFiles, log_start
from titanlike.core.metrics.sinks import JsonlSink, Sink
from titanlike.core.torch_private.process_groups import abort_groups
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import Run, build
from titanlike.core.training.layout import layout
from titanlike.core.training.step import PendingStep

if TYPE_CHECKING:  # each is imported where a config asks for it
    from titanlike.use.samples import Sampler
    from titanlike.watch.profile import Profile
    from titanlike.watch.stragglers import Stragglers
    from titanlike.watch.timeline import Timeline


@dataclass(kw_only=True)
class Session:
    """The resources of a training run. Only rank 0 has an owner and a check of the run's files, and
    writes to console, events and sinks."""

    config: Config
    worker: Worker
    data: Data
    run: Run
    detector: AnomalyDetector
    checkpointer: Checkpointer
    watchdog: Watchdog
    console: Console
    events: Events
    sinks: list[Sink]
    owner: RunDirOwner | None
    files: RunFiles | None
    profile: Profile | None
    recorders: list[Profile | Timeline]
    sampler: Sampler | None  # with sample.every
    stragglers: Stragglers | None  # None for one rank
    progress: Progress  # after the last step whose metrics are known
    pending: PendingStep | None = None  # the step after `progress`, without metrics yet
    stop_code: int = 0  # the stop request that ends the run, the same on every rank; 0 = none
    last: int = 0  # step of this run; fewer than the config says where its data end
    places: str = ""  # hosts and devices of the ranks, on rank 0 of several

    @property
    def stopped(self) -> str:
        """The request that stopped the run, "" if none did."""
        return stop_reason(self.stop_code)

    def log(self, record: dict[str, Any]) -> None:
        """Write a step's record to console and sinks. Raises what `check_run_dir` raises."""
        self.check_run_dir()
        if self.worker.rank == 0:
            self.console.step(record)
            for sink in self.sinks:
                sink.log(record)

    def check_run_dir(self) -> None:
        """Raises TakenOver if a newer launch owns the run's directory, LostFiles if it is gone."""
        if self.owner is not None and self.files is not None:
            self.owner.check()
            self.files.check()


def open_data_on_every_rank(config: Config, worker: Worker, *, writes: bool = True) -> Data:
    """Open the data; one process a machine prepares it (tokenizes) before the others read.

    Called before there is a process group: preparing may take longer than its timeout. writes:
    whether run_dir may be written; else `keep_first_day` is to be called once it is. Raises
    ConfigError for an error in the data.
    """
    if reads_chats(config):  # whose template may tell the day
        from titanlike.formats.chat_template import begin_on, first_day

        day = barrier(worker, "day", DATA_TIMEOUT, first_day(config.run_dir), listens=True)[0]
        begin_on(config.run_dir, day)
        if writes:
            first_day(config.run_dir, day)
    try:
        if worker.local_rank == 0:
            data = open_data(config)
        if worker.store is not None:
            barrier(worker, "data", DATA_TIMEOUT)
        return data if worker.local_rank == 0 else open_data(config)
    except DataError as error:
        raise ConfigError([error.problem]) from None


def reads_chats(config: Config) -> bool:
    read = [config.data]
    if config.validation.data:
        from titanlike.formats.validation_sets import sections

        read += sections(config).values()
    return any(isinstance(one, ChatData) for one in read)


def keep_first_day(config: Config) -> None:
    """Keep the day that chats were rendered with in run_dir."""
    if reads_chats(config):
        from titanlike.formats.chat_template import first_day

        first_day(config.run_dir, first_day(config.run_dir))


@contextmanager
def connected(
    config: Config,
    worker: Worker,
    watchdog: Watchdog | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[Mesh]:
    """A context with the mesh of a job without a session; it is closed at the end, unless by an
    error: whoever handles that leaves the groups.

    watchdog: the job's, in a phase already; None = one of its own. It names a rank that cannot
    connect, and lets this rank out of a collective on the device once a peer has failed. say: called
    on rank 0 if the ranks' hardware differs.
    """
    if watchdog is None:
        with Watchdog(worker, config.launch, abort_groups) as watchdog:
            watchdog.enter_phase(0, "connect", config.launch.timeout)
            with connected(config, worker, watchdog, say) as mesh:
                watchdog.enter_phase(0, "steps", 0)
                yield mesh
        return
    mesh = open_mesh(config, worker)
    watchdog.watch_device(device_queue(mesh.device))
    _, unlike = compare_places(config, mesh.device, worker)
    if unlike:
        say(unlike)
    yield mesh
    close_mesh()


def watch_long_steps(watchdog: Watchdog, data: Data) -> Moved:
    """Let what is done step by step on purpose, and takes long, be progress. Returns what counts
    the parts of checkpoints' files."""
    moved = Moved()
    watchdog.watch_steps(lambda: moved.count, MOVING)
    if isinstance(data.train, Stream):
        watchdog.watch_steps(data.train.samples_read, READING)
    return moved


@contextmanager
def open_session(config: Config, worker: Worker, watchdog: Watchdog) -> Iterator[Session]:
    """Open all resources of a run, resumed from the newest checkpoint; on exit, write its final
    status.

    watchdog: the job's, already entered.
    """
    watchdog.enter_phase(0, "start", 0)  # one process may tokenize for hours
    data = open_data_on_every_rank(config, worker)
    moved = watch_long_steps(watchdog, data)
    device, _ = choose_device(config, worker.local_rank, worker.local_world_size)
    worker.resources.enter_context(near_device(device))
    watchdog.enter_phase(0, "connect", config.launch.timeout)
    mesh = open_mesh(config, worker)
    if worker.world_size > 1:
        from titanlike.core.training.same_data import refuse_other_data

        refuse_other_data(config, data, mesh, worker, watchdog.enter_phase)
    queue = device_queue(mesh.device)
    watchdog.watch_device(queue)
    metric_names = [*(config.metrics.own or {})]
    console = Console(steps=config.last_step, log_every=config.log_every, own=metric_names)
    events = Events(worker.run_dir, console.line if worker.rank == 0 else None)
    sinks: list[Sink] = []
    status, together = "failed", False  # whether all ranks have come to the end
    with kernels(config, mesh.device):
        watchdog.enter_phase(0, "build", config.launch.timeout)
        places, unlike = compare_places(config, mesh.device, worker)
        if unlike:
            events.log("unlike", 0, unlike)
        say = console.line if worker.rank == 0 else lambda _: None
        run = build(config, mesh, data, say)
        rank = run.mesh.dp_rank
        checkpointer = Checkpointer(run.stage_states, config, data, events, rank, moved)
        run.phases.observers.append(watchdog)
        stragglers = None
        if mesh.world_size > 1:
            from titanlike.core.torch_private.fsdp import parameter_groups
            from titanlike.watch.stragglers import BusyTime, Stragglers, told_every

            groups = [group for stage in run.stages for group in parameter_groups(stage)]
            busy = BusyTime(mesh.device, groups, told_every(mesh.world_size))
            run = replace(run, busy=busy)
            run.phases.observers.append(busy)
            stragglers = Stragglers(config, mesh, worker, events)

        def report_profile(step: int, text: str) -> None:
            events.log("profile", step, text)
            for sink in sinks:
                sink.note("profile", text)

        def report_redone(steps: int, seconds: float) -> None:
            events.log("redone", checkpointer.newest, steps=steps, seconds=seconds)

        profile, sampler = None, None
        recorders: list[Profile | Timeline] = []
        if isinstance(config.profile, MemoryProfile):
            from titanlike.watch.profile import Profile

            profile = Profile(config, worker, run, watchdog, report_profile)
            recorders.append(profile)
        if config.timeline.enabled:
            from titanlike.watch.timeline import Timeline

            note = partial(events.log, "timeline")
            recorders.append(Timeline(config, worker, run, watchdog, sinks, note))
        try:
            if config.sample.every:
                from titanlike.use.samples import Sampler

                sampler = Sampler(run, config, data)
            watchdog.enter_phase(0, "load", config.checkpoint.timeout)
            owner = _take_over(config, worker, events) if worker.rank == 0 else None
            progress = checkpointer.resume()
            run_files = None
            if worker.rank > 0:
                worker.resources.enter_context(lock_as_rank(worker.run_dir))
            else:
                from titanlike.core.config.received import note_launch

                plain = to_plain(config)
                write_config(config, worker.run_dir)  # only now, as a launch may be refused
                note_launch(worker.run_dir)
                if getattr(config.data, "tokenizer", "bytes") != "bytes":
                    from titanlike.formats.tokenizer import keep_tokenizer

                    keep_tokenizer(config.data, worker.run_dir)
                step, overrides = progress.step, worker.overrides
                stages = layout(config, run.plan, mesh, data.description)
                began = worker.stop_request.started
                log_start(worker.run_dir, step, overrides, plain, stages, began)
                sinks.append(JsonlSink(worker.run_dir / "metrics.jsonl", step, report_redone))
                if isinstance(config.logger, Wandb):
                    from titanlike.watch.wandb_sink import WandbSink

                    folder, say = worker.run_dir, console.line
                    sinks.append(WandbSink(config.logger, plain, folder, say, overrides))
                elif isinstance(config.logger, TensorBoard):
                    from titanlike.watch.tensorboard_sink import TensorBoardSink

                    sinks.append(TensorBoardSink(worker.run_dir, step))
                run_files = worker.resources.enter_context(closing(RunFiles(worker.run_dir)))
            session = Session(
                config=config,
                worker=worker,
                data=data,
                run=run,
                detector=AnomalyDetector(config, progress.guard),
                checkpointer=checkpointer,
                watchdog=watchdog,
                console=console,
                events=events,
                sinks=sinks,
                owner=owner,
                files=run_files,
                profile=profile,
                recorders=recorders,
                sampler=sampler,
                stragglers=stragglers,
                progress=progress,
                last=config.last_step,
                places=places,
            )
            yield session
            status, together = "interrupted" if session.stop_code else "completed", True
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            checkpointer.close()
            for recorder in recorders:
                recorder.close(together)
            console.close()
            for sink in sinks:
                sink.close(status)


def _take_over(config: Config, worker: Worker, events: Events) -> RunDirOwner:
    """Own the run's directory on rank 0, once an earlier launch on this machine has ended."""
    owner = RunDirOwner(worker.run_dir)
    patience = min(config.launch.timeout, config.checkpoint.timeout / 2)
    waited: list[str] = []

    def say(text: str) -> None:
        events.log("takeover", 0, text)
        waited.append(text)

    worker.resources.enter_context(owner.wait(patience, say))
    if waited:
        clear_failures(worker.run_dir)  # the earlier launch's, not of this launch's ranks
    return owner
