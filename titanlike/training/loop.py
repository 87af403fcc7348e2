"""The training job: what every rank does from the first step to the last.

One step reads like the textbook: loss and gradients, their norm, clip, learning rate, update. Around
it, a run goes on from a checkpoint, saves others, and ends early where it is asked to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlike.checkpoint.saver import Progress, Saver
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.data.loader import Batch, batches, open_data, validation_batches
from titanlike.data.sources import Data
from titanlike.launch.owner import Owner
from titanlike.launch.signals import Interrupted
from titanlike.launch.stop import name_of_wish
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker, meet
from titanlike.metrics.console import Console
from titanlike.metrics.events import Events
from titanlike.metrics.open import open_sinks, where
from titanlike.metrics.sinks import Sink
from titanlike.metrics.summary import summary, value_of
from titanlike.optim.optimizer import clip_gradients, gradient_norm, learning_rate, set_lr
from titanlike.parallel.device import deterministic, peak_flops, peak_memory
from titanlike.parallel.mesh import Mesh, close_mesh, open_mesh
from titanlike.parallel.sharding import compute_dtype
from titanlike.training import report
from titanlike.training.build import Run, build
from titanlike.training.guard import BadNumbers, Guard, Verdict

PREPARATION = 24 * 3600.0  # seconds that one rank may work on its own before all begin
STOPPED_EARLY = 75  # exit code of a run that was asked to end and can go on (EX_TEMPFAIL)
MOST_ROLLBACKS = 3  # to one checkpoint: then leaving batches out does not help


@dataclass(frozen=True)
class Session:
    """What the loop works with. Console, events and sinks speak on rank 0 alone, which has the owner."""

    config: Config
    worker: Worker
    data: Data
    run: Run
    guard: Guard
    saver: Saver
    watchdog: Watchdog
    console: Console
    events: Events
    sinks: list[Sink]
    owner: Owner | None

    def log(self, record: dict[str, Any]) -> None:
        """Raises ValueError where another start of this run has taken over."""
        if self.owner is not None:
            self.owner.check()
            self.console.step(record)
            for sink in self.sinks:
                sink.log(record)


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """Train to the last step, or until the run is asked to end.

    Returns {"value": last validation loss (or loss), or what `config.value` names}, and of a run that was asked to end early
    also "stopped" (by what) and "exit_code".
    """
    data = open_on_every_rank(config, worker)
    mesh = open_mesh(config, worker)
    console = Console(steps=last_step(config), log_every=config.log_every)
    events = Events(worker.run_dir, console.line if worker.rank == 0 else None)
    sinks: list[Sink] = []
    status = "failed"
    with (
        deterministic(config.deterministic),
        Watchdog(worker, config.launch, worker.last_words) as watchdog,
    ):
        watchdog.at(0, "build", config.launch.timeout)
        run = build(config, mesh, data)
        run.pipeline.watch(watchdog.act)
        saver = Saver(run.parts, config, data, events)
        try:
            watchdog.at(0, "load", config.checkpoint.timeout)
            owner = Owner(worker.run_dir) if worker.rank == 0 else None
            progress = saver.resume()
            start = progress.step
            if worker.rank == 0:
                sinks += open_sinks(config, to_plain(config), worker.run_dir, start, console.line)
                report.opening(console, config, run, data, worker, start, where(sinks[1:]))
            guard = Guard(config, progress.guard)
            session = Session(
                config, worker, data, run, guard, saver, watchdog, console, events, sinks, owner
            )
            console.start_at(start)
            with worker.stop.armed():
                progress, wish = train_steps(session, progress)
                watchdog.at(progress.step, "save", config.checkpoint.timeout)
                saver.finish(progress, done=not wish)
            if wish:
                events.log("stop", progress.step, by=name_of_wish(wish))
            status = "interrupted" if wish else "completed"
        except (KeyboardInterrupt, Interrupted):
            status = "interrupted"
            raise
        finally:
            console.close()
            for sink in sinks:
                sink.close(status)
    value = progress.value
    if worker.rank == 0:
        report.closing(console, config, worker, start, progress, saver.newest, name_of_wish(wish))
        if config.value is not None:
            value = value_of(config.value, summary(worker.run_dir))
    close_mesh()
    ending = {"stopped": name_of_wish(wish), "exit_code": STOPPED_EARLY} if wish else {}
    return {"value": value, **ending}


def train_steps(s: Session, progress: Progress) -> tuple[Progress, int]:
    """Train from `progress` on; where it ended, and what asked for it (0 = the last step came)."""
    config, last, wish = s.config, last_step(s.config), 0
    stream = batches_from(s, progress)
    went_back: list[int] = []  # to these steps
    # the first step compiles, allocates, and meets every peer for the first time
    patience: float | None = config.launch.timeout
    stall: float | None = None
    while progress.step < last and not wish:
        step = progress.step + 1
        s.watchdog.at(step, "data", patience)
        record, verdict, wish = timed_step(s.run, config, step, stream, s.guard, s.worker)
        patience = None
        if stall is not None:
            record["save_stall_seconds"], stall = stall, None  # between the step before and this
        if verdict is not None:
            s.events.log(verdict.kind, step, verdict.text, action=verdict.action)
            if verdict.action == "stop":
                raise BadNumbers(f"{verdict.text}; {s.saver.way_back()}")
            if verdict.action == "rollback":
                progress = go_back(s, progress, verdict, went_back)
                stream = batches_from(s, progress)
                continue
            record["skipped"] = verdict.kind
        final = step == last  # is completed whatever asks the run to end
        if is_due(step, config.validation.every, final and config.validation.every > 0) and (
            final or not wish
        ):
            s.watchdog.at(step, "validation")
            asked = None if final else lambda: agreed_wish(s.run.mesh, config, s.worker)
            val_loss = validate(s.run, config, s.data, asked)
            if val_loss is None:
                wish = agreed_wish(s.run.mesh, config, s.worker)
            else:
                record["val_loss"] = val_loss
        value = record.get("val_loss", record["loss"])
        progress = replace(progress, step=step, value=value, guard=s.guard.state())
        s.log(record)
        s.saver.poll()
        if wish or is_due(step, config.checkpoint.every, final and config.checkpoint.last):
            s.watchdog.at(step, "save", config.checkpoint.timeout)
            for sink in s.sinks:
                sink.flush()  # a checkpoint must not outlive the records of its steps
            if s.owner is not None:
                s.owner.check()
            stall = s.saver.save(progress, record.get("val_loss"))
            wish = wish or agreed_wish(s.run.mesh, config, s.worker)
    return progress, wish if progress.step < last else 0


def go_back(s: Session, progress: Progress, verdict: Verdict, before: list[int]) -> Progress:
    """Load the newest checkpoint; the batches from there to this step are left out from now on."""
    bad = progress.step + 1
    s.watchdog.at(bad, "load", s.config.checkpoint.timeout)
    back = s.saver.go_back()
    if back is None:
        raise BadNumbers(f"{verdict.text}; there is no checkpoint to go back to")
    if before[-MOST_ROLLBACKS:] == [back.step] * MOST_ROLLBACKS:
        raise BadNumbers(f"{verdict.text}, after {MOST_ROLLBACKS} rollbacks to step {back.step}")
    before.append(back.step)
    out = bad - back.step
    text = f"back to step {back.step}; the batches of {out} step{'s' * (out > 1)} are left out"
    s.events.log("rollback", bad, text, to=back.step, left_out=out)
    s.guard.load(back.guard)
    s.console.start_at(back.step)
    for sink in s.sinks:
        sink.rewind(back.step)
    return replace(back, left_out=progress.left_out + out)


def batches_from(s: Session, progress: Progress) -> Iterator[dict[str, Tensor]]:
    """This dp rank's batches after `progress`: a place in the data is a function of the step."""
    start = progress.step + progress.left_out
    return batches(s.data.train, s.config, dp_rank=s.run.mesh.dp_rank, start_step=start)


