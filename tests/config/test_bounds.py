"""Numbers that no run can have are refused by a word, whatever the key; every rule at its bound."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.typed import typed
from titanlike.config import validate
from titanlike.config.errors import Problem
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
BEYOND = [math.nan, math.inf, -math.inf, 1e308, -1e308, 2**63, 10**400]
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 2**31, -(2**63), 10**30, *BEYOND]), st.integers(), st.floats()
)


def with_value(key: str, value: Any) -> dict[str, Any]:
    group, _, name = key.rpartition(".")
    plain = {k: dict(v) if isinstance(v, dict) else v for k, v in PLAIN.items()}
    (plain[group] if group else plain)[name] = value
    return plain


def told(plain: dict[str, Any]) -> list[Problem]:
    config, wrong = parse(plain)
    return [*wrong, *validate.problems(config)]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(KEYS), NUMBERS)
def test_any_number_is_refused_or_can_be_computed_with(key: str, value: float) -> None:
    plain = with_value(key, value)
    problems = told(plain)
    assert all(str(problem) for problem in problems)
    if not problems:  # what the run makes of times
        config, _ = parse(plain)
        for seconds in (config.launch.timeout, config.checkpoint.timeout, config.max_time or 1):
            timedelta(seconds=seconds)
        assert -(2**63) <= config.seed < 2**63 and math.isfinite(config.optimizer.lr)


@pytest.mark.parametrize("value", BEYOND, ids=lambda value: f"{str(value):.9}")
def test_no_key_takes_a_number_beyond_all_bounds(value: float) -> None:
    for key in KEYS:
        assert key in {problem.key for problem in told(with_value(key, value))}


# a key; values that are accepted, values that are refused; what else the command line says
RULES = [
    ("batch_size", "12 3", "13 1048577000", "dp=3"),
    ("dp", "1000000", "0 1000001", "batch_size=1000000"),
    ("ep", "2 4", "0 3 8", "dp=4"),
    ("replicate", "1 2 4", "0 3", "dp=4"),
    ("tp", "256", "0 257", ""),
    ("schedule.microbatches", "2 4", "3", "dp=4"),
    ("seq_len", "134217728", "0 134217729", ""),
    ("steps", "1 1099511627776", "0 1099511627777", ""),
    ("optimizer.betas", "[0,0.999]", "[0.9,1] [-0.1,0.9] [0.9]", ""),
    ("optimizer.clip", "0.1 null", "0 -1", ""),
    ("optimizer.eps", "1e-30", "0", ""),
    ("optimizer.ns_steps", "1 20", "0 21", "optimizer=muon"),
    ("optimizer.momentum", "0 0.99", "-0.1 1", "optimizer=sgd"),
    ("lr.final", "0 1", "-0.1 1.1", "lr=cosine"),
    ("lr.decay", "0.001 1", "0 1.1", "lr=wsd"),
    ("launch.timeout", "0.1 1e6", "0 1000001", ""),
    ("sample.top_p", "0.1 1", "0 1.1", ""),
    ("schedule.memory_bytes", "1048576", "1048575", "schedule=auto"),
    ("sweep.share", "0/4 3/4", "4/4 x", ""),
    ("sweep.wait", "null", "5", ""),
    ("value", "loss", "val_loss", "validation.every=0"),
    ("logger.project", "x", "a/b", "logger=wandb"),
    ("checkpoint.resume", "auto never s3://b/x", "no/such/folder", ""),
]


@pytest.mark.parametrize("key, right, wrong, words", RULES, ids=[rule[0] for rule in RULES])
def test_each_rule_refuses_its_first_wrong_value_and_proposes_one_that_is_accepted(
    key: str, right: str, wrong: str, words: str
) -> None:
    for value in right.split():
        assert told(typed([*words.split(), f"{key}={value}"])) == []
    for value in wrong.split():
        (problem,) = told(typed([*words.split(), f"{key}={value}"]))
        assert problem.key.partition("[")[0] == key and problem.reason
        if (fix := problem.fix.partition(" or ")[0]).count("=") == 1 and not fix.endswith("NAME"):
            assert told(typed([*words.split(), f"{key}={value}", fix])) == []


@pytest.mark.parametrize(
    "key, value",
    [
        ("launch.timeout", 1e30),
        ("data.vocab_size", 10**14),
        ("model.layers", 1_000_000),
        ("pp", 10**6),
        ("schedule.microbatches", 10**9),
    ],
)
def test_the_check_refuses_it_without_building_anything(key: str, value: float) -> None:
    config, wrong = parse(with_value(key, value))
    assert wrong == []
    assert [problem.key for problem in check.problems(config)] == [key]
