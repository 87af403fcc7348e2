"""The train step, and validation: functions of a run and a batch.

The host does not wait for a step's own metrics. A step is launched in two halves; its metrics are
read once the forward and backward of the next step are launched, or at once where they are needed:

1. `forward_backward`: computes gradients, their norm and the loss, on the device.
2. `update`: updates parameters unless loss or gradients are bad, which the device decides; starts
   to copy the metrics to the host.
3. `finish_step`: waits for the metrics; returns the record, and the anomaly if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import nan
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import validation_batches, validation_weights
from titanlike.core.data.sources import Batch, Data, Source, no_targets
from titanlike.core.device.accelerator import peak_flops
from titanlike.core.device.choose import ranks_of
from titanlike.core.device.memory import peak_memory
from titanlike.core.distributed.async_reads import PendingScalars, mark, seconds_between
from titanlike.core.launch.worker import Worker
from titanlike.core.optim.fused import step_unless
from titanlike.core.optim.optimizer import (
    clip_divisor,
    gradient_norms,
    learning_rate,
    set_lr,
)
from titanlike.core.training.anomalies import Anomaly, AnomalyDetector, BadNumbers, is_bad
from titanlike.core.training.build import Run
from titanlike.core.training.device_batches import batches_for, to_device
from titanlike.core.training.measured import Measuring, entries, taken

_SHOWN = 0.01  # of a step in which training waited for its batch, to be recorded


@dataclass(frozen=True)
class Gradients:
    """Results of a step whose forward and backward are launched; scalars on the device, fp32."""

    step: int
    loss: Tensor
    norm: Tensor  # global gradient norm
    norms: Tensor  # norm of this rank's shard of each gradient, in the order of `Run.owned`
    begin: Any  # `mark` before the step
    count: Tensor  # number of loss terms (valid tokens) in the global batch
    measured: dict[str, Tensor]  # by the names of `MEASURED`
    data_seconds: float  # until the batch was there


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose metrics have not arrived on the host."""

    gradients: Gradients
    sent: PendingScalars
    end: Any  # `mark` after the update
    lr: float
    time: float  # seconds since the epoch
    more: dict[str, Any] = field(default_factory=dict)  # further entries of its record

    @property
    def step(self) -> int:
        return self.gradients.step


class StepResult(NamedTuple):
    record: dict[str, Any]  # for metrics.jsonl
    waited: list[float]  # seconds in which each rank waited for others; [] = not known
    anomaly: Anomaly | None  # None = loss and gradients are good
    stop_code: int  # a stop request's, the same on every rank; 0 = none
    graphs: int  # compiled in this step, on the rank with the most
    ends: bool  # a rank's data end with the next step


def forward_backward(run: Run, config: Config, step: int, stream: Iterator[Batch]) -> Gradients:
    """Run forward and backward on this dp rank's next batch, which is on the device already."""
    begin, asked = mark(run.mesh.device), time.perf_counter()
    batch = next(stream)
    data_seconds = time.perf_counter() - asked
    run.phases.begin("forward and backward")
    for transform in run.transforms.values():
        transform.begin_step(step)
    if run.own is not None and step % config.log_every == 0:
        run.own.begin()
    loss, count, terms = run.pipeline.forward_backward(batch, config.metrics.microbatch_losses)
    run.phases.begin("gradient norm")
    sums = run.pipeline.sums
    if sums is not None:
        norm, norms = sums.norms([*run.owned.values()])
        squares = norms.new_zeros(())
    else:
        norms = gradient_norms([*run.owned.values()])
        squares = norms.square()
        squares = (squares if run.shares is None else squares * run.shares).sum()
    run.phases.begin("agree")
    more = taken(Measuring(run, config, norms, terms), step)
    summed = [(entry, value) for entry, value in more if entry.reduce == "sum"]
    packed = [squares.to(run.mesh.device), *(value for _, value in summed)]
    loss, total = run.pipeline.sum_loss(loss, torch.cat([value.view(-1) for value in packed]))
    totals = total.split([value.numel() for value in packed])
    measured = {entry.name: value for entry, value in more}
    for (entry, value), each_sum in zip(summed, totals[1:], strict=True):
        measured[entry.name] = entry.finish(each_sum.view(value.shape))
    run.phases.begin("numbers of the step before")
    if sums is None:
        norm = (total[0] / config.replicate).sqrt()  # replicas of a shard count once
    return Gradients(step, loss, norm, norms, begin, count, measured, data_seconds)


