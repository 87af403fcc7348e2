"""The bench job: speed, memory, start-up time and a step's breakdown, compared with a plain loop.

All ranks train in their layout, as `train` does with metrics.jsonl and nothing else, and,
interleaved step by step so that noise of the machine affects both alike, in a loop of
`plain_loops.py`.
"""

from __future__ import annotations

import gzip
import json
import operator
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.speed.machine import profile_words, resident_memory
from benchmarks.speed.plain_loops import plain_loop, why_no_plain_loop
from benchmarks.speed.step_kinds import GAPS, KINDS, draw, seconds_by_kind
from titanlike.core.config import files
from titanlike.core.config.errors import Refused
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import Data
from titanlike.core.device.accelerator import synchronize
from titanlike.core.device.choose import choose_device, ranks_of
from titanlike.core.device.memory import peak_memory
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics import units
from titanlike.core.metrics.console import Console
from titanlike.core.metrics.sinks import JsonlSink
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import Run, StepPhases, build
from titanlike.core.training.device_batches import batches_for
from titanlike.core.training.first_batch import compile_blocks
from titanlike.core.training.session import connected, open_data_on_every_rank
from titanlike.core.training.step import finish_step, forward_backward, update
from titanlike.core.training.train_plan import make_plan
from titanlike.watch.profile import ProfilerRanges, trace_profiler

WARMUP = 4  # steps after the first that are not measured
STEPS = 40  # measured, unless the command line has steps=
PROFILED = 2  # further steps


