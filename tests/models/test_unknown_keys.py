"""Keys that a model does not take: what is said about those of other frameworks."""

from __future__ import annotations

import pytest

from titanlike.config.errors import ConfigError
from titanlike.config.schema import Custom
from titanlike.models.registry import build_model


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("n_layers", 8, "no such argument; write model.layers=8"),
        ("converters", "float8", "(docs/layouts.md); write precision=float8"),
        ("torch_compile", True, "write compile=true"),
        ("flavor", "8B", "llama3_8b, gpt2, hf, own, ...; write model=llama_tiny"),
        ("mlp_ratio", 4, "no such argument; a key of llama: vocab_size, dim, layers"),
    ],
)
def test_a_key_of_another_framework_is_answered(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        build_model(Custom("llama", {"vocab_size": 64, key: value}))
    assert said in str(found.value)


@pytest.mark.parametrize("key", ["dim", "layers", "heads", "kv_heads", "ffn_dim"])
def test_the_size_that_is_proposed_fits_the_others(key: str) -> None:
    sizes = {"vocab_size": 64, key: 0}
    with pytest.raises(ConfigError) as found:
        build_model(Custom("llama", sizes))
    (problem,) = found.value.problems
    build_model(Custom("llama", sizes | {key: int(problem.fix.partition("=")[2])}))
