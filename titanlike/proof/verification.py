"""The verify job: a layout against the single-process truth, on the same batches.

1. Rank 0 trains the whole model for one step in plain torch: `model(x)`, cross entropy, backward,
   optimizer. No pipeline, no sharding, no engine of ours. In bf16 it does so twice, in fp32 for the
   truth and in bf16 for the size of the rounding.
2. All ranks do the same step in their layout, through what training uses.
3. Each rank compares what it holds with its part of the truth: initial weights (to the last bit),
   loss, validation loss, gradients, updated parameters, and the loss after the update.

A model with batch norm is defined by what it normalizes together: the truth then runs the same
microbatches one after the other, and its running statistics are those of the whole batch, which are
compared, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlike.config.schema import Config
from titanlike.data.loader import batches, validation_batches
from titanlike.data.sources import Data
from titanlike.launch.worker import Worker, barrier
from titanlike.metrics.console import Console
from titanlike.models.registry import build_model, initial_weights_of, resolve_model
from titanlike.optim.loss import build_loss
from titanlike.optim.optimizer import build_optimizer, gradient_norm, set_lr
from titanlike.parallel.device import choose_device
from titanlike.parallel.initialize import initialize
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.parallel.whole_batch import WholeBatch, batch_norms
from titanlike.torch_private.dtensor import local_slices
from titanlike.training.build import Run, build
from titanlike.training.draft import draft
from titanlike.training.open_data import DATA_TIMEOUT, open_data_on_every_rank
from titanlike.training.step import optimizer_step, to_device, validate

KINDS = ("loss", "initial", "gradient", "update", "buffer")  # of comparisons, causes before effects
LOSS_TOLERANCE = 1e-6  # relative, fp32
GRADIENT_TOLERANCE = 1e-6  # absolute at gradients of order one, fp32
RELATIVE_TOLERANCE = 1e-4  # norm against norm, so that small gradients are compared, too
ROUNDING = 3.0  # bf16: times the error that one process makes in bf16
BF16_FLOOR = 2.0**-8  # bf16: half of its last digit, relative
# Updates: norm of the difference against norm of the update, over the elements whose gradient is
# larger than its rounding or exactly zero. Adam divides a gradient by its own size: where it is
# almost zero, its last bit decides the sign of the update.
UPDATE_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
CERTAIN = {"fp32": 1e-3, "bf16": 1e-1}  # of the root mean square of a gradient


@dataclass(frozen=True)
class Truth:
    """What one process finds. Tensors are fp32 on the CPU, by parameter name."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]  # before clipping
    updated: dict[str, Tensor]
    losses: dict[str, float]  # "loss", "validation loss", "loss after the update"
    buffers: dict[str, Tensor]  # of batch norms, after the update
    groups: int  # equal parts of the batch that were computed one after the other


@dataclass(frozen=True)
class Piece:
    """What one rank compared of one tensor; pieces of the same tensor add up."""

    what: str
    name: str
    elements: int
    largest: float  # absolute value of the truth
    difference: float  # largest absolute difference; infinite where something is missing
    squared: float  # sum of squared differences
    scale: float  # sum of squares of what the difference is relative to
    rounding: float | None  # sum of squared differences of one process in bf16

    def __add__(self, other: Piece) -> Piece:
        return Piece(
            self.what,
            self.name,
            self.elements + other.elements,
            max(self.largest, other.largest),
            max(self.difference, other.difference),
            self.squared + other.squared,
            self.scale + other.scale,
            None if self.rounding is None else self.rounding + other.rounding,
        )

    @property
    def relative(self) -> float:
        """Norm of the difference over norm of the truth."""
        if self.squared == 0:
            return 0.0
        return math.sqrt(self.squared / self.scale) if self.scale else math.inf

    @property
    def agrees(self) -> bool:
        if self.what == "initial":
            return self.difference == 0
        if self.what == "update":
            limit = UPDATE_TOLERANCE["fp32" if self.rounding is None else "bf16"]
            return self.relative <= limit or self.difference <= 1e-9
        if self.rounding is not None:
            allowed = max(ROUNDING * math.sqrt(self.rounding), BF16_FLOOR * math.sqrt(self.scale))
            return math.sqrt(self.squared) <= allowed
        if self.what == "loss":
            return self.difference <= LOSS_TOLERANCE * max(1.0, self.largest)
        close = self.difference <= GRADIENT_TOLERANCE * max(1.0, self.largest)
        return close and (self.relative <= RELATIVE_TOLERANCE or self.difference <= 1e-9)


