"""Compile a run's blocks before the first step, while no rank waits for a message of another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titanlike.data.sources import Batch
from titanlike.launch.worker import Worker, barrier
from titanlike.training.build import Run


def compile_blocks(run: Run, batch: Batch, evaluates: bool, worker: Worker, timeout: float) -> str:
    """Compile the blocks of every rank's stages for batches such as this one.

    batch: on the device; evaluates: also for evaluation. Returns what to say of it. Collective.
    Raises BarrierTimeout where a rank has not compiled its blocks in `timeout` seconds.
    """
    assert run.compiled is not None
    begin = time.perf_counter()
    run.compiled.new_graphs()
    with _unchanged(run):
        run.pipeline.rehearse(batch)
        if evaluates:
            run.train_mode(False)
            with torch.no_grad():
                run.pipeline.rehearse(batch)
            run.train_mode(True)
    graphs, seconds = run.compiled.new_graphs(), time.perf_counter() - begin
    barrier(worker, "compile", timeout)
    count = len(run.compiled.names)
    text = f"compiled {count} block{'s' * (count != 1)}, {graphs} graph{'s' * (graphs != 1)}"
    return "; ".join([f"{text}, in {seconds:.1f} s", *run.compiled.notes])


@contextmanager
def _unchanged(run: Run) -> Iterator[None]:
    """Buffers and random states are afterwards what they were."""
    buffers = [(b, b.clone()) for stage in run.stages for b in stage.buffers()]
    devices = [run.mesh.device] if run.mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
