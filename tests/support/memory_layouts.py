"""Layouts whose estimated memory is compared with what their ranks take."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from support.live_memory import measured
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    EveryActivationCheckpoint,
    FitActivationCheckpoint,
    Fsdp,
    Numerics,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import (
    LoopedSchedule,
    LoopedZeroBubbleSchedule,
    Schedule,
    ZeroBubbleSchedule,
)
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.training.train_plan import make_plan

MODEL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "vocab_size": None,
}

# 1.5M parameters, 16 sequences of 128 tokens: a few MiB of activations for each microbatch
layout = functools.partial(tiny, model=Custom("llama", MODEL), seq_len=128)


def _pipeline(
    schedule: Any, recomputed: Any = None, pp: int = 2, dp: int = 1, **more: Any
) -> Config:
    chosen = recomputed or ActivationCheckpoint("none")
    return layout(pp, dp, schedule, activation_checkpoint=chosen, **more)


def _mixture(zero: Literal[2, 3]) -> Config:
    sizes = {
        name: MODEL[name]
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    }
    model = Custom(
        "moe",
        sizes
        | {
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 352,
        },
    )
    return layout(1, 2, Schedule("1f1b", 2), model=model, ep=2, fsdp=Fsdp(zero))


_FULL, _SELECTIVE = ActivationCheckpoint("full"), SelectiveActivationCheckpoint()
_1F1B, _LOGITS = Schedule("1f1b", 8), {"data": SyntheticData(vocab_size=4000)}
_BF16, _EXACT = {"precision": Precision("bf16")}, {"numerics": Numerics("exact")}

LAYOUTS = {
    "gpipe": _pipeline(Schedule("gpipe", 4)),
    "1f1b": _pipeline(_1F1B),
    "1f1b, pp=1": _pipeline(Schedule("1f1b", 4), pp=1),
    "1f1b, pp=4": _pipeline(_1F1B, pp=4),
    "1f1b, large logits": _pipeline(_1F1B, **_LOGITS),
    "1f1b, full": _pipeline(_1F1B, _FULL),
    "1f1b, selective": _pipeline(_1F1B, _SELECTIVE),
    "1f1b, every": _pipeline(_1F1B, EveryActivationCheckpoint()),
    "1f1b, fit into 26 MiB": _pipeline(_1F1B, FitActivationCheckpoint(memory=26 << 20)),
    "interleaved1f1b, dp=2, ZeRO 2, full": _pipeline(
        LoopedSchedule(microbatches=8), _FULL, dp=2, fsdp=Fsdp(2)
    ),
    "interleaved1f1b, bf16, chunked loss": _pipeline(
        LoopedSchedule(microbatches=8), loss=ChunkedCrossEntropy(), **_BF16, **_LOGITS
    ),
    "interleavedzerobubble, deferred": _pipeline(LoopedZeroBubbleSchedule(microbatches=8)),
    "interleavedzerobubble, together, selective": _pipeline(
        LoopedZeroBubbleSchedule(microbatches=8, weight_gradients="together"), _SELECTIVE
    ),
    "zbvzerobubble, deferred, full": _pipeline(ZeroBubbleSchedule("zbvzerobubble", 8), _FULL),
    "zbvzerobubble, together": _pipeline(ZeroBubbleSchedule("zbvzerobubble", 8, "together")),
    "dualpipev, deferred": _pipeline(ZeroBubbleSchedule("dualpipev", 8)),
    "1f1b, pp=1 dp=2, ZeRO 3": _pipeline(Schedule("1f1b", 2), pp=1, dp=2),
    "1f1b, dp=2, ZeRO 1": _pipeline(Schedule("1f1b", 4), dp=2, fsdp=Fsdp(1)),
    "1f1b, dp=2, ZeRO 3, bf16, selective": _pipeline(
        Schedule("1f1b", 4), _SELECTIVE, dp=2, fsdp=Fsdp(3), **_BF16
    ),
    "1f1b, pp=1 dp=2 replicate=2, chunked loss": _pipeline(
        Schedule("1f1b", 2), pp=1, dp=2, replicate=2, loss=ChunkedCrossEntropy(), **_LOGITS
    ),
    "1f1b, pp=1, exact": _pipeline(Schedule("1f1b", 16), pp=1, **_EXACT),
    "zbvzerobubble, deferred, exact": _pipeline(ZeroBubbleSchedule("zbvzerobubble", 16), **_EXACT),
    "1f1b, dp=2, ZeRO 2, bf16, exact": _pipeline(
        Schedule("1f1b", 8), dp=2, fsdp=Fsdp(2), **_BF16, **_EXACT
    ),
    "1f1b, pp=1 tp=2": _pipeline(Schedule("1f1b", 4), pp=1, tp=2),
    "1f1b, pp=1 tp=4": _pipeline(Schedule("1f1b", 4), pp=1, tp=4),
    "1f1b, pp=1 tp=2, whole activations": _pipeline(
        Schedule("1f1b", 4), pp=1, tp=2, tp_sequence=False
    ),
    "1f1b, pp=1 tp=2, large logits": _pipeline(Schedule("1f1b", 4), pp=1, tp=2, **_LOGITS),
    "1f1b, pp=1 tp=2, chunked loss": _pipeline(
        Schedule("1f1b", 2), pp=1, tp=2, loss=ChunkedCrossEntropy(), **_LOGITS
    ),
    "1f1b, pp=1 dp=2 tp=2, ZeRO 3, full": _pipeline(Schedule("1f1b", 2), _FULL, pp=1, dp=2, tp=2),
    "1f1b, pp=1 dp=2 ep=2, ZeRO 2": _mixture(2),
    "1f1b, pp=1 dp=2 ep=2, ZeRO 3": _mixture(3),
    "zbvzerobubble, tp=2, deferred": _pipeline(ZeroBubbleSchedule("zbvzerobubble", 8), tp=2),
}


def estimated_and_measured(config: Config, folder: Path) -> tuple[int, int]:
    """Bytes on the fullest rank."""
    plan = make_plan(config)
    expected = max(plan.memory().of_ranks(plan.recomputed.blocks))
    return expected, max(rank.peak for rank in run_world(measured, config, folder))
