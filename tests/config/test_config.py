"""The parser loses nothing, guesses nothing and says everything that is wrong; the shipped conf/
folder says what the schema says; --help is complete; printed commands can be pasted."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import subprocess
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from support.command_lines import examined
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.jobs import Checkpoint
from titanlike.core.config.groups.pipeline import CustomSchedule
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer, Model
from titanlike.core.config.keys import Paths, field_problems
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.parse import parse, to_plain, write_config
from titanlike.core.config.program import conf_dir
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config
from titanlike.core.config.validate import problems
from titanlike.core.config.yaml_files import parse_yaml
from titanlike.core.data import registry
from titanlike.run.argv import complete_args, parse_argv
from titanlike.run.help import help_on, help_text
from titanlike.run.overrides import config_loader
from titanlike.run.sweep import SweepRun

NUMBERS = st.integers(-(2**40), 2**40) | st.floats(-1e12, 1e12)  # that any argument may have
SCALARS = st.none() | st.booleans() | NUMBERS | st.text()
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
        below = dataclasses.is_dataclass(arguments[1])
        return st.dictionaries(
            NAMES, values(arguments[1]) if below or arguments[1] is str else SCALARS, max_size=3
        )
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
    drawn = {f.name: possible(f, hints[f.name]) for f in dataclasses.fields(variant)}
    return st.builds(variant, **drawn | fixed)


def possible(field: dataclasses.Field[Any], annotation: Any) -> st.SearchStrategy[Any]:
    """A field's values, the default in place of those beyond its bounds."""

    def within(value: Any) -> Any:
        if not any(field_problems(field, value, field.name)):
            return value
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        if field.default is not dataclasses.MISSING:
            return field.default
        return "a" if annotation in (str, Paths) else field.metadata["bounds"].get("le", 2**20)

    return values(annotation).map(within)


def choices(group: str) -> st.SearchStrategy[Any]:
    options = [instances(cls, name=st.just(n)) for n, cls in VARIANTS.get(group, {}).items()]
    if group in OPEN_GROUPS:
        owns = {"model": Model, "optimizer": CustomOptimizer, "schedule": CustomSchedule}
        own = owns.get(group, Custom)
        keys = ("lr", "clip", "weight_gradients", "tp_plan")
        names = NAMES.filter(lambda name: name not in keys)
        options.append(st.builds(own, st.just("my.module.Thing"), st.dictionaries(names, SCALARS)))
    return st.one_of(options)


@settings(max_examples=20)
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
        "data.path": "give data.path its value, or write data=text",
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
    hidden = Problem("pp", "x-12345/y", "no x-12345", "pp=x-12345").hiding(
        {"x-12345": "${oc.env:A}"}
    )
    assert hidden == Problem("pp", "${oc.env:A}/y", "no ${oc.env:A}", "pp=${oc.env:A}")
    # "write" stands before what can be written, and not before a sentence
    for fix in ("pp=2", "-m pp=1,2", "'run_dir=a b'", "\"data.path='a'\"", "pp=2 or dp=2"):
        assert str(Problem("pp", 3, "is odd", fix)) == f"pp=3: is odd; write {fix}"
    sentence = "give a path, or data.path=null"
    assert str(Problem("pp", 3, "is odd", sentence)) == f"pp=3: is odd; {sentence}"


FILES = sorted(conf_dir().glob("*/*.yaml"))
GROUPS = [
    [path for path in FILES if path.parent.name == group]
    for group in sorted({path.parent.name for path in FILES} - {"experiment"})
]


def composed(*overrides: str) -> dict:
    args = parse_argv(overrides)
    complete_args(args)
    composed = config_loader(args).load_configuration("config", args.overrides, RunMode.RUN)
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(config, dict)
    return config


def test_the_files_defaults_are_the_schemas() -> None:
    """run_dir alone differs: the file's has the time in it."""
    config, problems = parse(composed())
    assert problems == []
    config.run_dir = Config().run_dir
    config.model = Config().model
    assert config == Config()


