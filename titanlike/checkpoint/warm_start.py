"""Starting from another run's weights alone: a new run, at step 0, with a fresh optimizer."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlike.checkpoint import store
from titanlike.checkpoint.find import named
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.whole import check_all
from titanlike.config.schema import Checkpoint
from titanlike.optim.stage_state import StageState

_PREFIX = "model."


def warm_start(settings: Checkpoint, parts: list[StageState], group: dist.ProcessGroup) -> str:
    """Load parameters by name from `checkpoint.start_from`; says what was taken. Collective.

    With `strict` the names must be the same on both sides, after `rename`; otherwise parameters
    that are not there keep their initial values. A parameter of another shape is always an error,
    and so is a checkpoint of which nothing fits.
    Raises ValueError naming the parameters.
    """
    assert settings.start_from is not None
    chosen = [str(named("checkpoint.start_from", settings.start_from))]
    dist.broadcast_object_list(chosen, src=0, group=group)
    folder = Storage(chosen[0])
    if dist.get_rank(group) == 0:
        check_all(folder)
    metadata = store.metadata_of(folder)
    there: dict[str, str] = {}  # name here -> name there
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata):
            new = _PREFIX + renamed(_short(name), settings.rename)
            if new in there:
                raise ValueError(
                    f"checkpoint.rename: {_short(there[new])} and {_short(name)} would both be "
                    f"{_short(new)}; write longer beginnings of names"
                )
            there[new] = name
    here = store.model_tensors(parts, copies=True)
    everywhere: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size(group)
    shapes = {name: tuple(tensor.shape) for name, tensor in here.items()}
    dist.all_gather_object(everywhere, shapes, group=group)
    of_model = {name: shape for of_rank in everywhere for name, shape in of_rank.items()}
    all_names = of_model.keys()
    wrong = [
        f"{_short(name)} is {shape} there and {of_model[name]} here"
        for name in sorted(all_names & there.keys())
        if (shape := tuple(metadata.state_dict_metadata[there[name]].size)) != of_model[name]
    ]
    if wrong:
        raise ValueError(
            f"checkpoint.start_from={folder}: {_list(wrong)}; write that model's sizes"
        )
    missing = sorted(map(_short, all_names - there.keys()))
    unused = sorted(map(_short, there.keys() - all_names))
    lists = [
        f"{count} {what}: {_list(names)}"
        for names, what in ((missing, "not there"), (unused, "there and not in this model"))
        if (count := len(names))
    ]
    if lists and (settings.strict or not all_names & there.keys()):
        raise ValueError(
            f"checkpoint.start_from={folder}: parameters {'; '.join(lists)}; write "
            "checkpoint.rename=[old.:new.] for names that differ"
            + (", or checkpoint.strict=false" if settings.strict else "; no name is the same")
        )
    wanted = {there[name]: value for name, value in here.items() if name in there}
    store.read(folder, metadata, wanted, group)
    store.fill_copies(parts)
    moved = [
        f"{_short(old)} as {_short(new)}"
        for new, old in sorted(there.items())
        if new != old and new in all_names
    ]
    if moved:
        lists.insert(0, f"{len(moved)} renamed: {_list(moved)}")
    taken = len(all_names & there.keys())
    return "; ".join([f"starting from {folder}: {taken} parameters taken", *lists])


def renamed(name: str, rules: list[str]) -> str:
    """`name` with the first rule (old:new, beginnings of names) that fits it applied."""
    for rule in rules:
        old, _, new = rule.partition(":")
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _short(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _list(items: list[str], most: int = 8) -> str:
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