def verify(config: Config, worker: Worker) -> dict[str, Any]:
    """Compare; prints a table; returns exit_code 0 if everything agrees, 1 if not."""
    data = open_data_on_every_rank(config, worker)
    path = worker.run_dir / "truth.pt"
    if worker.rank == 0:
        device, _ = choose_device(config.device, worker.local_rank, worker.local_world_size)
        torch.save(_truths(config, data, device), path)
    barrier(worker, "truth", DATA_TIMEOUT)
    mesh = open_mesh(config, worker)
    exact, rounded = torch.load(path, map_location="cpu", weights_only=False, mmap=True)

    run = build(config, mesh, data)
    pieces = list(_compare_layout(run, config, data, exact, rounded))
    every: list[list[Piece]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(every, pieces)
    rows = _merge(every)
    copies = Counter(name for held in run.draft.stage_parameters for name in held)
    holes = _holes(rows, exact, {name: config.replicate * copies[name] for name in exact.initial})
    compared = {row.name for row in rows if row.what == "buffer"}
    holes += [f"{name}: is in no stage" for name in exact.buffers if name not in compared]
    ok = not holes and all(row.agrees for row in rows)
    if worker.rank == 0:
        path.unlink()
        _print(config, rows, holes, ok, exact.groups)
    close_mesh()
    worst = max(row.difference for row in rows if row.what == "gradient")
    return {"value": worst, "exit_code": 0 if ok else 1}


# --- the truth: plain torch --------------------------------------------------------------------


def _truths(config: Config, data: Data, device: torch.device) -> tuple[Truth, Truth | None]:
    """(in fp32, in bf16 if the config asks for it), each by one process."""
    alone = replace(config, dp=1, replicate=1)
    groups = 1
    if batch_norms(build_model(resolve_model(config))):
        groups = config.dp * draft(config, data).microbatches
    exact = single_process(alone, data, device, torch.float32, groups)
    bf16 = config.precision.name == "bf16"
    return exact, single_process(alone, data, device, torch.bfloat16, groups) if bf16 else None


def single_process(
    config: Config, data: Data, device: torch.device, dtype: torch.dtype, groups: int = 1
) -> Truth:
    """One training step of the whole model on the whole batch, computing in `dtype`.

    groups: equal parts of the batch that go through the model one after the other.
    """
    resolved = resolve_model(config)
    model = build_model(resolved)
    initialize(model, initial_weights_of(resolved, config.seed), device)
    loss = build_loss(config.loss, device)

    def loss_of(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        """(summed loss, what it counts)"""
        parts = [{n: value.chunk(groups)[i] for n, value in batch.items()} for i in range(groups)]
        totals, counts = zip(*map(loss_of_group, parts), strict=True)
        return sum(totals), sum(counts)

    def loss_of_group(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        fields = {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in batch.items()
        }
        targets = batch["targets"].to(device)
        del fields["targets"]
        # cast copies of the fp32 master weights; gradients flow back to the masters
        weights = {name: p.to(dtype) for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, weights, (fields.pop("inputs"),), fields)
        return loss.measure(output, targets)

    def mean_over(many: Iterator[dict[str, Tensor]]) -> float:
        with torch.no_grad():
            sums = [(total.item(), count) for total, count in map(loss_of, many)]
        return sum(total for total, _ in sums) / sum(count for _, count in sums)

    def copy_of(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}

    initial = copy_of(model.named_parameters())
    model.eval()
    validation = mean_over(validation_batches(data.validation, config, dp_rank=0))
    stream = batches(data.train, config, dp_rank=0)
    batch, following = next(stream), next(stream)

    model.train()
    norms = WholeBatch(model)
    total, count = loss_of(batch)
    buffers = norms.buffers()
    (total / count).backward()
    gradients = copy_of((name, _gradient(p)) for name, p in model.named_parameters())
    optimizer = build_optimizer(model, config.optimizer)
    if config.optimizer.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
    set_lr(optimizer, config, 1)
    optimizer.step()
    return Truth(
        initial,
        gradients,
        updated=copy_of(model.named_parameters()),
        losses={
            "loss": total.item() / count,
            "validation loss": validation,
            "loss after the update": mean_over(iter([following])),
        },
        buffers=buffers,
        groups=groups,
    )


# --- the layout --------------------------------------------------------------------------------


def _compare_layout(
    run: Run, config: Config, data: Data, exact: Truth, rounded: Truth | None
) -> Iterator[Piece]:
    """What this rank holds against its part of the truth."""

    def parameters() -> Iterator[tuple[str, nn.Parameter]]:
        for part in run.stage_states:
            yield from part.parameters()

    for name, parameter in parameters():
        yield _compare("initial", name, parameter, exact.initial[name])
    validation = validate(run, config, data)

    stream = batches(data.train, config, dp_rank=run.mesh.dp_rank)
    loss, _ = run.pipeline.train(to_device(next(stream), run.mesh, config))
    for name, parameter in parameters():
        rough = rounded and rounded.gradients[name]
        truth = exact.gradients[name]
        mine = parameter.grad if truth.any() else _gradient(parameter)
        yield _compare("gradient", name, mine, truth, rough)

    optimizer_step(run, config, 1, gradient_norm(run.owned, run.mesh))
    for name, parameter in parameters():
        truth, base = exact.updated[name], exact.initial[name]
        certain = _certain(exact.gradients[name], config.precision.name)
        # rounding is not measured here (0), but tells which tolerance holds
        rough = rounded and truth
        yield _compare("update", name, parameter, truth, rough, base=base, among=certain)

    for stage in run.stages:
        for name, buffer in stage.named_buffers():
            if name in exact.buffers:
                rough = rounded and rounded.buffers[name]
                yield _compare("buffer", name, buffer, exact.buffers[name], rough)

    after, _ = run.pipeline.evaluate(to_device(next(stream), run.mesh, config))
    losses = {"loss": loss.item(), "validation loss": validation}
    losses["loss after the update"] = after.item()
    for name, value in losses.items():
        truth = torch.tensor([exact.losses[name]], dtype=torch.float64)
        rough = rounded and torch.tensor([rounded.losses[name]], dtype=torch.float64)
        yield _compare("loss", name, torch.tensor([value], dtype=torch.float64), truth, rough)


def _gradient(parameter: Tensor) -> Tensor:
    """Zero where there is none: the parameter is frozen, or this batch does not reach it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _compare(
    what: str,
    name: str,
    mine: Tensor | None,
    truth: Tensor,
    rough: Tensor | None = None,
    *,
    base: Tensor | None = None,
    among: Tensor | None = None,
) -> Piece:
    """This rank's part of a tensor against the same part of the truth.

    base: differences are relative to truth - base (an update), not to the truth.
    among: a mask of the elements that are compared.
    """
    if mine is None:
        rounding = None if rough is None else 0.0
        return Piece(what, name, truth.numel(), math.nan, math.inf, math.inf, 1.0, rounding)
    part = local_slices(mine)
    local = (mine.to_local() if isinstance(mine, DTensor) else mine).detach().cpu().double()
    right = truth[part].double()
    scale = right - base[part].double() if base is not None else right
    difference = local - right
    if among is not None:
        difference = difference * among[part]
    return Piece(
        what,
        name,
        local.numel(),
        right.abs().max().item() if right.numel() else 0.0,
        _largest(difference),
        difference.square().sum().nan_to_num(math.inf).item(),
        scale.square().sum().item(),
        None if rough is None else (rough[part].double() - right).square().sum().item(),
    )


def _certain(gradient: Tensor, precision: str) -> Tensor:
    """Where a gradient is large enough for its sign not to be rounding, or exactly zero."""
    size = gradient.abs()
    limit = CERTAIN[precision] * gradient.square().mean().sqrt()
    return (size > limit) | (size == 0)


def _largest(difference: Tensor) -> float:
    """Largest absolute value; infinite if there is a NaN, which no comparison would notice."""
    if not difference.numel():
        return 0.0
    return difference.abs().nan_to_num(math.inf).max().item()


def _merge(ranks: list[list[Piece]]) -> list[Piece]:
    merged: dict[tuple[str, str], Piece] = {}
    for piece in (piece for pieces in ranks for piece in pieces):
        key = (piece.what, piece.name)
        merged[key] = merged[key] + piece if key in merged else piece
    return list(merged.values())


def _holes(rows: list[Piece], truth: Truth, copies: dict[str, int]) -> list[str]:
    """Parameters that were not compared in full: each element once a replica, and once a copy of a
    tied weight."""
    compared = {row.name: row.elements for row in rows if row.what == "initial"}
    return [
        f"{name}: {compared.get(name, 0)} of {tensor.numel() * copies[name]} elements are in a stage"
        for name, tensor in truth.initial.items()
        if compared.get(name, 0) != tensor.numel() * max(1, copies[name])
    ]


def _print(config: Config, rows: list[Piece], holes: list[str], ok: bool, groups: int) -> None:
    """The worst first within each kind; all that disagree, and the largest few of the rest."""
    console = Console(steps=1)
    shown = []
    for what in KINDS:
        kind = [row for row in rows if row.what == what]
        kind.sort(key=lambda row: (row.agrees, -row.relative))
        bad = sum(not row.agrees for row in kind)
        shown += kind[: max(3, bad)]
        if len(kind) > max(3, bad):
            agreeing = kind[max(3, bad) :]
            total = agreeing[0]
            for row in agreeing[1:]:
                total = total + row
            shown.append(replace(total, name=f"... {len(agreeing)} more"))
    title = f"against one process in plain torch ({config.precision.name})"
    if groups > 1:
        title += f", batch norm over the same {groups} groups of {config.batch_size // groups} rows"
    console.table(
        title,
        ["what", "name", "largest", "difference", "relative", ""],
        [
            (
                row.what,
                row.name,
                f"{row.largest:.2e}",
                f"{row.difference:.1e}",
                f"{row.relative:.1e}",
                "ok" if row.agrees or row.name.startswith("...") else "DIFFERS",
            )
            for row in shown
        ],
    )
    for hole in holes:
        console.line(f"DIFFERS: {hole}")
    wrong = [row for what in KINDS for row in rows if row.what == what and not row.agrees]
    if ok:
        console.line(f"PASS: {len(rows)} comparisons agree")
    else:
        names = ", ".join(f"{row.what} of {row.name}" for row in wrong[:10])
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        console.line(f"FAIL: {len(wrong)} of {len(rows)} comparisons differ: {names}{more}")
