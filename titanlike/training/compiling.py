"""Compile a run's blocks before the first step, while no rank waits for a message of another."""

from __future__ import annotations

import json
import time

import torch

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.data.sources import Batch
from titanlike.launch.worker import Worker, barrier
from titanlike.torch_private.compiler import compiler_error
from titanlike.training.build import Run
from titanlike.training.feed import to_device
from titanlike.training.unchanged import unchanged


def compile_blocks(run: Run, config: Config, batch: Batch, worker: Worker) -> str:
    """Compile the blocks of all stages for batches such as this one. Collective.

    Returns what to say of it, on rank 0. Raises ConfigError where the compiler fails, BarrierTimeout
    where a rank has not compiled its blocks in `launch.timeout`.
    """
    assert run.compiled is not None
    begin = time.perf_counter()
    run.compiled.new_graphs()
    batch = to_device(batch, run.mesh, config)
    try:
        with unchanged(run, config.seed):
            run.train_mode(True)
            run.pipeline.rehearse(batch)
            if config.validation.every:
                run.train_mode(False)
                with torch.no_grad():
                    run.pipeline.rehearse(batch)
    except Exception as error:
        if reason := compiler_error(error):
            raise ConfigError([Problem("compile", True, reason, "compile=false")]) from error
        raise
    mine = [run.compiled.new_graphs(), time.perf_counter() - begin, run.compiled.notes]
    first = worker.rank == 0
    told = barrier(worker, "compile", config.launch.timeout, json.dumps(mine), listens=first)
    if not first:
        return ""
    every = [told[rank] for rank in range(worker.world_size)]
    graphs, seconds, notes = zip(*map(json.loads, every), strict=True)
    count = f"{max(graphs)} graph{'s' * (max(graphs) != 1)}" + " a rank" * (len(every) > 1)
    unique = dict.fromkeys(note for own in notes for note in own)
    return "; ".join([f"compiled the blocks: {count}, {max(seconds):.1f} s", *unique])
