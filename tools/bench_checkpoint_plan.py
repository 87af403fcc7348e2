"""What it costs rank 0 to plan and describe a save of many ranks: with one process, without tensors.

    python tools/bench_checkpoint_plan.py --ranks 1024

The local plans are those of a transformer on a pipeline of 16 ranks with the others as shards of
FSDP. Everything that rank 0 does between the other ranks' messages is done, with messages as bytes:
plans unpickled, made one, pickled for each rank; results unpickled, `.metadata` and `pieces.json`
written. Three saves: as DCP does each of them by default; the first here, without a step count for
each parameter; and the next ones here, with the plan remembered. CPU seconds.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.checkpoint.integrity import dump_checksums  # noqa: E402
from titanlike.checkpoint.staging import WrittenFile  # noqa: E402
from titanlike.checkpoint.storage import Storage  # noqa: E402
from titanlike.checkpoint.writer import describe, global_plan  # noqa: E402
from titanlike.metrics.console import Console  # noqa: E402
from titanlike.torch_private.distributed_checkpoint import describe_files  # noqa: E402

PIPELINE, BLOCKS, MATRICES = 16, 8, 9  # ranks; blocks of a rank; parameters of a block
ROWS, LENGTH = 16384, 2**20  # of a matrix; bytes of a chunk
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
    plans = local_plans(ranks, steps=False)
    seconds = {"as torch does": _save_as_torch(local_plans(ranks, steps=True), folder)}
    seconds["first save"], metadata = _save(plans, plans, folder, None)
    cached = [SavePlan([]) for _ in plans]
    seconds["later saves"], _ = _save(cached, plans, folder, metadata)
    return seconds


def _save_as_torch(plans: list[SavePlan], folder: Storage) -> Seconds:
    seconds: Seconds = {}
    planner = DefaultSavePlanner()
    gathered = _sent(seconds, "plans received", plans)
    with _timed(seconds, "one plan made"):
        gathered = [replace(plan, planner_data={}) for plan in gathered]
        parts, metadata = planner.create_global_plan(gathered)
    _sent(seconds, "plans sent", parts)
    places = [
        [
            (item.index, f"__{rank}_0.distcp", LENGTH * at, LENGTH)
            for at, item in enumerate(part.items)
        ]
        for rank, part in enumerate(parts)
    ]
    written = [
        [
            WriteResult(index, LENGTH, info)
            for index, info in describe_files(metadata, of_rank).storage_data.items()
        ]
        for of_rank in places
    ]
    results = _sent(seconds, "results received", written)
    with _timed(seconds, "files described"):
        described = {result.index: result.storage_data for rank in results for result in rank}
        folder.write("metadata", pickle.dumps(replace(metadata, storage_data=described)))
    return seconds


def _save(
    plans: list[SavePlan], written: list[SavePlan], folder: Storage, cached: bytes | None
) -> tuple[Seconds, bytes]:
    """written: what the ranks write; cached: `.metadata`, where the plan is remembered."""
    seconds: Seconds = {}
    gathered = _sent(seconds, "plans received", plans)
    parts, metadata = gathered, None
    with _timed(seconds, "one plan made"):
        if cached is None:
            parts, metadata = global_plan(gathered)
    _sent(seconds, "plans sent", [[item.index for item in part.items] for part in parts])
    files = [_written(rank, part) for rank, part in enumerate(written)]
    results = _sent(seconds, "results received", files)
    with _timed(seconds, "files described"):
        described = cached or b""
        if metadata is not None:
            described = describe(metadata, parts, results)
        folder.write("metadata", described)
        folder.write("pieces", dump_checksums({r.name: (r.ends, r.sums) for r in results}))
    return seconds, described


def _sent(seconds: Seconds, part: str, objects: list[Any]) -> list[Any]:
    """Objects as messages: rank 0 pickles those that it sends, and unpickles those that it receives."""
    if part.endswith("sent"):
        with _timed(seconds, part):
            messages = [pickle.dumps(one) for one in objects]
        return messages
    messages = [pickle.dumps(one) for one in objects]
    with _timed(seconds, part):
        return [pickle.loads(message) for message in messages]


def _written(rank: int, part: SavePlan) -> WrittenFile:
    ends = [LENGTH * (at + 1) for at in range(len(part.items))]
    return WrittenFile(
        f"__{rank}_0.distcp", LENGTH * len(ends), "0" * 32, ends, bytes(16 * len(ends))
    )


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


if __name__ == "__main__":
    main()
