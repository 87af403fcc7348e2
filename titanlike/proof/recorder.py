"""Records a step's tensors module by module, in a layout and in one process, and describes how two
of them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import Part, Placement, experts_of, local_of
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.recording import tree_flatten
from titanlike.core.torch_private.autograd import in_backward
from titanlike.core.torch_private.dtensor import local
from titanlike.core.training.build import Run
from titanlike.proof.comparison import Comparison, compare, gathered
from titanlike.proof.operations import DIFFERS, Operations, first_operation

PHASES = ("input", "output", "gradient of the output", "share")
# the reference's files in the folder of a comparison
TENSORS, OPERATIONS = "tensors.pt", "operations.pt"
_SAME = 1e-3  # of the norm: a remainder that a description omits
_EXPLAINED = 256  # maximum number of microbatches whose gradient shares are distinguished
_MOST = 8 << 30  # bytes of recorded tensors


class Place(NamedTuple):
    """A tensor of a step: of a module's call in a microbatch, or a microbatch's share of a
    parameter's gradient."""

    phase: str  # of PHASES
    name: str
    call: int = 0
    at: int = 0  # among the tensors of inputs or outputs

    def __str__(self) -> str:
        number = f" {self.at}" if self.at else ""
        again = f", call {self.call + 1}" if self.call else ""
        return f"{self.phase}{number} of {self.name}{again}"


class What(NamedTuple):
    """How a tensor differs from the reference."""

    cause: str = ""
    factor: float | None = None  # of all of it, or of the part `where`
    where: str = ""

    def __str__(self) -> str:
        times = f"{self.factor:.5g} times" if self.factor else ""
        return ": ".join(filter(None, (self.where, times, self.cause)))


@dataclass(frozen=True)
class Wrong:
    """A tensor of one rank and microbatch that differs from the reference."""

    order: int  # index in the reference
    place: Place
    rank: int
    microbatch: int  # of the global batch
    relative: float
    before: float  # the largest relative difference of earlier tensors
    what: What


