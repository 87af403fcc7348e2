"""cp divides the sequences of any model whose attention is scaled_dot_product_attention.

Each layout is verified against one process in plain torch, gradients included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from support.cells import GRID, slow
from support.families import hf, llama, ours
from support.models import tiny
from support.proven import assert_proven
from titanlike.config.groups import ActivationCheckpoint
from titanlike.config.keys import Model
from titanlike.config.schema import Config, Custom, Sample, TextData
from titanlike.config.validate import problems
from titanlike.training.draft import draft, preflight

PATIENCE = 300


def own(**changes: Any) -> Model:
    return Model("support.token_models.Own", {"vocab_size": None, **changes})


MODELS = {
    "llama": llama(),
    "llama, tied": llama(tied=True),
    "llama, one kv head": llama(kv_heads=1),
    "gpt2": ours("gpt2", max_seq_len=None),
    "hf llama": hf("llama"),
    "hf qwen3": hf("qwen3", tie_word_embeddings=True),
    "hf mistral": hf("mistral"),
    "hf gpt2": hf("gpt2"),
    "own, weights of positions": own(positions="weights"),
    "own, embedded positions": own(positions="embedding"),
    "own, bias of attention": own(positions="bias"),
    "own, not causal": own(kind="encoder"),
}


@dataclass(frozen=True)
class Layout:
    cp: int
    pp: int = 1
    dp: int = 1
    replicate: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    recomputed: str = "none"
    documents: bool = False
    compile: bool = False


LAYOUTS = {
    "cp=2": Layout(2),
    "cp=4": Layout(4),
    "dp=2 cp=2": Layout(2, dp=2),
    "replicate=2 cp=2": Layout(2, dp=2, replicate=2),
    "pp=2 dp=2 cp=2": Layout(2, pp=2, dp=2),
    "cp=2 tp=2": Layout(2, tp=2),
    "documents": Layout(2, documents=True),
    "zero bubble, recomputed": Layout(2, pp=2, schedule="zbvzerobubble", recomputed="full"),
    "compiled": Layout(2, compile=True),
}
METHODS = ("gather", "ulysses", "ring")


def config_of(model: str, layout: str, method: str) -> Config:
    at = LAYOUTS[layout]
    changes = {"data": TextData(documents=True)} if at.documents else {}
    return tiny(
        at.pp,
        at.dp,
        at.schedule,
        model=MODELS[model],
        cp=at.cp,
        context_parallel=method,
        replicate=at.replicate,
        tp=at.tp,
        batch_size=8,
        seq_len=16,
        steps=3,
        activation_checkpoint=ActivationCheckpoint(at.recomputed),
        compile=at.compile,
        **changes,
    )


def can_be(model: str, layout: str, method: str) -> bool:
    """Whether the three do not exclude each other."""
    at = LAYOUTS[layout]
    ours = model.startswith(("llama", "gpt2"))
    masked = at.documents or model in (
        "own, bias of attention",
        "hf mistral",
    )
    if method == "ring" and (masked or at.compile):
        return False
    if model == "llama, one kv head" and at.tp > 1 and method == "ulysses":
        return True
    return not (at.documents and not ours) and not (at.tp > 1 and model.startswith("own"))


def cover() -> list[tuple[str, str, str]]:
    """(model, layout, method): a third of the pairs of a model and a layout, those of each three
    models together all; one of three methods with each."""
    found = []
    for i, model in enumerate(MODELS):
        for j, layout in enumerate(LAYOUTS):
            if (i + j) % 3:
                continue
            wanted = METHODS[i % 3 :] + METHODS[: i % 3]
            method = next((one for one in wanted if can_be(model, layout, one)), None)
            if method is not None:
                found.append((model, layout, method))
    return found


QUICK = [
    ("llama", "zero bubble, recomputed", "ring"),
    ("llama", "documents", "gather"),
    ("hf qwen3", "cp=4", "ulysses"),
    ("own, bias of attention", "cp=2", "gather"),
]
LEFT_OUT = [  # by .ci/run, too
    (("llama", "zero bubble, recomputed", "ring"),),
    (("hf qwen3", "cp=4", "ulysses"),),
    (("llama", "documents", "gather"),),
    (("own, weights of positions", "zero bubble, recomputed", "ulysses"),),
]
REST = [(c,) for c in cover() if c not in QUICK and (c,) not in LEFT_OUT]


@pytest.mark.parametrize("cell", [*QUICK, *slow(*LEFT_OUT, marks=GRID), *slow(*REST)], ids=str)
def test_a_model_trains_as_one_process_does(cell: tuple[str, str, str], tmp_path: Path) -> None:
    config = config_of(*cell)
    assert preflight(config) == []
    assert_proven(config, tmp_path, PATIENCE)


MIXED = {
    "by hand": "with cp a token sees others by scaled_dot_product_attention alone",
    "convolution": "convolves over a rank's part of the tokens",
    "lstm": "layers.0.more calls",
    "cumsum": "calls cumsum: it cumulates over a rank's part of the tokens",
    "shift": "a rank's part of the tokens",
    "mean": "calls mean: it reduces over a rank's part of the tokens",
    "first": "a rank's part of the tokens",
    "flip": "calls flip: it reverses over a rank's part of the tokens",
    "loop": "it makes other calls for shorter sequences",
    "rows of a table": "calls slice: it takes as many as the rank has of another tensor",
    "a list of positions": "layers.0",
    "chance of a sequence": "draws random numbers for whole sequences",
    "bias of pairs": "its mask is not that of the rank's tokens",
    "a mask that is cut": "layers.0",
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_a_model_that_mixes_tokens_otherwise_is_refused_with_the_call(
    kind: str, method: str
) -> None:
    config = tiny(dp=2, cp=2, context_parallel=method, model=own(kind=kind))
    [problem] = preflight(config)
    assert (problem.key, problem.value, problem.fix) == ("cp", 2, "cp=1 dp=4")
    assert MIXED[kind] in problem.reason


def test_attention_with_a_softcap_is_no_call_of_torchs() -> None:
    [problem] = preflight(tiny(cp=2, model=hf("gemma2")))
    assert "model.layers.0.self_attn" in problem.reason
    assert MIXED["by hand"] in problem.reason


def test_a_model_that_returns_no_tokens_is_refused() -> None:
    [problem] = preflight(tiny(cp=2, model=own(result="mean")))
    assert problem.key == "cp" or problem.key == "loss.name"


def shifted(output: Tensor, targets: Tensor) -> Tensor:
    """As transformers' models compute theirs: each token is held against the next target."""
    return F.cross_entropy(output[:, :-1].mT, targets[:, 1:], reduction="none")


