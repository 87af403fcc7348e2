"""Keys that a model does not take: what is said about those of other frameworks."""

from __future__ import annotations

import pytest

from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.models.registry import build_model


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("n_layers", 8, "no such argument; write model.num_hidden_layers=8"),
        ("converters", "float8", "(docs/layouts.md); write precision=float8"),
        ("torch_compile", True, "write compile=true"),
        ("flavor", "8B", "llama3_8b, gpt2, hf, own, ...; write model=llama3_8b"),
        ("mlp_ratio", 4, "no such argument; a key of llama: vocab_size, hidden_size"),
    ],
)
def test_a_key_of_another_framework_is_answered(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        build_model(Custom("llama", {"vocab_size": 64, key: value}))
    assert said in str(found.value)


def test_a_size_by_another_name_is_that_of_the_model() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "heads": 4}
    with pytest.raises(ConfigError) as found:
        build_model(Custom("gpt2", sizes))
    fixes = {problem.fix for problem in found.value.problems}
    assert fixes == {"model.n_embd=32", "model.n_layer=2", "model.n_head=4"}


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    ],
)
def test_the_size_that_is_proposed_fits_the_others(key: str) -> None:
    sizes = {"vocab_size": 64, key: 0}
    with pytest.raises(ConfigError) as found:
        build_model(Custom("llama", sizes))
    (problem,) = found.value.problems
    build_model(Custom("llama", sizes | {key: int(problem.fix.partition("=")[2])}))