class Recorder(Transform):
    """Records a step's tensors, of full models or of stages, as copies on the CPU."""

    def __init__(
        self,
        shares: frozenset[str] = frozenset(),
        step: int = 1,
        bits: bool = False,
        operations: Operations | None = None,
    ) -> None:
        """shares: parameters whose gradient is recorded by microbatch. bits: tensors must be
        bitwise equal. operations: records these instead of tensors."""
        self.operations = operations
        self.of_step, self._bits = step, bits
        self.tensors: dict[tuple[Place, int], Tensor] = {}
        # this rank's part of the gradients of `shares`
        self.gradients: dict[str, tuple[Tensor, Part | None]] = {}
        self.shares = shares
        self.compared_tensors = 0
        self._on, self._step, self._microbatch, self._bytes = False, 0, 0, 0
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
        self._on = self._step == self.of_step
        with self.operations if self._on and self.operations else nullcontext():
            yield
        self._on = False

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights, with hooks that record this microbatch's gradient of `shares`."""
        if not self._on:
            return weights
        new = {n: w.view_as(w) for n, w in weights.items() if n in self.shares and w.requires_grad}
        for name, weight in new.items():
            weight.register_hook(partial(self._keep, Place("share", name), self._microbatch))
        return weights | new

    def _keep(self, place: Place, microbatch: int, tensor: Tensor) -> None:
        if self.operations is not None:
            self.operations.at(place, microbatch)
            return
        self._bytes += tensor.nbytes
        if self._bytes < _MOST:
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
    ) -> tuple[list[Wrong], dict[str, What]]:
        """(the first wrong tensors in the reference's order, of all ranks; or else how the
        gradients of `shares` differ, in backward order). Writes the first wrong tensors into
        `folder`. Collective.

        Tensors without counterpart (tokens in expert order) are skipped.
        """
        path = folder / TENSORS  # written by rank 0
        reference = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        order = {place: i for i, place in enumerate(dict.fromkeys(place for place, _ in reference))}
        parts, self.compared_tensors = _Parts(run, config, self._bits), 0
        wrongs: list[tuple[Wrong, Tensor, Tensor]] = []
        before = 0.0
        for key in sorted(self.tensors, key=lambda key: (order.get(key[0], 0), key[1])):
            (place, microbatch), tensor, whole = key, self.tensors[key], reference.get(key)
            if whole is None or (wrongs and order[place] > wrongs[0][0].order):
                continue
            right, row = parts.compared(place, tensor, whole)
            if right is None or row is None:
                continue
            self.compared_tensors += 1
            if row.agrees:
                before = max(before, row.relative)
                continue
            # inputs that are used only for their dtype or shape may differ
            results = [
                parts.compared(other[0], value, reference[other])[1]
                for other, value in self.tensors.items()
                if other in reference and other[1] == microbatch
                if other[0][:3] == ("output", place.name, place.call)
            ]
            agree = [result.agrees for result in results if result is not None]
            if place.phase == "input" and agree and all(agree):
                continue
            what = first_bit(tensor, right) if self._bits else described(tensor, right, config)
            of = dist.get_rank(), microbatch, row.relative, before, what
            wrongs.append((Wrong(order[place], place, *of), tensor, right))
        first = [wrong for rank in gathered([wrong for wrong, *_ in wrongs]) for wrong in rank]
        least = min((wrong.order for wrong in first), default=None)
        for wrong, tensor, right in wrongs:
            if wrong.order == least:
                name = f"rank{wrong.rank}-microbatch{wrong.microbatch}.pt"
                torch.save({"layout": tensor, "one process": right}, folder / name)
        first = [wrong for wrong in first if wrong.order == least]
        return first, {} if first else self._explained(reference, config)

    def operation(self, run: Run, config: Config, folder: Path, wrong: Wrong) -> str:
        """A text about the first operation that differs, on the rank that has it. Collective."""
        assert self.operations is not None
        reference = torch.load(folder / OPERATIONS, map_location="cpu", weights_only=False)
        every, parts = gathered(self.operations.found), _Parts(run, config, self._bits)
        groups = [t.ranks.group for t in run.plan.transforms.values() if t.ranks is not None]
        ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
        peers = [every[rank] for rank in sorted(ranks - {dist.get_rank()})]

        def compared(
            x: Tensor, whole: Tensor, others: list[Tensor]
        ) -> tuple[Comparison | None, bool]:
            row = parts.compared(wrong.place, x, whole)[1]
            if row is None or row.agrees or any(of.shape != whole.shape for of in (x, *others)):
                return row, False
            total = torch.stack([x, *others]).double().sum(0).to(x.dtype)
            sum_row = parts.compared(wrong.place, total, whole)[1]
            return (sum_row, True) if sum_row is not None and sum_row.agrees else (row, False)

        texts = gathered(first_operation(self.operations.found, reference, peers, compared))
        differs = [f"{t} on rank {rank}" for rank, t in enumerate(texts) if DIFFERS in t]
        return [*differs, texts[wrong.rank]][0]

    def _explained(
        self, reference: dict[tuple[Place, int], Tensor], config: Config
    ) -> dict[str, What]:
        """How each gradient differs: the multiple of each microbatch's share in it."""
        order: dict[str, list[tuple[Place, int]]] = {}
        for place, number in sorted(reference, key=lambda key: key[1]):
            if place.phase == "share":
                order.setdefault(place.name, []).append((place, number))
        moments: dict[str, Any] = {}
        for name, (gradient, part) in self.gradients.items():
            if name in order and len(order[name]) <= _EXPLAINED:
                parts = [local_of(gradient, part, reference[key]).double() for key in order[name]]
                actual, shares = local(gradient).cpu().double(), torch.stack(parts)
                text = described(actual, shares.sum(0), config)
                actual, shares = actual.flatten(), shares.flatten(1)
                moments[name] = shares @ shares.T, shares @ actual, actual @ actual, text
        every, result = gathered(moments), {}
        for name in (place.name for place, _ in reference if place.phase == "share"):
            of = {rank: p[name] for rank, p in enumerate(every) if name in p}
            if of and name not in result:
                grams, products, squares, texts = zip(*of.values(), strict=True)
                lines = [f"rank {rank}: {text}" for rank, text in zip(of, texts, strict=True)]
                found = _multiples_of_shares(sum(grams), sum(products), sum(squares), config)
                result[name] = found or What("; ".join(lines[:4]))
        return result


