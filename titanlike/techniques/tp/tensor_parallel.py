"""Tensor parallelism of a run: how a model is sharded, decided on meta, and its steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.device.accelerator import kept_rng, own_backend
from titanlike.core.device.choose import first_device
from titanlike.core.distributed.initialize import piece_seed
from titanlike.core.distributed.mesh import Mesh, new_group
from titanlike.core.distributed.placement import ONLY_LAYERS, Placement, in_bf16
from titanlike.core.distributed.transform import Plan, Recorded, Transform
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.model_graph import Fields, ModelGraph, fields_of
from titanlike.core.optim.loss import build_loss, takes_divided_logits
from titanlike.core.torch_private.dtensor import local
from titanlike.core.torch_private.tensors import copy_values
from titanlike.techniques.tp.check import Draws, ForwardCheck, mixed_draws, plan_error, unnamed
from titanlike.techniques.tp.operators import ShardingError
from titanlike.techniques.tp.plan import Entry, match_modules, parse_plan, written_plan
from titanlike.techniques.tp.ranks import TensorRanks
from titanlike.techniques.tp.styles import shard_model

if TYPE_CHECKING:
    from titanlike.core.distributed.placement import StageState


@dataclass(frozen=True)
class TensorSharding:
    """How a model is sharded; the same on every rank."""

    modules: Mapping[str, Entry]  # see `plan.match_modules`
    sequence: bool  # activations between sharded layers are sharded along the sequence
    whole_logits: bool  # the loss needs the full vocabulary
    vocabulary: int | None  # size of the sharded vocabulary
    placements: Mapping[str, Placement]  # of each parameter, on the first rank
    like: TensorRanks  # the first rank, which has the most; the meta model is recorded with it
    context: int  # context-parallel ranks, which shard sequences first
    draws: Draws = field(default_factory=dict)  # modules that draw random numbers in training
    # the same without sequence sharding
    draws_whole: Draws = field(default_factory=dict)
    wrong_whole: str = ""  # why it would be wrong without sequence sharding
    # modules that gather their input for their sharded layers alone
    only_layers: frozenset[str] = frozenset()
    unchecked: str = ""  # why the plan was not compared with the full model's forward

    def divides(self, fields: Fields) -> bool:
        """Whether activations are sharded along the sequence in a batch of these fields."""
        return self.sequence and tokens_of(fields) % (self.like.size * self.context) == 0


def tokens_of(fields: Fields) -> int:
    """Tokens per sequence in a batch of these fields."""
    return next(iter(fields["inputs"].shape), 1)


class TensorParallel(Transform):
    def __init__(self, config: Config, sharding: TensorSharding, ranks: TensorRanks) -> None:
        """ranks: this process's."""
        self._config, self.sharding, self._ranks = config, sharding, ranks
        self.first, self.ranks = sharding.like, ranks
        self.placements, self.unchecked = sharding.placements, ""
        self._running: list[_Region] = []  # nested regions of random numbers
        if sharding.unchecked:
            what = "the tensor-parallel plan against the whole model's forward, and dropout masks"
            self.unchecked = f"{what}: {sharding.unchecked}"

    def loss(self, device: torch.device | None = None) -> Loss:
        size = self.sharding.vocabulary
        divided = None if size is None else partial(divided_cross_entropy, size, self._ranks)
        return build_loss(self._config.loss, device, divided)

    def recorded(self, graph: ModelGraph) -> None:
        graph.recording(graph.fields, True)  # notices layers that change a gathered input
        self._ranks.gathers_again = self.sharding.like.gathers_again

    def check(self, recorded: Recorded) -> None:
        """Raise ConfigError if a module outside of all units draws random numbers for a shard: no
        stage has that module, so `on_stage` cannot let each rank draw its own."""
        units = tuple(f"{unit.name}." for unit in recorded.graph.units)
        for name, for_shards in self.sharding.draws.items():
            if True in for_shards and not f"{name}.".startswith(units):
                where = "for a rank's part (dropout) between the modules of stages"
                reason = f"draws random numbers {where}"
                mistake = ShardingError(reason, style="nn.Dropout", module=name)
                raise plan_error(self._config, self.sharding.modules, [mistake])

    def describe(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Which layers are sharded, and whether activations between them are."""
        config, tp = self._config, self._config.tp
        parts = {name: p for name, p in self.placements.items() if p.part is not None}
        sharded = [name for name, p in parts.items() if p.copies == 1]
        repeated = [name for name, p in parts.items() if p.copies > 1]
        numel = sum(p.part.shape.numel() for p in parts.values() if p.part is not None)
        text = f"{numel / plan.whole_numel:.0%} of the parameters sharded: {_modules(sharded)}"
        if repeated:
            copies = max(parts[name].copies for name in repeated)
            text += f", and {_modules(repeated)} with each head on {copies} ranks"
        length = tokens_of(plan.fields)
        if not config.tp_sequence:
            activations = "full (tp_sequence=false)"
        elif not self.sharding.sequence:
            activations = "full: the plan has no style sequence"
        elif plan.variable:
            activations = (
                f"sharded along the sequence if {tp} divides the batch's length, else full"
            )
        elif length % tp:
            fits = -(-length // tp) * tp
            activations = f"full: {tp} does not divide {length} tokens (it would {fits})"
        else:
            activations = "sharded along the sequence"
        yield "tensor parallel", f"{text}; activations between them {activations}"

    def open(self, mesh: Mesh, plan: Plan) -> None:
        self._mesh = mesh
        self._ranks.group = mesh.axes.get_group("tp")

    def on_model(self, model: nn.Module, placements: dict[str, Placement]) -> None:
        sharding = self.sharding
        local_placements = shard_model(
            model, sharding.modules, self._ranks, whole_logits=sharding.whole_logits
        )
        placements.update(local_placements)
        _mark(model, sharding.only_layers)

    def why_not_compiled(self, block: str) -> str:
        for draws in (self.sharding.draws, self.sharding.draws_whole):
            for name, parts in draws.items():  # its forward changes the generator
                if True in parts and f"{name}.".startswith(f"{block}."):
                    return "it draws random numbers for each tensor-parallel rank's part (dropout)"
        return ""

    def prepare(self, fields: Fields) -> None:
        sequence, wrong = self.sharding.divides(fields), self.sharding.wrong_whole
        if self.sharding.sequence and not sequence and wrong:
            raise ValueError(
                f"tp={self._config.tp}: {tokens_of(fields)} tokens, which are not a multiple, are "
                f"computed with whole activations between layers, and {wrong}; write lengths that are "
                "a multiple"
            )
        self.sharding.like.sequence = self._ranks.sequence = sequence

    # Gradients of replicated parameters (a norm's weight, repeated heads): if ranks computed with
    # different tokens or heads, each has a partial sum; these are all-reduced once a step, in one
    # message. If they are equal, the first rank's are broadcast: kernels that add in any order
    # would let copies drift apart.

    def on_states(self, states: Mapping[int, StageState]) -> None:
        """Create groups for all of the model's parameters, so that every rank makes as many: torch
        numbers them."""
        all_copies = {p.copies for p in self.placements.values() if p.copies > 1}
        groups = {copies: self._group(copies) for copies in sorted(all_copies)}
        by_kind: dict[tuple[str, int], list[nn.Parameter]] = {}
        placed = {p: s.placements[name] for s in states.values() for name, p in s.parameters()}
        for parameter, placement in placed.items():
            if placement.copies > 1 and parameter.requires_grad:
                key = placement.partial, placement.copies
                by_kind.setdefault(key, []).append(parameter)
        self._copied = [(when, ps, groups[copies]) for (when, copies), ps in by_kind.items()]

    def _group(self, copies: int) -> dist.ProcessGroup:
        """This rank and the adjacent ones that hold the same elements."""
        if copies == self._ranks.size:
            assert self._ranks.group is not None
            return self._ranks.group
        return new_group(self._mesh.neighbours("tp", copies), self._config.launch.timeout)

    @torch.no_grad()
    def after_backward(self) -> None:
        """All-reduce replicated gradients (missing ones as zeros), or broadcast rank 0's."""
        for when, parameters, group in self._copied:
            summed = when == "always" or (when == "sequence" and self._ranks.sequence)
            by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is None and not summed:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local(parameter.grad)
                by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
            for gradients in by_kind.values():
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                if summed:
                    dist.all_reduce(flat, group=group)
                else:
                    dist.broadcast(flat, group=group, group_src=0)
                sizes = [gradient.numel() for gradient in gradients]
                totals = zip(gradients, flat.split(sizes), strict=True)
                copy_values(gradients, [total.view_as(gradient) for gradient, total in totals])

    def logits(self, part: Tensor) -> Tensor:
        size, ranks = self.sharding.vocabulary, self._ranks
        if size is None:
            return part
        padded = F.pad(part.float(), (0, -(-size // ranks.size) - part.size(-1)))
        parts = [torch.empty_like(padded) for _ in range(ranks.size)]
        dist.all_gather(parts, padded.contiguous(), group=ranks.group)
        return torch.cat(parts, -1)[..., :size]

    # Random numbers (dropout masks): all ranks of a group have equal default generators, so they
    # draw the same for unsharded activations. A module that draws for a shard of heads, features or
    # tokens runs in a region: it draws one number from the default generator, as all ranks do, then
    # from a generator seeded with this number and its rank. So the default generators stay equal,
    # and a recomputed block, whose generator torch restores, draws the same again.

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        """Let modules draw in regions; call it before all else that replaces forwards."""
        draws = {True: self.sharding.draws, False: self.sharding.draws_whole}  # by `ranks.sequence`
        regions = {sequence: _regions(stage, names) for sequence, names in draws.items()}
        for name, module in stage.named_modules():
            parts = {sequence: named.get(name) for sequence, named in regions.items()}
            if set(parts.values()) != {None}:
                module.forward = partial(self._draw, parts, module.forward)

    def _draw(
        self,
        parts_of: Mapping[bool, bool | None],
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        parts = parts_of[self._ranks.sequence]
        around = self._running[-1] if self._running else _Region(False, 0)
        if parts is None or around.parts == parts:
            return forward(*args, **kwargs)
        if self._running:  # the outer region's generator may differ between ranks
            around.inside += 1
            seed = piece_seed(around.seed, "region", around.inside)
        else:  # on the CPU, without a wait for the device
            seed = int(torch.randint(2**62, (), device="cpu"))
        self._running.append(_Region(parts, seed))
        try:
            with kept_rng(self._mesh.device):
                torch.manual_seed(piece_seed(seed, "rank", self._ranks.rank) if parts else seed)
                return forward(*args, **kwargs)
        finally:
            self._running.pop()


@dataclass
class _Region:
    parts: bool  # whether numbers differ between ranks
    seed: int  # the same on all of them
    inside: int = 0  # nested regions so far


def _regions(stage: nn.Module, draws: Draws) -> dict[str, bool]:
    """Modules that draw in a region -> whether for shards."""
    divided = [name for name, parts in draws.items() if parts == {True}]
    regions = dict.fromkeys(divided, True)
    for name, _ in stage.named_modules():
        within = any(name.startswith(f"{path}.") for path in divided)
        if within and draws.get(name) == {False}:
            regions[name] = False
    return regions


def _modules(parameters: Sequence[str]) -> str:
    """The last names of the parameters' modules: q_proj, k_proj."""
    return ", ".join(dict.fromkeys(name.split(".")[-2] for name in parameters if "." in name))


# --- decisions -----------------------------------------------------------------------------------


def tensor_parallel(
    config: Config,
    model: nn.Module,
    mesh: Mesh | None,
    batch: dict[str, Tensor],
    checked: Transform | None = None,
) -> TensorParallel:
    """Shard a model on meta in place, as on its first tensor-parallel rank.

    mesh: None in the launcher; batch: one sequence on meta, see `example_batch`; checked: the
    transform of an earlier plan of the same model and batch, whose checks hold for as many ranks.
    Raises ConfigError, also if the sharded model would compute other results.
    """
    if isinstance(config.split, TraceSplit):
        reason = "a graph that is traced has no collectives of tensor-parallel ranks"
        raise ConfigError([Problem("split", "trace", reason, "split=points")])
    sharding = checked.sharding if isinstance(checked, TensorParallel) else None
    like = TensorRanks(config.tp, 0, compiled=config.compile)
    if sharding is not None and (sharding.like.size, sharding.context) == (config.tp, config.cp):
        sharding = replace(sharding, like=like)
        shard_model(model.train(), sharding.modules, like, whole_logits=sharding.whole_logits)
        like.sequence = sharding.divides(fields_of(batch))
    else:
        sharding = _sharding_of(config, model, batch, like)
    _mark(model, sharding.only_layers)
    ranks = like if mesh is None else replace(like, size=mesh.layer_ranks, rank=mesh.layer_part)
    return TensorParallel(config, sharding, ranks)


def _sharding_of(
    config: Config, model: nn.Module, batch: dict[str, Tensor], like: TensorRanks
) -> TensorSharding:
    """Shard a model and check it. Raises ConfigError if its results would differ."""
    modules = tensor_plan(config, model)
    whole_logits = not takes_divided_logits(config.loss)
    heads = [model.get_submodule(name) for name, entry in modules.items() if entry.style == "vocab"]
    vocabulary = next((m.out_features for m in heads if isinstance(m, nn.Linear)), None)
    vocabulary = None if whole_logits else vocabulary
    model.train()
    # a copy for each forward: a model may cache results, such as a rotary table
    undivided, *probes = (copy.deepcopy(model) for _ in range(3))
    dtype = next(model.parameters()).dtype
    pair = {name: x.repeat_interleave(2, 0) for name, x in batch.items() if name != "targets"}
    pair = {name: x.to(dtype) if x.is_floating_point() else x for name, x in pair.items()}
    with in_bf16(undivided.modules()):
        check = ForwardCheck(undivided, modules, pair)
    placements = shard_model(model, modules, like, whole_logits=whole_logits)
    sequence = config.tp_sequence and any(entry.style == "sequence" for entry in modules.values())
    sharding = TensorSharding(
        modules, sequence, whole_logits, vocabulary, placements, like, context=config.cp
    )
    like.sequence = sharding.divides(fields_of(batch))

    def divided(sequence: bool) -> tuple[list[ShardingError], Draws, frozenset[str]]:
        probe, ranks = probes.pop(), TensorRanks(config.tp, 0)
        shard_model(probe, modules, ranks, whole_logits=whole_logits)
        ranks.sequence = sequence
        with in_bf16(probe.modules()):
            return check.mistakes(probe, placements, ranks, vocabulary is not None)

    mistakes, draws, only_layers = divided(like.sequence)
    if mistakes and not config.tp_check:
        reason = plan_error(config, modules, mistakes).problems[0].reason
        return replace(sharding, unchecked=f"{reason} (tp_check=false)")
    if written_plan(config.model) is not None or callable(getattr(model, "tp_plan", None)):
        style = "replicate_sum" if mistakes or check.unchecked else "replicate"
        mistakes += unnamed(model, modules, style)
    if mistakes := mistakes or mixed_draws(draws):
        raise plan_error(config, modules, mistakes)
    draws_whole, wrong = draws, ""
    if like.sequence:  # batches of other lengths may not be sharded
        mistakes, draws_whole, _ = divided(False)
        if mistakes := mistakes or mixed_draws(draws_whole):
            wrong = f"its {mistakes[0].module or 'forward'} {mistakes[0].reason}"
    return replace(
        sharding,
        draws=draws,
        draws_whole=draws_whole,
        wrong_whole=wrong,
        only_layers=only_layers,
        unchecked=check.unchecked,
    )


def _mark(model: nn.Module, only_layers: frozenset[str]) -> None:
    for name in only_layers:
        vars(model.get_submodule(name))[ONLY_LAYERS] = True


def async_problems(config: Config) -> list[Problem]:
    """What `tp_async` lacks in this config or on this machine."""
    nvidia = own_backend(first_device(config.device)) == "nccl" and torch.version.hip is None
    missing = [
        (config.tp > 1, "there is nothing to overlap with tp=1", "tp=2"),
        (config.compile, "torch.compile does it, in compiled blocks", "compile=true"),
        (config.tp_sequence, "it overlaps all-gather and reduce-scatter alone", "tp_sequence=true"),
        (nvidia, "it needs the symmetric memory of NVIDIA GPUs", "tp_async=false"),
    ]
    return [Problem("tp_async", True, why, fix) for there, why, fix in missing if not there]


# --- cross entropy with a sharded vocabulary -----------------------------------------------------
#
# No rank has all logits of a token: the maximum, the sum of exponentials and the target's logit are
# all-reduced, three numbers per token (arXiv 1909.08053, section 3).


def divided_cross_entropy(
    size: int, ranks: TensorRanks, logits: Tensor, targets: Tensor, ignore: int, z_loss: float
) -> Tensor:
    """Losses in nats [N], plus `z_loss` * log(sum(exp(logits)))^2; 0 for targets equal to `ignore`,
    NaN for those outside of the vocabulary; the same on every rank.

    size: of the full vocabulary; logits: fp32 [N, this rank's vocabulary shard]; targets: [N].
    """
    return _CrossEntropy.apply(logits, targets, size, ranks, ignore, z_loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        size: int,
        ranks: TensorRanks,
        ignore: int,
        z_loss: float,
    ) -> Tensor:
        start, stop = ranks.part(size)
        alone = ranks.group is None or logits.is_meta  # when costs are counted
        assert alone or logits.shape[-1] == stop - start, "logits of this rank's part"
        largest = logits.amax(-1)
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        shares = logits - largest.unsqueeze(-1)
        counted = targets != ignore
        inside = counted & (targets >= start) & (targets < stop)
        rows = (targets - start).masked_fill(~inside, 0).unsqueeze(-1)
        target_logit = shares.gather(-1, rows).squeeze(-1).masked_fill(~inside, 0)  # or 0
        unknown = counted & ((targets < 0) | (targets >= size))
        target_logit.masked_fill_(unknown, math.nan)
        shares.exp_()
        sums = torch.stack([shares.sum(-1), target_logit])
        if not alone:
            dist.all_reduce(sums, group=ranks.group)
        total, target_logit = sums
        shares.div_(total.unsqueeze(-1))
        losses, scale = total.log() - target_logit, counted.to(shares.dtype)
        if z_loss:
            log_sum = total.log() + largest
            losses += z_loss * log_sum.square()
            scale *= 1 + 2 * z_loss * log_sum
        ctx.save_for_backward(shares, rows, inside, scale)
        return losses.masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, rows, inside, scale = ctx.saved_tensors
        gradient = gradient.unsqueeze(-1)
        result = shares * (gradient * scale.unsqueeze(-1))
        result.scatter_add_(-1, rows, -gradient * inside.unsqueeze(-1))
        return result, None, None, None, None, None


def tensor_plan(config: Config, model: nn.Module) -> dict[str, Entry]:
    """Module -> its entry. Raises ConfigError if the model has no plan, or a wrong one."""
    from titanlike.techniques.tp.hf_plan import has_transformers_plan, transformers_plan

    plain = written_plan(config.model)
    if plain is None:
        if callable(method := getattr(model, "tp_plan", None)):
            plain = method()
        elif has_transformers_plan(model):
            plain = transformers_plan(model, config.tp)
    if not plain:
        name = model.config.model_type if has_transformers_plan(model) else config.model.name
        reason = f"{name} has no tensor-parallel plan"
        fix = f"tp=1 dp={config.dp * config.tp}, or a plan (docs/tensor_parallel.md)"
        raise ConfigError([Problem("tp", config.tp, reason, fix)])
    return match_modules(model, parse_plan(plain))
