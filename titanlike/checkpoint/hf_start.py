"""Starting a run of our own families from a folder of transformers: `checkpoint.start_from=hf:/path`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from titanlike.checkpoint.state_dict import sync_tied_copies
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.distributed.placement import pieces
from titanlike.models.hf_folder import FamilyWeights, folder_of, start_problems
from titanlike.models.hf_names import FAMILIES, family_of
from titanlike.models.registry import build_model, complete_arguments, resolve_model
from titanlike.optim.optimizer import StageState
from titanlike.torch_private.dtensor import local

PREFIX = "hf:"


def is_folder(start_from: str | None) -> bool:
    """Whether `checkpoint.start_from` names a folder of transformers, not a checkpoint."""
    return start_from is not None and start_from.startswith(PREFIX)


def problems(config: Config) -> Iterable[Problem]:
    """Why a run cannot start from that folder; reads headers only."""
    location = config.checkpoint.start_from
    assert location is not None
    if config.checkpoint.rename:
        reason = f"names of {location} are known, and none is changed"
        fix = "checkpoint.rename=[]"
        yield Problem("checkpoint.rename", config.checkpoint.rename, reason, fix)
    try:
        model = resolve_model(config)
        shapes: dict[str, torch.Size] = {}
        sizes = model.args
        if model.name in FAMILIES:
            sizes = complete_arguments(model)
            shapes = {name: one.shape for name, one in build_model(model).named_parameters()}
        yield from start_problems(location, model.name, sizes, shapes)
    except ConfigError as error:
        yield from error.problems
    except ValueError as error:  # of damaged files
        yield Problem("checkpoint.start_from", location, str(error))


@torch.no_grad()
def start_from_folder(
    config: Config, stage_states: list[StageState], group: dist.ProcessGroup
) -> str:
    """Read each rank's shards; returns a summary. Collective. Raises ConfigError."""
    location = config.checkpoint.start_from
    assert location is not None
    found = list(problems(config))
    everywhere = [found] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group=group)
    if wrong := next(filter(None, everywhere), None):  # one machine may not see the folder
        raise ConfigError(wrong)
    family = family_of(config.model.name, complete_arguments(resolve_model(config)))
    weights = FamilyWeights(family, folder_of(location))
    names = set()
    for stage in stage_states:
        for name, parameter in stage.parameters():
            for here, place in pieces(parameter, stage.part(name)):
                local(parameter)[here].copy_(weights.block(name, place))
            names.add(name)
    sync_tied_copies(stage_states)
    of_ranks = [names] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, names, group=group)
    return f"starting from {folder_of(location)}: {len(set().union(*of_ranks))} parameters read"
