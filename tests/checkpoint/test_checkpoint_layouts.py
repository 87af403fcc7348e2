"""What one layout saves, any other loads: parameters and optimizer state, to the last bit."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.families import moe
from support.models import tiny
from support.records import losses
from support.saved_runs import checkpoint, reseal
from support.saved_state import checkpointer_of, fill, local, opened, tensors
from support.world import run_world
from titanlike.core.checkpoint import format
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.checkpoint.integrity import (
    MODEL,
    OPTIMIZER,
    RNG,
    open_header,
    read_index,
    read_state,
)
from titanlike.core.checkpoint.reader import ShardReader
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.pipeline import BalanceSplit
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import close_mesh
from titanlike.core.distributed.placement import Part, local_of
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training.loop import train
from titanlike.hf.conversion import compare_digests

# 24 sequences divide among 1, 2, 3 and 4 ranks; 32 channels among 3 do not
# parts of 97 tokens differ among tp ranks, and four of them have two of keys' and values' heads
COMMON = {"batch_size": 24, "tied": True, "data": SyntheticData(vocab_size=97)}
GPT2 = COMMON | {"layers": 2, "family": "gpt2"}  # with packed matrices
V, PARTS = tiny(pp=2, schedule="zbvzerobubble", **GPT2), tiny(dp=2, tp=2, **GPT2)
LAYOUTS = {
    name: tiny(*mesh, **COMMON, layers=4, **changes)
    for name, mesh, changes in (
        ("one", (1, 1), {}),
        ("dp3", (1, 3), {}),
        ("pp3 uneven", (3, 1, "gpipe"), {"split": BalanceSplit(balance=[1, 2, 1])}),
        ("tp4", (1, 1), {"tp": 4}),
        ("dp2 x tp2 in two replicas", (1, 2), {"replicate": 2, "tp": 2}),
    )
}
BLOCK = 256  # bytes, so that tensors have several checksums
SAVED = Progress(step=7, left_out=3, value=0.1 + 0.2)


def test_a_checkpoint_of_one_layout_is_loaded_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element is in the files once, and as many in each rank's; also a warm start's."""
    monkeypatch.setattr(format, "BLOCK", BLOCK)
    run_world(save_and_load, V, tmp_path / "V", [])
    run_world(save_and_load, PARTS, tmp_path / "parts", ["V"])
    shutil.copytree(tmp_path / "V", tmp_path / "of tp2")
    paths = {name: checkpoint(tmp_path / name, 7) for name in ("V", "parts", "of tp2")}
    state = (paths["of tp2"] / "state.json").read_text()
    (paths["of tp2"] / "state.json").write_text(state.replace('"tp": 1', '"tp": 2'))
    reseal(paths["of tp2"])
    run_world(save_and_load, V, tmp_path / "V", ["parts", "V", "of tp2"], False)
    whole, parts = str(paths["V"]), str(paths["parts"])
    assert compare_digests(Console(steps=1), whole, parts)
    files: Counter[str] = Counter()
    header = open_header(Storage(parts))
    for name, pieces in header.pieces().items():
        assert sum(math.prod(piece.sizes) for piece in pieces) == header.tensors[name].numel, name
        for piece in pieces:
            files[piece.file[:10]] += math.prod(piece.sizes) * (not name.startswith(RNG))
    assert len(files) == 4 and max(files.values()) < 1.3 * min(files.values())
    rows = ShardReader.open("RUN", parts)  # which reads blocks of rows and columns by itself
    for name, entry in rows.entries(MODEL).items():
        found = torch.cat([*rows.rows(MODEL + name, most_bytes=300)])
        assert torch.equal(found, truth(name, entry.shape)), name


@pytest.mark.grid
def test_every_layout_loads_the_checkpoint_of_every_other(tmp_path: Path) -> None:
    for name, config in LAYOUTS.items():
        run_world(save_and_load, config, tmp_path / name, [])
    for name, config in LAYOUTS.items():
        run_world(save_and_load, config, tmp_path / name, list(LAYOUTS), False)


