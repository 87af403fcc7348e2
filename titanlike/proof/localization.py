"""Where a layout that fails `verify` departs from one process: the first tensor of a step, what
differs in it, and the dimensions of the layout without which it passes.

1. One process computes the reference once more, in the layout's microbatches, and a `Recorder` keeps
   what goes into and comes out of each module, and the gradients of that.
2. The layout is tried with one dimension less at a time, until the least that still fails is found.
3. That one is recorded, too; each rank compares its part with the reference, in its order.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.config.errors import ConfigError
from titanlike.config.schema import ActivationCheckpoint, Config, EvenSplit, Fsdp, Schedule
from titanlike.config.validate import problems
from titanlike.distributed.placement import Part, Placement, local_of
from titanlike.distributed.transform import Transform
from titanlike.graph.recording import tree_flatten
from titanlike.launch.rendezvous import barrier, in_words
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.proof.comparison import Comparison, compare
from titanlike.proof.reference import EARLY_LOSSES, REFERENCE_TIMEOUT, microbatches_of
from titanlike.proof.verification import (
    Found,
    compare_with_one_process,
    compute_reference,
    kind_order,
)
from titanlike.torch_private.autograd import in_backward
from titanlike.torch_private.dtensor import local
from titanlike.training.build import Run
from titanlike.training.session import open_data_on_every_rank

PHASES = ("input", "output", "gradient of the output", "share")
_STEPS, _TENSORS = "steps.pt", "tensors.pt"
_SAME = 1e-3  # of the norm: a remainder that a description leaves out
_EXPLAINED = 256  # microbatches of a step whose shares of a gradient are told apart


class Place(NamedTuple):
    """A tensor of a step: of a module's call in a microbatch, or a microbatch's share of the
    gradient of a parameter."""

    phase: str  # of PHASES
    name: str
    call: int = 0
    at: int = 0  # among the tensors of inputs or outputs

    def __str__(self) -> str:
        number = f" {self.at}" if self.at else ""
        again = f", call {self.call + 1}" if self.call else ""
        return f"{self.phase}{number} of {self.name}{again}"


@dataclass(frozen=True)
class Wrong:
    """A tensor of one rank and microbatch that is not equal to the reference's."""

    order: int  # among those of the reference
    place: Place
    rank: int
    microbatch: int  # of the global batch
    relative: float
    before: float  # the largest relative difference of what comes before it
    what: str


