"""What one layout saves, any other loads: parameters and optimizer state, to the last bit."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cells import cells, slow
from support.models import tiny
from support.world import run_world
from titanlike.checkpoint.checkpointer import Checkpointer, Progress
from titanlike.checkpoint.compare import compare
from titanlike.checkpoint.discovery import step_name
from titanlike.checkpoint.integrity import read_state
from titanlike.checkpoint.storage import Storage
from titanlike.checkpoint.tensor_index import read_entries
from titanlike.config.schema import (
    BalanceSplit,
    Checkpoint,
    Config,
    ConstantLr,
    Model,
    SyntheticData,
)
from titanlike.data.loader import open_data
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.metrics.events import Events
from titanlike.metrics.sinks import read_jsonl
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.parallel.tp.part import Part, local_of
from titanlike.training.build import Run, build
from titanlike.training.train import train

LAYERS = 4
# 24 sequences divide among 1, 2, 3 and 4 ranks; 32 channels among 3 do not
# parts of 97 tokens differ among tp ranks, and four of them have two of keys' and values' heads
COMMON = {"layers": LAYERS, "batch_size": 24, "data": SyntheticData(vocab_size=97)}
LAYOUTS = {
    name: tiny(*mesh, tied=True, **COMMON, **changes)
    for name, mesh, changes in (
        ("one", (1, 1), {}),
        ("dp3", (1, 3), {}),
        ("dp4 in two replicas", (1, 4), {"replicate": 2}),
        ("pp2 interleaved", (2, 1, "interleaved1f1b"), {}),
        ("pp2 x dp2 in a V", (2, 2, "zbvzerobubble"), {}),
        ("pp3 uneven", (3, 1, "gpipe"), {"split": BalanceSplit(balance=[1, 2, 1])}),
        ("tp4", (1, 1), {"tp": 4}),
        ("pp2 x tp2 in a V", (2, 1, "zbvzerobubble"), {"tp": 2}),
        ("dp3 x tp2", (1, 3), {"tp": 2}),
        ("dp2 x tp2 in two replicas", (1, 2), {"replicate": 2, "tp": 2}),
    )
}
PARAMETERS = LAYERS * 9 + 2  # the head's is the embedding's


@pytest.mark.slow
def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    for name, config in LAYOUTS.items():
        run_world(save, replace(config, checkpoint=Checkpoint()), tmp_path / name, name)
    for name, config in LAYOUTS.items():
        results = run_world(load_all, config, tmp_path / f"to {name}", str(tmp_path))
        loaded = {(source, key) for found in results for source, key in found}
        # model, exp_avg, exp_avg_sq and step of every parameter, in every one of the layouts
        assert len(loaded) == len(LAYOUTS) * 4 * PARAMETERS, name


@pytest.mark.parametrize(
    "divided",
    cells(
        {
            "packed matrices": {"dp": 2, "tp": 2, "family": "gpt2"},
        },
        {
            "shards of parts": {"dp": 2, "tp": 2, "tied": False, "mode": "async_process"},
            "repeated heads": {"tp": 4, "tied": False},
            "packed matrices among four": {"tp": 4, "family": "gpt2"},
        },
        {
            "shards of parts": {"dp": 2, "tp": 2, "tied": False, "mode": "async_process"},
        },
    ),
)
def test_parts_are_saved_as_the_whole_and_loaded_from_it(divided: dict, tmp_path: Path) -> None:
    """With every element in the files once, and as much in each rank's."""
    changes = COMMON | {"layers": 2} | divided
    mode = changes.pop("mode", "sync")
    parts = tiny(dp=changes.pop("dp", 1), **changes, checkpoint=Checkpoint(mode=mode))
    whole = replace(parts, dp=1, tp=1)
    for name, config in (("parts", parts), ("whole", whole)):
        run_world(save, config, tmp_path / name, name)
    for name, config in (("parts", parts), ("whole", whole)):
        sources = "parts", "whole"
        found = run_world(load_all, config, tmp_path / f"to {name}", str(tmp_path), sources)
        assert all(found)
    paths = [str(tmp_path / name / "checkpoints" / "step-00000007") for name in ("parts", "whole")]
    assert compare(Console(steps=1), *paths, 0.0, all_names=False)
    files: Counter[str] = Counter()
    for entry in read_entries(Storage(paths[0])):
        assert sum(math.prod(shard.sizes) for shard in entry.shards) == entry.numel, entry.name
        for shard in entry.shards:
            files[shard.file] += 4 * math.prod(shard.sizes) * (not entry.name.startswith("rng."))
    assert len(files) == parts.world_size
    assert max(files.values()) < 1.3 * min(files.values())


