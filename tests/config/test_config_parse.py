"""What the config parser promises: nothing is lost, nothing is guessed, everything wrong is said."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.keys import Paths
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import (
    OPEN_GROUPS,
    VARIANTS,
    Config,
    Custom,
    Model,
    OwnOptimizer,
    OwnSchedule,
)

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name != "name")


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value of a schema annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return st.sampled_from(arguments)
    if annotation is Paths:
        path = values(str)
        return st.one_of(path, st.lists(path, min_size=1, max_size=3))
    if origin is dict:
        return st.dictionaries(NAMES, SCALARS)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if annotation is types.NoneType:
        return st.none()
    if dataclasses.is_dataclass(annotation):
        return instances(annotation)
    if annotation is float:
        return st.floats(allow_nan=False)
    if annotation is str:
        return st.text(min_size=1).filter(lambda text: text != "???")
    return st.from_type(annotation)


def instances(variant: type, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(variant)
    return st.builds(variant, **{name: fixed.get(name, values(hints[name])) for name in hints})


def choices(group: str) -> st.SearchStrategy[Any]:
    options = [instances(cls, name=st.just(n)) for n, cls in VARIANTS.get(group, {}).items()]
    if group in OPEN_GROUPS:
        owns = {"model": Model, "optimizer": OwnOptimizer, "schedule": OwnSchedule}
        own = owns.get(group, Custom)
        keys = ("lr", "clip", "weight_gradients", "tp_plan")
        names = NAMES.filter(lambda name: name not in keys)
        options.append(st.builds(own, st.just("my.module.Thing"), st.dictionaries(names, SCALARS)))
    return st.one_of(options)


@settings(max_examples=20, deadline=None)
@given(instances(Config, **{group: choices(group) for group in {*VARIANTS, *OPEN_GROUPS}}))
def test_a_config_written_and_read_again_is_the_same(config: Config) -> None:
    assert parse(to_plain(config)) == (config, [])


def test_every_wrong_value_is_reported_at_once_with_one_that_works() -> None:
    plain = to_plain(Config())
    plain |= {"pp": "two", "dp": 2.0, "steps": True, "devise": "cpu", "device": "cdua", "qzx": 1}
    plain["schedule"] = {"name": "1f1bb"}
    plain["data"] = {"name": "tokens", "path": "???"}
    plain["optimizer"] |= {"betas": 0.9, "lr": "fast"}
    plain["checkpoint"]["evry"] = 5
    _, problems = parse(plain)
    fixes = {problem.key: problem.fix for problem in problems}
    assert fixes == {
        "pp": "pp=1",
        "dp": "dp=2",
        "steps": "steps=300",
        "devise": "device=cpu",
        "device": "device=cuda",
        "schedule.name": "schedule=1f1b",
        "data.path": "data.path=PATH",
        "optimizer.betas": "optimizer.betas=[0.9]",
        "optimizer.lr": "optimizer.lr=0.003",
        "checkpoint.evry": "checkpoint.every=5",
        "qzx": "",
    }


def test_an_integer_serves_as_a_number_and_null_only_where_it_has_a_meaning() -> None:
    plain = to_plain(Config())
    plain["optimizer"] |= {"lr": 1, "clip": None, "eps": None}
    config, problems = parse(plain)
    assert config.optimizer.lr == 1.0 and config.optimizer.clip is None
    assert [problem.key for problem in problems] == ["optimizer.eps"]


def test_a_problem_reads_as_key_value_reason_and_remedy() -> None:
    problem = Problem("pp", 3, "does not divide 8 layers", "pp=2")
    assert str(problem) == "pp=3: does not divide 8 layers; write pp=2"
    assert Problem.parse("model", str(problem)) == Problem("pp", "3", problem.reason, "pp=2")
    assert Problem.parse("model", "odd words") == Problem("model", "", "odd words")
    assert str(ConfigError([problem, problem])).count("\n") == 1
    # "write" stands before what can be written, and not before a sentence
    for fix in ("pp=2", "-m pp=1,2", "'run_dir=a b'", "\"data.path='a'\"", "pp=2 or dp=2"):
        assert str(Problem("pp", 3, "is odd", fix)) == f"pp=3: is odd; write {fix}"
    sentence = "give a path, or data.path=null"
    assert str(Problem("pp", 3, "is odd", sentence)) == f"pp=3: is odd; {sentence}"
