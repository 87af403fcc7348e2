"""A forward sees the device of the run, and constants; what decides by values is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import tiny
from support.proven import assert_proven
from support.stand_in_gpus import gpus
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.models.registry import build_model
from titanlike.core.training.preflight import preflight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Autocasting", "CompiledBlocks"])
def test_a_forward_that_is_recorded_without_a_device_trains_as_in_one_process(
    name: str, tmp_path: Path
) -> None:
    """In bf16 microbatches of other sizes than the whole batch round otherwise."""
    assert_proven(tiny(pp=2, model=Custom(f"support.device_dependent.{name}")), tmp_path)


def test_a_forward_is_recorded_for_the_device_that_it_will_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, 2)
    model = Custom("support.device_dependent.AsksForTheDevice")
    assert not preflight(tiny(pp=2, model=model, device="cpu"))
    (problem,) = preflight(tiny(pp=2, model=model, device="auto"))
    assert "the test runs on the CPU" in problem.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart", "mixtral"])
def test_a_module_that_wraps_a_model_of_transformers_is_recorded(name: str) -> None:
    """Their masks and mixtures of experts do not run on meta, unless they are compiled."""
    assert not preflight(tiny(pp=2, model=Custom(f"support.wrapped_transformers.{name}")))


@pytest.mark.slow
def test_a_module_that_wraps_a_model_of_transformers_trains_as_in_one_process(
    tmp_path: Path,
) -> None:
    assert_proven(tiny(pp=2, model=Custom("support.wrapped_transformers.t5")), tmp_path)


def test_the_line_that_looks_at_values_is_named() -> None:
    (problem,) = preflight(tiny(pp=2, model=Custom("support.any_models.Looking")))
    assert "any_models.py:" in problem.reason and "torch.where" in problem.fix


@pytest.mark.parametrize(
    ("name", "reason"),
    [("OneOfFloat64", "blocks.1.weight is float64"), ("ComplexWeight", "turns is complex64")],
)
def test_weights_that_would_be_cast_to_fp32_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_model(Custom(f"support.device_dependent.{name}"))


def test_a_product_in_a_dtype_that_weights_do_not_have_is_refused() -> None:
    (problem,) = preflight(tiny(pp=2, model=Custom("support.device_dependent.OneOfBf16")))
    assert "its blocks.1 calls linear with bfloat16 and float32 tensors" in problem.reason
