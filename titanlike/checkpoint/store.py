"""A checkpoint's tensors, keyed by parameter name, so that any layout loads what another one saved:

model.NAME                 parameters
optimizer.state.NAME.KEY   what the optimizer keeps of each
rng.RANK.cpu rng.RANK.cuda random generators, for going on in the same layout
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from titanlike.checkpoint.dcp_files import Reader, TensorsOnly, read_metadata
from titanlike.checkpoint.storage import Storage
from titanlike.optim.stage_state import StageState
from titanlike.torch_private.checkpoints import read_newer_checkpoints

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Tensors = dict[str, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_tensors(
    parts: list[StageState], dtype: torch.dtype | None = None, *, copies: bool = False
) -> Tensors:
    """model.NAME of all parts, cast to `dtype` if one is given: parameters and persistent buffers.

    copies: also of tied weights that another stage answers for (to be read, not to be saved).
    """
    tensors: Tensors = {}
    for part in parts:
        for name, value in get_model_state_dict(part.stage).items():
            name = part.names.get(name, name)
            if copies or part.owns(name):
                cast = dtype is not None and value.is_floating_point()
                tensors.setdefault(f"model.{name}", value.to(dtype) if cast else value)
    return tensors


def run_tensors(parts: list[StageState], *, copies: bool = False) -> Tensors:
    """Everything that a checkpoint of a run holds of this rank; copies: see `model_tensors`."""
    tensors = model_tensors(parts, copies=copies)
    for part in parts:  # one optimizer a stage: DCP mixes up those that span several modules
        if not part.optimizer.state:
            continue  # no update yet; torch would make one with lr=0 now, and count it
        for name, value in _optimizer(part).items():
            # settings (lr, betas) are the config's to say, and objects would have to be unpickled
            if isinstance(value, Tensor) and name.startswith("state."):
                name = _in_model(name, part)
                if copies or part.owns(_parameter(name)):
                    tensors.setdefault(name, value)
    return tensors | generators()


def fill_copies(parts: list[StageState]) -> None:
    """Give tied weights and buffers that two stages of this rank hold the value of the first."""
    seen: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in (*part.parameters(), *part.stage.named_buffers()):
            if name in seen:
                parameter.data.copy_(seen[name].data)
            seen.setdefault(name, parameter)


def load_run(folder: Storage, parts: list[StageState], group: dist.ProcessGroup) -> None:
    """Load a checkpoint that is whole, whatever layout saved it. Collective.

    Raises ValueError, naming the checkpoint, when a tensor is missing or of another shape.
    """
    metadata = metadata_of(folder)
    saved = metadata.state_dict_metadata
    for part in parts:
        _optimizer(part)  # makes the state that is to be filled
    tensors = run_tensors(parts, copies=True)
    # a parameter that had no gradient until then has no state there, and is to have none here
    stateful = {_parameter(name) for name in saved if name.startswith("optimizer.state.")}
    tensors = {
        name: value
        for name, value in tensors.items()
        if not name.startswith("optimizer.") or _parameter(name) in stateful
    }
    random = {name: value for name, value in tensors.items() if name.startswith("rng.")}
    ranks = sum(name.startswith("rng.") and name.endswith(".cpu") for name in saved)
    if ranks != dist.get_world_size() or not random.keys() <= saved.keys():
        # another layout has other ranks: each goes on with its own seed
        tensors = {name: value for name, value in tensors.items() if name not in random}
        random = {}
    if problems := _mismatches(tensors, metadata):
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"checkpoint {folder} is of another model or optimizer: {'; '.join(problems[:3])}{more}"
            "; write the config that saved it (its config.yaml is in the run directory), "
            "another run_dir, or checkpoint.start_from to take its weights alone"
        )
    read(folder, metadata, tensors, group)
    _set_generators({name: tensors[name] for name in random})
    for part in parts:
        state = get_model_state_dict(part.stage)
        set_model_state_dict(
            part.stage, {name: tensors[f"model.{part.names.get(name, name)}"] for name in state}
        )
        # what is not in the checkpoint stays: the settings
        state = _optimizer(part)
        for name, entry in ((name, _in_model(name, part)) for name in state):
            if entry in tensors:  # copies of a tied weight each have a state of their own
                own = part.owns(_parameter(entry))
                state[name] = tensors[entry] if own else tensors[entry].clone()
        if part.names:
            set_optimizer_state_dict(part.stage, part.optimizer, state, options=_FLAT)
        for name, parameter in part.parameters():
            if name not in stateful:
                part.optimizer.state.pop(parameter, None)


def metadata_of(folder: Storage) -> Metadata:
    """What is in a checkpoint: names, shapes, dtypes. Raises Damaged or Refused."""
    read_newer_checkpoints()
    return read_metadata(folder)


def read(
    folder: Storage, metadata: Metadata, tensors: Tensors, group: dist.ProcessGroup | None
) -> None:
    """Fill `tensors` from the entries of the same names. Collective with a group, else alone.

    Raises OSError naming the checkpoint where reading fails.
    """
    try:
        dcp.load(
            dict(tensors),
            storage_reader=Reader(folder, metadata),
            planner=TensorsOnly(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # a BaseException; one entry a rank that failed
        raise OSError(f"checkpoint {folder} could not be read: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What went wrong, of DCP's errors on the first rank that they name."""
    if isinstance(error, CheckpointException):
        error = next((wrapped[0] for wrapped in error.failures.values()), error)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _mismatches(tensors: Tensors, metadata: Metadata) -> list[str]:
    saved = metadata.state_dict_metadata
    absent = [f"{name} is not in it" for name in sorted(tensors.keys() - saved.keys())]
    shapes = []
    for name in sorted(tensors.keys() & saved.keys()):
        entry, here = saved[name], tensors[name]
        if not isinstance(entry, TensorStorageMetadata):
            shapes.append(f"{name} is no tensor there")
        elif entry.size != here.shape:
            shapes.append(f"{name} is {tuple(entry.size)} there and {tuple(here.shape)} here")
    return absent + shapes


def _parameter(name: str) -> str:
    """optimizer.state.layers.0.wq.weight.exp_avg -> layers.0.wq.weight"""
    return name.split(".", 2)[2].rpartition(".")[0]


def _in_model(name: str, part: StageState) -> str:
    """state.NAME.KEY of a stage's optimizer -> optimizer.state.NAME.KEY with the model's NAME."""
    kind, _, rest = name.partition(".")
    parameter, _, key = rest.rpartition(".")
    return f"optimizer.{kind}.{part.names.get(parameter, parameter)}.{key}"


def _optimizer(part: StageState) -> dict[str, Any]:
    if not part.names:
        return {}  # torch would miss the parameters
    return get_optimizer_state_dict(part.stage, part.optimizer, options=_FLAT)


def generators() -> Tensors:
    """The states of this rank's random generators."""
    rank = dist.get_rank()
    states = {f"rng.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: Tensors) -> None:
    for name, state in states.items():
        setter = torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state
        setter(state)
