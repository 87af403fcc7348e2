"""A checkpoint's tensors, keyed by parameter name, so that any layout loads what another one saved:

model.NAME                 parameters and persistent buffers
optimizer.state.NAME.KEY   optimizer state of each parameter
optimizer.state.step       the step count of all parameters that have no NAME.step of their own
rng.RANK.cpu rng.RANK.cuda random generators, restored in as many ranks with the same LAYER_AXES
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp_state_dict
from torch.distributed.tensor import DTensor

from titanlike.core.checkpoint.discovery import resolve
from titanlike.core.checkpoint.integrity import MODEL, OPTIMIZER, RNG, CheckpointHeader
from titanlike.core.checkpoint.reader import read, read_header_on_all_ranks
from titanlike.core.checkpoint.storage import Moved, Storage
from titanlike.core.config.errors import Refused, some_names
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.device.accelerator import rng_states, set_rng_state
from titanlike.core.distributed.collectives import distinct_values
from titanlike.core.distributed.placement import Blocks, Part, StageState, pieces
from titanlike.core.torch_private.dtensor import local

_FLAT = dcp_state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
Tensors = dict[str, Tensor | Blocks]  # Blocks: parameters sharded by tensor parallelism
SHARED_STEP = f"{OPTIMIZER}step"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cast_weights(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Convert a floating-point tensor. Raises ValueError for values beyond the dtype's range."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if dtype.itemsize < tensor.dtype.itemsize and not cast.isfinite().equal(tensor.isfinite()):
        word = next((word for word, other in DTYPES.items() if other == dtype), dtype)
        fix = "fp32" if dtype == torch.bfloat16 else "bf16"
        raise ValueError(f"--dtype {word}: {name} has values too large for it; write {fix}")
    return cast


def model_tensors(
    stage_states: list[StageState], dtype: torch.dtype | None = None, *, copies: bool = False
) -> Tensors:
    """Return this rank's model.NAME entries, cast to `dtype` if given.

    copies: include tied weights that another stage owns (for loading, not for saving).
    """
    tensors: Tensors = {}
    for stage in stage_states:
        state: dict[str, Any] = dcp_state_dict.get_model_state_dict(stage.stage)
        for name, value in state.items():
            name = stage.names.get(name, name)
            if copies or stage.owns(name):
                cast = dtype is not None and value.is_floating_point()
                value = placed(value.to(dtype) if cast else value, stage.part(name))
                tensors.setdefault(f"model.{name}", value)
    return tensors


def run_tensors(stage_states: list[StageState], *, copies: bool = False) -> Tensors:
    """Return this rank's entries of a run's checkpoint; copies: see `model_tensors`."""
    tensors = model_tensors(stage_states, copies=copies)
    for stage in stage_states:  # separately: DCP confuses optimizers of several modules
        # torch initializes an empty state by a step with lr=0, which it counts
        stepped = [optimizer for optimizer in stage.optimizers if optimizer.state]
        shapes = {name: parameter.shape for name, parameter in stage.parameters()}
        for name, value in _optimizer_state(stage, stepped).items():
            # hyperparameters (lr, betas) come from the config; other objects would need pickle
            if isinstance(value, Tensor) and name.startswith("state."):
                name = _in_model(name, stage)
                parameter = _parameter(name)
                if copies or stage.owns(parameter):
                    alike = value.shape == shapes.get(parameter)  # False for step counts
                    part = stage.part(parameter) if alike else None
                    tensors.setdefault(name, placed(value, part))
    rank = dist.get_rank()
    return tensors | {f"rng.{rank}.{kind}": state for kind, state in rng_states().items()}


def placed(tensor: Tensor, part: Part | None) -> Tensor | Blocks:
    """Return a parameter, or a tensor like it, as a checkpoint stores it. part: this rank's."""
    if part is None:
        return tensor
    held, blocks = local(tensor), {}
    for here, place in pieces(tensor, part):
        if held[here].numel():
            blocks[tuple(rows.start for rows in place)] = held[here]
    return Blocks(tensor, part.shape, blocks)


def _held(tensor: Tensor | Blocks) -> Tensor:
    return tensor.held if isinstance(tensor, Blocks) else tensor


