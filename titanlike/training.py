"""The training job: what every rank does from the first step to the last.

One step reads like the textbook: loss and gradients, their norm, clip, learning rate, update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from titanlike import report
from titanlike.build import Run, build
from titanlike.checkpoint.run import last_good, resume_run, save_run
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.data.loader import batches, open_data, validation_batches
from titanlike.data.sources import Data
from titanlike.guard import NonFinite, check_finite
from titanlike.launch.signals import Interrupted
from titanlike.launch.worker import Worker, meet
from titanlike.metrics.console import Console
from titanlike.metrics.open import open_sinks, where
from titanlike.optimization import clip_gradients, gradient_norm, set_lr
from titanlike.parallel.device import peak_flops, peak_memory
from titanlike.parallel.mesh import Mesh, close_mesh, open_mesh

PREPARATION = 24 * 3600.0  # seconds that one rank may work on its own before all begin


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """Train to `config.steps`; returns {"value": last validation loss (or loss)}."""
    data = open_on_every_rank(config, worker)
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    state = resume_run(run.parts, config, data, worker.run_dir)
    start = state.get("step", 0)

    console = Console(steps=config.steps, start_step=start, log_every=config.log_every)
    speaks = worker.rank == 0
    sinks = []
    if speaks:
        sinks = open_sinks(config, to_plain(config), worker.run_dir, start, console.line)
        report.opening(console, config, run, data, worker, start, where(sinks[1:]))

    status, value, last_saved = "failed", state.get("value"), start
    try:
        train_batches = batches(data.train, config, dp_rank=mesh.dp_rank, start_step=start)
        for step in range(start + 1, config.steps + 1):
            record = timed_step(run, config, step, train_batches)
            value = record["loss"]
            final = step == config.steps
            if is_due(step, config.validation.every, final and config.validation.every > 0):
                value = record["val_loss"] = validate(run, config, data)
            if speaks:
                console.step(record)
                for sink in sinks:
                    sink.log(record)
            if is_due(step, config.checkpoint.every, final and config.checkpoint.last):
                save_run(run.parts, config, data, worker.run_dir, step, value)
                last_saved = step
        status = "completed"
    except (KeyboardInterrupt, Interrupted):
        status = "interrupted"
        raise
    except NonFinite as error:
        raise NonFinite(f"{error}; {last_good(worker.run_dir)}") from None
    finally:
        console.close()
        for sink in sinks:
            sink.close(status)
    if speaks:
        report.closing(console, config, worker, start, last_saved, value)
    close_mesh()
    return {"value": value}


def timed_step(
    run: Run, config: Config, step: int, stream: Iterator[dict[str, Tensor]]
) -> dict[str, Any]:
    """Take a batch, train on it, and measure: a whole record for metrics.jsonl."""
    begin = time.perf_counter()
    record = training_step(run, config, step, next(stream))
    if run.mesh.device.type == "cuda":
        torch.cuda.synchronize()  # the update's kernels belong to this step
    return record | measure(run, config, time.perf_counter() - begin)


def training_step(run: Run, config: Config, step: int, batch: dict[str, Tensor]) -> dict[str, Any]:
    """One optimizer step on this dp rank's part of a batch; the step's numbers."""
    loss, _ = run.pipeline.train(*on_device(batch, run.mesh))
    norm = gradient_norm(run.parameters, run.mesh)
    record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}
    check_finite(record, run)
    lr = update(run, config, step, norm)
    for part in run.parts:
        part.optimizer.zero_grad()
    return record | {"lr": lr, "tokens": step * config.batch_size * config.seq_len}


def update(run: Run, config: Config, step: int, norm: Tensor) -> float:
    """Clip by the global norm and update all parameters; returns the learning rate."""
    if config.optimizer.clip is not None:
        clip_gradients(run.parameters, norm, config.optimizer.clip)
    for part in run.parts:
        lr = set_lr(part.optimizer, config, step)
        part.optimizer.step()
    return lr


def validate(run: Run, config: Config, data: Data) -> float:
    """Loss in nats a token over the validation batches, the same ones each time."""
    run.train_mode(False)
    total = torch.zeros(2, dtype=torch.float64)
    for batch in validation_batches(data.validation, config, dp_rank=run.mesh.dp_rank):
        loss, tokens = run.pipeline.evaluate(*on_device(batch, run.mesh))
        total += torch.tensor([loss.item() * tokens.item(), tokens.item()])
    run.train_mode(True)
    return (total[0] / total[1]).item()


def on_device(batch: dict[str, Tensor], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [batch / dp, T], on this rank's device."""
    if batch.keys() != {"inputs", "targets"}:
        raise ValueError(
            f"data: a batch has {', '.join(batch)}; a model takes inputs and targets, no others"
        )
    return tuple(batch[key].to(mesh.device, non_blocking=True) for key in ("inputs", "targets"))


def measure(run: Run, config: Config, seconds: float) -> dict[str, Any]:
    """What a step cost: the slowest rank's time, the largest rank's peak memory."""
    memory = peak_memory(run.mesh.device)
    if run.mesh.world_size > 1:
        mine = torch.tensor([seconds, memory], dtype=torch.float64, device=run.mesh.device)
        seconds, memory = run.mesh.max(mine).tolist()
    speed = config.batch_size * config.seq_len / seconds
    record = {"tokens_per_second": speed, "step_seconds": seconds, "memory_bytes": int(memory)}
    peak = peak_flops(run.mesh.device, config.precision.name)
    if peak is not None and run.draft.flops_per_token is not None:
        record["mfu"] = speed * run.draft.flops_per_token / (peak * run.mesh.world_size)
    return record


def is_due(step: int, every: int, anyway: bool) -> bool:
    """Every so many steps (0 = never), or anyway."""
    return anyway or (every > 0 and step % every == 0)


def open_on_every_rank(config: Config, worker: Worker) -> Data:
    """Open the data; one process a machine prepares it (tokenizes) before the others read.

    To be called before there is a process group: preparing may take longer than its timeout.
    """
    if worker.local_rank == 0:
        data = open_data(config)
    meet(worker, "data", PREPARATION)
    return data if worker.local_rank == 0 else open_data(config)
