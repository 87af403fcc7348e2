"""The reference: a few training steps of the full model in one process, in plain torch.

`model(x)`, loss, backward, optimizer; no pipeline and no sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import ActivationCheckpoint, Fsdp, Numerics, Precision
from titanlike.core.config.groups.pipeline import EvenSplit, Schedule
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, validation_batches, validation_weights
from titanlike.core.data.sources import REAL, Data, Source, no_targets
from titanlike.core.distributed.initialize import draw, initialize
from titanlike.core.distributed.mesh import one_process
from titanlike.core.distributed.placement import optimizer_state
from titanlike.core.distributed.transform import Transform
from titanlike.core.models.registry import MODELS, build_model, initial_weights_of, resolve_model
from titanlike.core.optim.loss import build_loss, logits_of
from titanlike.core.optim.optimizer import build_optimizers, learning_rate, set_lr
from titanlike.core.torch_private.autograd import watch_autocast
from titanlike.core.training.train_plan import make_plan
from titanlike.core.training.transforms import stage_transforms
from titanlike.proof.comparison import compare, reliable
from titanlike.proof.promises import Pair, loss_in_plain_torch, of_data, of_documents

if TYPE_CHECKING:
    from titanlike.proof.recorder import Recorder

# Relative change of the weights to measure how rounding grows: layouts' gradients differ from the
# reference's by some 1e-7 to 1e-6 of their norm.
_NUDGE = 2.0**-22
_BF16_NUDGE = 2.0**-9
_NUDGES = 3
_FILLED = 0.02  # standard deviation
VALIDATION_LOSS = "validation loss"
REFERENCE_TIMEOUT = 24 * 3600.0  # seconds for one process to compute while the others wait


@dataclass(frozen=True)
class Reference:
    """One process's results. Tensors are fp32 on the CPU, by parameter name."""

    initial: dict[str, Tensor]
    # zero-initialized ones, random here: behind a zero gate neither wrong gradients nor coupled
    # samples would be seen; or those of `verify.against`
    filled: frozenset[str]
    gradients: dict[str, Tensor]  # of `step`, before clipping
    reliable: dict[str, Tensor]  # elements whose gradients exceed rounding in every step
    updated: dict[str, Tensor]  # after the last step
    state: dict[str, Tensor]  # of the optimizer after the last step, by "PARAMETER KEY"
    losses: dict[str, float]  # "loss of step 1", ..., "validation loss", "loss after ..."
    norms: dict[str, float]  # "gradient norm of step 1", ...
    rates: list[dict[str, float]]  # of each step: see `rates_of`
    # buffers that change once a step, such as a batch norm's; after the first step
    buffers: dict[str, Tensor]
    # sequences of a batch -> number of equal parts computed one after the other; none = 1
    groups: Mapping[int, int]
    step: int = 1  # the recorded one, if any
    before: dict[str, Tensor] = field(
        default_factory=dict
    )  # weights before it, if it is not the first
    promises: dict[str, Pair] = field(default_factory=dict)

    @property
    def divided(self) -> bool:
        return max(self.groups.values(), default=1) > 1


def reference_steps(
    config: Config, data: Data, device: torch.device, recorder: Recorder | None = None
) -> tuple[Reference, Reference | None]:
    """(fp32 reference, one in bf16 or float8 if the config, or an autocast in the model, asks for
    it); recorder: of its tensors, in the layout's microbatches and precision."""
    low, step = config.precision.low, recorder.of_step if recorder else 1
    transforms = _transforms(replace(config, precision=Precision()), data, device)
    mixed = config.mixes_samples or any(transform.by_microbatch for transform in transforms)
    in_layout = microbatches_of(config, data) if mixed or low or recorder else {}
    groups = in_layout if mixed or recorder else {}
    compute = partial(_single_process, config, data, device, step=step)
    if low:
        exact = compute(transforms, torch.float32, groups)
        # as in the layout: float8 scales are per microbatch
        transforms = _transforms(config, data, device)
        return exact, compute(transforms, torch.bfloat16, in_layout, recorder=recorder)
    with watch_autocast() as used:
        exact = compute(transforms, torch.float32, groups, recorder=recorder)
    if not used:
        return exact, None
    with watch_autocast(off=True):
        return compute(transforms, torch.float32, groups, "bf16"), exact