def update(
    run: Run,
    config: Config,
    gradients: Gradients,
    detector: AnomalyDetector,
    worker: Worker,
    ends: bool = False,
) -> PendingStep:
    """Update the parameters, and start to copy the step's metrics to the host.

    A step whose loss or gradients the detector rejects changes no parameter, optimizer state or
    running statistics. detector: has seen all earlier steps; ends: this rank's data do with the next
    step.
    """
    step, loss, norm = gradients.step, gradients.loss, gradients.norm
    bad = is_bad(loss, norm, detector.limits())
    lr = optimizer_step(run, config, step, norm, bad)
    drop_gradients(run)
    run.phases.begin("measure")
    end = mark(run.mesh.device)  # the update's kernels belong to this step
    stop_code = worker.stop_request.code(config.max_time)
    graphs = run.compiled.new_graphs() if run.compiled else 0
    peak = peak_memory(run.mesh.device)
    numbers = {"loss": loss, "grad_norm": norm, "bad": bad, "count": gradients.count}
    numbers |= gradients.measured
    for transform in run.transforms.values():
        numbers |= transform.measured()
    host: dict[str, float | list[float]] = {"stop_code": stop_code, "graphs": graphs}
    host |= {"ends": float(ends), "data": gradients.data_seconds}
    host["allocated"] = peak.allocated
    if peak.reserved is not None:  # on an accelerator
        host["reserved"] = peak.reserved
    if run.busy is not None and (waiting := run.busy.told()) is not None:
        host["waited"] = waited = [0.0] * run.mesh.world_size
        waited[worker.rank] = waiting
    sent = run.async_scalars.send(numbers, host)
    return PendingStep(gradients, sent, end, lr, time.time())


def finish_step(
    run: Run, config: Config, pending: PendingStep, detector: AnomalyDetector
) -> StepResult:
    """Wait for a step's metrics, and check them. Collective if the step is bad."""
    numbers = pending.sent.read()
    assert numbers is not None
    record = step_record(run, config, pending, numbers)

    def first_bad() -> str:
        """The first parameter of this rank with a non-finite gradient norm; "" = none."""
        finite = pending.gradients.norms.isfinite().tolist()
        return next((name for name, fine in zip(run.owned, finite, strict=True) if not fine), "")

    anomaly = detector.classify(record, first_bad, bool(numbers["count"]))
    same = bool(numbers["bad"]) == (anomaly is not None)
    assert same, "the device and the detector disagree on a step"
    if anomaly is not None:
        record["lr"] = 0.0
    stop_code, graphs = int(numbers["stop_code"]), int(numbers["graphs"])
    waited, ends = numbers.get("waited", []), bool(numbers["ends"])
    return StepResult(record, waited, anomaly, stop_code, graphs, ends)


def step_record(
    run: Run, config: Config, pending: PendingStep, numbers: dict[str, Any]
) -> dict[str, Any]:
    """Make a record for metrics.jsonl from the metrics that `update` has sent."""
    step, seconds = pending.step, seconds_between(pending.gradients.begin, pending.end)
    size, length = config.batch_shape(step)
    unit, each = run.plan.unit, 1 if run.plan.unit == "tokens" else length
    speed = size * length / seconds  # in tokens
    record = {
        "step": step,
        "loss": numbers["loss"],
        "grad_norm": numbers["grad_norm"],
        "lr": pending.lr,
        unit: config.tokens(step) // each,
        "time": pending.time,
        f"{unit}_per_second": speed / each,
        "step_seconds": seconds,
        "memory_bytes": int(numbers["allocated"]),
    }
    for transform in run.transforms.values():
        record |= transform.record(numbers)
    if numbers["data"] >= _SHOWN * seconds:
        record["data_seconds"] = numbers["data"]
    for entry in entries(run):
        record |= entry.shown(numbers, run)
    if "reserved" in numbers:
        record["memory_reserved_bytes"] = int(numbers["reserved"])
    if waited := numbers.get("waited"):
        record["busy_seconds"] = max(0.0, seconds - sum(waited) / len(waited))
        record["busiest_rank"] = waited.index(min(waited))
        record["busiest_seconds"] = max(0.0, seconds - min(waited))
    peak = peak_flops(run.mesh.device, config.precision.name)
    if ranks_of(run.mesh.device, config.launch, run.mesh.world_size) > 1:
        peak = None  # the devices are fewer than the ranks
    if peak is not None and run.plan.flops_per_token is not None:
        flops = speed * run.plan.flops_per_token
        record["mfu"] = flops / (peak * run.mesh.world_size)
    return record | pending.more


