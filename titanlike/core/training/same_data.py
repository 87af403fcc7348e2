"""Whether all ranks read the same data, compared when a job begins: a rank with other samples would
be trained on, with the inputs of one sample and the targets of another in a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import Data, Stream, source_fingerprint
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.launch.rendezvous import DATA_TIMEOUT, barrier
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.process_groups import as_only_rank


def refuse_other_data(
    config: Config,
    data: Data,
    mesh: Mesh,
    worker: Worker,
    enter_phase: Callable[[int, str, float], object] = lambda *_: None,
) -> None:
    """Raise ConfigError on all ranks if one reads other samples than another. Collective.

    enter_phase: the watchdog's, if the job has one; each sample may take launch.timeout.
    """
    if worker.world_size == 1:
        return

    def read(data: Data) -> dict[str, str | int | None]:
        found: dict[str, str | int | None] = {"fingerprint": data.fingerprint}
        before = partial(enter_phase, 0, "data", config.launch.timeout)
        before()
        for part, value in _parts(config, data, mesh, before):
            found[part] = value
            before()
        enter_phase(0, "data of other ranks", 0)
        return found

    differs = _compared("data/compared", read(data), worker)
    if differs is None:
        return
    rank, other, part = differs
    try:
        with as_only_rank():
            alone: dict[str, str | int | None] = read(open_data(config))
    except Exception as error:
        alone = {"": f"rank {worker.rank}: {error}"}
    reason = f"rank {rank} reads other data than rank {other} ({part}): "
    if _compared("data/alone", alone, worker) is None:
        reason += "they divide themselves by rank (RANK, WORLD_SIZE, or torch.distributed.get_rank)"
        fix = "give every rank the same samples: each reads its part of a batch"
    else:
        reason += (
            "what they read, or its order, depends on the process (names in a set, os.listdir "
        )
        reason += "or glob unsorted, a shuffle by a generator without a seed), or files differ"
        fix = "sort names, seed generators, and give all machines the same files"
    key, value = "data.name", getattr(config.data, "name", "")
    if (path := getattr(config.data, "path", None)) is not None:
        key, value = "data.path", path
    raise ConfigError([Problem(key, value, reason, fix)])


def _parts(
    config: Config, data: Data, mesh: Mesh, before: Callable[[], object]
) -> Iterator[tuple[str, str | int]]:
    """Yield each part of the data, and what identifies it as this rank reads it. before: called
    before each sample."""
    sources = {f"validation {name}".strip(): each for name, each in data.validations.items()}
    if not isinstance(data.train, Stream):
        sources["training"] = data.train
    for name, source in sources.items():
        if not hasattr(source, "of_stream"):
            yield f"{name} samples", source_fingerprint(source, before)
    if isinstance(data.train, Stream):
        for reader, first in data.train.first_samples(config, mesh.dp_rank):
            yield f"the first sample of reader {reader}", first


def _compared(
    name: str, found: dict[str, str | int | None], worker: Worker
) -> tuple[int, int, str] | None:
    """Return a rank, another, and what they have differently; None if all are alike. Collective."""
    listens, differs = worker.rank == 0, ""
    messages = barrier(worker, name, DATA_TIMEOUT, json.dumps(found), listens=listens)
    first: dict[str, tuple[object, int]] = {}
    for rank, text in sorted(messages.items()):
        for part, value in json.loads(text).items():
            expected, other = first.setdefault(part, (value, rank))
            if value != expected and not differs:
                differs = json.dumps([rank, other, part])
    answers = barrier(worker, f"{name} by rank 0", DATA_TIMEOUT, differs, listens=True)
    return tuple(json.loads(answers[0])) if answers else None
