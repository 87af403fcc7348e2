"""Compares a layout with one process in plain torch, on the same batches.

1. Rank 0 computes the reference (`reference`): for bf16 twice, in fp32 as the reference and in bf16
   for the size of rounding; so also if the model's forward turns autocast on.
2. All ranks run the same `verify.steps` steps in their layout, with training's code.
3. Each rank compares its part of each tensor with the reference (`comparison`): initial weights
   (bitwise), losses, the first step's gradients, parameters and optimizer state after the last
   step, the loss after it.
4. In fp32, if all agree up to the first update but not after it: rank 0 repeats the reference from
   weights changed by rounding, since a model may amplify rounding from step to step. On an
   accelerator, whose kernels depend on sizes and round differently, it first repeats it in other
   microbatches.

Batch norm, and models that couple samples (`mixes_samples=true`), depend on what is computed
together: the reference then runs the same microbatches one after the other. Running statistics are
the full batch's, and are compared as well.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import Data
from titanlike.core.device.accelerator import is_accelerator
from titanlike.core.device.choose import choose_device
from titanlike.core.distributed.placement import Part, experts_of, pieces
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.torch_private.dtensor import local
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import Run, build
from titanlike.core.training.device_batches import to_device
from titanlike.core.training.first_batch import compile_blocks, refuse_mixed_samples
from titanlike.core.training.same_data import refuse_other_data
from titanlike.core.training.session import connected, open_data_on_every_rank
from titanlike.core.training.step import measured_step, validate
from titanlike.proof.comparison import RELATIVE_TOLERANCE, Comparison, compare, gathered, merge
from titanlike.proof.reference import (
    EARLY,
    REFERENCE_TIMEOUT,
    VALIDATION_LOSS,
    Reference,
    gradient_of,
    loss_name,
    norm_name,
    rates_of,
    reference_steps,
    rounding_of_one_process,
    state_of,
)

if TYPE_CHECKING:
    from titanlike.proof.recorder import Recorder, What, Wrong

_BATCHES = 4  # of a validation with validation.batches=all
# kinds of comparisons, causes before effects; also "AXIS gradient" and "AXIS update": see
# `_compare_copies`
KINDS = ("promise", "loss", "initial", "gradient", "norm", "buffer", "rate", "update", "state")


def kind_order(row: Comparison) -> tuple[Any, ...]:
    *axis, kind = row.kind.split()
    return KINDS.index(kind), *axis


class OutOfMemory(RuntimeError):
    """One process cannot hold the model, its gradients and the optimizer state."""


@dataclass(frozen=True)
class Verdict:
    """rows: of all ranks; missing: tensors in no stage, a line each; groups: of a full batch, see
    `Reference`."""

    rows: list[Comparison]
    missing: list[str]
    groups: int
    ranks: list[list[Comparison]] = field(default_factory=list)  # each rank's rows
    step: int = 1  # whose gradients are compared, from one process's weights
    # if it was recorded
    wrong: list[Wrong] = field(default_factory=list)
    gradients: dict[str, What] = field(default_factory=dict)
    operation: str = ""  # what is said of the first that differs

    @property
    def agrees(self) -> bool:
        return not self.missing and all(row.agrees for row in self.rows)

    @property
    def verdict(self) -> str:
        if self.agrees:
            return f"PASS: {len(self.rows)} comparisons agree"
        wrong = sorted((row for row in self.rows if not row.agrees), key=kind_order)
        names = ", ".join([*(row.full_name for row in wrong[:10]), *self.missing[:3]])
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        return f"FAIL: {len(wrong)} of {len(self.rows)} comparisons differ: {names}{more}"


def compare_with_one_process(
    config: Config,
    worker: Worker,
    watchdog: Watchdog | None = None,
    *,
    reference: Path | None = None,
    recorder: Recorder | None = None,
    wrong: Wrong | None = None,
) -> Verdict:
    """Compare, with the same result on all ranks. Collective. Raises OutOfMemory on all if one
    process has too little memory.

    watchdog: the job's, if it has one. reference: its file, if it exists. recorder: of the layout's
    tensors, to compare with those next to `reference`; or of the operations before the wrong one,
    `wrong`.
    """
    config = _bounded(config)
    data = open_data_on_every_rank(config, worker)
    path = reference or worker.run_dir / "reference.pt"
    if reference is None:
        compute_reference(config, data, worker, path)
    say = Console(steps=1).line if reference is None else lambda _: None
    with connected(config, worker, watchdog, say) as mesh:
        refuse_other_data(config, data, mesh, worker)
        exact, rounded = torch.load(path, map_location="cpu", weights_only=False, mmap=True)

        more = {} if recorder is None else {"recorder": recorder}
        run = build(config, mesh, data, more=more)
        stream = batches(data.train, config, dp_rank=mesh.dp_rank)
        stream = refuse_mixed_samples(run, config, stream)
        if run.compiled:
            compile_blocks(run, config, next(stream), worker)
        comparisons = list(_compare_layout(run, config, data, worker, exact, rounded, recorder))
        every = gathered(comparisons)
        rows = merge(every)
        rows = _explain(rows, config, data, exact, rounded is not None, worker, mesh.device)
        copies = Counter(name for names in run.plan.stage_parameters for name in names)
        # each element once per replica, and once per copy of a tied weight
        for name, placement in run.plan.placements.items():  # and once per rank that has it
            copies[name] *= placement.copies
        expected = {n: t.numel() * config.replicate * copies[n] for n, t in exact.initial.items()}
        compared = {row.name: row.elements for row in rows if row.kind == "initial"}
        missing = [
            f"{name}: {compared.get(name, 0)} of {elements} elements are in a stage"
            for name, elements in expected.items()
            if compared.get(name) != elements
        ]
        compared = {row.name for row in rows if row.kind == "buffer"}
        missing += [f"{name}: is in no stage" for name in exact.buffers if name not in compared]
        if worker.rank == 0 and reference is None:
            path.unlink()
        groups = exact.groups.get(config.batch_size, 1)
        result = Verdict(rows, missing, groups, every, exact.step)
        if recorder is not None and wrong is not None:
            text = recorder.operation(run, config, path.parent, wrong)
            result = replace(result, operation=text)
        elif recorder is not None:
            wrongs, gradients = recorder.compared(run, config, path.parent)
            result = replace(result, wrong=wrongs, gradients=gradients)
    return result


def apart(worker: Worker, name: str, ranks: int | None = None) -> Worker:
    """The worker with a separate store, as one of the first `ranks` of the job."""
    store = worker.store and dist.PrefixStore(name, worker.store)
    if ranks is None:
        return replace(worker, store=store)
    local = min(ranks, worker.local_world_size)
    store = store if ranks > 1 else None
    return replace(worker, world_size=ranks, local_world_size=local, store=store)


def _bounded(config: Config) -> Config:
    """The config with a bounded validation; a stream has one only if something is held out."""
    some = config.validation.batches or _BATCHES if config.validation.every else 1
    validation = replace(config.validation, batches=some, every=config.validation.every or 1)
    return replace(config, validation=validation)


def compute_reference(
    config: Config, data: Data, worker: Worker, path: Path, recorder: Recorder | None = None
) -> None:
    """Write rank 0's reference to a file; the others wait. Raises OutOfMemory on all."""
    config, error = _bounded(config), ""
    if worker.rank == 0:
        device, _ = choose_device(config, worker.local_rank, worker.local_world_size)
        try:
            torch.save(reference_steps(config, data, device, recorder), path)
        except (MemoryError, RuntimeError) as problem:
            if not isinstance(problem, (MemoryError, torch.OutOfMemoryError)) and (
                "can't allocate memory" not in str(problem)
            ):
                raise
            error = " ".join(str(problem).split())[:200]
    errors = barrier(worker, "reference", REFERENCE_TIMEOUT, error, listens=True)
    if error := errors.get(0, ""):
        raise OutOfMemory(error)