def of_sequences(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets, reduction="none").mean(1)


@pytest.mark.parametrize("loss", ["shifted", "of_sequences"])
def test_a_loss_of_more_than_a_token_is_refused(loss: str) -> None:
    config = tiny(cp=2, loss=Custom(f"{__name__}.{loss}"))
    [problem] = preflight(config)
    assert problem.key == "loss.name" and "each must have its own" in problem.reason
    assert preflight(replace(config, cp=1)) == []


def test_samples_are_refused() -> None:
    config = tiny(cp=2, data=TextData(), sample=Sample(every=5, prompts=["def"]))
    [problem] = problems(config)
    assert (problem.key, problem.fix) == ("sample.every", "sample.every=0")


def test_the_method_is_chosen_by_heads_and_masks() -> None:
    def chosen(**changes: Any) -> tuple[str, str]:
        context = draft(tiny(**changes)).context
        assert context is not None
        return context.ranks.method, context.why

    assert chosen(cp=2)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32) == (
        "ring",
        "4 heads and 2 key/value heads cannot be shared by 8 ranks",
    )
    documents = TextData(documents=True)
    assert chosen(cp=2, data=documents)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32, data=documents)[0] == "gather"


@pytest.mark.parametrize(
    "changes, key, value, said, fix",
    [
        ({"seq_len": 18, "cp": 4}, "seq_len", 18, "no multiple of 2 x cp = 8", "seq_len=24"),
        (
            {"cp": 8, "seq_len": 32, "context_parallel": "ulysses"},
            "context_parallel",
            "ulysses",
            "4 heads and 2 key/value heads cannot be shared by 8 ranks",
            "context_parallel=ring",
        ),
        (
            {"cp": 2, "context_parallel": "ring", "data": TextData(documents=True)},
            "context_parallel",
            "ring",
            "a ring takes no mask, and documents are one",
            "context_parallel=ulysses",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], key: str, value: Any, said: str, fix: str
) -> None:
    [problem] = preflight(replace(tiny(), **changes))
    assert (problem.key, problem.value, problem.fix) == (key, value, fix)
    assert said in problem.reason