@dataclass
class _Measured:
    """A loop, and the times of its steps on this rank."""

    loop: Iterator[Any]
    device: torch.device
    wall: list[float] = field(default_factory=list)  # seconds
    cpu: list[float] = field(default_factory=list)  # seconds of all threads of this process
    ranges: ProfilerRanges | None = None  # while it is profiled

    def step(self) -> Any:
        """Run one step; return what the loop yields."""
        dist.barrier()  # no rank waits for one still in the other loop
        begin, cpu = time.perf_counter(), time.process_time()
        if self.ranges is not None:
            self.ranges.start_step(len(self.wall))
        result = next(self.loop)
        synchronize(self.device)  # the update's kernels belong to this step
        if self.ranges is not None:
            self.ranges.close()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - begin)
        return result

    def of_all_ranks(self) -> tuple[list[float], list[float]]:
        """(wall, cpu) seconds of each step: the slowest rank's, all ranks' sum."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.wall, self.cpu))
        walls, cpus = zip(*ranks, strict=True)
        wall = [max(step) for step in zip(*walls, strict=True)]
        return wall, [sum(step) for step in zip(*cpus, strict=True)]

    def by_kind(self, trace: Path, phases: StepPhases) -> dict[str, float]:
        """Profile further steps into `trace`; return mean seconds of a step by kind, over all
        ranks."""
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorder = trace_profiler(self.device, lambda: trace)
        self.ranges = ProfilerRanges()
        phases.observers.append(self.ranges)
        recorder.start()
        for _ in range(PROFILED):
            self.step()
        recorder.stop()
        phases.remove(self.ranges)
        with gzip.open(trace, "rb") as file:
            events = json.load(file)["traceEvents"]
        if self.device.type != "cpu" and all(event.get("cat") != "kernel" for event in events):
            print("the profiler may not record kernels here: times are of the host's operators")
        seconds = seconds_by_kind(events)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, seconds)
        return {kind: mean(table[kind] for table in ranks) for kind in seconds}


def bench(config: Config, worker: Worker) -> dict[str, Any]:
    """Run the measurement, print a table, return {"value": tokens/s, ...all figures}."""
    device, _ = choose_device(config, worker.local_rank, worker.local_world_size)
    if (shared := ranks_of(device, config.launch, worker.local_world_size)) > 1:
        reason = f"{shared} ranks that share a GPU take turns: their speed is no layout's"
        raise Refused("launch.ranks_per_device", shared, reason, "launch.ranks_per_device=1")
    steps_given = any(text.startswith("steps=") for text in worker.overrides)
    counted = max(2, config.steps) if steps_given else STEPS
    config = replace(config, steps=1 + WARMUP + counted + PROFILED)
    data = open_data_on_every_rank(config, worker)
    with connected(config, worker, say=Console(steps=1).line) as mesh:
        return _measure(config, worker, data, mesh, counted)


def _measure(
    config: Config, worker: Worker, data: Data, mesh: Mesh, counted: int
) -> dict[str, Any]:
    before = resident_memory(mesh.device)
    ours = plain = None
    if config.bench.loop == "plain":
        plan = make_plan(config, data)
    else:
        run = build(config, mesh, data)
        plan, ours = run.plan, _Measured(titanlike_loop(run, config, data, worker), mesh.device)
    reason = why_no_plain_loop(config, plan)
    if config.bench.loop != "titanlike" and not reason:
        plain = _Measured(plain_loop(config, data, plan, mesh), mesh.device)
    loops = [loop for loop in (ours, plain) if loop is not None]
    if not loops:
        raise ValueError(f"bench.loop=plain: it is written {reason}; write bench.loop=titanlike")

    figures: dict[str, Any] = {}
    for loop in loops:
        for _ in range(1 + WARMUP):
            record = loop.step()
            figures.setdefault("first_step_seconds", time.time() - _start_time(worker))
        figures.setdefault("memory", (peak_memory(mesh.device).allocated, before))
        loop.wall, loop.cpu = [], []
    for pair in range(counted):
        # titanlike, plain, plain, titanlike: the second of a pair finds warm caches
        for loop in loops if pair % 2 == 0 else reversed(loops):
            result = loop.step()
            record = result if loop is ours else record

    each_memory = [(0, 0)] * mesh.world_size
    peak, before = figures.pop("memory")
    dist.all_gather_object(each_memory, (peak, peak - before))
    (wall, cpu), *others = [loop.of_all_ranks() for loop in loops]
    figures["step_by_kind"] = by_kind = {}
    for loop in loops:
        name = "titanlike" if loop is ours else "plain loop"
        path = worker.run_dir / "profile" / f"{name.replace(' ', '_')}_rank{worker.rank}.json.gz"
        by_kind[name] = loop.by_kind(path, run.phases if loop is ours else StepPhases())
    seconds, has_tokens = median(wall), plan.unit == "tokens"
    figures |= {
        "value": config.batch_size * (config.seq_len if has_tokens else 1) / seconds,
        "unit": plan.unit,
        "step_seconds": seconds,
        "cpu_seconds": median(cpu),
        "computations": sum(map(len, plan.order.ranks)) * config.dp,
        "memory_bytes": [peak for peak, _ in each_memory],
        "memory_of_training_bytes": [training for _, training in each_memory],
        "no_plain_loop": reason,
    }
    names = "plain_step_seconds", "plain_cpu_seconds", "cpu_more_seconds", "ratio", "cpu_ratio"
    figures |= dict.fromkeys(names)
    for plain_wall, plain_cpu in others:
        more = median(map(operator.sub, cpu, plain_cpu))
        ratios = _paired_ratio(wall, plain_wall), _paired_ratio(cpu, plain_cpu)
        values = median(plain_wall), median(plain_cpu), more, *ratios
        figures |= dict(zip(names, values, strict=True))
    if ours is not None and "mfu" in record:
        figures["mfu"] = record["mfu"] * record["step_seconds"] / seconds
    # a CPU's cores are shared with whatever else runs: hardware=cpu says what one does
    figures["hardware"] = profile_words(mesh.device) if mesh.device.type != "cpu" else []
    if worker.rank == 0:
        _print(figures, len(wall), worker.run_dir)
        files.atomic_write_text(worker.run_dir / "bench.json", json.dumps(figures, indent=1))
    return figures


def _paired_ratio(ours: list[float], plain: list[float]) -> float:
    """Median over pairs of pairs; each loop runs first in one of the two."""
    sums = ([a + b for a, b in zip(s[::2], s[1::2], strict=False)] for s in (ours, plain))
    pairs = list(zip(*sums, strict=True)) or list(zip(ours, plain, strict=True))
    return median(a / b for a, b in pairs)


def titanlike_loop(
    run: Run, config: Config, data: Data, worker: Worker
) -> Iterator[dict[str, Any]]:
    """Train as `train` does; yield the previous step's record."""
    stream = batches_for(run, config, batches(data.train, config, dp_rank=run.mesh.dp_rank))
    if run.compiled:
        first = next(stream)
        compile_blocks(run, config, first, worker)
        stream = chain([first], stream)
    detector = AnomalyDetector(config, {})
    sink = JsonlSink(worker.run_dir / "metrics.jsonl") if worker.rank == 0 else None
    record: dict[str, Any] = {}
    pending = None
    for step in range(
        1, config.steps + 1
    ):  # as in core/training/loop.py, one step ahead of its metrics
        gradients = forward_backward(run, config, step, stream)
        if pending is not None:
            record = finish_step(run, config, pending, detector).record
            if sink:
                sink.log(record)
        pending = update(run, config, gradients, detector, worker)
        yield record