def _explain(
    rows: list[Comparison],
    config: Config,
    data: Data,
    exact: Reference,
    low: bool,
    worker: Worker,
    device: torch.device,
) -> list[Comparison]:
    """Mark the differing rows that rounding explains."""

    def late(row: Comparison) -> bool:
        return row.kind in ("update", "state", "loss", "norm") and row.name not in EARLY

    def explained(**how: bool) -> list[Comparison]:
        moved = rounding_of_one_process(config, data, device, exact, **how)
        sizes = {
            name: t.numel() for name, t in (exact.updated | exact.state | exact.buffers).items()
        }
        # rounding errors of a gradient's elements are not independent: the largest of all gradients
        scales = {(row.kind, row.name): row.scale / (row.elements or 1) for row in rows}
        ratios = [
            along / math.sqrt(squared * scales[key])
            for key, (squared, along) in moved.items()
            if key[0] == "gradient" and squared * scales.get(key, 0.0) > 0
        ]
        result = []
        for row in rows:
            copies = row.elements / (sizes.get(row.name) or 1)  # replicas, and tied weights
            by = moved.get((row.kind, row.name), ())
            if low and any(by):
                size = math.sqrt(by[0] * scales[row.kind, row.name])
                by = by[0], max([by[1], *(ratio * size for ratio in ratios)])
            result.append(row.explain(*(copies * each for each in by)) if any(by) else row)
        return result

    if all(row.agrees for row in rows):
        return rows
    if worker.rank == 0:
        if low:
            rows = explained(low=True)
        elif is_accelerator(device):
            rows = explained(kernels=True)
        different = [row for row in rows if not row.agrees]
        done = is_accelerator(device) and exact.divided  # the same, above
        if (
            not low
            and different
            and all(map(late, different))
            and config.verify.steps > 1
            and not done
        ):
            rows = explained(kernels=False)
    barrier(worker, "rounding", REFERENCE_TIMEOUT)
    if worker.world_size > 1:
        objects: list[Any] = [rows]
        dist.broadcast_object_list(objects, src=0)
        (rows,) = objects
    return rows


