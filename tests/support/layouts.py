"""Layouts that are verified: every dimension of a config, and tables in which all values meet.

`table(n)` has each value of each dimension with each one of every other dimension (n=2), or of every
two others (n=3), wherever they do not exclude each other (`EXCLUDED`). It depends on this file alone,
so every machine has the same cells; a cell's name says what it does not share with the first values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import covertable

from support.families import hf, llama, moe, ours
from support.models import SCHEDULES, schedule_of, tiny
from support.planned_models import PLAN
from titanlike.config.keys import Model
from titanlike.config.schema import (
    VARIANTS,
    ActivationCheckpoint,
    AdamW,
    BalanceSplit,
    ChunkedCrossEntropy,
    Config,
    CrossEntropy,
    Custom,
    EvenSplit,
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    Float8Precision,
    Fsdp,
    Muon,
    PointSplit,
    Precision,
    SelectiveActivationCheckpoint,
    Sgd,
    SyntheticData,
    TextData,
)
from titanlike.pipeline.from_config import microbatch_problem
from titanlike.pipeline.schedules import LOOPED, V_SCHEDULES

LAYERS = 4
ZERO_BUBBLE = ("interleavedzerobubble", "zbh1", "zbh2", "vhalf", "vmin", "zbvzerobubble", "dualpipev")
MODELS = {
    "llama": lambda: llama(layers=LAYERS),
    "llama tied": lambda: llama(layers=LAYERS, tied=True),
    "gpt2 tied": lambda: ours("gpt2", layers=LAYERS, max_seq_len=None, tied=True),
    "moe": lambda: moe(layers=LAYERS, shared_experts=1, balance_loss=0.01, z_loss=0.001),
    "hf qwen3 tied": lambda: hf("qwen3", vocab_size=None, tie_word_embeddings=True),
    "custom": lambda: Model(
        "support.planned_models.Own", {"vocab_size": None, "max_seq_len": 16}, PLAN
    ),
}
DATA = {
    "random": lambda: SyntheticData(vocab_size=64),
    "unequal tokens": lambda: Custom("support.data.uneven", {"vocab_size": 64}),
    "lengths": lambda: Custom("support.samples.phrases", {}),
    "documents": lambda: TextData(documents=True),
}
FSDP = {
    "zero auto": Fsdp,
    "zero 1": lambda: Fsdp(1),
    "zero 2": lambda: Fsdp(2),
    "zero 3": lambda: Fsdp(3),
    "offload": lambda: Fsdp(cpu_offload=True),
}
PRECISION = {
    "fp32": Precision,
    "bf16": lambda: Precision("bf16"),
    "float8": lambda: Float8Precision(min_features=16),
}
RECOMPUTE = {
    "none": ActivationCheckpoint,
    "full": lambda: ActivationCheckpoint("full"),
    "selective": SelectiveActivationCheckpoint,
    "every": lambda: EveryActivationCheckpoint(every=3),
    "fit": lambda: FitActivationCheckpoint(memory=700_000),
}
OPTIMIZER = {
    "adamw": AdamW,
    "adamw bf16": lambda: AdamW(state_dtype="bf16"),
    "sgd": lambda: Sgd(momentum=0.9, clip=0.01),
    "muon": Muon,
}
LOSS = {"whole": CrossEntropy, "chunks": lambda: ChunkedCrossEntropy(chunk=16)}
DIMENSIONS: dict[str, list[Any]] = {
    "schedule": ["1f1b", *(name for name in SCHEDULES if name != "1f1b")],
    "pp": [2, 1, 4],
    "dp": ["1", "2", "2 replicas", "2x2"],
    "tp": [1, 2],
    "cp": ["1", "gather", "ulysses", "ring"],
    "ep": [1, 2],
    "model": [*MODELS],
    "data": [*DATA],
    "fsdp": [*FSDP],
    "precision": [*PRECISION],
    "recompute": [*RECOMPUTE],
    "optimizer": [*OPTIMIZER],
    "loss": [*LOSS],
    "split": ["even", "inside", "unequal"],
    "weight_gradients": ["deferred", "together"],
    "microbatches": ["auto", "fewest"],
}
Cell = dict[str, Any]
SHARDED = ("zero 2", "zero 3")
TWO_STAGES = (*LOOPED, *V_SCHEDULES, "csv")  # a rank
DP = {"1": 1, "2": 2, "2 replicas": 2, "2x2": 4}
BLOCKS = {  # of a model: the path of a block, and of a module inside of it
    "custom": ("blocks.{}", "blocks.{}.gate_up"),
    "gpt2 tied": ("layers.{}", "layers.{}.ffn_norm"),
    "hf qwen3 tied": ("model.layers.{}", "model.layers.{}.mlp"),
}


def ranks(cell: Cell) -> int:
    """Processes of a cell."""
    return cell["pp"] * DP[cell["dp"]] * cell["tp"] * (1 if cell["cp"] == "1" else 2)


def shards(dp: str, cp: str) -> int:
    """Ranks that have different parts of a parameter."""
    return (2 if dp in ("2", "2x2") else 1) * (1 if cp == "1" else 2)


def split_of(cell: Cell) -> Any:
    """The stages of a cell: even, some that begin inside of a block, or unequal and some empty."""
    count = cell["pp"] * (2 if cell["schedule"] in TWO_STAGES else 1)
    if cell["split"] == "inside":
        names = BLOCKS.get(cell["model"], ("layers.{}", "layers.{}.ffn"))
        points = [name.format(block) for block in range(LAYERS) for name in names][1:]
        return PointSplit(points=points[: count - 1])
    if cell["split"] == "unequal":
        blocks = [0] * count
        for block in range(LAYERS):
            blocks[(0, -1, 0, -2)[block] % count] += 1
        return BalanceSplit(balance=blocks)
    return EvenSplit()


def schedule_of_cell(cell: Cell, folder: Path) -> Any:
    schedule = schedule_of(cell["schedule"], cell["pp"], folder)
    if isinstance(schedule, str):
        kind = VARIANTS["schedule"][schedule]
        schedule = kind(name=schedule)
    if cell["weight_gradients"] == "together":
        schedule.weight_gradients = "together"
    if cell["microbatches"] == "fewest":
        schedule.microbatches = next(
            n for n in (1, 2, 4, 8) if not microbatch_problem(schedule, cell["pp"], n)
        )
    return schedule


def config_of(cell: Cell, folder: Path, **changes: Any) -> Config:
    """The config of a cell; `folder` gets the files that it needs."""
    return tiny(
        cell["pp"],
        DP[cell["dp"]],
        schedule_of_cell(cell, folder),
        replicate=2 if cell["dp"].startswith("2 ") or cell["dp"] == "2x2" else 1,
        tp=cell["tp"],
        cp=1 if cell["cp"] == "1" else 2,
        context_parallel="auto" if cell["cp"] == "1" else cell["cp"],
        ep=cell["ep"],
        model=MODELS[cell["model"]](),
        data=DATA[cell["data"]](),
        fsdp=FSDP[cell["fsdp"]](),
        precision=PRECISION[cell["precision"]](),
        activation_checkpoint=RECOMPUTE[cell["recompute"]](),
        optimizer=OPTIMIZER[cell["optimizer"]](),
        loss=LOSS[cell["loss"]](),
        split=split_of(cell),
        **{"steps": 3, **changes},
    )


# Values that exclude each other: of which dimensions, and when
EXCLUDED: list[tuple[tuple[str, ...], Callable[..., bool]]] = [
    (("pp", "dp", "tp", "cp"), lambda pp, dp, tp, cp: pp * DP[dp] * tp * (2 - (cp == "1")) > 8),
    (("dp", "cp", "ep"), lambda dp, cp, ep: ep == 2 and shards(dp, cp) == 1),
    (("dp", "cp", "fsdp"), lambda dp, cp, fsdp: fsdp in SHARDED and shards(dp, cp) == 1),
    (("model", "ep"), lambda model, ep: ep == 2 and model != "moe"),
    (("model", "data"), lambda model, data: model == "custom" and data == "documents"),
    (("cp", "data"), lambda cp, data: cp == "ring" and data == "documents"),
    (("precision", "tp"), lambda precision, tp: precision == "float8" and tp == 2),
    (("precision", "cp"), lambda precision, cp: precision == "float8" and cp != "1"),
    (("schedule", "fsdp"), lambda schedule, fsdp: schedule in ZERO_BUBBLE and fsdp in SHARDED),
    (
        ("schedule", "weight_gradients"),
        lambda schedule, how: how == "together" and schedule not in (*ZERO_BUBBLE, "csv"),
    ),
    (("schedule", "microbatches"), lambda schedule, n: schedule == "csv" and n != "auto"),
    (
        ("schedule", "pp", "split"),
        lambda schedule, pp, split: split != "even" and pp == 1 and schedule not in TWO_STAGES,
    ),
    (("model", "split"), lambda model, split: model == "moe" and split == "inside"),
    (("fsdp", "split"), lambda fsdp, split: fsdp in SHARDED and split == "inside"),
]


def allowed(cell: Cell) -> bool:
    """Whether no values of a cell exclude each other."""
    return not any(holds(*map(cell.get, names)) for names, holds in EXCLUDED)
