"""The train step and the validation: plain functions of a run and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlike.config.schema import Config
from titanlike.data.loader import Batch, validation_batches
from titanlike.data.sources import Data
from titanlike.optim.learning_rate import learning_rate, set_lr
from titanlike.optim.optimizer import clip_gradients, gradient_norm
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.sharding import compute_dtype
from titanlike.training.build import Run
from titanlike.training.guard import Guard, Verdict


def train_step(
    run: Run, config: Config, step: int, batch: Batch, guard: Guard
) -> tuple[dict[str, Any], Verdict | None]:
    """One optimizer step on this dp rank's part of a batch; the step's numbers.

    A step whose numbers the guard rejects changes no parameter.
    """
    loss, _ = run.pipeline.train(to_device(batch, run.mesh, config))  # forward and backward
    norm = gradient_norm(run.owned, run.mesh)
    record = {"step": step, "loss": loss.item(), "grad_norm": norm.item()}
    verdict = guard.judge(record, run)
    lr = optimizer_step(run, config, step, norm) if verdict is None else 0.0
    for state in run.stage_states:
        state.optimizer.zero_grad()
    return record | {"lr": lr, "tokens": step * config.batch_size * config.seq_len}, verdict


def optimizer_step(run: Run, config: Config, step: int, norm: Tensor) -> float:
    """Clip by the global norm, update the parameters and the running statistics of batch norms;
    returns the learning rate."""
    if config.optimizer.clip is not None:
        clip_gradients(run.parameters, norm, config.optimizer.clip)
    for state in run.stage_states:
        set_lr(state.optimizer, config, step)
        state.optimizer.step()
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
    for batch in validation_batches(data.validation, config, dp_rank=run.mesh.dp_rank):
        if stopped := should_stop is not None and bool(should_stop()):
            break
        loss, tokens = run.pipeline.evaluate(to_device(batch, run.mesh, config))
        total += torch.tensor([loss.item() * tokens.item(), tokens.item()])
    run.train_mode(True)
    return None if stopped else (total[0] / total[1]).item()


def to_device(batch: Batch, mesh: Mesh, config: Config) -> Batch:
    """A batch on this rank's device, the model's floating-point inputs in the compute dtype."""
    moved = {name: value.to(mesh.device, non_blocking=True) for name, value in batch.items()}
    dtype = compute_dtype(config)
    return {
        name: value.to(dtype) if value.is_floating_point() and name != "targets" else value
        for name, value in moved.items()
    }