class _Parts:
    """A rank's part of the reference's tensors: cut by tokens, by the parts of a weight, or by
    ranks."""

    def __init__(self, run: Run, config: Config, bits: bool) -> None:
        self._run, self._config, self._bits = run, config, bits
        self._placements: dict[str, Placement] = {}
        for state in run.stage_states:  # the plan has the first rank's
            self._placements.update(state.placements)
        tokens = torch.arange(config.seq_len)
        self._tokens = [tokens]
        for transform in run.plan.transforms.values():
            take: Callable[..., Tensor] | None = getattr(transform.ranks, "take", None)
            if take is not None:
                self._tokens.append(take(tokens[None], 1)[0])
        divided = run.mesh.layer_ranks > 1 or config.ep > 1
        if run.mesh.layer_ranks > 1:
            parts = (t.chunk(run.mesh.layer_ranks) for t in [*self._tokens])
            self._tokens += [part[run.mesh.layer_part] for part in parts if len(part) > 1]
        # tokens in expert order; partial sums over ranks with the same heads
        names = [name for stage in run.stages for name in experts_of(stage)]
        self._unlike = {(phase, name) for name in names for phase in PHASES[: 3 * divided]}
        repeated = (n for n, p in self._placements.items() if p.part is not None and p.copies > 1)
        self._unlike |= {(PHASES[2], name.rpartition(".")[0]) for name in repeated}

    def compared(
        self, place: Place, tensor: Tensor, whole: Tensor
    ) -> tuple[Tensor | None, Comparison | None]:
        """The part of `whole` nearest to `tensor`, of the possible ones, and its comparison."""
        if place[:2] in self._unlike:
            return None, None
        # rounding grows with the number of terms
        terms = max(64, *whole.shape) if whole.dim() else 64
        eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        tolerance = 0.0 if self._bits else (16 if eps < 1e-3 else 1) * eps * terms**0.5
        parts = [whole] if tensor.dim() == whole.dim() else []
        for dim, size in enumerate(tensor.shape if parts else ()):
            if size != whole.shape[dim]:
                parts = [new for part in parts for new in self._cut(place, part, dim, size)]
        rows = [
            (part, compare(place.phase, place.name, tensor, part, tolerance=tolerance))
            for part in parts
        ]
        return min(rows, key=lambda pair: pair[1].squared, default=(None, None))

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