def test_a_default_stands_in_the_schema_alone(tmp_path: Path) -> None:
    """No shipped file repeats a default; a file of the user's, too, says only what differs."""
    for file in (conf_dir() / "config.yaml", *FILES):
        plain, defaults = yaml.safe_load(file.read_text()), to_plain(Config())
        group = file.parent.name
        if file.parent != conf_dir():
            variant = VARIANTS.get(group, {}).get(plain.get("name"))
            fields = dataclasses.fields(variant) if variant and group != "hardware" else ()
            defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
            defaults |= {f.name: f.default_factory() for f in fields if callable(f.default_factory)}
        repeated = {key for key in plain if key != "name" and plain[key] == defaults.get(key, ...)}
        assert repeated == set(), file
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "slow.yaml").write_text("name: sgd\nlr: 0.01\n")
    (tmp_path / "optimizer" / "slower.yaml").write_text("defaults: [slow]\nname: sgd\nclip: 2.0\n")
    (tmp_path / "short.yaml").write_text("defaults: [config, _self_]\nsteps: 2\n")
    mine = "--config-dir", str(tmp_path)
    config = examined(*mine, "optimizer=slow", "optimizer.momentum=0.9", "seed=3").config
    assert config is not None and (config.optimizer, config.seed) == (Sgd(lr=0.01, momentum=0.9), 3)
    words = "optimizer=slower", "--config-name", "short", "ema.decay=0.9"
    config = examined(*mine, *words).config
    assert config is not None and config.optimizer == Sgd(lr=0.01, clip=2.0)
    assert (config.steps, config.ema.decay) == (2, 0.9)
    (problem,) = examined("seeed=1").problems
    assert str(problem) == "seeed=1: unknown key; write seed=1"


@pytest.mark.parametrize("files", [*itertools.zip_longest(*GROUPS)], ids=itertools.count())
def test_every_choice_composes_and_parses(files: tuple[Path | None, ...]) -> None:
    """One of each group at a time."""
    chosen = {path.parent.name: path.stem for path in files if path is not None}
    plain = composed(*(f"{group}={choice}" for group, choice in chosen.items()))
    for key, value in {"path": "x", "sources": {"a": {"path": "x", "weight": 1}}}.items():
        for part in (plain["data"], plain["schedule"], plain["hardware"]):
            if part.get(key) == "???":
                part[key] = value
    config, problems = parse(plain)
    own = {f"{group}.name" for group, choice in chosen.items() if choice == "own"}
    assert {problem.key for problem in problems} == own
    for group, choice in chosen.items():
        if group in VARIANTS and choice != "own":
            fields = VARIANTS[group][choice].__dataclass_fields__.items()
            values = {  # a device's are all its own
                name: plain[group][name]
                for name, field in fields
                if is_required(field) or group == "hardware"
            }
            expected = VARIANTS[group][choice](**{**values, "name": choice})
            assert getattr(config, group) == expected, (
                "the file's defaults differ from the schema's"
            )


def is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


MODELS = [path for path in FILES if path.parent.name in ("experiment", "model")]
PUBLISHED = re.compile(
    r"model=(gpt2|llama3_.*|mixtral_.*|qwen3_.*|deepseek_.*|gpt_oss_.*)|experiment=(gpt2|ll).*"
)


@pytest.mark.parametrize("override", [f"{path.parent.name}={path.stem}" for path in MODELS])
def test_a_model_of_published_size_asks_for_data_and_the_small_ones_have_some(
    override: str,
) -> None:
    config, _ = parse(composed(override))
    problems = registry.problems(config)
    assert len(problems) == (PUBLISHED.fullmatch(override) is not None)
    for problem in problems:
        assert problem.key == "data.path"
        assert f"{config.model.args['vocab_size']:,} token ids" in problem.reason
        ways = re.findall(r"data=.*?(?=, or|; to|$)", problem.fix)
        assert [way.split()[0] for way in ways] == ["data=tokens", "data=text", "data=synthetic"]
        for way in ways if override == "model=gpt2" else ():
            config, mistakes = parse(composed(override, *way.split()))
            assert mistakes == []
            reasons = [problem.reason for problem in registry.problems(config)]
            assert all("no such file" in reason.lower() for reason in reasons), reasons


