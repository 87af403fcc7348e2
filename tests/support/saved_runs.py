"""A small run in real ranks, and what it leaves: for tests that harm its checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from support.models import tiny
from support.runs import train_one
from support.world import run_world
from titanlike.core.checkpoint.format import checksum
from titanlike.core.checkpoint.integrity import MODEL
from titanlike.core.checkpoint.storage import INDEX, MARKER, STATE, Storage
from titanlike.core.checkpoint.writer import prepare_save, write_checkpoint
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.use.checkpoint_commands import main


def a_run(run_dir: Path, pp: int = 1, dp: int = 1, steps: int = 8, **checkpoint: Any) -> Config:
    """8 steps with checkpoints of steps 3 and 6."""
    settings = {"every": 3, "last": False, "keep": 0} | checkpoint
    return tiny(
        pp=pp,
        dp=dp,
        layers=2,
        steps=steps,
        checkpoint=Checkpoint(**settings),
        run_dir=str(run_dir),
    )


def train_or_refuse(_: Config, worker: Worker, configs: list[Config]) -> list[str]:
    """Train each, one after the other; what each raised, "" for a run that came to its end.

    With several ranks, of which the first error stops some in the middle, that is raised.
    """
    raised = []
    for number, config in enumerate(configs):
        try:
            train_one(config, worker, number)
            raised.append("")
        except (ValueError, OSError) as error:
            if worker.world_size > 1:
                raise
            raised.append(f"{type(error).__name__}: {error}")
            dist.destroy_process_group()
    return raised


def train_all(*configs: Config, folder: Path | None = None) -> list[str]:
    """`train_or_refuse` in ranks of the first one's mesh; what rank 0 says.

    folder: for rank0.out, the console's output; None = the first one's run directory.
    """
    folder = folder or Path(configs[0].run_dir)
    for config in configs:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    limit = max(60, 4 * len(configs))  # seconds: one after the other, half a second each alone
    return run_world(train_or_refuse, configs[0], folder, list(configs), timeout=limit)[0]


# a test's module takes both: saved, run = saved_runs.saved, saved_runs.run
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of 8 steps with checkpoints of steps 3 and 6."""
    config = a_run(tmp_path_factory.mktemp("saved") / "run")
    assert train_all(config) == [""]
    return config


@pytest.fixture
def run(saved: Config, tmp_path: Path) -> Config:
    """A copy of it, which a test may harm."""
    shutil.copytree(saved.run_dir, tmp_path / "run")
    return replace(saved, run_dir=str(tmp_path / "run"))


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    found = read_jsonl(path) if path.exists() else []
    return [event for event in found if event["event"] == kind]


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, position: int | None = None, bit: int = 6) -> None:
    """Flip a bit of a file; position: of its byte, None = in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1 << bit
    path.write_bytes(data)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Make index and marker fit state.json after a change of the index, as who plants one would."""
    text, state = (folder / INDEX).read_text(), (folder / STATE).read_bytes()
    content = json.loads(text)
    content["state.json"] = [len(state), checksum(state)]
    change(content)
    pieces = content.pop("pieces")
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(of)}" for name, of in pieces.items())
    head = json.dumps(content).removesuffix("}")
    data = f'{head},\n"pieces": {{\n{lines}\n}}\n}}\n'.encode()
    (folder / INDEX).write_bytes(data)
    Storage(folder).write(MARKER, checksum(data).encode())


def edited(source: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with the model of `source` after a change."""
    number = len(list(tmp_path.iterdir()))
    file, folder = tmp_path / f"{number}.safetensors", tmp_path / f"{number}" / "model-00000000"
    assert main(["consolidate", str(source), str(file)]) == 0
    tensors = load_file(file)
    change(tensors)
    save = prepare_save({MODEL + name: tensor for name, tensor in tensors.items()})
    state = {"step": 0, "progress": {}, "val_loss": None, "same": {}}
    folder.parent.mkdir()
    write_checkpoint(Storage(folder), state, save, None)
    return folder
