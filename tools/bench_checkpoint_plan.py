"""What rank 0 spends to plan and describe a save of many ranks: with one process, without tensors.

    python tools/bench_checkpoint_plan.py --ranks 1024

The pieces are those of a transformer on a pipeline of 16 ranks with the others as shards of FSDP;
with --replicas N, N ranks have each of them. Then what it costs a rank to read the index. CPU
seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.core.checkpoint.format import WrittenFile, dump_index, parse_index  # noqa: E402
from titanlike.core.checkpoint.writer import _keys, assign  # noqa: E402

PIPELINE, BLOCKS, MATRICES, ROWS = (
    16,
    8,
    9,
    16384,
)  # ranks; blocks of a rank; of a block; of a matrix


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    print(f"{what}: {time.process_time() - begin:.2f} s")


def names(stage: int) -> list[str]:
    kinds = ("model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq")
    matrices = [
        f"model.layers.{stage}.{b}.mlp.{m}.weight" for b in range(BLOCKS) for m in range(MATRICES)
    ]
    return [kind.format(name) for name in matrices for kind in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--replicas", type=int, default=1)
    arguments = parser.parse_args()
    pipeline = min(PIPELINE, arguments.ranks)
    shards = arguments.ranks // pipeline // arguments.replicas
    block, keys, files = torch.zeros(1), [], []
    for rank in range(arguments.ranks):
        shard, stage = divmod(rank, pipeline)[0] % shards, rank % pipeline
        rows = ROWS // shards
        places = [(name, (shard * rows, 0)) for name in names(stage)]
        keys.append(_keys(dict.fromkeys(places, block)))
        pieces = [(n, i * rows * 4, at, (rows, 1), "0" * 16) for i, (n, at) in enumerate(places)]
        tensors = {name: ["F32", (ROWS, 1)] for name, _ in places} if not shard else {}
        size = rows * 4 * len(pieces)
        text = json.dumps(pieces, separators=(",", ":"))
        files.append(WrittenFile(f"rank-{rank:05d}.safetensors", size, (0, ""), tensors, text))
    with timed(f"who writes which of {sum(map(len, keys)):,} pieces"):
        assign(keys)
    with timed("the index"):
        data = dump_index(files[: pipeline * shards], (0, ""))
    with timed(f"reading its beginning ({len(data):,} bytes)"):
        index = parse_index(data)
    with timed("reading the pieces of a pipeline rank"):
        index.pieces(names(0))


if __name__ == "__main__":
    main()