def described(tensor: Tensor, right: Tensor, config: Config) -> What:
    """How two tensors of the same shape differ."""
    tensor, right = tensor.double(), right.double()
    if not tensor.isfinite().all():
        return What(f"{(~tensor.isfinite()).sum().item()} elements are not finite")
    if what := _factor(tensor, right, config):
        return what
    norm = tensor.norm() * _SAME
    square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]
    if square and (tensor.transpose(-1, -2) - right).norm() <= norm:
        return What("transposed")
    for axis, dim in product(("tp", "cp", "dp", "ep"), range(tensor.dim())):
        part, rest = divmod(tensor.shape[dim], getattr(config, axis))
        for by in range(part, 0 if rest else tensor.shape[dim], max(part, 1)):
            if (tensor.roll(by, dim) - right).norm() <= norm:
                return What(f"the parts of {axis} ranks are in another order along dim {dim}")
    off = (tensor - right).abs() > _SAME * right.square().mean().sqrt()
    where, inside = [], [slice(None)] * tensor.dim()
    for dim, size in enumerate(tensor.shape):
        lines = off.movedim(dim, 0).reshape(size, off.numel() // max(size, 1))
        rows = lines.any(1).nonzero().flatten().tolist()
        if rows and len(rows) < size and rows[-1] - rows[0] + 1 == len(rows):
            inside[dim] = slice(rows[0], rows[-1] + 1)
            name = {0: "sample", 1: "token"}.get(dim) if tensor.dim() > 2 else None
            rows_text = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
            last = " (the last)" if rows == [size - 1] else ""
            where.append(f"{name or f'index of dim {dim}'} {rows_text} of {size}{last}")
    inner = _factor(tensor[tuple(inside)], right[tuple(inside)], config)
    what = inner or What(f"another by {(tensor - right).norm() / right.norm():.1e} of its norm")
    return what._replace(where=f"only {', '.join(where)}") if where else what


def first_bit(tensor: Tensor, right: Tensor) -> What:
    """The first differing element, and its lowest differing bit."""
    place = tuple((tensor != right).nonzero()[0].tolist())
    here, there = tensor[place], right[place]
    kind = {2: torch.int16, 4: torch.int32}.get(here.itemsize, torch.int64)
    other = int(here.view(kind).item()) ^ int(there.view(kind).item())
    bit = (other & -other).bit_length() - 1
    values = f"{here.item()!r}, in one process {there.item()!r}"
    return What(f"{[*place]} is {values}: from bit {bit}")


def _factor(tensor: Tensor, right: Tensor, config: Config) -> What | None:
    """The factor between two tensors; None = they are not multiples."""
    scale = right.square().sum().item()
    factor = (tensor * right).sum().item() / scale if scale else 0.0
    rest = (tensor - factor * right).norm().item()
    # a remainder as large as the factor's change is another fault
    limit = min(_SAME * max(abs(factor), _SAME), 0.1 * abs(1 - factor)) * scale**0.5
    return times(factor, config) if scale and rest <= limit else None


def times(factor: float, config: Config) -> What:
    """Describe a factor, as "2 times: summed instead of averaged over dp"."""
    if abs(factor) < _SAME:
        return What("zeros", 0.0)
    factor, causes = float(f"{factor:.5g}"), {-1.0: "the sign"}
    parts = {"tokens": config.batch_size * config.seq_len, "samples": config.batch_size}
    parts["microbatches"] = getattr(config.schedule, "microbatches", None) or 1
    for name, size in parts.items():
        causes |= {float(size): f"summed instead of averaged over {name}"} if size > 1 else {}
    for name in ("pp", "replicate", "ep", "cp", "tp", "dp"):
        if (size := getattr(config, name)) > 1:
            causes[1 / size] = f"divided by {name} once too often, or not summed over it"
            causes[size] = f"summed instead of averaged over {name}"
    near = (cause for value, cause in reversed(causes.items()) if abs(factor / value - 1) < _SAME)
    return What(next(near, ""), factor)


def _multiples_of_shares(gram: Any, products: Any, square: Any, config: Config) -> What | None:
    """How often the share of each microbatch is in a gradient; None if the gradient is no sum of
    multiples of shares. Dot products, fp64: gram [dp * microbatches, dp * microbatches] of the
    shares, products [dp * microbatches] of shares and gradient, square [] of the gradient."""
    # least squares by gelsd, as shares may depend linearly on each other
    multiples = torch.linalg.lstsq(gram, products[:, None], driver="gelsd").solution.flatten()
    if square - multiples @ products > _SAME**2 * square:  # the square of the remainder
        return None
    if multiples.max() - multiples.min() < 1e-2 * multiples.abs().max() or not square:
        return times(multiples.mean().item(), config)
    texts = []
    for rank, row in enumerate(multiples.view(config.dp, -1)):
        of, alike = f"dp rank {rank}", config.dp > 1 and row.max() - row.min() < 1e-2
        for microbatch, multiple in enumerate(row[:1] if alike else row):
            how = "missing" if abs(multiple) < 1e-2 else f"in it {multiple.item():.3g} times"
            if abs(multiple - 1) > 1e-2:
                name = of if alike else f"microbatch {microbatch} of {of}"
                texts.append(f"the share of {name} is {how}")
    return What("; ".join(texts[:4]))
