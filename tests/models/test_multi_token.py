"""Multi-token prediction: further tokens that llama and moe predict in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.cells import cells
from support.models import LLAMA, tiny
from support.proven import assert_proven
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.models.documents import attention_inputs
from titanlike.core.models.llama import Llama, rotary_table
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.optim.loss import build_loss
from titanlike.core.training.preflight import preflight

WEIGHT = CrossEntropy(mtp_weight=0.3)
CHUNKED = ChunkedCrossEntropy(chunk=7, mtp_weight=0.3)
EXPERTS = {"num_local_experts": 4, "moe_intermediate_size": 16, "num_hidden_layers": 2}


def predicting(tokens: int, *mesh: Any, **changes: Any) -> Config:
    config = tiny(*mesh, **{"layers": 2, "loss": WEIGHT, **changes})
    args = {**config.model.args, "num_nextn_predict_layers": tokens}
    return replace(config, model=replace(config.model, args=args))


MOE = predicting(1, dp=2, ep=2, model=Model("moe", {**LLAMA, **EXPERTS, "vocab_size": None}))


@pytest.mark.parametrize(
    "config",
    cells(
        {"pp and dp": predicting(2, 2, 2)},
        {
            "chunked, tied, V": predicting(1, 2, 1, "zbvzerobubble", loss=CHUNKED, tied=True),
            "experts": MOE,
        },
    ),
)
def test_multi_token_prediction_in_layouts_matches_one_process(
    config: Config, tmp_path: Path
) -> None:
    assert_proven(config, tmp_path)


def test_the_multi_token_loss_is_over_tokens_that_have_a_target() -> None:
    model: Any = build_model(resolve_model(predicting(1))).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape)
    assert isinstance(model, Llama)
    batch = torch.randint(64, (2, 17))
    ids, targets = batch[:, :-1], batch[:, 1:]
    positions, mask = attention_inputs(ids[:, :-1], None, None, None, True)
    table = rotary_table(positions, *model.rotary)
    hidden = model.model(ids[:, :-1], table, mask)
    later = model.mtp.get_submodule("0")(hidden, model.model.embed_tokens(ids[:, 1:]), table, mask)
    further = F.cross_entropy(
        model.lm_head(later).flatten(0, 1), targets[:, 1:].flatten(), reduction="sum"
    )
    model.eval()
    logits = model(ids)
    assert logits.shape == (2, 16, 64)  # the next token alone, as before
    text = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    model.train()
    output = model(ids)
    torch.testing.assert_close(build_loss(WEIGHT)(output, targets), text + 0.3 * further)
    with torch.no_grad():
        torch.testing.assert_close(build_loss(WEIGHT)(output, targets), text)


@pytest.mark.parametrize(
    "config, said",
    [
        (predicting(1, loss=CrossEntropy()), "have no loss; write loss.mtp_weight=0.3"),
        (predicting(0), "the model predicts the next token alone; write model.num_nextn"),
        (predicting(1, tp=2), "which other ranks may have; write tp=1 dp=2"),
    ],
)
def test_multi_token_prediction_refuses_cp_and_unused_weights(config: Config, said: str) -> None:
    assert any(said in str(problem) for problem in preflight(config))
