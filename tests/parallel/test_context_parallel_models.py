"""cp divides the sequences of any model whose attention is scaled_dot_product_attention, or refuses
it with the call that mixes tokens otherwise.

Its layouts of our own models are in `tests/proof/test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from support.cells import cells
from support.families import hf
from support.models import tiny
from support.proven import assert_proven
from titanlike.config.keys import Model
from titanlike.config.schema import Config, Custom, Sample, TextData
from titanlike.config.validate import problems
from titanlike.training.draft import draft, preflight


def own(**changes: Any) -> Model:
    return Model("support.token_models.Own", {"vocab_size": None, **changes})


def divided(model: Model, method: str, **layout: Any) -> Config:
    sizes = {"batch_size": 8, "seq_len": 16, "steps": 3}
    return tiny(model=model, cp=2, context_parallel=method, **sizes, **layout)


BIASED = {"own, bias of attention": divided(own(positions="bias"), "gather")}
OTHERS = {
    "own, weights of positions": divided(own(positions="weights"), "ring", dp=2),
    "own, embedded positions": divided(own(positions="embedding"), "ulysses", pp=2),
    "own, not causal": divided(own(kind="encoder"), "ring"),
    "hf mistral, a window": divided(hf("mistral"), "gather"),
    "hf gpt2": divided(hf("gpt2"), "ulysses"),
}


@pytest.mark.parametrize("config", cells(BIASED, OTHERS))
def test_a_model_trains_as_one_process_does(config: Config, tmp_path: Path) -> None:
    assert preflight(config) == []
    assert_proven(config, tmp_path)


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
def test_a_model_that_mixes_tokens_otherwise_is_refused_with_the_call(kind: str) -> None:
    method = ("gather", "ulysses")[len(kind) % 2]
    config = tiny(dp=2, cp=2, context_parallel=method, model=own(kind=kind, layers=1))
    [problem] = preflight(config)
    assert (problem.key, problem.value, problem.fix) == ("cp", 2, "cp=1 dp=4")
    assert MIXED[kind] in problem.reason


@pytest.mark.slow
def test_attention_with_a_softcap_is_no_call_of_torchs() -> None:
    [problem] = preflight(tiny(cp=2, model=hf("gemma2", num_hidden_layers=1)))
    assert "model.layers.0.self_attn" in problem.reason
    assert MIXED["by hand"] in problem.reason


def shifted(output: Tensor, targets: Tensor) -> Tensor:
    """As transformers' models compute theirs: each token is held against the next target."""
    return F.cross_entropy(output[:, :-1].mT, targets[:, 1:], reduction="none")


def of_sequences(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets, reduction="none").mean(1)


ITS_OWN = "each must have its own"
SHARED = "4 heads and 2 key/value heads cannot be shared by 8 ranks"
OF_8 = {"cp": 8, "seq_len": 32, "context_parallel": "ulysses"}
TEXT = {"data": TextData(documents=True), "context_parallel": "ring"}


@pytest.mark.parametrize(
    "changes, key, said, fix",
    [
        ({"model": own(result="mean")}, "loss.name", "", ""),
        ({"loss": Custom(f"{__name__}.shifted")}, "loss.name", ITS_OWN, ""),
        ({"loss": Custom(f"{__name__}.of_sequences")}, "loss.name", ITS_OWN, ""),
        ({"seq_len": 18, "cp": 4}, "seq_len", "no multiple of 2 x cp = 8", "seq_len=24"),
        (OF_8, "context_parallel", SHARED, "context_parallel=ring"),
        (TEXT, "context_parallel", "a ring takes no mask, and", "context_parallel=ulysses"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], key: str, said: str, fix: str
) -> None:
    [problem] = preflight(replace(tiny(cp=2, layers=1), **changes))
    assert problem.key == key and said in problem.reason and fix in problem.fix


def test_samples_are_refused() -> None:
    config = tiny(cp=2, data=TextData(), sample=Sample(every=5, prompts=["def"]))
    [problem] = problems(config)
    assert (problem.key, problem.fix) == ("sample.every", "sample.every=0")


def test_the_method_is_chosen_by_heads_and_masks() -> None:
    def chosen(**changes: Any) -> tuple[str, str]:
        context = draft(tiny(layers=1, **changes)).context
        assert context is not None
        return context.ranks.method, context.why

    assert chosen(cp=2)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32) == ("ring", SHARED)
    documents = TextData(documents=True)
    assert chosen(cp=2, data=documents)[0] == "ulysses"
    assert chosen(cp=8, seq_len=32, data=documents)[0] == "gather"
