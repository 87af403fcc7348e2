"""The training job: what every rank does from the first step to the last.

One step reads like the textbook: loss and gradients, their norm, clip, learning rate, update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike import report
from titanlike.build import Run, build
from titanlike.checkpoint import store
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.data.loader import batches, open_data, validation_batches
from titanlike.data.sources import Data
from titanlike.guard import NonFinite, check_finite
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.metrics.open import open_sinks, where
from titanlike.optimization import clip_gradients, gradient_norm, set_lr
from titanlike.parallel.device import peak_flops, peak_memory
from titanlike.parallel.mesh import Mesh, close_mesh, open_mesh


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """Train to `config.steps`; returns {"value": last validation loss (or loss)}."""
    mesh = open_mesh(config, worker)
    data = open_on_every_rank(config, worker)
    run = build(config, mesh)
    state = resume(run, config, worker.run_dir)
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
                save(run, config, worker.run_dir, step, value)
                last_saved = step
        status = "completed"
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


# --- data and checkpoints ----------------------------------------------------------------------


def open_on_every_rank(config: Config, worker: Worker) -> Data:
    """Open the data; one process a machine prepares it (tokenizes) before the others read."""
    if worker.local_rank == 0:
        data = open_data(config)
    if worker.world_size > 1:
        dist.barrier()
    return data if worker.local_rank == 0 else open_data(config)


def save(run: Run, config: Config, run_dir: Path, step: int, value: float | None) -> None:
    """Write the checkpoint of a step."""
    about = {
        "value": value,
        "world_size": run.mesh.world_size,
        "layout": {key: getattr(config, key) for key in ("pp", "dp", "replicate")},
        "data": data_order(config),
    }
    store.save(run_dir / "checkpoints", step, run.parts, about)


def resume(run: Run, config: Config, run_dir: Path) -> dict[str, Any]:
    """Load what `checkpoint.resume` names; its state, empty for a fresh start."""
    path = store.find(config.checkpoint.resume, run_dir)
    if path is None:
        return {}
    state = store.load(path, run.parts)
    for key, value in state["data"].items():
        if value != data_order(config)[key]:
            raise ValueError(
                f"{key}={data_order(config)[key]}: {path} was made with {value}, and the position "
                f"in the data depends on it; write {key}={value}, another run_dir, or "
                "checkpoint.resume=never"
            )
    return state


def data_order(config: Config) -> dict[str, Any]:
    """What the order of the samples depends on, apart from the step."""
    return {"seed": config.seed, "batch_size": config.batch_size, "seq_len": config.seq_len}


def last_good(run_dir: Path) -> str:
    """From where a run that diverged can go on."""
    path = store.newest(run_dir / "checkpoints")
    if path is None:
        return "there is no checkpoint yet: write a smaller optimizer.lr or a longer lr.warmup"
    return f"the last good checkpoint is {path}: start again from it with a smaller optimizer.lr"
