"""Plain PyTorch training loops, without a framework: the baseline that titanlike is measured
against.

One process: the model, the loss, `backward()`, the optimizer. Several: FSDP2 around each block, and
torch's Schedule1F1B over manually cut stages, as in torchtitan. Each loop trains a command line's
model on its batches and microbatches, with the same blocks recomputed and compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import record_function

from benchmarks.speed.plain_tensor_parallel import divide_by_hand, loss_parallel
from titanlike.core.config.groups.computation import ScaledPrecision
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import IGNORE, Data
from titanlike.core.distributed.initialize import initialize
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.models.gpt2 import Gpt2
from titanlike.core.models.llama import Llama, rotary_table
from titanlike.core.models.registry import build_model, initial_weights_of
from titanlike.core.optim.optimizer import build_optimizers, set_lr
from titanlike.core.torch_private.dtensor import local
from titanlike.core.training.train_plan import TrainPlan
from titanlike.proof.reference import parts_of
from titanlike.techniques.activation_checkpoint import checkpoint_blocks


def why_no_plain_loop(config: Config, plan: TrainPlan) -> str:
    """Why there is no plain loop for this run; "" = there is one."""
    if not isinstance(config.loss, (CrossEntropy, ChunkedCrossEntropy)):
        return "of cross entropy alone"
    if config.world_size == 1:
        return ""
    scaled = isinstance(config.precision, ScaledPrecision)
    if config.fsdp.cpu_offload or scaled or config.cp > 1:
        return "of several ranks without CPU offload, float8 and context parallelism"
    simple = config.pp == 1 and config.model.name == "llama" and not config.precision.low
    if _axis_in_layers(plan) and not simple:
        return "of tensor parallelism for a built-in Llama, without a pipeline, in fp32"
    if config.pp > 1:
        model = plan.model_graph.model
        if not isinstance(model, Llama | Gpt2) or model.depth < config.pp:
            return "of a pipeline for the built-in Llama and GPT-2, a block or more a rank"
        if model.lm_head.weight is next(model.parameters()):
            return "of a pipeline for weights that are not tied"
        if plan.variable or set(plan.fields) - {"inputs", "targets"}:
            return "of a pipeline for sequences of one length, without documents"
    return ""


def _axis_in_layers(plan: TrainPlan) -> str:
    """The mesh axis whose ranks shard layers; "" = none."""
    return next((axis for axis, t in plan.transforms.items() if t.placements), "")


def plain_loop(config: Config, data: Data, plan: TrainPlan, mesh: Mesh) -> Iterator[float]:
    """Train; yield the loss of each step."""
    device, alone, pipelined = mesh.device, mesh.world_size == 1, config.pp > 1
    low = torch.bfloat16 if config.precision.low else None
    model: Any = build_model(plan.model)
    if isinstance(config.precision, ScaledPrecision):
        from titanlike.techniques.low_precision.float8 import use_float8

        use_float8(model, config, device)
    part = _StageByHand(model, mesh.pp_rank, config.pp) if pipelined else model
    divided = _axis_in_layers(plan)
    if divided:
        divide_by_hand(model, mesh.axes[divided])
    blocks = _recompute_and_compile(part, config, plan)
    # in a pipeline, and with fsdp.zero=1, parameters stay gathered within a step
    stay = pipelined or config.fsdp.zero == 1
    if mesh.dp > 1 or divided or (low and not alone):  # gradients as their parameters are
        axes = ("replicate", "shard") if config.replicate > 1 else ("shard",)
        options: dict[str, Any] = {
            "mesh": mesh.axes[axes],
            "mp_policy": MixedPrecisionPolicy(low, torch.float32),
            "reshard_after_forward": not stay,
        }
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(part, **options)
    initialize(part, initial_weights_of(plan.model, config.seed), device)
    optimizers = build_optimizers(dict(part.named_parameters()), model, config)
    schedule = None
    if pipelined:
        group = mesh.axes.get_group("pp")
        stage = PipelineStage(part, mesh.pp_rank, config.pp, device, group=group)
        schedule = Schedule1F1B(stage, plan.microbatches, loss_fn=_cross_entropy)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    for step in range(1, config.steps + 1):
        batch = next(stream)
        if schedule is not None:
            loss = _pipelined(schedule, batch, mesh)
        else:
            with loss_parallel() if divided else nullcontext():
                loss = _accumulated(part, batch, plan, device, stay, cast=alone and bool(low))
        _take_step(part.parameters(), optimizers, config, step, mesh)
        if not alone:
            dist.all_reduce(loss)
        yield loss.item() / (mesh.world_size // mesh.pp)


def _accumulated(
    model: Any, batch: Any, plan: TrainPlan, device: torch.device, stay: bool, cast: bool
) -> Tensor:
    """Forward and backward of each microbatch; gradients are reduced in the last one, and
    parameters stay gathered until then, or are gathered twice in each. cast: compute in bf16 by
    autocast."""
    loss = torch.zeros((), device=device)
    used = {*plan.fields, "inputs", "targets"}
    moved = {name: value.to(device) for name, value in batch.items() if name in used}
    for index, fields in enumerate(parts_of(moved, plan.microbatches)):
        inputs, targets = fields.pop("inputs"), fields.pop("targets")
        last = index == plan.microbatches - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not stay)
        with torch.autocast(device.type, torch.bfloat16, enabled=cast):
            logits = model(inputs, **fields)
        share = _cross_entropy(logits, targets) / plan.microbatches
        share.backward()
        loss += local(share.detach())
    return loss


def _pipelined(schedule: Schedule1F1B, batch: Any, mesh: Mesh) -> Tensor:
    losses: list[Tensor] = []
    last = mesh.pp_rank == mesh.pp - 1
    inputs = [batch["inputs"].to(mesh.device)] if mesh.pp_rank == 0 else []
    targets = batch["targets"].to(mesh.device) if last else None
    schedule.step(*inputs, target=targets, losses=losses)
    return torch.stack(losses).mean().detach() if last else torch.zeros((), device=mesh.device)


# by model: where its blocks, embeddings and final norm are
_PARTS: dict[type[nn.Module], tuple[str, str, list[str], str]] = {
    Llama: ("model", "layers", ["embed_tokens"], "norm"),
    Gpt2: ("transformer", "h", ["wte", "wpe"], "ln_f"),
}


class _StageByHand(nn.Module):
    """Some blocks of a Llama or a GPT-2; the first stage also embeds, the last has the head.
    Modules keep their names."""

    def __init__(self, model: Llama | Gpt2, stage: int, stages: int) -> None:
        super().__init__()
        self.rotary = model.rotary if isinstance(model, Llama) else None
        path, container, embeddings, norm = _PARTS[type(model)]
        inner = model.get_submodule(path)
        blocks: Any = inner.get_submodule(container)
        begin, end = (len(blocks) * i // stages for i in (stage, stage + 1))
        names = embeddings if stage == 0 else []
        self.blocks = [blocks[i] for i in range(begin, end)]
        self.embeddings = [inner.get_submodule(name) for name in names]
        modules = dict(zip(names, self.embeddings, strict=True))
        modules[container] = nn.ModuleDict({str(i): blocks[i] for i in range(begin, end)})
        self.norm = [inner.get_submodule(norm)] if stage == stages - 1 else []
        if self.norm:
            modules[norm] = inner.get_submodule(norm)
            self.lm_head = model.lm_head
        self.add_module(path, nn.ModuleDict(modules))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.size(1), device=x.device)
        tables = () if self.rotary is None else (rotary_table(positions, *self.rotary),)
        if self.embeddings:
            x = sum(embed(ids) for embed, ids in zip(self.embeddings, (x, positions), strict=False))
        for block in self.blocks:
            x = block(x, *tables, None)
        return self.lm_head(self.norm[0](x)) if self.norm else x


def _recompute_and_compile(part: nn.Module, config: Config, plan: TrainPlan) -> list[nn.Module]:
    """Apply recomputation and compilation; return this part's blocks of the model, in order."""
    blocks = []
    for stage, recomputed in enumerate(plan.recomputed.blocks):
        for name in plan.blocks(stage):
            try:
                block = part.get_submodule(name)
            except AttributeError:  # on another rank
                continue
            if name in recomputed:
                checkpoint_blocks(part, [name], config.activation_checkpoint.saved)
            if config.compile:
                block.forward = torch.compile(block.forward)
            blocks.append(block)
    return blocks


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    with record_function("loss"):
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE)


def _take_step(
    parameters: Iterable[Tensor],
    optimizers: list[torch.optim.Optimizer],
    config: Config,
    step: int,
    mesh: Mesh | None = None,
) -> None:
    """Clip gradients by their norm over all shards and stages, update, and clear gradients."""
    with record_function("norm and clip"):
        parameters = [p for p in parameters if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if mesh is not None and mesh.pp > 1:
            squared = norm.square()
            dist.all_reduce(squared, group=mesh.axes.get_group("pp"))
            norm = squared.sqrt()
        if config.optimizer.clip is not None:
            clip_grads_with_norm_(parameters, config.optimizer.clip, norm)
    set_lr(optimizers, config, step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
