"""Small configs that tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.pipeline import CsvSchedule, LoopedSchedule, Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.groups.watching import NoLogger
from titanlike.core.config.schema import Config
from titanlike.core.pipeline.schedules import LOOPED, interleaved_1f1b

ZERO_BUBBLE = (
    "interleavedzerobubble",
    "zbh1",
    "zbh2",
    "vhalf",
    "vmin",
    "zbvzerobubble",
    "dualpipev",
)
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", *ZERO_BUBBLE, "csv")
LLAMA = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_positions": None}


def tiny(pp: int = 1, dp: int = 1, schedule: Any = "1f1b", **changes: Any) -> Config:
    """8 blocks of 32 channels, 16 sequences of 16 random tokens, on the CPU."""
    family = changes.pop("family", "llama")
    depth = "num_hidden_layers" if family == "llama" else "n_layer"
    sizes = {**(LLAMA if family == "llama" else GPT2), "vocab_size": None}
    sizes[depth] = changes.pop("layers", 8)
    if "tied" in changes:
        sizes["tie_word_embeddings"] = changes.pop("tied")
    if isinstance(schedule, str):
        kind = LoopedSchedule if schedule in LOOPED else Schedule
        schedule = kind(name=schedule)
    config = Config(
        pp=pp,
        dp=dp,
        device="cpu",
        batch_size=16,
        seq_len=16,
        steps=5,
        model=Model(family, sizes),
        schedule=schedule,
        data=SyntheticData(vocab_size=64),
        logger=NoLogger(),
        validation=Validation(batches=1),
        checkpoint=Checkpoint(every=0, last=False),
    )
    return replace(config, **changes)


def schedule_of(name: str, pp: int, folder: Path) -> Any:
    """The schedule's config; `csv` is an interleaved order, written to a file in `folder`."""
    if name != "csv":
        return name
    path = folder / "order.csv"
    path.write_text(interleaved_1f1b(pp, 2 * pp, stages_per_rank=2).to_csv())
    return CsvSchedule(path=str(path))