def _start_time(worker: Worker) -> float:
    """When the command started: this process, or the launcher, whose fork server is its parent."""
    pid = os.getpid()
    for _ in range(1 if worker.world_size == 1 else 3):
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        pid, ticks = int(fields[1]), int(fields[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _print(figures: dict[str, Any], steps: int, run_dir: Path) -> None:
    console = Console(steps=1)
    memory, training = figures["memory_bytes"], figures["memory_of_training_bytes"]
    peak = f"{units.size(max(memory))} at most, {units.size(max(training))} of it for this run"
    step, cpu = figures["step_seconds"] * 1e3, figures["cpu_seconds"] * 1e3
    rows = [
        (f"{figures['unit']}/s", units.count(figures["value"])),
        ("step", f"{step:.1f} ms, {cpu:.1f} ms of CPU on all ranks (medians of {steps})"),
        ("first step done", f"{figures['first_step_seconds']:.1f} s after the start"),
        ("peak memory a rank", peak),
    ]
    if len(memory) > 1:
        rows.append(("of each rank", ", ".join(units.size(value) for value in training)))
    if "mfu" in figures:
        rows.append(("MFU", f"{figures['mfu']:.1%}"))
    if figures["no_plain_loop"]:
        rows.append(("plain loop", f"is written {figures['no_plain_loop']}"))
    elif figures["ratio"] is not None:
        more, computations = figures["cpu_more_seconds"], figures["computations"]
        which = "more" if more >= 0 else "less"
        each = f"{abs(more) / computations * 1e6:.0f} us for each of {computations} computations"
        rows += [
            ("plain loop", f"{figures['plain_step_seconds'] * 1e3:.1f} ms a step, interleaved"),
            (f"CPU time {which} than the plain loop", f"{abs(more) * 1e3:.1f} ms a step: {each}"),
            ("CPU time, titanlike / plain loop", f"{figures['cpu_ratio']:.3f}"),
            ("time, titanlike / plain loop", f"{figures['ratio']:.3f}"),
        ]
    console.table("", (), rows)
    loops, picture = figures["step_by_kind"], run_dir / "step_by_kind.svg"
    draw(loops, picture)
    kinds = [(kind, *(f"{1e3 * t[kind]:.1f}" for t in loops.values())) for kind in (*KINDS, GAPS)]
    console.table(f"ms of a profiled step ({picture})", ("kind", *loops), kinds)
    if figures["hardware"]:
        console.line(
            f"for a plan of machines as this one, behind hardware=: {' '.join(figures['hardware'])}"
        )