class Step(NamedTuple):
    """What came of a step."""

    record: dict[str, Any]  # for metrics.jsonl
    verdict: Verdict | None  # of its numbers; None = good
    wish: int  # what asked the run to end after it, the same on every rank; 0 = nothing


def timed_step(
    run: Run,
    config: Config,
    step: int,
    stream: Iterator[dict[str, Tensor]],
    guard: Guard,
    worker: Worker,
) -> Step:
    """Take a batch, train on it, and measure."""
    begin = time.perf_counter()
    record, verdict = training_step(run, config, step, next(stream), guard)
    if run.mesh.device.type == "cuda":
        torch.cuda.synchronize()  # the update's kernels belong to this step
    measured, wish = measure(run, config, time.perf_counter() - begin, worker)
    return Step(record | measured, verdict, wish)


def training_step(
    run: Run, config: Config, step: int, batch: dict[str, Tensor], guard: Guard
) -> tuple[dict[str, Any], Verdict | None]:
    """One optimizer step on this dp rank's part of a batch; the step's numbers.

    A step whose numbers the guard finds bad changes no parameter.
    """
    loss, _ = run.pipeline.train(on_device(batch, run.mesh, config))
    norm = gradient_norm(run.owned, run.mesh)
    record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}
    verdict = guard.judge(record, run)
    lr = update(run, config, step, norm) if verdict is None else 0.0
    for part in run.parts:
        part.optimizer.zero_grad()
    return record | {"lr": lr, "tokens": step * config.batch_size * config.seq_len}, verdict


