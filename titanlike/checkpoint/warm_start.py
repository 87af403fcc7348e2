"""Starting from another run's weights only: a new run, at step 0, with a fresh optimizer."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist

from titanlike.checkpoint import state_dict
from titanlike.checkpoint.discovery import resolve
from titanlike.checkpoint.integrity import check_sizes, read_manifest
from titanlike.checkpoint.metadata import MODEL, CheckpointHeader
from titanlike.checkpoint.reader import read, read_header_on_all_ranks
from titanlike.checkpoint.storage import Storage
from titanlike.config.schema import Checkpoint
from titanlike.optim.optimizer import StageState

_MAX_NAMES = 8  # in a message

Shapes = dict[str, tuple[int, ...]]


def warm_start(
    settings: Checkpoint, stage_states: list[StageState], group: dist.ProcessGroup
) -> str:
    """Load parameters by name from `checkpoint.start_from`; returns a summary. Collective.

    With `strict` the names must be the same in the checkpoint and the model, after `rename`;
    otherwise missing parameters keep their initial values. A parameter of another shape is always
    an error, and so is a checkpoint without any of the parameters. Raises ValueError.
    """
    assert settings.start_from is not None
    location = [str(resolve("checkpoint.start_from", settings.start_from))]
    dist.broadcast_object_list(location, src=0, group=group)
    folder = Storage(location[0])
    if dist.get_rank(group) == 0:
        check_sizes(folder, read_manifest(folder))
    header = read_header_on_all_ranks(folder, group, "checkpoint.start_from")
    sources = _sources(header, settings.rename)
    tensors = state_dict.model_tensors(stage_states, copies=True)
    model = _all_shapes(tensors, group)
    wrong = []
    for name in sorted(model.keys() & sources.keys()):
        shape = header.tensors[sources[name]].shape
        if shape != model[name]:
            wrong.append(f"{_short(name)} is {shape} there and {model[name]} here")
    if wrong:
        raise ValueError(
            f"checkpoint.start_from={folder}: {_list(wrong)}; write that model's sizes"
        )
    notes = _unmatched(settings, folder, sources.keys(), model.keys())
    matched = {sources[name]: tensor for name, tensor in tensors.items() if name in sources}
    read(header, matched, group)
    state_dict.sync_tied_copies(stage_states)
    moves = [(old, new) for new, old in sorted(sources.items()) if new != old and new in model]
    if moved := [f"{_short(old)} as {_short(new)}" for old, new in moves]:
        notes.insert(0, f"{len(moved)} renamed: {_list(moved)}")
    count = len(model.keys() & sources.keys())
    return "; ".join([f"starting from {folder}: {count} parameters loaded", *notes])


def _sources(header: CheckpointHeader, rules: list[str]) -> dict[str, str]:
    """The checkpoint's name of each parameter, by its name after `rename`."""
    sources: dict[str, str] = {}
    for name in header.tensors:
        if name.startswith(MODEL):
            new = MODEL + renamed(_short(name), rules)
            if new in sources:
                raise ValueError(
                    f"checkpoint.rename: {_short(sources[new])} and {_short(name)} would both be "
                    f"{_short(new)}; write longer prefixes"
                )
            sources[new] = name
    return sources


def _all_shapes(tensors: state_dict.Tensors, group: dist.ProcessGroup) -> Shapes:
    """The shapes of the whole model, of which each rank has some."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    of_ranks = [shapes] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, shapes, group=group)
    return {name: shape for shapes in of_ranks for name, shape in shapes.items()}


def _unmatched(
    settings: Checkpoint, folder: Storage, saved: Collection[str], model: Collection[str]
) -> list[str]:
    """Texts about names that only one side has. Raises ValueError where they are not allowed."""
    missing = sorted(map(_short, set(model) - set(saved)))
    unused = sorted(map(_short, set(saved) - set(model)))
    sides = (missing, "not in the checkpoint"), (unused, "only in the checkpoint")
    notes = [f"{len(names)} {what}: {_list(names)}" for names, what in sides if names]
    if notes and (settings.strict or len(missing) == len(model)):
        raise ValueError(
            f"checkpoint.start_from={folder}: parameters {'; '.join(notes)}; write "
            "checkpoint.rename=[old.:new.] for names that differ"
            + (", or checkpoint.strict=false" if settings.strict else "; no name is the same")
        )
    return notes


def renamed(name: str, rules: list[str]) -> str:
    """`name` with the first matching rule (old:new, prefixes) applied."""
    for rule in rules:
        old, _, new = rule.partition(":")
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _short(name: str) -> str:
    return name.removeprefix(MODEL)


def _list(items: list[str]) -> str:
    more = f", and {len(items) - _MAX_NAMES} more" if len(items) > _MAX_NAMES else ""
    return ", ".join(items[:_MAX_NAMES]) + more
