"""Numbers that no run can have are refused by a word, whatever the key."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config import validate
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import Config, SyntheticData
from titanlike.job import check


def numeric_keys(plain: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in plain.items():
        if isinstance(value, dict):
            found += numeric_keys(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(f"{prefix}{name}")
    return found


PLAIN = to_plain(Config(data=SyntheticData()))
PLAIN["model"] |= {"vocab_size": 256, "dim": 64, "layers": 2, "rope_theta": 1e4}
KEYS = [*numeric_keys(PLAIN), "max_time", "max_tokens", "schedule.microbatches"]
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e308, math.nan, math.inf]),
    st.integers(),
    st.floats(),
)


def with_value(key: str, value: Any) -> dict[str, Any]:
    group, _, name = key.rpartition(".")
    plain = {k: dict(v) if isinstance(v, dict) else v for k, v in PLAIN.items()}
    (plain[group] if group else plain)[name] = value
    return plain


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KEYS), NUMBERS)
def test_any_number_is_refused_or_can_be_computed_with(key: str, value: float) -> None:
    config, wrong = parse(with_value(key, value))
    problems = [*wrong, *validate.problems(config)]
    assert all(str(problem) for problem in problems)
    if not problems:  # what the run makes of times
        for seconds in (config.launch.timeout, config.checkpoint.timeout, config.max_time or 1):
            timedelta(seconds=seconds)
        assert -(2**63) <= config.seed < 2**63 and math.isfinite(config.optimizer.lr)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 2**63, 10**400])
@pytest.mark.parametrize("key", KEYS)
def test_no_key_takes_a_number_beyond_all_bounds(key: str, value: float) -> None:
    config, wrong = parse(with_value(key, value))
    problems = [*wrong, *validate.problems(config)]
    assert key in {problem.key for problem in problems}


@pytest.mark.parametrize(
    "key, value",
    [
        ("launch.timeout", 1e30),
        ("checkpoint.timeout", 1e30),
        ("data.vocab_size", 10**14),
        ("model.layers", 1_000_000),
        ("model.dim", 10**9),
        ("pp", 10**6),
        ("schedule.microbatches", 10**9),
        ("batch_size", 10**12),
        ("seq_len", 10**12),
    ],
)
def test_the_check_refuses_it_without_building_anything(key: str, value: float) -> None:
    config, wrong = parse(with_value(key, value))
    assert wrong == []
    assert [problem.key for problem in check.problems(config)] == [key]