class Recorder(Transform):
    """Keeps the first step's tensors, of whole models or of stages; copies on the CPU."""

    def __init__(self, shares: frozenset[str] = frozenset()) -> None:
        """shares: parameters, of whose gradient the microbatches' shares are kept."""
        self.tensors: dict[tuple[Place, int], Tensor] = {}
        # of the layout: this rank's part of the gradients of `shares`
        self.gradients: dict[str, tuple[Tensor, Part | None]] = {}
        self.shares = shares
        self.compared_tensors = 0
        self._on, self._step, self._microbatch = False, 0, 0
        self._calls: Counter[tuple[str, int]] = Counter()

    def on_weights(self, stage: nn.Module) -> None:
        for name, module in stage.named_modules():
            if name:
                before = partial(self._enter, name)
                module.register_forward_pre_hook(before, with_kwargs=True)
                module.register_forward_hook(partial(self._leave, name))

    def in_one_process(self, model: nn.Module) -> Transform:
        self.on_weights(model)
        return self

    def begin_step(self, step: int) -> None:
        self._step = step

    def begin_microbatch(self, stage: int, microbatch: int) -> None:
        self._microbatch = microbatch

    @contextmanager
    def training(self, tokens: Tensor) -> Iterator[None]:
        self._on = self._step == 1
        yield
        self._on = False

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """These, so that the gradient of this microbatch alone is kept of `shares`."""
        if not self._on:
            return weights
        own = {n: w.view_as(w) for n, w in weights.items() if n in self.shares and w.requires_grad}
        for name, weight in own.items():
            weight.register_hook(partial(self._keep, Place("share", name), self._microbatch))
        return weights | own

    def _keep(self, place: Place, microbatch: int, tensor: Tensor) -> None:
        self.tensors[place, microbatch] = local(tensor.detach()).cpu().clone()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._on and not in_backward():
            self._calls[name, self._microbatch] += 1
            self._keep_all("input", name, (args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._on and not in_backward():
            self._keep_all("output", name, output)

    def _keep_all(self, phase: str, name: str, value: Any) -> None:
        call = self._calls[name, self._microbatch] - 1
        tensors = (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
        for index, tensor in enumerate(tensors):
            self._keep(Place(phase, name, call, index), self._microbatch, tensor)
            if phase == "output" and tensor.requires_grad and torch.is_grad_enabled():
                place = Place("gradient of the output", name, call, index)
                tensor.register_hook(partial(self._keep, place, self._microbatch))

    def compared(
        self, run: Run, config: Config, folder: Path
    ) -> tuple[list[Wrong], dict[str, str]]:
        """What `differences` and `explained` find. Collective."""
        differences = self.differences(run, config, folder)
        return differences, {} if differences else self.explained(config, folder)

    def differences(self, run: Run, config: Config, folder: Path) -> list[Wrong]:
        """What is first in the order of the reference, on all ranks that have it wrong; this rank's
        tensors of it go into `folder`. Collective.

        What has no counterpart (tokens in the order of experts) is left out.
        """
        reference = _load(folder)
        order: dict[Place, int] = {}
        for place, _ in reference:
            order.setdefault(place, len(order))
        parts, self.compared_tensors = _Parts(run, config), 0
        found: list[tuple[Wrong, Tensor, Tensor]] = []
        before = 0.0
        for key in sorted(self.tensors, key=lambda key: (order.get(key[0], 0), key[1])):
            place, microbatch = key
            mine, whole = self.tensors[key], reference.get(key)
            if whole is None or (found and order[place] > found[0][0].order):
                continue
            row = min(parts.compared(place, mine, whole), key=lambda r: r[0].squared, default=None)
            if row is None:
                continue
            self.compared_tensors += 1
            if row[0].agrees:
                before = max(before, row[0].relative)
                continue
            what = described(mine, row[1], config)
            at, relative = order[place], row[0].relative
            wrong = Wrong(at, place, dist.get_rank(), microbatch, relative, before, what)
            found.append((wrong, mine, row[1]))
        every: list[list[Wrong]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, [wrong for wrong, *_ in found])
        first = min((wrong.order for rank in every for wrong in rank), default=None)
        for wrong, mine, right in found:
            if wrong.order == first:
                name = f"first-rank{wrong.rank}-microbatch{wrong.microbatch}.pt"
                torch.save({"layout": mine, "one process": right}, folder / name)
        return [wrong for rank in every for wrong in rank if wrong.order == first]

    def explained(self, config: Config, folder: Path) -> dict[str, str]:
        """What is wrong with each of the gradients of `shares`: by how often each microbatch's share
        is in it. In the order of the backward. Collective."""
        reference = _load(folder)
        order = dict.fromkeys(p.name for p, _ in reference if p.phase == "share")
        numbers = sorted({number for p, number in reference if p.phase == "share"})
        mine: dict[str, tuple[Tensor, Tensor, float]] = {}
        for name, (gradient, part) in self.gradients.items():
            keys = [(Place("share", name), number) for number in numbers]
            if not all(key in reference for key in keys) or len(keys) > _EXPLAINED:
                continue
            own = local(gradient).cpu().double().flatten()
            cut = [local_of(gradient, part, reference[key]).double().flatten() for key in keys]
            shares = torch.stack(cut)
            mine[name] = shares @ shares.T, shares @ own, (own @ own).item()
        every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, mine)
        result = {}
        for name in order:
            sums = [rank[name] for rank in every if name in rank]
            if sums:
                squares, products, norm = (sum(column) for column in zip(*sums, strict=True))
                result[name] = _counted(squares, products, norm, config)
        return result


def _load(folder: Path) -> dict[tuple[Place, int], Tensor]:
    path = folder / _TENSORS  # which rank 0 has just written
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


class _Parts:
    """Which part of the reference's tensors a rank has: cut by tokens, by the parts of a weight, or
    by ranks."""

    def __init__(self, run: Run, config: Config) -> None:
        self._run, self._config = run, config
        self._placements: dict[str, Placement] = {}
        for state in run.stage_states:  # the plan has those of the first rank
            self._placements.update(state.placements)
        tokens = torch.arange(config.seq_len)
        self._tokens = [tokens]
        for transform in run.plan.transforms.values():
            take: Callable[..., Tensor] | None = getattr(transform.ranks, "take", None)
            if take is not None:
                self._tokens.append(take(tokens[None], 1)[0])
        if run.mesh.layer_ranks > 1:
            parts = (t.chunk(run.mesh.layer_ranks) for t in [*self._tokens])
            self._tokens += [part[run.mesh.layer_part] for part in parts if len(part) > 1]

    def compared(
        self, place: Place, mine: Tensor, whole: Tensor
    ) -> Iterator[tuple[Comparison, Tensor]]:
        """With each part of `whole` that this one can be."""
        # a sum of so many terms is rounded so often
        terms = max(64, *whole.shape) if whole.dim() else 64
        eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
        tolerance = (16 if eps < 1e-3 else 1) * eps * terms**0.5
        for right in self._of(place, mine, whole):
            row = compare(place.phase, place.name, mine, right, tolerance=tolerance)
            yield row, right

    def _of(self, place: Place, mine: Tensor, whole: Tensor) -> Iterator[Tensor]:
        if mine.shape == whole.shape:
            yield whole
            return
        if mine.dim() != whole.dim():
            return
        parts = [whole]
        for dim, (size, full) in enumerate(zip(mine.shape, whole.shape, strict=True)):
            if size != full:
                parts = [new for part in parts for new in self._cut(place, part, dim, size)]
        yield from parts

    def _cut(self, place: Place, whole: Tensor, dim: int, size: int) -> Iterator[Tensor]:
        full, mesh = whole.shape[dim], self._run.mesh
        for tokens in self._tokens:
            if full == self._config.seq_len and size == len(tokens):
                yield whole.index_select(dim, tokens)
            elif full % self._config.seq_len == 0 and size * self._config.seq_len == full * len(
                tokens
            ):  # samples and tokens in one dimension
                rows = whole.unflatten(dim, (-1, self._config.seq_len))
                yield rows.index_select(dim + 1, tokens).flatten(dim, dim + 1)
        weight = self._placements.get(f"{place.name}.weight")
        if weight is not None and weight.part is not None:
            ranges = [torch.arange(*r) for r in weight.part.ranges]
            if sum(map(len, ranges)) == size and weight.part.shape[weight.part.dim] == full:
                yield whole.index_select(dim, torch.cat(ranges))
        if size * mesh.layer_ranks == full:
            yield whole.chunk(mesh.layer_ranks, dim)[mesh.layer_part]


# --- what differs ---------------------------------------------------------------------------------


def described(mine: Tensor, right: Tensor, config: Config) -> str:
    """What distinguishes two tensors of the same shape."""
    mine, right = mine.double(), right.double()
    if not mine.isfinite().all():
        return f"{(~mine.isfinite()).sum().item()} elements are not finite"
    if (text := _factor(mine, right, config)) is not None:
        return text
    norm = mine.norm() * _SAME
    square = mine.dim() > 1 and mine.shape[-1] == mine.shape[-2]
    if square and (mine.transpose(-1, -2) - right).norm() <= norm:
        return "transposed"
    sizes = {name: getattr(config, name) for name in ("tp", "cp", "dp", "ep")}
    for dim in range(mine.dim()):
        for axis, size in sizes.items():
            if size > 1 and mine.shape[dim] % size == 0:
                for by in range(1, size):
                    if (mine.roll(by * mine.shape[dim] // size, dim) - right).norm() <= norm:
                        return f"the parts of {axis} ranks stand in another order along dim {dim}"
    off = (mine - right).abs() > _SAME * right.square().mean().sqrt()
    where, inside = [], [slice(None)] * mine.dim()
    for dim, full in enumerate(mine.shape):
        others = [other for other in range(mine.dim()) if other != dim]
        rows = (off.any(dim=others) if others else off).nonzero().flatten().tolist()
        if rows and len(rows) < full and rows[-1] - rows[0] + 1 == len(rows):
            last = " (the last)" if rows == [full - 1] else ""
            shown = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
            named = {0: "sample", 1: "token"}.get(dim) if mine.dim() == 3 else None
            where.append(f"{named or f'dim {dim}'} {shown} of {full}{last}")
            inside[dim] = slice(rows[0], rows[-1] + 1)
    if not where:
        return f"all over: {(mine - right).norm() / right.norm():.1e} of its norm"
    text = _factor(mine[tuple(inside)], right[tuple(inside)], config)
    return f"only in {', '.join(where)}" + (f": {text}" if text else "")


def _factor(mine: Tensor, right: Tensor, config: Config) -> str | None:
    scale = (right * right).sum().item()
    factor = (mine * right).sum().item() / scale if scale else 0.0
    rest = (mine - factor * right).norm().item()
    if not scale or rest > _SAME * max(abs(factor), _SAME) * scale**0.5:
        return None if mine.any() else "zeros"
    # a remainder that is larger than what the factor changes is another fault
    return None if rest > 0.1 * abs(1 - factor) * scale**0.5 else factor_text(factor, config)


def factor_text(factor: float, config: Config) -> str:
    """Such as "2.000 times: summed instead of averaged over dp"."""
    if abs(factor) < _SAME:
        return "zeros"
    text = f"{factor:.4g} times"
    if abs(factor + 1) < _SAME:
        return f"{text}: the sign"
    sizes = {name: getattr(config, name) for name in ("dp", "tp", "cp", "ep", "replicate", "pp")}
    for name, size in {n: size for n, size in sizes.items() if size > 1}.items():
        if abs(factor / size - 1) < _SAME:
            return f"{text}: summed instead of averaged over {name}"
        if abs(factor * size - 1) < _SAME:
            return f"{text}: divided by {name} once too often, or not summed over it"
    return text


def _counted(squares: Any, products: Any, norm: Any, config: Config) -> str:
    """What a gradient is, by least squares, of the shares of microbatches."""
    shares = torch.linalg.lstsq(squares, products[:, None], driver="gelsd").solution.flatten()
    rest = norm - (shares @ products).item()
    if norm == 0:
        return "zeros"
    if rest > _SAME**2 * norm:
        return f"no sum of the microbatches' shares: {max(rest, 0) ** 0.5 / norm**0.5:.1e} is left"
    if (shares - shares.mean()).abs().max() < 1e-2 * shares.abs().max():
        return factor_text(shares.mean().item(), config)
    by_rank = shares.view(config.dp, -1)
    texts = []
    for rank, row in enumerate(by_rank):
        if (row - row.mean()).abs().max() < 1e-2 and config.dp > 1:
            if abs(row.mean() - 1) > 1e-2:
                texts.append(f"the share of dp rank {rank} is {_times(row.mean())}")
            continue
        for at, value in enumerate(row):
            if abs(value - 1) > 1e-2:
                of = f" of dp rank {rank}" if config.dp > 1 else ""
                texts.append(f"the share of microbatch {at}{of} is {_times(value)}")
    return "; ".join(texts[:4])


def _times(value: Tensor) -> str:
    return "missing" if abs(value) < 1e-2 else f"in it {value.item():.3g} times"


# --- the least layout that fails ------------------------------------------------------------------


_MESH = ("pp", "cp", "tp", "ep", "replicate", "dp")


def smaller(config: Config, microbatches: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(a dimension, the keys without it; "" = with less of it); microbatches: of the global batch,
    which are kept."""
    if config.compile:
        yield "compile=true", {"compile": False}
    if config.activation_checkpoint.name != "none":
        name = f"activation_checkpoint={config.activation_checkpoint.name}"
        yield name, {"activation_checkpoint": ActivationCheckpoint()}
    if config.pp > 1 and config.schedule.name != "1f1b":
        plain = Schedule("1f1b", microbatches // config.dp)
        yield f"schedule={config.schedule.name}", {"schedule": plain}
    if config.fsdp != Fsdp():
        yield f"fsdp.zero={config.fsdp.zero}", {"fsdp": Fsdp()}
    for axis in _MESH:
        size = getattr(config, axis)
        if size > 1:
            yield axis, {axis: 1}
        if size > 3:
            yield "", {axis: 2}


def least_failing(
    config: Config, microbatches: int, fails: Callable[[Config], bool | None]
) -> tuple[Config, list[str], bool]:
    """(the least config that fails, its dimensions, whether it is known to pass without any of
    them); fails: None = it cannot run."""
    needed: list[str] = []
    known = True
    for name, without in smaller(config, microbatches):
        other = replace(config, **without)
        if other.pp == 1 < config.pp:
            other = replace(other, schedule=Schedule("1f1b"), split=EvenSplit())
        if isinstance(other.schedule, Schedule):
            each = microbatches // other.dp
            other = replace(other, schedule=replace(other.schedule, microbatches=each))
        failed = fails(other)
        if failed:
            config = other
        elif name:
            needed.append(name)
            known = known and failed is not None
    shown = [f"{name}={getattr(config, name)}" if name in _MESH else name for name in needed]
    return config, shown, known


def axis_text(needed: list[str], known: bool) -> str:
    if not needed:
        return "fails in one process, too: it is not the layout"
    text = f"fails with {' '.join(needed)} alone"
    without = "it" if len(needed) == 1 else "any of them"
    return f"{text}; passes without {without}" if known else text


def localize(config: Config, found: Found, worker: Worker) -> dict[str, Any]:
    """Find the first difference of a layout that fails, and print it. Collective.

    Returns what is printed; it is in `folder`, too, with the tensors.
    """
    wrong = [row for row in found.rows if not row.agrees]
    shares = frozenset(row.name for row in wrong if row.kind == "gradient")
    if shares or any(
        row.kind in ("initial", "buffer") or row.name in EARLY_LOSSES for row in wrong
    ):
        config = replace(config, verify=replace(config.verify, steps=1))
    attempts = Attempts(config, worker, shares)
    least, needed, known = least_failing(config, attempts.microbatches, attempts.fails)
    recorded = attempts.run(least, Recorder(shares))
    barrier(worker, "localized", REFERENCE_TIMEOUT)
    if worker.rank:
        return {}
    assert recorded is not None
    first, axis = first_text(recorded, least), axis_text(needed, known)
    path = attempts.folder / "first_difference.json"
    located = {"first": first, "axis": axis}
    path.write_text(json.dumps(located, indent=1) + "\n")
    for name in (_TENSORS, _STEPS):
        (attempts.folder / name).unlink()
    console = Console(steps=1)
    for line in (*first, axis, f"tensors: {attempts.folder}"):
        console.line(line)
    return located


class Attempts:
    """Comparisons of layouts on the first ranks of a job with one reference, whose tensors are
    recorded."""

    def __init__(self, config: Config, worker: Worker, shares: frozenset[str]) -> None:
        self.worker, self.folder = worker, worker.run_dir / "first_difference"
        if worker.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        data = open_data_on_every_rank(config, _apart(worker, "data of localization"))
        recorder, self._path = Recorder(shares), self.folder / _STEPS
        apart = _apart(worker, "localization")
        compute_reference(config, data, apart, self._path, recorder)
        if worker.rank == 0:
            torch.save(recorder.tensors, self.folder / _TENSORS)
        (self.microbatches,) = {*microbatches_of(config, data).values()}  # of the global batch
        self._verdicts: list[bool | None] = []

    def run(self, config: Config, recorder: Recorder | None = None) -> Found | None:
        """Collective; None on ranks that it has no use for, and where it cannot run."""
        name, result = f"attempt {len(self._verdicts)}", None
        if self.worker.rank < config.world_size and not problems(config):
            part, path = _apart(self.worker, name, config.world_size), self._path
            with suppress(ConfigError):  # on all of its ranks
                result = compare_with_one_process(config, part, reference=path, recorder=recorder)
        text = "" if result is None else str(int(result.agrees))
        answers = barrier(self.worker, name, REFERENCE_TIMEOUT, text, listens=True)
        self._verdicts.append({"1": False, "0": True}.get(answers.get(0, "")))
        return result

    def fails(self, config: Config) -> bool | None:
        self.run(config)
        return self._verdicts[-1]


def first_text(found: Found, config: Config) -> list[str]:
    """A line for the place, and lines for what differs there."""
    if found.wrong:
        first = found.wrong[0]
        lines = [f"first difference: {first.place}, by {first.relative:.1e} of its norm"]
        lines[0] += f"; what comes before differs by at most {first.before:.1e}"
        where: dict[str, list[Wrong]] = {}
        for wrong in found.wrong:
            where.setdefault(wrong.what, []).append(wrong)
        for what, group in [*where.items()][:4]:
            ranks = in_words(sorted({wrong.rank for wrong in group}))
            numbers = in_words(sorted({wrong.microbatch for wrong in group}))
            lines.append(f"  rank {ranks}, microbatch {numbers} of the global batch: {what}")
        return lines
    wrong = sorted((row for row in found.rows if not row.agrees), key=kind_order)
    if not wrong:
        return [f"first difference: {found.missing[0]}" if found.missing else "none in this run"]
    row = wrong[0]
    if row.kind != "gradient":
        factor = 1 + row.along / row.scale if row.scale else math.nan
        text = factor_text(factor, config) if math.isfinite(factor) else "missing or not finite"
        return [f"first difference: {row.full_name}, by {row.relative:.1e}", f"  {text}"]
    names = [*(found.gradients or {row.name: "missing"}).items()]
    lines = ["first difference: in what is done to gradients: those of modules' outputs agree"]
    texts: dict[str, list[str]] = {}
    for name, what in names:
        texts.setdefault(what, []).append(name)
    for what, of in [*texts.items()][:4]:
        more = f" and {len(of) - 1} more" if len(of) > 1 else ""
        lines.append(f"  gradient of {of[0]}{more}: {what}")
    return lines


def _apart(worker: Worker, name: str, ranks: int | None = None) -> Worker:
    """The worker with a store of its own, as one of the first `ranks` of the job."""
    store = worker.store and dist.PrefixStore(name, worker.store)
    if ranks is None:
        return replace(worker, store=store)
    local = min(ranks, worker.local_world_size)
    store = store if ranks > 1 else None
    return replace(worker, world_size=ranks, local_world_size=local, store=store)
