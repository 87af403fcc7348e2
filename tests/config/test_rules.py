"""What is refused: numbers that no run can have, each rule at its bound, and meshes that do not
fit; each with what can be written instead."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.command_lines import proposals
from support.typed import typed
from titanlike.core.config import validate
from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.overrides import key_of
from titanlike.core.config.parse import parse, to_plain
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import placement_warning, problems


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


@settings(max_examples=100)
@given(st.sampled_from(KEYS), NUMBERS)
def test_any_number_is_refused_or_works(key: str, value: float) -> None:
    plain = with_value(key, value)
    problems = told(plain)
    assert all(str(problem) for problem in problems)
    if not problems:  # what the run makes of times
        config, _ = parse(plain)
        for seconds in (config.launch.timeout, config.checkpoint.timeout, config.max_time or 1):
            timedelta(seconds=seconds)
        assert -(2**63) <= config.seed < 2**63 and math.isfinite(config.optimizer.lr)


@pytest.mark.parametrize("value", BEYOND, ids=lambda value: f"{str(value):.9}")
def test_every_numeric_key_has_bounds(value: float) -> None:
    for key in KEYS:
        assert key in {problem.key for problem in told(with_value(key, value))}


RAMP = "ramp=[{tokens:1000,batch_size:8}]"
# a key; values that are accepted, values that are refused; what else the command line says
RULES = [
    ("batch_size", "12 3", "13 1048577000", "dp=3"),
    ("dp", "1000000", "0 1000001", "batch_size=1000000"),
    ("ep", "2 4", "0 3 8", "dp=4"),
    ("ep", "2 4 8", "3 6 16", "dp=4 tp=2"),
    ("ep", "1 3 4 12", "2 6 8", "dp=3 tp=4 batch_size=12"),
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
    ("data.workers", "0 4096", "4097", ""),
    ("launch.max_restarts", "1000000", "1000001", ""),
    ("spike_window", "2 1000000", "1 1000001", ""),
    ("sweep.parallel", "1 100000", "0 100001", ""),
    ("value", "loss", "val_loss", "validation.every=0"),
    ("value", "val_loss mfu", "accuracy val_loss/code", ""),
    ("logger.project", "x", "a/b", "logger=wandb"),
    ("checkpoint.resume", "auto never s3://b/x", "no/such/folder", ""),
    ("checkpoint.start_from", "null", "a", "checkpoint.resume=/"),
    ("checkpoint.rename", "[a:b]", "[a]", ""),
    ("run_dir", f"{'x' * 200}/a", "x" * 201, ""),
    ("logger.group", "x" * 128, "x" * 129, "logger=wandb"),
    ("logger.tags", "[a,b]", f"[{'x' * 65}]", "logger=wandb"),
    ("numerics.digest_every", "0", "5", "tp=2"),
    ("sample.prompts", "[def]", "[]", "sample.every=3"),
    ("sample.every", "0", "3", "sample.prompts=[def] data=synthetic"),
    ("sample.every", "0", "3", "sample.prompts=[def] cp=2"),
    ("split.head_weight", "0 2", "-1", ""),
    ("data.validation_fraction", "0.01 0.9", "0 1", ""),
    ("data.vocab_size", "1", "0", "data=synthetic"),
    ("data.rows", "null 1", "0", "data=hf data.path=x"),
    ("schedule.stages_per_rank", "2", "1", "schedule=interleavedzerobubble"),
    ("schedule.stages_per_rank", "2", "3", "schedule=auto schedule.search=order"),
    ("schedule.memory", "null 0.1", "0", "schedule=auto"),
    ("schedule.in_flight", "null 1", "0.5", "schedule=auto"),
    ("on_nonfinite", "skip", "rollback", RAMP),
    ("on_spike", "skip", "rollback", RAMP),
    ("schedule", "gpipe", "auto", RAMP),
    ("data", "", "mixture", f"{RAMP} data.sources={{a:{{path:x,weight:1}}}}"),
    ("profile.steps", "[1,2] [300,300]", "[0,3] [3,2] [300,301] [1]", "profile=trace"),
    ("profile.ranks", "[0] []", "[0,1]", "profile=memory"),
    ("timeline.steps", "[1,100]", "[1,101] [301,302]", "timeline.enabled=true"),
    ("tp", "1", "2", "numerics=exact"),
    ("cp", "1", "2", "numerics=exact"),
    ("numerics.grain", "1 2", "3", "numerics=exact"),
    ("batch_size", "16", "262144", "numerics=exact"),
    ("ramp", "[]", "[{tokens:1000,batch_size:8}]", "numerics=exact"),
    ("compile", "false", "true", "numerics=exact"),
    ("precision", "bf16", "float8", "numerics=exact"),
    ("mixes_samples", "false", "true", "numerics=exact"),
]


@pytest.mark.parametrize("key, right, wrong, words", RULES, ids=[rule[0] for rule in RULES])
def test_each_rule_refuses_beyond_its_bound_and_proposes_what_is_accepted(
    key: str, right: str, wrong: str, words: str
) -> None:
    for value in right.split():
        assert told(typed([*words.split(), f"{key}={value}"])) == []
    for value in wrong.split():
        (problem,) = told(typed([*words.split(), f"{key}={value}"]))
        assert problem.key.partition("[")[0] == key and problem.reason and problem.fix
        ways = [way for way in proposals(problem.fix) if not way[0].endswith("=NAME")]
        assert ways or problem.fix.startswith(("the path of", "stages")) or "NAME" in problem.fix
        for way in ways:
            given = [*words.split(), f"{key}={value}"]
            chosen = tuple(f"{key_of(word)}{end}" for word in way for end in "=.")
            kept = [word for word in given if not word.startswith(chosen)]  # not another choice's
            assert told(typed([*kept, *way])) == [], way


def test_each_rule_between_keys_has_its_row() -> None:
    rows = [
        typed([*words.split(), f"{k}={v}"]) for k, _, wrong, words in RULES for v in wrong.split()
    ]
    configs = [parse(row)[0] for row in rows]
    rules = validate.RULES + validate.MESH_RULES + validate.STEP_RULES + validate.EXACT_RULES
    for rule in rules:
        of_exact = rule in validate.EXACT_RULES
        assert any(rule.broken(c) for c in configs if c.exact or not of_exact), rule


def test_numbers_out_of_bounds_are_told_with_the_rules_between_keys() -> None:
    found = told(typed(["optimizer.lr=-1", "batch_size=7", "dp=2"]))
    assert [problem.key for problem in found] == ["optimizer.lr", "batch_size"]


def test_check_refuses_without_building_anything() -> None:
    for key, value in {
        "data.vocab_size": 10**14,
        "model.num_hidden_layers": 10**6,
        "pp": 10**6,
    }.items():
        assert [problem.key for problem in told(with_value(key, value))] == [key]


SMALL = st.integers(1, 12)


def named_in(fix: str) -> list[dict[str, int]]:
    meshes = re.findall(r"pp=\d+ dp=\d+(?: tp=\d+)?(?: replicate=\d+)?", fix)
    return [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", mesh)} for mesh in meshes]


@settings(max_examples=50)
@given(
    pp=SMALL,
    dp=SMALL,
    tp=st.sampled_from([1, 1, 2, 3, 8]),
    each=SMALL,
    microbatches=st.none() | SMALL,
    replicate=SMALL,
    world_size=st.integers(2, 64),
)
def test_every_proposed_mesh_fits_the_world_size(
    pp: int, dp: int, tp: int, each: int, microbatches: int | None, replicate: int, world_size: int
) -> None:
    config = Config(
        pp=pp,
        dp=dp * replicate,
        tp=tp,
        replicate=replicate,
        batch_size=dp * replicate * each * (microbatches or 1),
        schedule=Schedule(microbatches=microbatches),
    )
    assert problems(config) == []
    found = problems(config, world_size)
    assert bool(found) == (config.world_size != world_size)
    for problem in found:
        meshes = named_in(problem.fix)
        assert len(meshes) <= 3
        for mesh in meshes:
            named = replace(config, **mesh)
            assert named.world_size == world_size and tp % named.tp == 0
            assert problems(named, world_size) == []
        one = replace(config, pp=world_size, dp=1, tp=1, replicate=1)  # divides any batch
        assert meshes or problems(one, world_size)


def test_proposed_meshes_are_ordered_by_similarity(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems(Config(pp=2, dp=2), world_size=2)
    assert problem.reason == "pp x dp = 2 x 2 = 4 processes, but 2 were started"
    nodes = "start with --nproc-per-node 4 (times nodes)"
    assert problem.fix == f"pp=2 dp=1, or pp=1 dp=2; or {nodes}"
    (problem,) = problems(Config(pp=1, dp=4, replicate=4), world_size=2)
    assert problem.fix.startswith("pp=1 dp=2 replicate=2, or ")
    (problem,) = problems(Config(dp=4, replicate=4, batch_size=12), world_size=6)
    assert problem.fix.startswith("pp=1 dp=6 replicate=2, or ")
    (problem,) = problems(Config(pp=2, dp=2, tp=2), world_size=4)
    assert problem.reason == "pp x dp x tp = 2 x 2 x 2 = 8 processes, but 4 were started"
    assert problem.fix.startswith("pp=2 dp=1, or pp=1 dp=2, or pp=2 dp=2 tp=1; or start with ")
    (problem,) = problems(Config(pp=2, dp=2, batch_size=6), world_size=257)
    assert problem.fix == nodes, "neither 257 stages nor 6 sequences among 257 ranks"


@settings(max_examples=50)
@given(
    tp=st.sampled_from([2, 4, 6, 8, 16]),
    pp=SMALL,
    dp=SMALL,
    local=st.integers(1, 16),
    machines=st.integers(1, 8),
    each=SMALL,
)
def test_tp_across_nodes_is_a_warning_that_proposes_a_mesh(
    tp: int, pp: int, dp: int, local: int, machines: int, each: int
) -> None:
    config = Config(pp=pp, dp=dp, tp=tp, batch_size=dp * each)
    text = placement_warning(config, local)
    groups = [range(first, first + tp) for first in range(0, config.world_size, tp)]
    spans = any(group[0] // local != group[-1] // local for group in groups)
    assert bool(text) == spans
    for mesh in named_in(text):
        named = replace(config, **mesh)
        assert named.world_size == config.world_size and placement_warning(named, local) == ""
        assert problems(named, config.world_size) == []


def test_tp_across_nodes_warning_text() -> None:
    assert placement_warning(Config(tp=16), 8) == (
        "tp=16 on machines of 8 ranks: the activations of every layer go over the network; "
        "pp=1 dp=2 tp=8 keeps them within a machine"
    )
    assert "pp=2 dp=1 tp=8 keeps" in placement_warning(Config(tp=16, batch_size=1), 8)
    assert placement_warning(Config(dp=4, tp=8), 8) == ""