def _compare_layout(
    run: Run,
    config: Config,
    data: Data,
    worker: Worker,
    exact: Reference,
    rounded: Reference | None,
    recorder: Recorder | None = None,
) -> Iterator[Comparison]:
    """Compare this rank's tensors with the fp32 (exact) and bf16 (rounded) reference."""
    references = [each for each in (exact, rounded) if each is not None]

    def parameters() -> Iterator[tuple[str, nn.Parameter, Part | None]]:
        for state in run.stage_states:
            for name, parameter in state.parameters():
                if name in exact.initial:
                    yield name, parameter, state.part(name)

    def fill(values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter, part in parameters():
                for here, place in pieces(parameter, part) if name in values else ():
                    local(parameter)[here].copy_(values[name][place])

    for name, pair in exact.promises.items():
        yield compare("promise", name, *pair, tolerance=1e-4)
    for state in run.stage_states:
        for name, _ in state.parameters():
            if name not in exact.initial:  # tied to another in one process
                yield compare("initial", name, None, torch.zeros(1))
    for name, parameter, part in () if config.verify.against else parameters():
        initial = exact.initial[name]
        right = torch.zeros_like(initial) if name in exact.filled else initial
        yield compare("initial", name, parameter, right, part=part)
    fill({name: exact.initial[name] for name in exact.filled})
    for name, parameter, part in parameters() if config.verify.against else ():
        yield compare("initial", name, parameter, exact.initial[name], part=part)
    validation = validate(run, config, data)
    assert validation is not None, "it is not stopped"
    losses = {VALIDATION_LOSS: validation["loss"]}

    # with ep the tokens of all ranks are rows of one matmul, whose result is bf16
    experts = {
        state.names.get(f"{path}.{name}")
        for state in run.stage_states
        for path, module in experts_of(state.stage).items()
        for name, _ in module.named_parameters()
        if config.ep > 1
    }

    def compare_gradients() -> None:
        """Before the update of the step that is compared."""
        for name, parameter, part in parameters():
            right = [of.gradients[name] for of in references]
            gradient = parameter.grad if right[0].any() else gradient_of(parameter)
            if recorder is not None and gradient is not None and name in recorder.shares:
                recorder.gradients[name] = gradient.clone(), part
            more: dict[str, Any] = {"part": part, "of_sums": name not in experts}
            rows.append(compare("gradient", name, gradient, *right, **more))
        rows.extend(_compare_copies(run, "gradient"))

    rows: list[Comparison] = []
    stream, detector = (
        batches(data.train, config, dp_rank=run.mesh.dp_rank),
        AnomalyDetector(config, {}),
    )
    for step in range(1, config.verify.steps + 1):
        if step == exact.step:  # what comes of an update that is within rounding, is not
            fill((rounded or exact).before)
        compared = compare_gradients if step == exact.step else lambda: None
        record = measured_step(run, config, step, stream, detector, worker, compared).record
        losses[loss_name(step)] = record["loss"]
        name = norm_name(step)
        # a sum over ranks; from the second step on, from rounded weights
        least = None if rounded else 1e-5 if step == exact.step else RELATIVE_TOLERANCE
        of = [record["grad_norm"], *(of.norms[name] for of in references)]
        numbers = torch.tensor(of, dtype=torch.float64)[:, None]
        rows.append(compare("norm", name, *numbers, tolerance=least))
        right = exact.rates[step - 1]
        optimizers = [each for state in run.stage_states for each in state.optimizers]
        rates = rates_of(optimizers, ((name, p) for name, p, _ in parameters()), record["lr"])
        pairs = torch.tensor([(rate, right.get(name, rate)) for name, rate in rates.items()])
        rows.append(compare("rate", f"learning rate of step {step}", *pairs.T, tolerance=1e-5))
        if step == 1:
            for name, buffer in (pair for stage in run.stages for pair in stage.named_buffers()):
                if name in exact.buffers:
                    buffers = (of.buffers[name] for of in references)
                    rows.append(compare("buffer", name, buffer, *buffers))
    yield from rows
    for name, parameter, part in parameters():
        options: dict[str, Any]
        options = {"base": exact.initial[name], "mask": exact.reliable[name], "part": part}
        updated = (of.updated[name] for of in references)
        yield compare("update", name, parameter, *updated, **options)
    yield from _compare_copies(run, "update")
    yield from _compare_states(run, exact, rounded)

    after, _ = run.pipeline.evaluate(to_device(next(stream), run.mesh, config))
    losses["loss after the last step"] = after.item()
    for name, value in losses.items():
        of = [value, *(of.losses[name] for of in references)]
        yield compare("loss", name, *torch.tensor(of, dtype=torch.float64)[:, None])


def _compare_copies(run: Run, kind: str) -> Iterator[Comparison]:
    """Compare replicated gradients or updated parameters on the ranks of an axis inside layers with
    the first rank's: if they differ, replicated computation has diverged, as with different dropout
    masks."""
    for axis, transform in run.plan.transforms.items():
        ranks, placements = transform.ranks, transform.placements
        if not placements or ranks is None:
            continue
        placements = {n: p for n, p in placements.items() if p is run.plan.placements[n]}
        for name, parameter in (item for state in run.stage_states for item in state.parameters()):
            if name not in placements or (copies := placements[name].copies) == 1:
                continue
            value = gradient_of(parameter) if kind == "gradient" else parameter
            tensor = local(value.detach()).contiguous()
            every = [torch.empty_like(tensor) for _ in range(ranks.size)]
            dist.all_gather(every, tensor, group=ranks.group)
            first = every[ranks.rank // copies * copies].cpu()
            yield compare(f"{axis} {kind}", name, tensor, first)


def _compare_states(run: Run, exact: Reference, rounded: Reference | None) -> Iterator[Comparison]:
    """Compare the optimizer state of each parameter; a missing one (never updated) counts as zeros,
    so that a step counted too often is found."""
    for stage in run.stage_states:
        for parameter_name, parameter in stage.parameters():
            state = state_of(stage.optimizers, parameter)
            prefix = f"{parameter_name} "
            expected = {name for name in exact.state if name.startswith(prefix)}
            for name in sorted(expected | {prefix + key for key in state}):
                value = state.get(name.removeprefix(prefix))
                # not a step count
                like = value is not None and value.shape == parameter.shape
                part = stage.part(parameter_name) if like else None
                reference = exact.state.get(name)
                if reference is None:
                    assert value is not None
                    reference = torch.zeros(value.shape if part is None else part.shape)
                zeros = torch.zeros(reference.shape)
                in_bf16 = rounded.state.get(name, zeros) if rounded else None
                if value is not None and value.dtype == torch.bfloat16 and in_bf16 is None:
                    in_bf16 = reference  # stored in bf16: equal to its last digit
                yield compare("state", name, value, reference, in_bf16, part=part)


def print_found(config: Config, result: Verdict, other: str = "one process in plain torch") -> None:
    """Print the worst first within each kind: all that differ, and the largest few of the rest."""
    console, rows, groups = Console(steps=1), result.rows, result.groups
    shown = []
    for _, group in groupby(sorted(rows, key=kind_order), lambda row: row.kind):
        rows_of_kind = sorted(group, key=lambda row: (row.agrees, -row.relative))
        count = max(3, sum(not row.agrees for row in rows_of_kind))
        shown += rows_of_kind[:count]
        if agreeing := rows_of_kind[count:]:
            total = reduce(operator.add, agreeing)
            shown.append(replace(total, name=f"... {len(agreeing)} more"))
    title = f"against {other} ({config.precision.name})"
    if groups > 1:
        title += f", samples in the same {groups} groups of {config.batch_size // groups}"
    cells = []
    for row in shown:
        numbers = f"{row.largest:.2e}", f"{row.difference:.1e}", f"{row.relative:.1e}"
        verdict = "ok" if row.name.startswith("...") else row.verdict
        cells.append((row.kind, row.name, *numbers, verdict))
    console.table(title, ["what", "name", "largest", "difference", "relative", ""], cells)
    for text in result.missing:
        console.line(f"DIFFERS: {text}")
    if grown := sum(row.amplified for row in rows):
        changed = "2e-7, or on an accelerator with other microbatches"
        changed = "half a bf16 digit" if config.precision.low else changed
        console.line(
            f"{grown} comparisons differ as rounding does: one process is as far from itself with "
            f"weights changed by {changed}"
        )
    console.line(result.verdict)
