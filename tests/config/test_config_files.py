"""The shipped conf/ folder: every file composes, is explained, and says what the schema says."""

from __future__ import annotations

import dataclasses
import itertools
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
GROUPS = [
    [path for path in FILES if path.parent.name == group]
    for group in sorted({path.parent.name for path in FILES} - {"experiment"})
]


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
            required = {name: plain[group][name] for name, field in fields if is_required(field)}
            expected = VARIANTS[group][choice](**{**required, "name": choice})
            assert getattr(config, group) == expected, (
                "the file's defaults differ from the schema's"
            )
            assert plain[group].keys() == to_plain(expected).keys(), "it must write out every key"


def is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


MODELS = [path for path in FILES if path.parent.name in ("experiment", "model")]
PUBLISHED = re.compile(
    r"model=(gpt2|llama3_.*|mixtral_.*|qwen3_.*|deepseek_.*)|experiment=(gpt2|ll).*"
)


@pytest.mark.parametrize("override", [f"{path.parent.name}={path.stem}" for path in MODELS])
def test_a_model_of_published_size_asks_for_data_and_the_small_ones_have_some(
    override: str,
) -> None:
    config, _ = parse(composed(override))
    problems = checks.problems(config)
    assert len(problems) == (PUBLISHED.fullmatch(override) is not None)
    for problem in problems:
        assert problem.key == "data.path"
        assert f"{config.model.args['vocab_size']:,} token ids" in problem.reason
        ways = re.findall(r"data=.*?(?=, or|; to|$)", problem.fix)
        assert [way.split()[0] for way in ways] == ["data=tokens", "data=text", "data=synthetic"]
        for way in ways if override == "model=gpt2" else ():
            config, mistakes = parse(composed(override, *way.split()))
            assert mistakes == []
            reasons = [problem.reason for problem in checks.problems(config)]
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


def test_the_8b_experiment_fits_the_mesh_that_its_comment_names() -> None:
    config, problems = parse(composed("pp=4", "dp=16", "experiment=llama3_8b"))
    assert problems == [] and config.batch_size % config.dp == 0
    assert config.batch_size // config.dp % config.schedule.microbatches == 0
    sizes = yaml.safe_load((conf_dir() / "model" / "llama3_8b.yaml").read_text())
    assert config.model.args["dim"] == sizes["dim"] and config.precision.name == "bf16"
