"""The shipped conf/ folder: every file composes, is explained, and says what the schema says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from titanlike.config.parse import parse, to_plain
from titanlike.config.program import conf_dir
from titanlike.config.schema import VARIANTS, Config
from titanlike.data import checks

FILES = sorted(conf_dir().glob("*/*.yaml"))
REQUIRED = ["data.path=x", "data.vocab_size=9"]


def composed(*overrides: str) -> dict:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return config


def test_the_files_defaults_are_the_schemas() -> None:
    """run_dir alone differs: the file's has the time in it."""
    config, problems = parse(composed())
    assert problems == []
    config.run_dir = Config().run_dir
    config.model = Config().model
    assert config == Config()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_choice_composes_and_parses(path: Path) -> None:
    group, choice = path.parent.name, path.stem
    plain = composed(f"{group}={choice}")
    for key, value in {"path": "x", "sources": {"a": {"path": "x", "weight": 1}}}.items():
        for part in (plain["data"], plain["schedule"], plain["hardware"]):
            if part.get(key) == "???":
                part[key] = value
    config, problems = parse(plain)
    assert [problem.key for problem in problems] == [f"{group}.name"] * (choice == "own")
    if group in VARIANTS and choice != "own":
        variant = VARIANTS[group][choice]
        required = {
            k: plain[group][k] for k, v in variant.__dataclass_fields__.items() if is_required(v)
        }
        expected = variant(**{**required, "name": choice})
        assert getattr(config, group) == expected, "the file's defaults differ from the schema's"
        assert plain[group].keys() == to_plain(expected).keys(), "the file must write out every key"


def is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


PUBLISHED = ["experiment=gpt2_124m", "model=gpt2"]
PUBLISHED += [f"experiment=llama3_{size}" for size in ("8b", "70b", "405b")]
LARGE = ("llama3_", "mixtral_", "qwen3_", "deepseek_")
PUBLISHED += [
    f"model={path.stem}"
    for path in FILES
    if path.stem.startswith(LARGE) and path.parent.name == "model"
]


MODELS = [path for path in FILES if path.parent.name in ("experiment", "model")]


@pytest.mark.parametrize("override", [f"{path.parent.name}={path.stem}" for path in MODELS])
def test_a_model_of_published_size_asks_for_data_and_the_small_ones_have_some(
    override: str,
) -> None:
    config, _ = parse(composed(override))
    problems = checks.problems(config)
    assert len(problems) == (override in PUBLISHED)
    for problem in problems:
        assert problem.key == "data.path"
        assert f"{config.model.args['vocab_size']:,} token ids" in problem.reason
        ways = re.findall(r"data=.*?(?=, or|; to|$)", problem.fix)
        assert [way.split()[0] for way in ways] == ["data=tokens", "data=text", "data=synthetic"]
        for way in ways:
            config, mistakes = parse(composed(override, *way.split()))
            assert mistakes == []
            reasons = [problem.reason for problem in checks.problems(config)]
            assert all("no such file" in reason.lower() for reason in reasons), reasons


def test_every_choice_of_the_schema_is_a_file() -> None:
    for group, variants in VARIANTS.items():
        assert {path.stem for path in (conf_dir() / group).glob("*.yaml")} - {"own"} == set(
            variants
        )


@pytest.mark.parametrize("path", [conf_dir() / "config.yaml", *FILES], ids=lambda path: path.stem)
def test_every_file_begins_with_what_it_is(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @")]
    assert lines[0].startswith("# ") and lines[0].endswith(".")
    assert not lines[1].startswith("#")


def test_the_8b_experiment_fits_the_mesh_that_its_comment_names() -> None:
    config, problems = parse(composed("pp=4", "dp=16", "experiment=llama3_8b"))
    assert problems == [] and config.batch_size % config.dp == 0
    assert config.batch_size // config.dp % config.schedule.microbatches == 0
    sizes = yaml.safe_load((conf_dir() / "model" / "llama3_8b.yaml").read_text())
    assert config.model.args["dim"] == sizes["dim"] and config.precision.name == "bf16"
