"""A train step with its costs: time, memory, MFU; and the stop code that all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from titanlike.config.schema import Config
from titanlike.data.loader import Batch
from titanlike.launch.worker import Worker
from titanlike.parallel.device import peak_flops, peak_memory
from titanlike.parallel.mesh import Mesh
from titanlike.training.build import Run
from titanlike.training.guard import Guard, Verdict
from titanlike.training.step import train_step


class StepResult(NamedTuple):
    record: dict[str, Any]  # for metrics.jsonl
    verdict: Verdict | None  # of the guard; None = the numbers are good
    stop_code: int  # of a stop request, the same on every rank; 0 = none


def measured_step(
    run: Run, config: Config, step: int, stream: Iterator[Batch], guard: Guard, worker: Worker
) -> StepResult:
    """Take a batch, train on it, and measure."""
    begin = time.perf_counter()
    record, verdict = train_step(run, config, step, next(stream), guard)
    if run.mesh.device.type == "cuda":
        torch.cuda.synchronize()  # the update's kernels belong to this step
    costs, stop_code = _measure(run, config, time.perf_counter() - begin, worker)
    return StepResult(record | costs, verdict, stop_code)


def _measure(
    run: Run, config: Config, seconds: float, worker: Worker
) -> tuple[dict[str, Any], int]:
    """A step's costs (the slowest rank's time, the largest rank's peak memory), and the stop code.

    Both in one all-reduce.
    """
    memory, stop_code = peak_memory(run.mesh.device), worker.stop_request.code(config.max_time)
    if run.mesh.world_size > 1:
        mine = [seconds, memory, stop_code]
        mine = torch.tensor(mine, dtype=torch.float64, device=run.mesh.device)
        seconds, memory, stop_code = run.mesh.max(mine).tolist()
    speed = config.batch_size * config.seq_len / seconds
    record = {"tokens_per_second": speed, "step_seconds": seconds, "memory_bytes": int(memory)}
    peak = peak_flops(run.mesh.device, config.precision.name)
    if peak is not None and run.draft.flops_per_token is not None:
        record["mfu"] = speed * run.draft.flops_per_token / (peak * run.mesh.world_size)
    return record, int(stop_code)


def agreed_stop_code(mesh: Mesh, config: Config, worker: Worker) -> int:
    """The stop code between steps, the same on every rank. Collective."""
    stop_code = worker.stop_request.code(config.max_time)
    if mesh.world_size > 1:
        stop_code = int(mesh.max(torch.tensor([stop_code], device=mesh.device)).item())
    return stop_code