def save_and_load(config: Config, worker: Worker, sources: list[str], saves: bool = True) -> None:
    """Save what `truth` says of this rank's share as step 7; then load it of other layouts."""
    format.BLOCK = BLOCK
    run, checkpointer = opened(config, worker)
    if saves:
        for key, tensor, part in tensors(run):
            local(tensor).copy_(local_truth(key, tensor, part))
        torch.manual_seed(100 + worker.rank)
        checkpointer.save(SAVED)
        checkpointer.finish(SAVED, done=False)
    for source in sources:
        folder = Path(config.run_dir).parent / source
        fill(run, -1)
        loading = checkpointer_of(run, replace(config, run_dir=str(folder)))
        torch.manual_seed(7)
        assert loading.resume() == SAVED
        path = Storage(checkpoint(folder, 7))
        saved = read_state(path)
        # tensor-parallel ranks draw some numbers together
        alike = (saved["world_size"], saved["layout"]["tp"]) == (config.world_size, config.tp)
        assert torch.initial_seed() == (100 + worker.rank if alike else 7), source
        loaded = set()
        for key, tensor, part in tensors(run):
            assert torch.equal(local(tensor), local_truth(key, tensor, part)), (source, key)
            loaded.add(key)
        there = read_index(path).tensors
        whole = {name.removeprefix(MODEL).removeprefix(OPTIMIZER) for name in there}
        assert loaded <= whole | {f"{name}.step" for name in whole}
        if source != sources[0]:
            continue
        fill(run, -1)
        start = Checkpoint(start_from=str(folder))
        new = replace(config, run_dir=str(folder.parent / "new"), checkpoint=start)
        assert checkpointer_of(run, new).resume() == Progress()
        parameters = {name for stage in run.stage_states for name, _ in stage.parameters()}
        for key, tensor, part in tensors(run):
            true = local_truth(key, tensor, part) if key in parameters else torch.tensor(-1.0)
            assert (local(tensor) == true).all(), (source, key)
    close_mesh()


def local_truth(key: str, tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """What this rank has of it."""
    whole = truth(key, part.shape if part else tensor.shape)
    return local_of(tensor, part, whole)


def truth(key: str, shape: torch.Size) -> torch.Tensor:
    """The whole tensor of a name."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_a_run_resumed_in_another_layout_matches_one_process(tmp_path: Path) -> None:
    """With the losses of one process; a plan for tensor parallelism makes no other run of it."""
    settings = COMMON | {"layers": 2, "lr": ConstantLr(warmup=0)}
    plan = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    whole = tiny(**settings, steps=4)
    planned = whole.model.args | {"tie_word_embeddings": True}
    own = replace(
        whole.model, args=planned, tp_plan=plan | {"model.layers.*.mlp.down_proj": "rowwise"}
    )
    layouts = [
        (1, tiny(tp=2, **settings | {"model": own})),
        # two copies of the tied weight on a rank, each with optimizer state that goes on
        (4, tiny(pp=2, schedule="zbvzerobubble", **settings)),
    ]
    run_world(train, whole, tmp_path / "whole")
    for steps, config in layouts:
        saving = Checkpoint(last=True, model_only="bf16")
        run_world(train, replace(config, steps=steps, checkpoint=saving), tmp_path / "moved")
    moved = losses(tmp_path / "moved")
    assert len(moved) == 4
    assert moved == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    sizes = []
    for step in (1, 4):  # of tp=2, of pp=2
        folder = Storage(tmp_path / "moved" / "checkpoints" / f"model-{step:08d}")
        sizes.append({name: one[1:] for name, one in read_index(folder).tensors.items()})
    assert sizes[0] == sizes[1] and {dtype for dtype, _ in sizes[0].values()} == {"bfloat16"}


@pytest.mark.slow
def test_a_run_resumes_with_another_ep_and_cp(tmp_path: Path) -> None:
    """Experts over dp's ranks, then over tp's, over both, over none and so on: with the losses and
    the balance of one process."""
    settings = {"batch_size": 24, "data": SyntheticData(vocab_size=97), "model": moe()}
    settings |= {"lr": ConstantLr(warmup=0)}
    layouts = [
        *({"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"dp": 2}, {"dp": 2, "tp": 2, "ep": 4}),
        *({"cp": 2}, {"cp": 2, "tp": 2, "ep": 4}, {"tp": 4, "ep": 4}, {"tp": 2}, {"pp": 2}),
    ]
    run_world(train, tiny(**settings, steps=len(layouts)), tmp_path / "whole")
    for step, layout in enumerate(layouts, 1):
        config = tiny(**layout, **settings, steps=step, checkpoint=Checkpoint(last=True))
        run_world(train, config, tmp_path / "moved")
    whole, moved = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("whole", "moved"))
    assert len(moved) == len(layouts)
    for key in ("loss", "grad_norm", "busiest_expert"):
        assert [row[key] for row in moved] == pytest.approx([row[key] for row in whole], abs=1e-5)