def in_one_process(config: Config) -> Config:
    """The config of the same training in one process."""
    config = replace(config, pp=1, dp=1, replicate=1, tp=1, cp=1, ep=1, split=EvenSplit())
    config = replace(config, schedule=Schedule("1f1b", None), fsdp=Fsdp())
    return replace(config, activation_checkpoint=ActivationCheckpoint())


def _transforms(config: Config, data: Data, device: torch.device) -> list[Transform]:
    """The config's transforms that exist in one process."""
    config = replace(in_one_process(config), compile=False, numerics=Numerics())
    plan = make_plan(config, data)
    return [*stage_transforms(config, one_process(device), plan).values()]


def microbatches_of(config: Config, data: Data) -> dict[int, int]:
    """Sequences of a global batch -> its microbatches on all ranks; with `ramp` batches differ."""
    plan = make_plan(config, data)
    orders = {config.batch_size // config.dp: plan.order, **plan.orders}
    return {rows * config.dp: order.microbatches * config.dp for rows, order in orders.items()}


# (kind, name) -> sum of squares of the difference, and its part along the tensor
Distances = dict[tuple[str, str], tuple[float, ...]]


def rounding_of_one_process(
    config: Config,
    data: Data,
    device: torch.device,
    exact: Reference,
    *,
    kernels: bool = False,
    low: bool = False,
) -> Distances:
    """How far rounding alone moves one process in fp32, in the first step's gradients, in buffers,
    updates, optimizer state and losses. low: in the layout's precision, from weights changed by half
    a bf16 digit: a router may choose other experts for a token, as in a layout.

    kernels: repeat the steps one sample at a time, so that kernels get other sizes; else, for
    models that normalize samples together, from weights changed by _NUDGE, several times, and take
    the largest differences.
    """
    sizes = (size for _, size, _ in config.ramp_stages())
    runs: list[dict[str, Any]] = [{"groups": {size: size for size in sizes}}]
    if exact.divided or not kernels:
        runs = [{"groups": exact.groups, "nudge": seed} for seed in range(_NUDGES)]
    dtype, groups = torch.float32, exact.groups
    of = replace(config, precision=Precision())
    if low:
        dtype, groups, of = torch.bfloat16, microbatches_of(config, data), config
        runs = [{"groups": groups, "nudge": seed} for seed in range(_NUDGES)]
    transforms = _transforms(of, data, device)
    largest: Distances = {}
    # again, with process groups: code that is wrong with them must not count as rounding
    exact = _single_process(config, data, device, transforms, dtype, groups)
    for run in runs:
        other = _single_process(config, data, device, transforms, dtype, **run)
        for key, pair in _distances(exact, other).items():
            largest[key] = tuple(map(max, pair, largest.get(key, pair)))
    return largest


def _distances(exact: Reference, other: Reference) -> Distances:
    """One figure for all losses before the first update, and one for those after it, since a single
    loss's may be small by chance."""
    rows = [
        compare("gradient", name, other.gradients[name], g) for name, g in exact.gradients.items()
    ]
    rows += [compare("buffer", name, other.buffers[name], b) for name, b in exact.buffers.items()]
    for name, right in exact.updated.items():  # from the same weights
        update = other.updated[name].double() - other.initial[name].double()
        moved = exact.initial[name].double() + update
        rows.append(compare("update", name, moved, right, mask=exact.reliable[name]))
    rows += [
        compare("state", name, value, exact.state[name])
        for name, value in other.state.items()
        if name in exact.state
    ]
    distances: Distances = {(row.kind, row.name): (row.squared, abs(row.along)) for row in rows}
    pairs = ("loss", exact.losses, other.losses), ("norm", exact.norms, other.norms)
    for kind, values, others in pairs:
        for names in (values.keys() & EARLY, values.keys() - EARLY):
            squared = max((abs(others[name] - values[name]) for name in names), default=0.0) ** 2
            distances |= {(kind, name): (squared, 0.0) for name in names}
    return distances


def _single_process(
    config: Config,
    data: Data,
    device: torch.device,
    transforms: Iterable[Transform],
    dtype: torch.dtype,
    groups: Mapping[int, int],
    rounding: str = "",
    nudge: int | None = None,
    recorder: Recorder | None = None,
    step: int = 1,
) -> Reference:
    """Train the full model on full batches, computing in `dtype`.

    transforms: the config's in one process. groups: see `Reference`. rounding: the precision of the
    compared layout, if not the config's. nudge: seed of random changes of the initial weights, of
    size _NUDGE or _BF16_NUDGE. step: whose gradients are kept.
    """
    config = replace(config, dp=1, replicate=1)
    resolved = resolve_model(config)
    model = build_model(resolved)
    initialize(model, initial_weights_of(resolved, config.seed), device)
    filled = frozenset(name for name, p in model.named_parameters() if p.numel() and not p.any())
    given: dict[str, Tensor] = {}
    if config.verify.against:
        from titanlike.proof.dump import dumped

        given, _ = dumped(config, model, "weights")
        filled = frozenset(given)
    with torch.no_grad():
        for name in filled:
            parameter = model.get_parameter(name)
            if given:
                parameter.copy_(given[name])
                continue
            rows = slice(0, parameter.shape[0] if parameter.dim() else 1)
            drawn = draw(parameter.shape, rows, config.seed, f"filled {name}", 0.0, _FILLED)
            parameter.copy_(drawn)
    if nudge is not None:
        generator = torch.Generator().manual_seed(nudge)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(device)
            size = _NUDGE if dtype == torch.float32 else _BF16_NUDGE
            parameter.data.mul_(1 + size * noise)
    transforms = [*transforms, *([recorder] if recorder else [])]
    transforms_here = [t for each in transforms if (t := each.in_one_process(model)) is not None]
    loss = build_loss(config.loss, device)

    def mean_of(total: float, count: float, what: str) -> float:
        if not count:
            fix = "give data with targets that count, or write verify=off for a run without proof"
            raise ConfigError([no_targets(config.data, what, fix)])
        return total / count

    def loss_of(batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        """(summed loss, what it counts)"""
        number = groups.get(len(batch["targets"]), 1)
        parts = parts_of(batch, number)
        totals, counts = zip(*map(loss_of_group, parts, range(number)), strict=True)
        return sum(totals), sum(counts)

    def loss_of_group(batch: dict[str, Tensor], microbatch: int) -> tuple[Tensor, float]:
        for transform in transforms_here:
            transform.begin_microbatch(0, microbatch)
            batch = transform.batch(batch)
        fields = {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in batch.items()
            if name != REAL
        }
        targets = batch["targets"].to(device)
        del fields["targets"]
        # cast copies of the fp32 master weights; gradients flow back to the masters
        weights = {name: p.to(dtype) for name, p in model.named_parameters()}
        if recorder is not None:
            weights = recorder.weights(weights)
        output = torch.func.functional_call(model, weights, (fields.pop("inputs"),), fields)
        if now == 1 and torch.is_grad_enabled():
            plain.append(loss_in_plain_torch(config, output, targets))
        return loss.measure(output, targets)

    def mean_over(
        many: Iterator[dict[str, Tensor]], what: str, weights: Sequence[float] = (1.0,)
    ) -> float:
        with torch.no_grad():
            sums = [(total.item(), count) for total, count in map(loss_of, many)]
        sums = [(w * total, w * count) for w, (total, count) in zip(weights, sums, strict=True)]
        return mean_of(sum(total for total, _ in sums), sum(count for _, count in sums), what)

    def mean_of_set(source: Source) -> float:
        many = validation_batches(source, config, dp_rank=0, batches=config.validation.batches)
        weights = validation_weights(source, config, config.validation.batches)
        return mean_over(many, "the validation", weights)

    def copy_of(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}

    def logits(batch: dict[str, Tensor]) -> Tensor:
        fields = {name: value.to(device) for name, value in batch.items()}
        del fields["targets"]
        fields.pop(REAL, None)
        with torch.no_grad():
            return logits_of(model(fields.pop("inputs"), **fields))

    now, plain = 0, list[Tensor | None]()
    initial = copy_of(model.named_parameters())
    model.eval()
    example = next(batches(data.train, config, dp_rank=0))
    promises = of_data(config, example)
    if dtype == torch.float32 and config.model.name in MODELS:
        promises |= of_documents(example, logits)
    validation = fmean(map(mean_of_set, data.validations.values()))
    stream = batches(data.train, config, dp_rank=0)
    model.train()
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    losses = {VALIDATION_LOSS: validation}
    step_gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    rates: list[dict[str, float]] = []
    weights: dict[str, Tensor] = {}
    for now in range(1, config.verify.steps + 1):
        if now == step > 1:
            weights = copy_of(model.named_parameters())
        batch = next(stream)
        tokens = batch.get(REAL, torch.ones_like(batch["targets"])).sum().float().to(device)
        with ExitStack() as stack:
            for transform in transforms_here:
                transform.begin_step(now)
                stack.enter_context(transform.training(tokens))
            total, count = loss_of(batch)
            losses[loss_name(now)] = mean_of(total.item(), count, f"step {now}")
            sums = [part for part in plain if part is not None] if now == 1 else []
            if sums:
                in_torch = torch.stack(sums).sum() / count
                computed = torch.tensor(losses[loss_name(1)])
                promises[f"{loss_name(1)} beside F.cross_entropy"] = computed, in_torch
            (total / count).backward()
        gradients = copy_of((name, gradient_of(p)) for name, p in model.named_parameters())
        squares = [gradient.double().square().sum() for gradient in gradients.values()]
        norms[norm_name(now)] = torch.stack(squares).sum().sqrt().item()
        if now == step:
            step_gradients = gradients
        for name, gradient in gradients.items():
            masks[name] = masks.get(name, True) & reliable(
                gradient, rounding or config.precision.name
            )
        if config.optimizer.clip is not None:
            clip_grad_norm_(model.parameters(), config.optimizer.clip)
        set_lr(optimizers, config, now)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recorded = learning_rate(config, now)
        rates.append(rates_of(optimizers, model.named_parameters(), recorded))
        before = copy_of(model.named_buffers())
        for transform in transforms_here:
            transform.after_update(None)
        if now == 1:
            after = copy_of(model.named_buffers())
            buffers = {name: b for name, b in after.items() if not torch.equal(b, before[name])}
    last_loss = mean_over(iter([next(stream)]), "the batch after the last step")
    losses["loss after the last step"] = last_loss
    updated = copy_of(model.named_parameters())
    state = copy_of(
        (f"{name} {key}", value)
        for name, p in model.named_parameters()
        for key, value in state_of(optimizers, p).items()
    )
    tensors = initial, filled, step_gradients, masks, updated, state
    return Reference(*tensors, losses, norms, rates, buffers, groups, step, weights, promises)


def loss_name(step: int) -> str:
    return f"loss of step {step}"


def norm_name(step: int) -> str:
    return f"gradient norm of step {step}"


def rates_of(
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Iterable[tuple[str, Tensor]],
    recorded: float,
) -> dict[str, float]:
    """Learning rates by parameter; "" = of the step's record."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
    return {"": recorded} | {name: rates[id(p)] for name, p in parameters if id(p) in rates}


# before the first update
EARLY = {VALIDATION_LOSS, loss_name(1), norm_name(1)}


def state_of(
    optimizers: Iterable[torch.optim.Optimizer], parameter: nn.Parameter
) -> dict[str, Tensor]:
    """An optimizer's state of a parameter: {} if it was never updated. Adam's second moment as its
    root, which has the size of a gradient."""
    state = {}
    for key, value in optimizer_state(optimizers, parameter).items():
        if key == "exp_avg_sq":
            state["sqrt(exp_avg_sq)"] = value.float().sqrt().to(value.dtype)
        elif isinstance(value, Tensor | int | float):
            state[key] = torch.as_tensor(value)
    return state


def gradient_of(parameter: Tensor) -> Tensor:
    """The gradient; zeros for a frozen parameter, or one that this batch does not reach."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def parts_of(batch: Mapping[str, Tensor], number: int) -> Iterator[dict[str, Tensor]]:
    """Split a batch into equal parts: its microbatches."""
    parts = {name: value.chunk(number) for name, value in batch.items()}
    return ({name: chunks[i] for name, chunks in parts.items()} for i in range(number))