def save(config: Config, worker: Worker, name: str) -> None:
    """Fill this rank's share with what `truth` says, and save it as step 7."""
    run, checkpointer = opened(config, worker)
    for key, tensor, part in tensors(run):
        local(tensor).copy_(local_truth(key, tensor, part))
    torch.manual_seed(100 + worker.rank)
    progress = Progress(step=7, left_out=3, value=0.1 + 0.2)
    checkpointer.save(progress)
    checkpointer.finish(progress, done=False)
    checkpointer.close()
    close_mesh()


def load_all(
    config: Config, worker: Worker, root: str, sources: Iterable[str] = LAYOUTS
) -> list[tuple[str, str]]:
    """Load each layout's checkpoint; what of it this rank has, all of it compared with `truth`."""
    run, _ = opened(config, worker)
    found = []
    for source in sources:
        for _, tensor, _ in tensors(run):
            local(tensor).fill_(-1)
        here = replace(config, run_dir=str(Path(root) / source), checkpoint=Checkpoint())
        checkpointer = Checkpointer(run.stage_states, here, open_data(here), Events(Path(), None))
        torch.manual_seed(7)
        assert checkpointer.resume() == Progress(step=7, left_out=3, value=0.1 + 0.2)
        # tensor-parallel ranks draw some numbers together
        saved = read_state(checkpointer._folder.at(step_name(7)))
        alike = (saved["world_size"], saved["layout"]["tp"]) == (config.world_size, config.tp)
        assert torch.initial_seed() == (100 + worker.rank if alike else 7), source
        for key, tensor, part in tensors(run):
            assert torch.equal(local(tensor), local_truth(key, tensor, part)), (source, key)
            found.append((source, key))
    close_mesh()
    return found


def opened(config: Config, worker: Worker) -> tuple[Run, Checkpointer]:
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    for parameter in run.parameters:
        parameter.grad = torch.zeros_like(parameter)
    for part in run.stage_states:
        for optimizer in part.optimizers:
            optimizer.step()  # so that there is a state
        part.zero_grad()
    events = Events(worker.run_dir, None)
    return run, Checkpointer(run.stage_states, config, open_data(config), events)


def tensors(run: Run) -> list[tuple[str, torch.Tensor, Part | None]]:
    """All of this rank's, with the part of the whole that it is."""
    found = []
    for stage in run.stage_states:
        for name, parameter in stage.parameters():
            found.append((name, parameter.data, stage.part(name)))
            for key, value in stage.optimizer_state(parameter).items():
                part = stage.part(name) if value.dim() else None
                found.append((f"{name}.{key}", value, part))
    return found