def test_every_choice_of_the_schema_is_a_file() -> None:
    for group, variants in VARIANTS.items():
        files = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
        assert files - {"own"} == set(variants)


def test_every_file_begins_with_what_it_is() -> None:
    for path in (conf_dir() / "config.yaml", *FILES):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("# @")]
        assert lines[0].startswith("# ") and lines[0].endswith("."), path
        assert not lines[1].startswith("#"), path


def all_keys() -> set[str]:
    keys = set()
    for name, value in to_plain(Config()).items():
        if name in VARIANTS:
            for variant in VARIANTS[name].values():
                keys |= {f"{name}.{f.name}=" for f in dataclasses.fields(variant)} - {
                    f"{name}.name="
                }
        elif isinstance(value, dict):
            keys |= {f"{name}.{key}=" for key in value if name != "model"}
        else:
            keys.add(f"{name}=")
    return keys


def test_help_lists_every_key_and_every_choice_within_the_terminal() -> None:
    for width in (80, 160):
        text = help_text(["python", "train.py"], {}, width)
        words = text.split()
        missing = {key for key in all_keys() if not any(word.startswith(key) for word in words)}
        assert missing == set()
        assert {path.stem for path in conf_dir().glob("*/*.yaml")} <= set(words)
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    "words, shown, hidden",
    [
        (["async"], "checkpoint.mode=sync", "checkpoint.every"),  # a value
        (["Learning", "rate"], "optimizer.lr=0.003", "optimizer.betas"),  # documentation
        (["fsdp"], "fsdp.cpu_offload=false", "steps="),  # a section: all of it
        (["wsd"], "lr=  learning-rate schedule\n  wsd ", "linear"),
        (["zzz"], "no key has zzz: python train.py --help lists all", "steps="),
    ],
)
def test_help_on_a_word_shows_the_keys_that_have_it(
    words: list[str], shown: str, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their name, value or documentation, below their section."""
    monkeypatch.setenv("COLUMNS", "100")
    text = help_on(words, ["python", "train.py"])
    assert shown in text and hidden not in text


FOLDERS = ["plain-1.x", "a b", "it's", 'say "x"', "$HOME", "`date`", "back\\slash", "x\\'s\\"]
FOLDERS += ["{a},b=c#;(*%", "é"]


def pasted(line: str) -> list[str]:
    """The words that bash makes of a line."""
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, timeout=20
    )
    return shown.stdout.decode().split("\0")[:-1]


def test_any_yaml_is_data_or_an_error_at_once() -> None:
    odd = ["!!timestamp 'x'", "!!bool 'x'", "!!int ''", "0x" + "f" * 6000, "1:" * 400 + "1.5"]
    for text in [*odd, "1:" * 200_000 + "1"]:
        with pytest.raises(ValueError, match="a number of|a value is not what its tag says"):
            parse_yaml(f"seed: {text}")
    assert parse_yaml("seed: 1:30") == {"seed": 90}


def test_a_printed_command_is_quoted_for_the_shell(tmp_path: Path) -> None:
    """Of a run, in its config.yaml, and of a sweep, whose folder is also a value of an override."""
    for name in FOLDERS:
        folder = tmp_path / name
        write_config(Config(run_dir=str(folder)), folder)
        line = (folder / "config.yaml").read_text().splitlines()[1].removeprefix("#").strip()
        assert pasted(line)[-2:] == ["--config-path", str(folder)]
        sweep = SimpleNamespace(command=["seed=1,2"], program=["python", "train.py"], folder=folder)
        words = pasted(shlex.join(SweepRun._again(sweep)))
        assert words[:3] == ["python", "train.py", "seed=1,2"]
        override = OverridesParser.create().parse_override(words[-2])
        assert override.key_or_group == "run_dir" and str(override.value()) == str(folder)


def test_a_path_with_control_characters_is_refused() -> None:
    for name in ("a\nb", "a\rb", "\x1b[31m"):
        found = problems(Config(run_dir=name, checkpoint=Checkpoint(folder=name)))
        assert [problem.key for problem in found] == ["run_dir", "checkpoint.folder"]
        assert all(str(problem).isprintable() for problem in found)
        assert not problems(Config(run_dir=found[0].fix.partition("=")[2]))
