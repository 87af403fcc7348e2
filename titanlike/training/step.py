"""The train step, its costs (time, memory, MFU), and the validation: functions of a run and a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlike.config.schema import Config
from titanlike.data.loader import validation_batches
from titanlike.data.sources import Batch, Data
from titanlike.device.accelerator import synchronize
from titanlike.device.memory import peak_memory
from titanlike.device.peaks import peak_flops
from titanlike.launch.worker import Worker
from titanlike.optim.learning_rate import learning_rate, set_lr
from titanlike.optim.optimizer import clip_gradients, gradient_norm
from titanlike.training.build import Run
from titanlike.training.feed import batches_for, to_device
from titanlike.training.guard import Guard, Verdict


def train_step(
    run: Run, config: Config, step: int, batch: Batch, guard: Guard
) -> tuple[dict[str, Any], Verdict | None]:
    """One optimizer step on this dp rank's part of a batch; the step's numbers.

    A step whose numbers the guard rejects changes no parameter.
    """
    run.ranges.begin("forward and backward")
    loss, _ = run.pipeline.train(to_device(batch, run.mesh, config))  # forward and backward
    run.ranges.begin("gradient norm")
    norm = gradient_norm(run.owned, run.mesh)
    record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}
    verdict = guard.judge(record, run)
    lr = optimizer_step(run, config, step, norm) if verdict is None else 0.0
    for state in run.stage_states:
        state.zero_grad()
    return record | {"lr": lr, "tokens": step * config.batch_size * config.seq_len}, verdict


def optimizer_step(run: Run, config: Config, step: int, norm: Tensor) -> float:
    """Clip by the global norm, update the parameters and the running statistics of batch norms;
    returns the learning rate. A parameter that no rank's backward reached is left alone."""
    run.ranges.begin("clip")
    run.pipeline.drop_unreached()
    if config.optimizer.clip is not None:
        clip_gradients(run.parameters, norm, config.optimizer.clip)
    run.ranges.begin("optimizer")
    for state in run.stage_states:
        set_lr(state.optimizers, config, step)
        for optimizer in state.optimizers:
            optimizer.step()
    run.norms.update()
    return learning_rate(config, step)


def validate(
    run: Run, config: Config, data: Data, should_stop: Callable[[], object] | None = None
) -> float | None:
    """Loss in nats a token over the validation batches, the same ones each time.

    should_stop: called before each batch, on all ranks; once true, the result is None.
    """
    run.train_mode(False)
    total = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
    stopped = False
    batches = validation_batches(data.validation, config, dp_rank=run.mesh.dp_rank)
    for batch in batches_for(run, config, batches):
        if stopped := should_stop is not None and bool(should_stop()):
            break
        loss, tokens = run.pipeline.evaluate(to_device(batch, run.mesh, config))
        total += torch.tensor([loss.item() * tokens.item(), tokens.item()])
    run.train_mode(True)
    return None if stopped else (total[0] / total[1]).item()


class StepResult(NamedTuple):
    record: dict[str, Any]  # for metrics.jsonl
    verdict: Verdict | None  # of the guard; None = the numbers are good
    stop_code: int  # of a stop request, the same on every rank; 0 = none
    graphs: int  # compiled in this step, by the rank with the most


def measured_step(
    run: Run, config: Config, step: int, stream: Iterator[Batch], guard: Guard, worker: Worker
) -> StepResult:
    """Take a batch, train on it, and measure: time of the slowest rank, largest peak memory."""
    begin = time.perf_counter()
    record, verdict = train_step(run, config, step, next(stream), guard)
    mesh = run.mesh
    run.ranges.begin("measure")
    synchronize(mesh.device)  # the update's kernels belong to this step
    seconds, peak = time.perf_counter() - begin, peak_memory(mesh.device)
    memory, reserved = peak.allocated, peak.reserved or 0
    stop_code = worker.stop_request.code(config.max_time)
    graphs = run.compiled.new_graphs() if run.compiled else 0
    if mesh.world_size > 1:  # all in one message
        mine = [seconds, memory, reserved, stop_code, graphs]
        mine = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
        seconds, memory, reserved, stop_code, graphs = mesh.max(mine).tolist()
    speed = config.batch_size * config.seq_len / seconds
    record |= {
        "time": time.time(),
        "tokens_per_second": speed,
        "step_seconds": seconds,
        "memory_bytes": int(memory),
    }
    if peak.reserved is not None:
        record["memory_reserved_bytes"] = int(reserved)
    flops = peak_flops(mesh.device, config.precision.name)
    if flops is not None and run.draft.flops_per_token is not None:
        record["mfu"] = speed * run.draft.flops_per_token / (flops * mesh.world_size)
    return StepResult(record, verdict, int(stop_code), int(graphs))
