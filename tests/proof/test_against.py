"""verify compares with what another framework has written of its training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.models import tiny
from support.paths import ROOT
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.jobs import Verify
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.proof import against, dump
from titanlike.proof.verify import verify

VOCAB, SAMPLES, TOKENS = 64, 16, 16
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    },
    "gpt2": {
        "n_positions": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def ours(family: str, folder: Path, names: str | None = None, **changes: Any) -> Config:
    return tiny(
        layers=2,
        family=family,
        tied=family == "gpt2",
        data=SyntheticData(vocab_size=VOCAB),
        optimizer=Sgd(lr=0.5, clip=None),
        lr=ConstantLr(warmup=0),
        verify=Verify(against=str(folder), names=names, steps=2),
        **changes,
    )


def documented() -> Callable[..., None]:
    """The function of the page."""
    page = (ROOT / "docs/against.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    space: dict[str, Any] = {}
    exec(code, space)
    return space["dump"]


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def write_dump(config: Config, worker: Worker, loss: Callable[..., Tensor]) -> None:
    """Two steps of a plain torch loop over a model of transformers."""
    import transformers

    torch.manual_seed(1)
    kind = transformers.AutoConfig.for_model(
        config.model.name, vocab_size=VOCAB, **SIZES[config.model.name]
    )
    model = transformers.AutoModelForCausalLM.from_config(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    write, folder = documented(), Path(config.verify.against or "")
    for _ in range(2):
        ids = torch.randint(VOCAB, (SAMPLES, TOKENS + 1))
        inputs, targets = ids[:, :-1], ids[:, 1:]
        value = loss(model(inputs, use_cache=False).logits, targets)
        value.backward()
        losses.append(value.item())
        write(model, losses, folder, inputs=inputs, targets=targets)
        optimizer.step()
        optimizer.zero_grad()


def dumped(family: str, folder: Path, loss: Callable[..., Tensor] = mean) -> Path:
    run_world(write_dump, ours(family, folder / "dump"), folder / "written", loss)
    return folder / "dump"


@pytest.mark.parametrize("family", SIZES)
def test_an_equal_loop_of_another_framework_matches(family: str, tmp_path: Path) -> None:
    folder = dumped(family, tmp_path)
    result = run_world(verify, ours(family, folder, pp=2), tmp_path / "run")[0]
    assert result["exit_code"] == 0, (result["against"], result["differ"])
    count = len(load_file(folder / "gradients.safetensors"))
    assert result["against"]["comparisons"] == 2 + count > 20


def test_a_summed_loss_is_reported_with_its_factor(tmp_path: Path) -> None:
    folder = dumped("llama", tmp_path, summed)
    result = run_world(verify, ours("llama", folder), tmp_path / "run")[0]
    assert result["exit_code"] == 1 and not result["differ"]
    first = result["against"]["first_difference"]
    assert first["place"]["name"] == "loss of step 1", first
    what = first["differs"][0]
    assert what["factor"] == SAMPLES * TOKENS
    assert what["cause"] == "summed instead of averaged over tokens"
    assert {"loss of step 1", "gradient of lm_head.weight"} <= {*what["names"]}


def in_files(tensors: dict[str, Tensor], folder: Path) -> None:
    for kind in ("weights", "gradients"):
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{kind}.safetensors")


def meta(config: Config) -> Any:
    return build_model(resolve_model(config))


def test_names_are_mapped(tmp_path: Path) -> None:
    """Those of wrappers, of a file, and rows of one tensor that are several parameters'."""
    config = ours("llama", tmp_path, names=str(tmp_path / "names.yaml"))
    expected = {name: torch.randn(p.shape) for name, p in meta(config).named_parameters()}
    given = {f"module._orig_mod.{name}": value for name, value in expected.items()}
    for layer in (0, 1):
        parts = [
            f"module._orig_mod.model.layers.{layer}.mlp.{n}_proj.weight" for n in ("gate", "up")
        ]
        given[f"module.decoder.{layer}.fc1"] = torch.cat([given.pop(part) for part in parts])
    both = [f"model.layers.#.mlp.{name}_proj.weight" for name in ("gate", "up")]
    (tmp_path / "names.yaml").write_text(yaml.safe_dump({"decoder.#.fc1": both}))
    in_files(given, tmp_path)
    found, wrong = dump.dumped(config, meta(config), "weights")
    assert not wrong and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_missing_and_different_tensors_of_a_dump_are_reported(tmp_path: Path) -> None:
    config = ours("llama", tmp_path)
    given = {name: torch.randn(p.shape) for name, p in meta(config).named_parameters()}
    mlp = "model.layers.0.mlp"
    given[f"{mlp}.up_proj.weight"] = given[f"{mlp}.up_proj.weight"].T
    given["lm_head.weight"] = given["lm_head.weight"][:-1]
    given["model.final.weight"] = given.pop("model.norm.weight")
    in_files(given, tmp_path)
    _, wrong = dump.dumped(config, meta(config), "weights")
    assert sorted(wrong) == [
        "lm_head.weight: [63, 32] in the dump, [64, 32] in the model",
        "model.final.weight: extra",
        f"{mlp}.up_proj.weight: transposed, [32, 64] in the dump, [64, 32] in the model",
        "model.norm.weight: missing",
    ]


def test_a_missing_or_mismatched_dump_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps.json"):
        against.with_batches(ours("llama", tmp_path))
    in_files({"x": torch.ones(1)}, tmp_path)
    (tmp_path / "steps.json").write_text('{"losses": [1.0]}')
    ids = torch.zeros(4, 8, dtype=torch.int64)
    save_file({"inputs": ids, "targets": ids.clone()}, tmp_path / "batch1.safetensors")
    with pytest.raises(ConfigError, match="batch_size=4 seq_len=8"):
        against.with_batches(ours("llama", tmp_path))