def update(run: Run, config: Config, step: int, norm: Tensor) -> float:
    """Clip by the global norm, update all parameters and the running statistics of batch norms;
    returns the learning rate."""
    if config.optimizer.clip is not None:
        clip_gradients(run.parameters, norm, config.optimizer.clip)
    for part in run.parts:
        set_lr(part.optimizer, config, step)
        part.optimizer.step()
    run.norms.update()
    return learning_rate(config, step)


def validate(
    run: Run, config: Config, data: Data, asked: Callable[[], int] | None = None
) -> float | None:
    """Loss in nats a token over the validation batches, the same ones each time.

    `asked` is called before each batch, on all ranks: where it says that the run is to end, the
    validation is given up, and None returned.
    """
    run.train_mode(False)
    total = torch.zeros(2, dtype=torch.float64)
    given_up = False
    for batch in validation_batches(data.validation, config, dp_rank=run.mesh.dp_rank):
        if given_up := asked is not None and bool(asked()):
            break
        loss, tokens = run.pipeline.evaluate(on_device(batch, run.mesh, config))
        total += torch.tensor([loss.item() * tokens.item(), tokens.item()])
    run.train_mode(True)
    return None if given_up else (total[0] / total[1]).item()


def on_device(batch: Batch, mesh: Mesh, config: Config) -> Batch:
    """This rank's part of a batch on its device, what the model takes in the compute dtype."""
    moved = {name: value.to(mesh.device, non_blocking=True) for name, value in batch.items()}
    dtype = compute_dtype(config)
    return {
        name: value.to(dtype) if value.is_floating_point() and name != "targets" else value
        for name, value in moved.items()
    }


def measure(run: Run, config: Config, seconds: float, worker: Worker) -> tuple[dict[str, Any], int]:
    """What a step cost (the slowest rank's time, the largest rank's peak memory), and `Step.wish`."""
    memory, wish = peak_memory(run.mesh.device), worker.stop.wish(config.max_time)
    if run.mesh.world_size > 1:
        mine = torch.tensor([seconds, memory, wish], dtype=torch.float64, device=run.mesh.device)
        seconds, memory, wish = run.mesh.max(mine).tolist()
    speed = config.batch_size * config.seq_len / seconds
    record = {"tokens_per_second": speed, "step_seconds": seconds, "memory_bytes": int(memory)}
    peak = peak_flops(run.mesh.device, config.precision.name)
    if peak is not None and run.draft.flops_per_token is not None:
        record["mfu"] = speed * run.draft.flops_per_token / (peak * run.mesh.world_size)
    return record, int(wish)


def agreed_wish(mesh: Mesh, config: Config, worker: Worker) -> int:
    """`Step.wish` between steps. Collective."""
    wish = worker.stop.wish(config.max_time)
    if mesh.world_size > 1:
        wish = int(mesh.max(torch.tensor([wish], device=mesh.device)).item())
    return wish


def last_step(config: Config) -> int:
    """The step that completes the run: `steps`, or the first that has trained on `max_tokens`."""
    if config.max_tokens is None:
        return config.steps
    return min(config.steps, -(-config.max_tokens // (config.batch_size * config.seq_len)))


def is_due(step: int, every: int, anyway: bool) -> bool:
    """Every so many steps (0 = never), or anyway."""
    return anyway or (every > 0 and step % every == 0)


def open_on_every_rank(config: Config, worker: Worker) -> Data:
    """Open the data; one process a machine prepares it (tokenizes) before the others read.

    To be called before there is a process group: preparing may take longer than its timeout.
    """
    if worker.local_rank == 0:
        data = open_data(config)
    meet(worker, "data", PREPARATION)
    return data if worker.local_rank == 0 else open_data(config)