def measured_step(
    run: Run,
    config: Config,
    step: int,
    stream: Iterator[Batch],
    detector: AnomalyDetector,
    worker: Worker,
    before_update: Callable[[], object] = lambda: None,
) -> StepResult:
    """Run a whole step on the next batch, on any device, and wait for its metrics."""
    moved = (to_device(batch, run.mesh, config) for batch in stream)
    gradients = forward_backward(run, config, step, moved)
    before_update()
    return finish_step(run, config, update(run, config, gradients, detector, worker), detector)


def optimizer_step(
    run: Run, config: Config, step: int, norm: Tensor, skip: Tensor | None = None
) -> float:
    """Clip by the global norm, update the parameters and what else changes once a step (running
    statistics, expert load balancing); returns the learning rate. A parameter without a gradient on
    any rank is not updated.

    skip: a flag on the device, 1 = change nothing; None = 0.
    """
    run.phases.begin("clip")
    unreached: Mapping[nn.Parameter, Tensor] = run.pipeline.unreached()
    limit = config.optimizer.clip
    clip = None if limit is None else clip_divisor(norm, limit)
    run.phases.begin("optimizer")
    for state in run.stage_states:
        set_lr(state.optimizers, config, step)
        for optimizer in state.optimizers:
            step_unless(optimizer, skip, unreached, clip)
    for transform in run.transforms.values():
        transform.after_update(skip)
    return learning_rate(config, step)


def drop_gradients(run: Run) -> None:
    for state in run.stage_states:
        state.zero_grad()


def validate(
    run: Run, config: Config, data: Data, should_stop: Callable[[], object] | None = None
) -> dict[str, float] | None:
    """Compute the validation loss ("loss"), in nats per token, and metrics of the user's own, over
    the same batches each time; of several sets those of each ("loss/NAME"), and their plain mean.

    should_stop: called before each batch, on all ranks; once true, the result is None.
    """
    sets: dict[str, dict[str, float]] = {}  # of each set
    for name, source in data.validations.items():
        sums = evaluate(run, config, source, config.validation.batches, should_stop)
        if sums is None:
            return None
        if not sums["loss"][1]:
            of = f"the {config.validation.batches or 'whole'} batches of the validation"
            fix = "validation.every=0, or other validation data"
            raise BadNumbers(str(no_targets(config.data, of, fix)))
        sets[name] = {key: total / count if count else nan for key, (total, count) in sums.items()}
    means = {key: fmean(each[key] for each in sets.values()) for key in next(iter(sets.values()))}
    return means | {
        f"{key}/{name}": value for name in sets if name for key, value in sets[name].items()
    }


def evaluate(
    run: Run,
    config: Config,
    source: Source,
    batches: int,
    should_stop: Callable[[], object] | None = None,
) -> dict[str, tuple[float, float]] | None:
    """ "loss", and the name of each metric of the user's own -> (its sum, what it counts) over the
    first so many batches of a source, 0 = all. Collective; should_stop: as of `validate`."""
    run.train_mode(False)
    results: list[tuple[Tensor, Tensor]] = []  # of each batch, read after the last one
    custom = torch.zeros((), dtype=torch.float64, device=run.mesh.device)
    weights = validation_weights(source, config, batches)
    stream = validation_batches(source, config, dp_rank=run.mesh.dp_rank, batches=batches)
    for weight, batch in zip(weights, batches_for(run, config, stream), strict=True):
        if should_stop is not None and should_stop():
            run.train_mode(True)
            return None
        if run.own is not None:
            run.own.begin()
        results.append(run.pipeline.evaluate(batch))
        if run.own is not None:
            custom = custom + weight * run.own.take_sums()
    run.train_mode(True)
    total = counted = 0.0
    for weight, (loss, count) in zip(weights, results, strict=True):
        number = weight * count.item()
        total, counted = total + (loss.item() * number if number else 0.0), counted + number
    sums = {"loss": (total, counted)}
    if run.own is not None:
        both = run.mesh.sum(custom).view(2, -1).tolist()
        sums |= {name: pair for name, *pair in zip(run.own.names, *both, strict=True)}
    return sums
