"""The stall of a save in each mode, and the bandwidth of checkpoints beside that of plain files.

    python tools/bench_checkpoint.py pp=2

It takes the overrides of train.py.

The modes take turns, a few training steps after each save, so that noise of the machine hits all.
The plain write is this rank's own bytes into one file with fsync, at the same time on all ranks;
the plain read reads them back. Both are in the page cache for reading: what is compared is the
program's own cost (checksums, copying into shards), not the disk's.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout that is not installed

from titanlike.cli import start_job  # noqa: E402
from titanlike.core.checkpoint.checkpointer import Checkpointer, Progress  # noqa: E402
from titanlike.core.checkpoint.integrity import read_index  # noqa: E402
from titanlike.core.checkpoint.storage import Storage  # noqa: E402
from titanlike.core.config.groups.jobs import Checkpoint  # noqa: E402
from titanlike.core.config.program import set_program  # noqa: E402
from titanlike.core.config.schema import Config  # noqa: E402
from titanlike.core.data.loader import batches  # noqa: E402
from titanlike.core.distributed.mesh import close_mesh, open_mesh  # noqa: E402
from titanlike.core.launch.worker import Worker  # noqa: E402
from titanlike.core.metrics import units  # noqa: E402
from titanlike.core.metrics.console import Console  # noqa: E402
from titanlike.core.metrics.run_files import Events  # noqa: E402
from titanlike.core.training.anomalies import AnomalyDetector  # noqa: E402
from titanlike.core.training.build import Run, build  # noqa: E402
from titanlike.core.training.session import open_data_on_every_rank  # noqa: E402
from titanlike.core.training.step import measured_step  # noqa: E402

MODES: tuple[Literal["sync", "async", "async_pinned"], ...]
MODES = ("sync", "async", "async_pinned")
ROUNDS = 5  # counted; one before them is not
STEPS = 2  # of training after a save


def bench(config: Config, worker: Worker) -> dict[str, Any]:
    """Measure; prints a table; {"value": stall of async / stall of sync, ...the figures}."""
    data = open_data_on_every_rank(config, worker)
    mesh = open_mesh(config, worker)
    run = build(config, mesh, data)
    detector, stream = (
        AnomalyDetector(config, {}),
        batches(data.train, config, dp_rank=mesh.dp_rank),
    )
    quiet = Events(worker.run_dir, None)
    folders = {mode: worker.run_dir / mode for mode in MODES}
    checkpointers = {}
    for mode in MODES:
        settings = Checkpoint(folder=str(folders[mode]), mode=mode, keep=1)
        in_mode = replace(config, checkpoint=settings)
        checkpointers[mode] = Checkpointer(run.stage_states, in_mode, data, quiet)
    step = 1
    measured_step(run, config, step, stream, detector, worker)
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES}
    during: dict[str, list[float]] = {mode: [] for mode in MODES}
    loads, writes, reads = [], [], []
    for _ in range(ROUNDS + 1):
        for mode, checkpointer in checkpointers.items():
            dist.barrier()
            stalls[mode].append(_slowest(run, checkpointer.save(Progress(step=step))))
            for _ in range(STEPS):
                step += 1
                before = checkpointer.before_update
                result = measured_step(run, config, step, stream, detector, worker, before)
                record = result.record
                during[mode].append(record["step_seconds"])
            # the next mode has the disk to itself
            checkpointer.finish(Progress(step=step), done=False)
        size, own = _sizes(folders["sync"], checkpointers["sync"].newest, worker.rank)
        writes.append(_timed(run, partial(_plain_write, worker, own)))
        reads.append(_timed(run, plain_file(worker).read_bytes))
        loads.append(_timed(run, checkpointers["sync"].resume))
    for mode in MODES:
        dist.barrier()
        if worker.rank == 0:
            shutil.rmtree(folders[mode])
    plain_file(worker).unlink()
    stall = {mode: median(stalls[mode][1:]) for mode in MODES}
    figures = {
        "value": stall["async"] / stall["sync"],
        "bytes": size,
        "stall_seconds": stall,
        "step_seconds": {mode: median(during[mode][STEPS:]) for mode in MODES},
        "save_seconds": stall["sync"],
        "load_seconds": median(loads[1:]),
        "plain_write_seconds": median(writes[1:]),
        "plain_read_seconds": median(reads[1:]),
    }
    if worker.rank == 0:
        _print(figures)
    close_mesh()
    return figures


def plain_file(worker: Worker) -> Path:
    return worker.run_dir / f"plain-{worker.rank}"


def _sizes(folder: Path, step: int, rank: int) -> tuple[int, int]:
    """Bytes of a checkpoint, and of a rank's own files in it."""
    files = read_index(Storage(folder / f"step-{step:08d}")).files
    own = sum(size for name, (size, _) in files.items() if name.startswith(f"rank-{rank:05d}"))
    return sum(size for size, _ in files.values()), own


def _plain_write(worker: Worker, size: int) -> None:
    plain_file(worker).unlink(missing_ok=True)
    piece = torch.ones(size, dtype=torch.uint8).numpy().data
    with plain_file(worker).open("wb", buffering=0) as file:
        file.write(piece)
        os.fsync(file.fileno())


def _timed(run: Run, action: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    return _slowest(run, time.perf_counter() - begin)


def _slowest(run: Run, seconds: float) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64, device=run.mesh.device)
    return run.mesh.max(mine).item()


def _print(figures: dict[str, Any]) -> None:
    def speed(key: str) -> str:
        return f"{units.size(figures['bytes'] / figures[key])}/s"

    console = Console(steps=1)
    stall, steps = figures["stall_seconds"], figures["step_seconds"]
    rows = []
    for mode in MODES:
        waits, share = f"{stall[mode] * 1e3:.1f} ms", f"{stall[mode] / stall['sync']:.2f}"
        rows.append((mode, waits, share, f"{steps[mode] * 1e3:.1f} ms"))
    console.table("", ["mode", "training waits", "of sync's", "a step during it"], rows)
    console.line()
    save = figures["plain_write_seconds"] / figures["save_seconds"]
    load = figures["plain_read_seconds"] / figures["load_seconds"]
    rows = [
        ("save", speed("save_seconds"), f"{save:.2f}"),
        ("plain write with fsync", speed("plain_write_seconds"), ""),
        ("load, checksums read too", speed("load_seconds"), f"{load:.2f}"),
        ("plain read", speed("plain_read_seconds"), ""),
    ]
    console.table("", ["", f"a checkpoint of {units.size(figures['bytes'])}", "of plain"], rows)


if __name__ == "__main__":
    set_program()
    start_job("bench_checkpoint.bench", "bench_checkpoint")
