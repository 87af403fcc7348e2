"""What it costs rank 0 to plan and describe a save of many ranks: with one process, without tensors.

The local plans are those of a transformer on a pipeline of 16 ranks with the others as shards of
FSDP. Everything that rank 0 does between the other ranks' messages is done, with messages as bytes:
plans unpickled, made one, pickled for each rank; results unpickled, `.metadata` and `pieces.json`
written. Three saves: as DCP does each of them by default; the first here, without a step count for
each parameter; and the next ones here, with the plan remembered. CPU seconds.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from titanlike.checkpoint.dcp_storage import StorageWriter
from titanlike.checkpoint.piece_sums import WrittenFile, dump_pieces
from titanlike.checkpoint.save_plan import SavePlanner
from titanlike.checkpoint.storage import Storage
from titanlike.metrics.console import Console
from titanlike.torch_private.distributed_checkpoint import written_piece

PIPELINE, BLOCKS, MATRICES = 16, 8, 9  # ranks; blocks of a rank; parameters of a block
ROWS = 16384
_PROPERTIES = TensorProperties(dtype=torch.float32)

Seconds = dict[str, float]


def local_plans(ranks: int, *, steps: bool) -> list[SavePlan]:
    """Of each rank: its shards of model, exp_avg and exp_avg_sq; steps: of each `step`, too."""
    pipeline = min(PIPELINE, ranks)
    shards = ranks // pipeline
    return [
        SavePlan(list(_items(stage, shard, shards, steps)))
        for stage in range(pipeline)
        for shard in range(shards)
    ]


def _items(stage: int, shard: int, shards: int, steps: bool) -> Iterator[WriteItem]:
    for block in range(stage * BLOCKS, (stage + 1) * BLOCKS):
        for matrix in range(MATRICES):
            name = f"layers.{block}.attention.w{matrix}.weight"
            entries = [f"model.{name}"]
            entries += [f"optimizer.state.{name}.{key}" for key in ("exp_avg", "exp_avg_sq")]
            rows = ROWS // shards
            begin, size = torch.Size([shard * rows, 0]), torch.Size([rows, ROWS])
            for entry in entries:
                yield _item(entry, begin, size, torch.Size([ROWS, ROWS]), WriteItemType.SHARD)
            if steps:
                scalar = torch.Size([])
                entry = f"optimizer.state.{name}.step"
                yield _item(entry, scalar, scalar, scalar, WriteItemType.TENSOR)


def _item(
    name: str, begin: torch.Size, size: torch.Size, whole: torch.Size, kind: WriteItemType
) -> WriteItem:
    data = TensorWriteData(ChunkStorageMetadata(begin, size), _PROPERTIES, whole)
    return WriteItem(MetadataIndex(name, begin), kind, tensor_data=data)


def measure(ranks: int) -> dict[str, Seconds]:
    """CPU seconds of rank 0, by save and part."""
    folder = Storage("memory://plan/step-00000001")
    found = {"as torch does": _save(DefaultSavePlanner(), local_plans(ranks, steps=True), folder)}
    planner = SavePlanner({}, None, None)
    plans = local_plans(ranks, steps=False)
    found["first save"] = _save(planner, plans, folder)
    later = SavePlanner({}, planner.kept, None)
    found["later saves"] = _save(later, [SavePlan([]) for _ in plans], folder, plans)
    return found


def _save(
    planner: Any, plans: list[SavePlan], folder: Storage, written: list[SavePlan] | None = None
) -> Seconds:
    """written: what the ranks write, where the plans do not say it."""
    seconds: Seconds = {}
    writer = StorageWriter(folder, {}, lambda files: None)
    messages = [pickle.dumps(plan) for plan in plans]
    with _timed(seconds, "plans received"):
        gathered = [pickle.loads(message) for message in messages]
    with _timed(seconds, "one plan made"):
        if isinstance(planner, DefaultSavePlanner) and not isinstance(planner, SavePlanner):
            gathered = [replace(plan, planner_data={}) for plan in gathered]
        parts, metadata = planner.create_global_plan(gathered)
        parts = writer.prepare_global_plan(parts)
    with _timed(seconds, "plans sent"):
        messages = [pickle.dumps(part) for part in parts]
    known = isinstance(planner, SavePlanner) and planner.known
    messages = [
        pickle.dumps(_results(rank, part, full=not known))
        for rank, part in enumerate(written or parts)
    ]
    del parts
    with _timed(seconds, "results received"):
        results = [pickle.loads(message) for message in messages]
    with _timed(seconds, "files described"):
        _describe(writer, planner, metadata, results, folder)
    return seconds


def _results(rank: int, part: SavePlan, *, full: bool) -> list[Any]:
    name, length = f"__{rank}_0.distcp", 2**20
    ends = [length * (at + 1) for at in range(len(part.items))]
    results: list[Any] = []
    if full:
        begins = [end - length for end in ends]
        pairs = zip(part.items, begins, strict=True)
        results = [written_piece(item.index, name, begin, length) for item, begin in pairs]
    return [
        *results,
        WrittenFile(name, ends[-1] if ends else 0, "0" * 32, ends, bytes(16 * len(ends))),
    ]


def _describe(
    writer: StorageWriter, planner: Any, metadata: Metadata, results: list[Any], folder: Storage
) -> None:
    if isinstance(planner, SavePlanner):
        writer.describe_as(planner)
        folder.write("pieces", dump_pieces([own for *_, own in results]))
    pieces = [pieces for *pieces, _ in results]
    if isinstance(planner, SavePlanner):
        folder.write("metadata", writer.describe(metadata, pieces))
    else:
        plain = FileSystemWriter("unused")
        plain.fs, plain.path = writer.fs, ""
        plain.finish(metadata, pieces)


@contextmanager
def _timed(seconds: Seconds, part: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    seconds[part] = time.process_time() - begin


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    if ranks < 1:
        parser.error(f"--ranks {ranks}: write a number of at least 1")
    found = measure(ranks)
    parts = list(next(iter(found.values())))
    rows: list[list[Any]] = [
        [part, *(f"{seconds[part]:.2f} s" for seconds in found.values())] for part in parts
    ]
    rows.append(["together", *(f"{sum(seconds.values()):.2f} s" for seconds in found.values())])
    items = BLOCKS * MATRICES * 3
    title = f"CPU time of rank 0, {ranks} ranks with {items} tensors each"
    Console(steps=1).table(title, ["", *found], rows)
