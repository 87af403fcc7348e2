"""The estimates of a plan: the time of a step and the memory of a rank."""

from __future__ import annotations

import pytest

from support.cells import GRID, slow
from support.models import LLAMA, tiny
from support.world import run_world
from titanlike.config.schema import (
    AdamW,
    Config,
    Custom,
    Muon,
    Schedule,
    SyntheticData,
)
from titanlike.data.loader import batches, open_data
from titanlike.device.memory import peak_memory, resident_memory, return_freed_memory
from titanlike.launch.worker import Worker
from titanlike.parallel.mesh import open_mesh
from titanlike.planning.estimate import estimate
from titanlike.training.build import build
from titanlike.training.draft import draft
from titanlike.training.guard import Guard
from titanlike.training.step import measured_step


def test_the_most_promising_have_not_too_small_microbatches():
    one, many = (tiny(pp=2, batch_size=256, schedule=Schedule("1f1b", count)) for count in (8, 256))
    assert estimate(one, draft(one)).time < estimate(many, draft(many)).time


_LARGE = {"dim": 512, "heads": 8, "kv_heads": 8, "ffn_dim": 1408, "layers": 8, "vocab_size": None}
STATE = {  # more parameters than activations
    "model": Custom("llama", _LARGE),
    "batch_size": 2,
    "pp": 2,
    "schedule": Schedule("1f1b", 1),
}


def grown(config: Config, worker: Worker) -> int:
    """Bytes that this rank's memory grew by at its peak, as metrics.jsonl has it less the start."""
    return_freed_memory()  # as a GPU's allocator does
    mesh = open_mesh(config, worker)
    before = resident_memory(mesh.device)
    stream = batches(open_data(config).train, config, dp_rank=mesh.dp_rank)
    run = build(config, mesh)
    for step in (1, 2):
        measured_step(run, config, step, stream, Guard(config, {}), worker)
    return peak_memory(mesh.device).allocated - before


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *slow(("many activations", {"pp": 2, "schedule": Schedule("gpipe", 4)})),
        *slow(("few in flight", {"pp": 2, "schedule": Schedule("1f1b", 4)}), marks=GRID),
        *slow(("sharded", {"dp": 2})),
        ("large logits", {"data": SyntheticData(vocab_size=32000), "batch_size": 4,
                          "model": Custom("llama", {**LLAMA, "layers": 2, "vocab_size": None})}),
        *slow(("state", STATE)),
        *slow(("state of Muon", {**STATE, "optimizer": Muon()})),
        *slow(("state of Muon, sharded", {**STATE, "dp": 2, "pp": 1, "optimizer": Muon()})),
        *slow(("state in bf16", {**STATE, "optimizer": AdamW(state_dtype="bf16")})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_estimate_is_near_what_the_fullest_rank_takes(tmp_path, name, layout):
    """Within 0.7 to 1.25 of the growth that is measured, less what libraries and gloo take."""
    sizes = {"dim": 256, "heads": 8, "kv_heads": 8, "ffn_dim": 704, "layers": 4}
    shared = {"model": Custom("llama", {**sizes, "vocab_size": None}), "seq_len": 256}
    config = tiny(**{**shared, "batch_size": 16, "data": SyntheticData(vocab_size=1000), **layout})
    measured = max(run_world(grown, config, tmp_path / "run")) - (45 << 20)
    expected = estimate(config, draft(config)).memory
    assert 0.7 < expected / measured < 1.25, f"{name}: {expected / 2**20:.0f} MiB"