def local_truth(key: str, tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """What this rank has of it."""
    whole = truth(key, part.shape if part else tensor.shape)
    return local_of(tensor, part, whole.__getitem__)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def truth(key: str, shape: torch.Size) -> torch.Tensor:
    """The whole tensor of a name."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_a_run_goes_on_in_other_dimensions_as_in_one_process(tmp_path: Path) -> None:
    settings = COMMON | {"layers": 2, "lr": ConstantLr(warmup=0)}
    steps = {"checkpoint": Checkpoint(last=True, model_only="bf16"), "steps": 4}
    layouts = [{"tp": 2}, {"dp": 2}, {"pp": 2, "tp": 2}, {}]
    run_world(train, tiny(**settings, steps=4), tmp_path / "whole")
    plan = {"layers.*.ffn.gate": "colwise", "layers.*.ffn.up": "colwise"}
    for step, layout in enumerate(layouts, 1):
        config = tiny(**layout, **settings | steps | {"steps": step})
        if layout == layouts[2]:  # with a plan of one's own, which makes no other run of it
            own = plan | {"layers.*.ffn.down": "rowwise"}
            config = replace(config, model=replace(config.model, tp_plan=own))
        run_world(train, config, tmp_path / "moved")
    losses = [
        [row["loss"] for row in read_jsonl(tmp_path / run / "metrics.jsonl")]
        for run in ("whole", "moved")
    ]
    assert len(losses[1]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    sizes = {}
    for step in (1, 4):  # of tp=2, of one process
        folder = tmp_path / "moved" / "checkpoints" / f"model-{step:08d}"
        sizes[step] = {
            one.name: (one.shape, one.dtype) for one in read_entries(Storage(str(folder)))
        }
    assert sizes[1] == sizes[4] and {dtype for _, dtype in sizes[1].values()} == {"bfloat16"}


@pytest.mark.slow
def test_a_run_goes_on_with_other_experts_and_sequences(tmp_path: Path) -> None:
    """ep=2, then dp=2, cp=2, pp=2: with the losses and the balance of one process."""
    sizes = {"vocab_size": None, "dim": 32, "heads": 4, "kv_heads": 2, "layers": 2}
    mixture = Model("moe", sizes | {"experts": 4, "expert_dim": 32, "bias_rate": 0.01})
    settings = COMMON | {"model": mixture, "lr": ConstantLr(warmup=0)}
    layouts = [{"dp": 2, "ep": 2}, {"dp": 2}, {"cp": 2}, {"pp": 2}]
    run_world(train, tiny(**settings, steps=4), tmp_path / "whole")
    for step, layout in enumerate(layouts, 1):
        config = tiny(**layout, **settings, steps=step, checkpoint=Checkpoint(last=True))
        run_world(train, config, tmp_path / "moved")
    whole, moved = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("whole", "moved"))
    assert len(moved) == 4
    for key in ("loss", "grad_norm", "busiest_expert"):
        assert [row[key] for row in moved] == pytest.approx([row[key] for row in whole], abs=1e-5)


@pytest.mark.parametrize("mode", [*slow("sync", "async", "async_pinned"), "async_process"])
def test_a_background_save_holds_the_state_of_its_step(mode: str, tmp_path: Path) -> None:
    """Parameters change while it is written, and again before the next one."""
    config = tiny(2, 1, layers=2, steps=6, checkpoint=Checkpoint(every=1, mode=mode))
    found = run_world(save_and_change, config, tmp_path)
    assert all(found)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-00000001", "step-00000002", "step-00000003"]


def save_and_change(config: Config, worker: Worker) -> bool:
    run, checkpointer = opened(config, worker)
    slow_down_writing()
    for step in (1, 2, 3):
        for _, tensor, _ in tensors(run):
            local(tensor).fill_(step)
        begin = time.monotonic()
        checkpointer.save(Progress(step=step))
        waited = time.monotonic() - begin
        if config.checkpoint.mode != "sync" and step == 1:
            assert waited < 0.25, "training waited for a write in the background"
        checkpointer.before_update()
        for _, tensor, _ in tensors(run):
            local(tensor).fill_(-1)
    checkpointer.finish(Progress(step=3), done=True)
    checkpointer.close()
    for step in (1, 2, 3):
        path = Path(config.run_dir) / "checkpoints" / f"step-{step:08d}"
        here = replace(config, checkpoint=Checkpoint(resume=str(path)), run_dir="nowhere")
        other = Checkpointer(run.stage_states, here, open_data(here), Events(Path(), None))
        assert other.resume().step == step
        for key, tensor, _ in tensors(run):
            assert (local(tensor) == step).all(), (step, key)
    close_mesh()
    return True


def slow_down_writing() -> None:
    fsync = os.fsync

    def slow(handle: int) -> None:
        time.sleep(0.05)  # some eight times a save
        fsync(handle)

    os.fsync = slow
