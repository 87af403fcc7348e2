"""Small trained runs whose models transformers has, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.saved_runs import a_run, train_all
from titanlike.core.checkpoint.integrity import MODEL
from titanlike.core.checkpoint.reader import ShardReader
from titanlike.core.config.groups.data import TextData
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.schema import Config
from titanlike.core.models.registry import build_model, resolve_model

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": None}
LLAMA = Model(
    "llama", SIZES | {"num_key_value_heads": 2, "intermediate_size": 64, "rope_theta": 500.0}
)
GPT2 = Model(
    "gpt2", {"vocab_size": None, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": None}
)

MOE = Model(
    "moe",
    SIZES
    | {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "bias_rate": 0.0,
    },
)


def with_args(model: Model, **changes: Any) -> Model:
    return replace(model, args=model.args | changes)


def trained(
    run_dir: Path, model: Any, pp: int = 1, dp: int = 1, tp: int = 1, steps: int = 1, **more: Any
) -> Config:
    """A run of a step that moves all weights far from where they began, or of more that learn."""
    names = {"export", "model_only"} & more.keys()
    saving = {"last": True, "every": 0} | {name: more.pop(name) for name in names}
    config = replace(a_run(run_dir, pp, dp, steps=steps, **saving), model=model, tp=tp, **more)
    config = replace(config, optimizer=replace(config.optimizer, lr=0.1 if steps == 1 else 0.01))
    assert train_all(config) == [""]
    return config


def byte_text(folder: Path) -> TextData:
    """Some text, in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("def größe():\n\treturn 'é'\n" * 300)
    return TextData(path=str(folder / "text.txt"), cache=str(folder / "cache"))


def ours(config: Config) -> nn.Module:
    """The model of a run's checkpoint, in this process."""
    rows = ShardReader.open("RUN", config.run_dir)
    model = build_model(resolve_model(config), "cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in model.state_dict():  # not the rotary frequencies of transformers
                tensor.copy_(rows.whole(MODEL + name))
    return model.eval()
