"""All that a rank's checkpoint holds of it, and what loading checkpoints into it gives."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from titanlike.core.checkpoint import storage
from titanlike.core.checkpoint.checkpointer import Checkpointer
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import open_mesh
from titanlike.core.distributed.placement import Part, optimizer_state
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.run_files import Events
from titanlike.core.training.build import Run, build


def opened(config: Config, worker: Worker) -> tuple[Run, Checkpointer]:
    """A built run whose optimizers have state, and its checkpointer."""
    run = build(config, open_mesh(config, worker))
    update(run)
    return run, checkpointer_of(run, config, worker.rank)


def checkpointer_of(run: Run, config: Config, rank: int = 1) -> Checkpointer:
    """rank: 0 = it writes events."""
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    events = Events(Path(config.run_dir), print if rank == 0 else None)
    return Checkpointer(run.stage_states, config, open_data(config), events)


def update(run: Run, leave_out: str = "nothing") -> None:
    """A step of each optimizer, with gradients of one."""
    for stage in run.stage_states:
        for name, parameter in stage.parameters():
            if leave_out not in name:
                parameter.grad = torch.ones_like(parameter)
        for optimizer in stage.optimizers:
            optimizer.step()
        stage.zero_grad()


def tensors(run: Run) -> list[tuple[str, torch.Tensor, Part | None]]:
    """Parameters and optimizer state, each with the part of the whole that it is."""
    found: list[tuple[str, torch.Tensor, Part | None]] = []
    for stage in run.stage_states:
        for name, parameter in stage.parameters():
            found.append((name, parameter.data, stage.part(name)))
            for key, value in optimizer_state(stage.optimizers, parameter).items():
                part = stage.part(name) if value.dim() else None
                found.append((f"{name}.{key}", value, part))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copied(run: Run) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor, _ in tensors(run)}


def fill(run: Run, value: float) -> None:
    for _, tensor, _ in tensors(run):
        local(tensor).fill_(value)


@dataclass(frozen=True)
class Loaded:
    """What a start has loaded: the step that it goes on from, or -1 and the error."""

    step: int
    error: str
    state: str  # a checksum of tensors and random generator
    read: dict[str, int] = field(default_factory=dict)  # file of step 6 -> bytes read


def load_each(_: Config, worker: Worker, configs: list[Config]) -> list[Loaded]:
    """Begin as each run would, one after the other, in ranks that are built once."""
    run, _ = opened(configs[0], worker)
    return [load(run, config, worker.rank) for config in configs]


def load_in_silence(config: Config, worker: Worker) -> Loaded:
    """`load`, in which no rank may hear all the others, as so many objects would reach each."""
    run, _ = opened(config, worker)

    def all_gather_object(*_: object, **__: object) -> None:
        raise AssertionError("each rank hears all others")

    torch.distributed.all_gather_object = all_gather_object
    return load(run, config, worker.rank)


def load(run: Run, config: Config, rank: int) -> Loaded:
    fill(run, -1)
    torch.manual_seed(rank)
    checkpointer, counts = checkpointer_of(run, config, rank), dict[str, int]()
    original, step, error = storage.open_regular, -1, ""

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.count(len(data))
            return data

        def readinto(self, buffer: Any) -> int:
            size = super().readinto(buffer)
            self.count(size)
            return size

        def count(self, size: int) -> None:
            name = Path(self.name).name
            counts[name] = counts.get(name, 0) + size

    def counted(path: str, *args: Any) -> Any:
        file = original(path, *args)
        return Counted(file.detach()) if "step-00000006" in str(path) else file

    storage.open_regular = counted
    try:
        step = checkpointer.resume().step
    except (ValueError, OSError) as raised:
        error = str(raised)
        assert "\n" not in error, error
    finally:
        storage.open_regular = original
        checkpointer.close()
    hasher = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for name, tensor in copied(run).items():
        hasher.update(name.encode() + tensor.contiguous().view(-1).numpy().tobytes())
    return Loaded(step, error, hasher.hexdigest(), counts)


def going_on(config: Config, run_dir: Path, **checkpoint: Any) -> Config:
    """The run in another folder."""
    settings = replace(config.checkpoint, **checkpoint)
    return replace(config, run_dir=str(run_dir), checkpoint=settings)