def share_step(tensors: Tensors, group: dist.ProcessGroup) -> Tensors:
    """Replace the equal step counts of all parameters by one entry. Collective.

    Optimizers count steps for each parameter, which would be a quarter of a checkpoint's entries.
    Only parameters that are not updated in every step (experts) differ; the largest count is
    shared.
    """
    counts = {
        name: value
        for name, value in tensors.items()
        if name.startswith(OPTIMIZER)
        and name.endswith(".step")
        and isinstance(value, Tensor)
        and value.dim() == 0
        and value.dtype == torch.float32
        and not isinstance(value, DTensor)
    }
    others = {_parameter(name) for name in tensors.keys() - counts.keys() if _of_optimizer(name)}
    # parameters whose only state is the count keep it, else they would seem to have no state
    counts = {name: value for name, value in counts.items() if _parameter(name) in others}
    values = torch.stack([*counts.values()]).cpu() if counts else torch.zeros(0)
    largest = torch.cat([values, torch.tensor([-1.0])]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if largest < 0:
        return tensors
    equal = {name for name, value in zip(counts, values.tolist(), strict=True) if value == largest}
    rest = {name: value for name, value in tensors.items() if name not in equal}
    return rest | {SHARED_STEP: largest}


def sync_tied_copies(stage_states: list[StageState]) -> None:
    """Copy tied weights and buffers between this rank's stages; the first stage's value wins."""
    seen: dict[str, Tensor] = {}
    for stage in stage_states:
        for name, parameter in (*stage.parameters(), *stage.stage.named_buffers()):
            if name in seen:
                parameter.data.copy_(seen[name].data)
            seen.setdefault(name, parameter)


def load_run(
    header: CheckpointHeader,
    stage_states: list[StageState],
    group: dist.ProcessGroup,
    *,
    same_layers: bool = True,
) -> None:
    """Load a checkpoint saved in any layout. Collective.

    same_layers: whether it was saved with as many ranks per layer (LAYER_AXES), which share random
    streams. Raises ValueError for a missing tensor or another shape, and what `read` raises; the
    state must then not be used, but another checkpoint may be loaded.
    """
    saved = header.tensors
    for stage in stage_states:
        _optimizer_state(stage, stage.optimizers)  # allocates the state to read into
    tensors = run_tensors(stage_states, copies=True)
    averages = [name for name in tensors if _of_optimizer(name) and name.endswith(".ema")]
    if any(name.endswith(".ema") for name in saved):
        averages = []
    for name in averages:  # missing averages begin with the next update
        del tensors[name]
    # a parameter without state in the checkpoint never had a gradient, and gets none here
    stateful = {_parameter(name) for name in saved if _of_optimizer(name)}
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        if _parameter(name) not in stateful:
            del tensors[name]
    random = [name for name in tensors if name.startswith("rng.")]
    ranks = sum(name.startswith("rng.") and name.endswith(".cpu") for name in saved)
    if ranks != dist.get_world_size() or not same_layers or not saved.keys() >= set(random):
        # in another layout each rank keeps its own seed
        tensors = {name: value for name, value in tensors.items() if name not in random}
        random = []
    counts: dict[str, Any] = {}
    if SHARED_STEP in saved:
        steps = [name for name in tensors if _of_optimizer(name) and name.endswith(".step")]
        counts = {name: tensors.pop(name) for name in steps if name not in saved}
        tensors[SHARED_STEP] = torch.zeros(())
    absent = tensors.keys() - saved.keys()
    problems = [f"it has no tensor {name}" for name in sorted(absent)]
    for name in sorted(tensors.keys() - absent):
        there, here = saved[name].shape, tuple(tensors[name].shape)
        if there != here:
            problems.append(f"{name} is {there} there and {here} here")
    if problems:
        others = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"checkpoint {header.folder} is from another model or optimizer: "
            f"{'; '.join(problems[:3])}{others}; write the config that saved it (its config.yaml is in the run directory), "
            "another run_dir, or checkpoint.start_from to load only its weights"
        )
    read(header, tensors, group, unread="" if random else RNG)
    if counts:
        shared = tensors[SHARED_STEP]
        tensors |= {name: count.copy_(shared) for name, count in counts.items()}
    for name in random:
        rng_state = tensors[name]
        assert isinstance(rng_state, Tensor)
        set_rng_state(name.rpartition(".")[2], rng_state)
    for stage in stage_states:
        state: dict[str, Any] = dcp_state_dict.get_model_state_dict(stage.stage)
        dcp_state_dict.set_model_state_dict(
            stage.stage,
            {name: _held(tensors[f"model.{stage.names.get(name, name)}"]) for name in state},
        )
        # hyperparameters are not in the checkpoint and stay unchanged
        state = _optimizer_state(stage, stage.optimizers)
        for name, entry in ((name, _in_model(name, stage)) for name in state):
            if entry in tensors:  # each copy of a tied weight has its own optimizer state
                value = _held(tensors[entry])
                state[name] = value if stage.owns(_parameter(entry)) else value.clone()
        if stage.names:
            dcp_state_dict.set_optimizer_state_dict(
                stage.stage, stage.optimizers, state, options=_FLAT
            )
        for name, parameter in stage.parameters():
            if name not in stateful:
                for optimizer in stage.optimizers:
                    optimizer.state.pop(parameter, None)
            for optimizer in stage.optimizers if averages else ():
                optimizer.state.get(parameter, {}).pop("ema", None)


