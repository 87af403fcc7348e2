"""Layouts that are verified: the dimensions of a config, and tables of cells over all of them.

`PAIRS` has each value of each dimension together with each one of every other dimension, wherever
they do not exclude each other (`EXCLUDED`), on as few ranks as that allows. `layouts.csv` keeps it;
after a change of dimensions, `PYTHONPATH=.:tests python -m support.layouts` makes it anew (a
minute). `one_of_each` are some of a table's cells in which each value stands once at least,
`random_cells` are any.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

from support.families import gpt2, hf, llama, moe
from support.models import SCHEDULES, ZERO_BUBBLE, schedule_of, tiny
from support.planned_models import PLAN
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    Float8Precision,
    Fsdp,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.data import SyntheticData, TextData
from titanlike.core.config.groups.jobs import Verify
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy
from titanlike.core.config.groups.pipeline import BalanceSplit, EvenSplit, PointSplit
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import VARIANTS, Config
from titanlike.core.pipeline.from_config import microbatch_problem
from titanlike.core.pipeline.schedules import LOOPED, V_SCHEDULES

LAYERS = 4
MODELS = {
    "llama": lambda: llama(num_hidden_layers=LAYERS),
    "llama tied": lambda: llama(num_hidden_layers=LAYERS, tie_word_embeddings=True),
    "gpt2 tied": lambda: gpt2(n_layer=LAYERS, tie_word_embeddings=True),
    "moe": lambda: moe(
        num_hidden_layers=LAYERS, n_shared_experts=1, balance_loss=0.01, z_loss=0.001
    ),
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
OPTIMIZER = {"adamw": AdamW, "sgd": lambda: Sgd(lr=10.0, momentum=0.9, clip=0.01), "muon": Muon}
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
    "llama": ("model.layers.{}", "model.layers.{}.mlp"),
    "custom": ("blocks.{}", "blocks.{}.gate_up"),
    "gpt2 tied": ("transformer.h.{}", "transformer.h.{}.ln_2"),
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
        names = BLOCKS.get(cell["model"], BLOCKS["llama"])
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
        pp=cell["pp"],
        dp=DP[cell["dp"]],
        schedule=schedule_of_cell(cell, folder),
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
        # scales of float8 are those of a microbatch: after an update layouts drift apart
        verify=Verify(steps=1 if cell["precision"] == "float8" else 2),
        steps=2,
        **changes,
    )


# Values that exclude each other: of which dimensions, and when
EXCLUDED: list[tuple[tuple[str, ...], Callable[..., bool]]] = [
    (("pp", "dp", "tp", "cp"), lambda pp, dp, tp, cp: pp * DP[dp] * tp * (2 - (cp == "1")) > 8),
    (("dp", "cp", "tp", "ep"), lambda dp, cp, tp, ep: ep == 2 and shards(dp, cp) * tp == 1),
    (("dp", "cp", "fsdp"), lambda dp, cp, fsdp: fsdp in SHARDED and shards(dp, cp) == 1),
    (("model", "ep"), lambda model, ep: ep == 2 and model != "moe"),
    (("model", "data"), lambda model, data: model == "custom" and data == "documents"),
    (("cp", "data"), lambda cp, data: cp == "ring" and data == "documents"),
    # padding, which differs from rank to rank, counts where experts are balanced (docs/models.md)
    (
        ("model", "data", "dp", "cp"),
        lambda model, data, dp, cp: (model, data) == ("moe", "lengths") and (dp, cp) != ("1", "1"),
    ),
    # rounding sends a token to another expert: what follows is no rounding any more
    (("model", "precision"), lambda model, precision: model == "moe" and precision != "fp32"),
    # of tiny biases and norms of heads, some rounding of float8 is more than three times another
    (("model", "precision"), lambda *cell: cell[1] == "float8" and not cell[0].startswith("llama")),
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
    """Whether no values of a cell, or of a part of one, exclude each other."""
    return not any(
        holds(*(cell[name] for name in names))
        for names, holds in EXCLUDED
        if all(name in cell for name in names)
    )


def possible(part: Cell) -> bool:
    """Whether there is an allowed cell with these values."""
    if not allowed(part):
        return False
    name = next((name for name in DIMENSIONS if name not in part), None)
    return name is None or any(possible(part | {name: value}) for value in DIMENSIONS[name])


def name_of(cell: Cell) -> str:
    """What a cell does not share with the first values."""
    words = {"pp": "pp={}", "dp": "dp={}", "tp": "tp={}", "cp": "cp={}", "ep": "ep={}"}
    different = {name: value for name, value in cell.items() if value != DIMENSIONS[name][0]}
    return ", ".join(words.get(name, "{}").format(value) for name, value in different.items())


TABLE = Path(__file__).with_suffix(".csv")
with TABLE.open(newline="") as rows:
    PAIRS: list[Cell] = [
        {
            name: {str(known): known for known in DIMENSIONS[name]}[text]
            for name, text in row.items()
        }
        for row in csv.DictReader(rows)
    ]


def one_of_each(cells: list[Cell]) -> list[Cell]:
    """Some of the cells, found by taking the next best, with few ranks: each value that one of them
    has is there; a schedule with two stages at least."""

    def values(cell: Cell) -> set[tuple[str, Any]]:
        return {item for item in cell.items() if item[0] != "schedule" or cell["pp"] > 1}

    missing = set().union(*map(values, cells))
    taken = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & values(cell)) / ranks(cell) ** 1.5)
        taken.append(best)
        missing -= values(best)
    return taken


def with_fewer_ranks(cells: list[Cell]) -> list[Cell]:
    """The same pairs of values on fewer ranks: a cell gets a smaller mesh, and one more value
    another, as long as no pair is lost. Where a schedule has two ranks, it keeps them."""

    def pairs(cell: Cell) -> set[Any]:
        return set(combinations(cell.items(), 2))

    mesh = ("pp", "dp", "tp", "cp")
    groups = [dict.fromkeys((name, other)) for name in mesh for other in DIMENSIONS]
    count = Counter(pair for cell in cells for pair in pairs(cell))
    found, before = list(cells), None
    while before != found:
        before = list(found)
        for at, names in product(range(len(found)), groups):
            cell = best = found[at]
            for values in product(*(DIMENSIONS[name] for name in names)):
                new = cell | dict(zip(names, values, strict=True))
                if ranks(new) < ranks(best) and allowed(new) and new["pp"] >= min(2, cell["pp"]):
                    best = new if all(count[p] > 1 for p in pairs(cell) - pairs(new)) else best
            count.subtract(pairs(cell))
            count.update(pairs(best))
            found[at] = best
    return found


def random_cells(count: int, seed: int) -> list[Cell]:
    draw, found = random.Random(seed), []
    while len(found) < count:
        cell = {name: draw.choice(values) for name, values in DIMENSIONS.items()}
        if allowed(cell) and cell not in found:
            found.append(cell)
    return found


def main() -> None:
    """Write `PAIRS`."""
    import covertable
    from covertable.shortcuts import Constraint

    conditions = [
        Constraint().fn(
            [*names], lambda cell, names=names, holds=holds: not holds(*map(cell.get, names))
        )
        for names, holds in EXCLUDED
    ]
    made = covertable.make(DIMENSIONS, constraints=conditions)
    cells = with_fewer_ranks([{name: cell[name] for name in DIMENSIONS} for cell in made])
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*DIMENSIONS], lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)


if __name__ == "__main__":
    main()
