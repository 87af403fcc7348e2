"""Starts a run of a built-in family from a transformers folder: `checkpoint.start_from=hf:/path`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titanlike.core.checkpoint.reader import raise_on_all_ranks
from titanlike.core.checkpoint.state_dict import sync_tied_copies
from titanlike.core.checkpoint.storage import Moved
from titanlike.core.config.errors import ConfigError, Problem, Refused, override_text, some_names
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.imports import quiet_import
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import StageState, pieces
from titanlike.core.models.registry import build_model, complete_arguments, resolve_model
from titanlike.core.torch_private.dtensor import local
from titanlike.hf.hf_config import read_config
from titanlike.hf.hf_names import FAMILIES, Counterpart, counterpart, whole_sizes
from titanlike.hf.hf_weights import own_weights
from titanlike.hf.safetensors_folder import has_weights

PREFIX = "hf:"  # of a `checkpoint.start_from` that names a transformers folder, not a checkpoint
_KEY = "checkpoint.start_from"


def problems(config: Config) -> Iterable[Problem]:
    """Yield why a run cannot start from its hf: folder; reads only file headers."""
    location = config.checkpoint.start_from
    if config.checkpoint.rename:
        reason = f"names of {location} are known, and none is changed"
        fix = "checkpoint.rename=[]"
        yield Problem("checkpoint.rename", config.checkpoint.rename, reason, fix)
    try:
        yield from _sizes_that_differ(config, _path(config.checkpoint))
    except ConfigError as error:
        yield from error.problems
    except Refused as error:
        yield error.problem
    except ValueError as error:  # raised for damaged files
        yield Problem(_KEY, location, str(error))


def _sizes_that_differ(config: Config, folder: Path) -> Iterable[Problem]:
    """Yield problems of the model's sizes. Raises Refused for a folder of no use at all."""
    model, location = resolve_model(config), config.checkpoint.start_from
    as_theirs = f"model=hf model.path={folder}"
    if model.name not in FAMILIES:
        reason = f"is for {' and '.join(FAMILIES)}, whose counterparts in transformers are known"
        raise Refused(_KEY, location, reason, f"{as_theirs} {_KEY}=null")
    if not (folder / "config.json").is_file() or not has_weights(folder):
        fix = f"{_KEY}=hf:/a/folder that has config.json and safetensors"
        raise Refused(_KEY, location, "there is no model of transformers in safetensors", fix)
    try:
        with quiet_import():
            import transformers
    except ImportError:
        reason = "transformers, which reads its config, is not installed"
        raise Refused(_KEY, location, reason, "pip install 'titanlike[hf]'") from None
    settings = read_config(transformers, str(folder))
    kind, values = settings.model_type, settings.to_dict()
    ours = {theirs.model_type: name for name, several in FAMILIES.items() for theirs in several}
    if ours.get(kind) != model.name:
        fix = f"model.name={ours[kind]}" if kind in ours else as_theirs
        raise Refused(_KEY, location, f"is a {kind}, and the model a {model.name}", fix)
    theirs = next(theirs for theirs in FAMILIES[model.name] if theirs.model_type == kind)
    if other := theirs.unsupported(values):
        reason = f"has {', '.join(other)}, which model.name={model.name} does not compute"
        raise Refused(_KEY, location, reason, f"{as_theirs} {_KEY}=null")
    sizes, built = complete_arguments(model), build_model(model)
    wrong = [
        Problem(
            f"model.{size}", sizes[size], f"{folder} has {size}={value}", f"model.{size}={value}"
        )
        for size, stored in theirs.our_sizes(values).items()
        if whole_sizes(sizes)[size] != stored
        for value in [override_text(stored)]
    ]
    yield from wrong
    shapes = _stored_shapes(theirs, built)
    if not wrong and (lacks := list(own_weights(theirs, folder, shapes).mismatches(shapes))):
        yield Problem(_KEY, location, some_names(lacks), "copy the folder's files again")


def _stored_shapes(theirs: Counterpart, model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of parameters, and of buffers that the folder's files contain."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.shape for name, tensor in both if theirs.stored_name(name)}


@torch.no_grad()
def start_from_folder(
    config: Config, stage_states: list[StageState], group: dist.ProcessGroup, moved: Moved
) -> str:
    """Read each rank's shards; return a summary. Collective. moved: counts. Raises ConfigError."""
    with raise_on_all_ranks(group, ConfigError):  # a machine may not see the folder
        if wrong := list(problems(config)):
            raise ConfigError(wrong)
    model = resolve_model(config)
    theirs = counterpart(model.name, complete_arguments(model))
    shapes = _stored_shapes(theirs, build_model(model))
    weights = own_weights(theirs, _path(config.checkpoint), shapes)
    for stage in stage_states:
        for name, parameter in stage.parameters():
            for here, place in pieces(parameter, stage.part(name)):
                local(parameter)[here].copy_(weights.block(name, shapes[name], place))
                moved.count += 1
        for name, buffer in stage.stage.named_buffers():
            if name in shapes:
                buffer.copy_(weights.block(name, buffer.shape, (slice(None),) * buffer.dim()))
    sync_tied_copies(stage_states)
    return f"starting from {_path(config.checkpoint)}: {len(shapes)} parameters read"


def _path(settings: Checkpoint) -> Path:
    return Path((settings.start_from or "").removeprefix(PREFIX)).expanduser()