def _of_optimizer(name: str) -> bool:
    """Return whether an entry is optimizer state of a parameter."""
    return name.startswith(OPTIMIZER) and name != SHARED_STEP


def _parameter(name: str) -> str:
    """Map optimizer.state.layers.0.up.weight.exp_avg to layers.0.up.weight."""
    return name.split(".", 2)[2].rpartition(".")[0]


def _in_model(name: str, stage: StageState) -> str:
    """Map a stage's state.NAME.KEY to optimizer.state.NAME.KEY with the model's NAME."""
    kind, _, rest = name.partition(".")
    parameter, _, key = rest.rpartition(".")
    return f"optimizer.{kind}.{stage.names.get(parameter, parameter)}.{key}"


def _optimizer_state(stage: StageState, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    if not stage.names or not optimizers:
        return {}  # a stage without parameters, for which torch raises
    return dcp_state_dict.get_optimizer_state_dict(stage.stage, optimizers, options=_FLAT)


# --- starting from the weights of another run -----------------------------------------------------


def warm_start(
    settings: Checkpoint, stage_states: list[StageState], group: dist.ProcessGroup, moved: Moved
) -> str:
    """Load parameters by name from `checkpoint.start_from`, counting in `moved` what is read;
    return a summary. Collective.

    With `strict`, the checkpoint and the model must have the same names after `rename`; otherwise
    missing parameters keep their initial values. A different shape is always an error, and so is a
    checkpoint without any of the parameters. Raises ValueError.
    """
    assert settings.start_from is not None
    location = [str(resolve("checkpoint.start_from", settings.start_from, moved))]
    dist.broadcast_object_list(location, src=0, group=group)
    folder = Storage(location[0], moved)
    header = read_header_on_all_ranks(folder, group, "checkpoint.start_from")
    entries = model_tensors(stage_states, copies=True)
    tensors = {entry.removeprefix(MODEL): tensor for entry, tensor in entries.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # all ranks of a pipeline rank have the same
    model = dict(chain.from_iterable(each.items() for each in distinct_values(shapes, group)))
    sources, notes = matched_names(settings, header, model)
    matched = {MODEL + sources[name]: tensor for name, tensor in tensors.items() if name in sources}
    read(header, matched, group)
    sync_tied_copies(stage_states)
    count = len(model.keys() & sources.keys())
    return "; ".join([f"starting from {folder}: {count} parameters loaded", *notes])


def matched_names(
    settings: Checkpoint, header: CheckpointHeader, model: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str]]:
    """Match a checkpoint with a model's parameters, name -> shape, as `warm_start` says. Returns the
    model's names -> the checkpoint's, and notes. Raises Refused."""
    key, folder = "checkpoint.start_from", str(header.folder)
    sources: dict[str, str] = {}  # name after `rename` -> the checkpoint's name
    for entry in (entry for entry in header.tensors if entry.startswith(MODEL)):
        name = entry.removeprefix(MODEL)
        new = renamed(name, settings.rename)
        if new in sources:
            reason = f"{sources[new]} and {name} would both be {new}"
            raise Refused("checkpoint.rename", settings.rename, reason, "longer prefixes")
        sources[new] = name
    names_of = partial(some_names, most=8)
    wrong = []
    for name in sorted(model.keys() & sources.keys()):
        shape = header.tensors[MODEL + sources[name]].shape
        if shape != model[name]:
            wrong.append(f"{name} is {shape} there and {model[name]} here")
    if wrong:
        raise Refused(key, folder, names_of(wrong), "that model's sizes")
    missing = sorted(model.keys() - sources.keys())
    unused = sorted(sources.keys() - model.keys())
    sides = (missing, "not in the checkpoint"), (unused, "only in the checkpoint")
    notes = [f"{len(names)} {what}: {names_of(names)}" for names, what in sides if names]
    if notes and (settings.strict or len(missing) == len(model)):
        fix = "checkpoint.rename=[old.:new.] for names that differ"
        fix += ", or checkpoint.strict=false" if settings.strict else "; no name is the same"
        raise Refused(key, folder, f"parameters {'; '.join(notes)}", fix)
    moves = [(old, new) for new, old in sorted(sources.items()) if new != old and new in model]
    if moved := [f"{old} as {new}" for old, new in moves]:
        notes.insert(0, f"{len(moved)} renamed: {names_of(moved)}")
    return sources, notes


def renamed(name: str, rules: list[str]) -> str:
    """Apply the first matching rule (old:new, prefixes) to a name."""
    for rule in rules:
        old, _, new = rule.partition(":")
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
