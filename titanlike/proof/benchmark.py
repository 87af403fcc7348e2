"""The bench job: a command line's speed, memory and start-up, beside a plain torch loop.

1. All ranks train in their layout, as `train` does with metrics.jsonl and nothing else.
2. One process trains the same model on the same batches in a loop written straight on torch. With a
   mesh of one process the two alternate step by step, so that noise of the machine hits both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlike.config.schema import Config
from titanlike.data.loader import batches
from titanlike.data.sources import IGNORE, Data
from titanlike.launch.environment import available_cores
from titanlike.launch.worker import Worker, barrier
from titanlike.metrics import units
from titanlike.metrics.console import Console
from titanlike.metrics.sinks import JsonlSink
from titanlike.models.float8 import use_float8
from titanlike.models.registry import build_model, initial_weights_of, resolve_model
from titanlike.optim.learning_rate import set_lr
from titanlike.optim.optimizer import build_optimizers
from titanlike.parallel.activation_checkpoint import checkpoint_blocks
from titanlike.parallel.device import peak_memory, resident_memory
from titanlike.parallel.initialize import initialize
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.proof.reference import REFERENCE_TIMEOUT
from titanlike.split.rank_memory import saved_operators
from titanlike.training.build import Run, build
from titanlike.training.compiling import compile_blocks
from titanlike.training.guard import Guard
from titanlike.training.session import open_data_on_every_rank
from titanlike.training.step import measured_step

WARMUP = 4  # steps that are not counted
STEPS = 40  # counted, unless the command line has steps=


def bench(config: Config, worker: Worker) -> dict[str, Any]:
    """Measure; prints a table; {"value": tokens/s, ...the figures}."""
    steps_given = any(text.startswith("steps=") for text in worker.overrides)
    counted = max(2, config.steps) if steps_given else STEPS
    config = replace(config, steps=1 + WARMUP + counted)
    data = open_data_on_every_rank(config, worker)
    mesh = open_mesh(config, worker)
    before = resident_memory(mesh.device)
    run = build(config, mesh, data)
    titanlike_loop = _titanlike_loop(run, config, data, worker)
    next(titanlike_loop)
    ready = time.time() - _start_time(worker)

    for _ in range(WARMUP):
        next(titanlike_loop)
    memory = peak_memory(mesh.device)
    if mesh.world_size == 1:
        plain_loop = _plain_loop(config, data, run)
        for _ in range(WARMUP):
            next(plain_loop)
        ours, plain, ratios = [], [], []
        for _ in range(counted // 2):
            # ours, plain, plain, ours: the second of a pair finds warm caches
            a, b, c, d = map(next, (titanlike_loop, plain_loop, plain_loop, titanlike_loop))
            ours, plain = [*ours, a, d], [*plain, b, c]
            first, second = (x["step_seconds"] + y["step_seconds"] for x, y in ((a, d), (b, c)))
            ratios.append(first / second)
        ratio = median(ratios)
    else:
        ours = list(titanlike_loop)
        memory = peak_memory(mesh.device)
        plain, ratio = _plain_loop_on_rank_0(config, data, run, worker, counted), None
    each_memory = [(0, 0)] * mesh.world_size
    dist.all_gather_object(each_memory, (memory, memory - before))

    seconds = median(record["step_seconds"] for record in ours)
    tokens = config.batch_size * config.seq_len
    figures = {
        "value": tokens / seconds,
        "step_seconds": seconds,
        "first_step_seconds": ready,
        "memory_bytes": [peak for peak, _ in each_memory],
        "memory_of_training_bytes": [own for _, own in each_memory],
        "plain_step_seconds": median(r["step_seconds"] for r in plain) if plain else None,
        "ratio": ratio,
    }
    if worker.rank == 0:
        _print(figures, ours)
    close_mesh()
    return figures


def _titanlike_loop(
    run: Run, config: Config, data: Data, worker: Worker
) -> Iterator[dict[str, Any]]:
    """Records of training steps, as `train` makes them."""
    stream = batches(data.train, config, dp_rank=run.mesh.dp_rank)
    if run.compiled:
        first = next(stream)
        compile_blocks(run, config, first, worker)
        stream = chain([first], stream)
    guard = Guard(config, {})
    sink = JsonlSink(worker.run_dir / "metrics.jsonl") if worker.rank == 0 else None
    for step in range(1, config.steps + 1):
        record = measured_step(run, config, step, stream, guard, worker).record
        if sink:
            sink.log(record)
        yield record


def _plain_loop(config: Config, data: Data, run: Run) -> Iterator[dict[str, Any]]:
    """A training loop without a framework, which recomputes and compiles the same blocks."""
    device, plan = run.mesh.device, run.draft
    alone = replace(config, dp=1, replicate=1)
    resolved = resolve_model(config)
    model = build_model(resolved)
    use_float8(model, config, device)
    for stage, recomputed in enumerate(plan.recomputed.blocks):
        checkpoint_blocks(model, recomputed, saved_operators(config))
        for block in map(model.get_submodule, plan.blocks(stage) if config.compile else ()):
            block.forward = torch.compile(block.forward)
    initialize(model, initial_weights_of(resolved, config.seed), device)
    optimizers = build_optimizers(dict(model.named_parameters()), model, config)
    stream = batches(data.train, alone, dp_rank=0)
    low = config.precision.low
    for step in range(1, config.steps + 1):
        begin = time.perf_counter()
        batch = next(stream)
        inputs, targets = (batch[key].to(device) for key in ("inputs", "targets"))
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        set_lr(optimizers, config, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield {"loss": value, "step_seconds": time.perf_counter() - begin}


def _plain_loop_on_rank_0(
    config: Config, data: Data, run: Run, worker: Worker, counted: int
) -> list[dict[str, Any]]:
    """The plain loop with the whole machine's cores, while the other ranks wait.

    Empty where the whole model does not fit one device.
    """
    records: list[dict[str, Any]] = []
    if worker.rank == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(available_cores())
        try:
            loop = _plain_loop(config, data, run)
            records = [next(loop) for _ in range(WARMUP + counted)][WARMUP:]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        torch.set_num_threads(threads)
    barrier(worker, "plain loop", REFERENCE_TIMEOUT)
    return records


def _start_time(worker: Worker) -> float:
    """When the command was started: this process, or the launcher that is its parent."""
    pid = os.getpid() if worker.world_size == 1 else os.getppid()
    with open(f"/proc/{pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _print(figures: dict[str, Any], records: list[dict[str, Any]]) -> None:
    console = Console(steps=1)
    memory, own = figures["memory_bytes"], figures["memory_of_training_bytes"]
    peak = f"{units.size(max(memory))} at most, {units.size(max(own))} of it for this run"
    rows = [
        ("tokens/s", units.count(figures["value"])),
        ("step", f"{figures['step_seconds'] * 1e3:.1f} ms (median of {len(records)})"),
        ("first step done", f"{figures['first_step_seconds']:.1f} s after the start"),
        ("peak memory a rank", peak),
    ]
    if len(memory) > 1:
        rows.append(("of each rank", ", ".join(units.size(value) for value in own)))
    if "mfu" in records[-1]:
        rows.append(("MFU", f"{median(record['mfu'] for record in records):.1%}"))
    plain = figures["plain_step_seconds"]
    if plain is None:
        rows.append(("plain torch loop", "does not fit one device"))
    else:
        ratio = figures["ratio"] or figures["step_seconds"] / plain
        how = "paired: ours, plain, plain, ours" if figures["ratio"] else "one process, all cores"
        rows.append(("plain torch loop", f"{plain * 1e3:.1f} ms a step ({how})"))
        rows.append(("time of ours / plain", f"{ratio:.3f}"))
    console.table("", (), rows)
