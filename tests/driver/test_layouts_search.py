"""The throughput search: which layouts it lists and leaves out, the command it ends with."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from support import forked
from support.paths import ROOT
from titanlike.config.errors import ConfigError
from titanlike.config.parse import parse
from titanlike.config.schema import Config
from titanlike.driver.job import JobRunner, config_problems
from titanlike.driver.layout_search import Machine, filter_layouts, read_space
from titanlike.driver.sweep_status import read_spec
from titanlike.pipeline.schedules import SCHEDULES
from titanlike.planning.estimate import make_estimate
from titanlike.planning.layouts import SearchSpace
from titanlike.training.train_plan import make_plan

RUNNER = JobRunner("titanlike.training.loop:train", "")
MODEL = [
    "model.num_hidden_layers=4",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.intermediate_size=64",
    "data=synthetic",
]


def train(*words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """train.py as a user runs it."""
    return forked.run(["train.py", *map(str, words)], ROOT, timeout=timeout)


@cache
def _composed(*overrides: str) -> Config:
    """The config of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        made = compose("config", [f"++{o}" if o.startswith("model.") else o for o in overrides])
    config, problems = parse(OmegaConf.to_container(made, resolve=True))
    assert not problems
    return replace(config, run_dir=gettempdir())  # a check looks whether it can be written


def composed(overrides: list[str]) -> Config:
    return _composed(*overrides)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- a search ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_search_ends_with_the_command_line_of_the_fastest_layout(tmp_path):
    """Of all layouts of two ranks the promising ones are run; the command trains as it stands."""
    limits = ["hydra.sweeper.ranks=2", "hydra.sweeper.most=2", "hydra.sweeper.microbatches=[2,4]"]
    ended = train("experiment=throughput", *MODEL, *limits, "steps=4", f"run_dir={tmp_path}")
    assert ended.returncode == 0, ended.stderr
    told = re.search(r"(\d+) layouts: 2 to run, (\d+) left out", ended.stdout)
    rows = rows_of(tmp_path)
    done = [row for row in rows if row["status"] == "completed"]
    assert len(rows) == int(told[1]) == int(told[2]) + 2 and len(done) == 2
    assert {row["error"] for row in rows if row not in done} == {"not among the 2 most promising"}
    best = max(done, key=lambda row: float(row["tokens_per_second"]))
    command = ended.stdout.partition(f"of job {best['job']}\n")[2].splitlines()[0].strip()
    own = [word for word in shlex.split(best["overrides"]) if word != "experiment=throughput"]
    assert shlex.split(command) == ["python", "train.py", *own]
    assert {"pp", "dp", "schedule", "schedule.microbatches"} <= {w.partition("=")[0] for w in own}
    again = composed(own)
    assert again.checkpoint.last and again.validation.every and again.value is None
    assert not (tmp_path / best["job"] / "checkpoints").exists()  # of the search itself
    # said again, it has nothing to do
    words = ["experiment=throughput", *MODEL, *limits, "steps=4", f"run_dir={tmp_path}"]
    ended = train("-m", *words, "sweep.resume=true")
    assert ended.returncode == 0 and "2 of them done before" in ended.stdout, ended.stderr
    assert [row["status"] for row in rows_of(tmp_path)] == [row["status"] for row in rows]


def test_a_model_that_fits_in_no_layout_is_refused_before_anything_is_started(tmp_path):
    """405B parameters on two ranks of this machine: nothing is started, and the reason is told."""
    words = ["hydra.sweeper.ranks=2", "data=synthetic", f"run_dir={tmp_path}"]
    ended = train("-m", "experiment=throughput", "model=llama3_405b", *words)
    assert ended.returncode == 1
    assert "no layout can be run" in ended.stderr
    assert re.search(r"\d+ layouts: 0 to run, \d+ left out \(\d+ too large\)", ended.stdout)
    assert re.search(r"skipped: needs more than \d\.\d TiB on a rank, of ", ended.stdout)
    spec = read_spec(tmp_path)
    assert spec is not None and len(spec.jobs) > 20 and all(job.skipped for job in spec.jobs)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_setting_that_makes_no_sense_names_its_key_and_one_that_does(tmp_path):
    ended = train("experiment=throughput", "hydra.sweeper.mosd=3", f"run_dir={tmp_path}")
    assert ended.returncode == 2 and "write hydra.sweeper.most=3" in ended.stderr
    assert ended.stdout == "" and not (tmp_path / "sweep.csv").exists()
    plain = {one: getattr(SearchSpace(), one) for one in SearchSpace.__dataclass_fields__}
    for key, value in (
        *(("ranks", 0), ("most", 0), ("microbatches", [4, 0]), ("stages_per_rank", [])),
        *(("schedules", []), ("memory", "80 boxes"), ("ranks", "many")),
    ):
        told = rf"hydra\.sweeper\.{key}=.*; write hydra\.sweeper\.{key}="
        with pytest.raises(ConfigError, match=told):
            read_space({**plain, key: value})
    assert read_space({**plain, "memory": "1.5GiB"}).memory == 1.5 * 2**30
    assert read_space({**plain, "memory": "80G"}).memory == 80 * 2**30


# --- which layouts -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.grid
@given(
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from(
        ["tp=2", "schedule=gpipe", "fsdp.zero=2", "schedule.microbatches=4", "pp=2"] + [""]
    ),
    st.sets(st.sampled_from(list(SCHEDULES)), min_size=1, max_size=3),
    st.sampled_from([12, 16]),
)
@settings(max_examples=5, deadline=None)
def test_every_layout_of_the_ranks_is_listed_once_and_runs(ranks, fixed, names, batch):
    """What is fixed stays fixed; what is left out as invalid is refused by a run, too."""
    search = SearchSpace(schedules=sorted(names), stages_per_rank=[1, 2], most=1000)
    overrides = [*MODEL, *filter(None, [fixed]), f"batch_size={batch}"]
    found = filter_layouts(composed, [overrides], search, Machine(ranks, None), RUNNER)
    layouts, meshes = set(), set()
    for words in found.combinations:
        config = composed(words)
        assert words[: len(overrides)] == overrides
        meshes.add((config.pp, config.dp, config.tp))
        if tuple(words) in found.skipped:
            wrong_size = config.world_size != ranks  # also of a tp that the model refuses
            assert wrong_size or config_problems(config, None, [])
            continue
        assert config.world_size == ranks
        layout = config.dp, config.tp, make_plan(config).order
        assert layout not in layouts
        layouts.add(layout)
    assert found.to_run == len(layouts)
    for tp in (tp for tp in (1, 2, 4) if ranks % tp == 0 and not fixed):
        left = ranks // tp
        assert meshes >= {(n, left // n, tp) for n in range(1, left + 1) if left % n == 0}


def test_what_is_known_to_be_wrong_is_left_out_with_the_reason():
    """ZeRO 2 loses gradients where a backward is split; dp=4 does not divide 6 sequences."""
    overrides = [*MODEL, "fsdp.zero=2", "batch_size=6"]
    search = SearchSpace(schedules=["1f1b", "zbvzerobubble"])
    found = filter_layouts(composed, [overrides], search, Machine(4, None), RUNNER)
    reasons = {words[len(overrides) :][:3]: why for words, why in found.skipped.items()}
    assert "does not divide among dp=4" in reasons["pp=1", "dp=4", "schedule=1f1b"]
    assert "splits the backward" in reasons["pp=2", "dp=2", "schedule=zbvzerobubble"]
    assert ("pp=2", "dp=2", "schedule=1f1b") not in reasons


@pytest.mark.slow
def test_tensor_parallel_ranks_are_tried_as_the_plan_allows_within_a_machine():
    """4 heads; 12 ranks, of which a machine has 6. A model without a plan has no tp."""
    search = SearchSpace(schedules=["1f1b"], microbatches=[1])
    words = [*MODEL, "pp=1", "batch_size=12"]
    found = filter_layouts(composed, [words], search, Machine(12, None, 6), RUNNER)
    left = {w[len(words)]: why for w, why in found.skipped.items()}
    assert left["tp=3"].endswith("write tp=2") and {"tp=3", "tp=4", "tp=6", "tp=12"} == {*left}
    assert "go over the network: a machine has 6 ranks" in left["tp=4"]
    run = [w[len(words) :] for w in found.combinations if tuple(w) not in found.skipped]
    assert [w[:-2] for w in run] == [["dp=12"], ["dp=6", "tp=2"]]
    own = ["model=own", "model.name=support.losses.Ended", "pp=1", "batch_size=12"]
    found = filter_layouts(composed, [own], search, Machine(4, None), RUNNER)
    assert [composed(w).tp for w in found.combinations] == [1]


def test_a_layout_that_is_another_one_in_other_words_is_run_once():
    """Looped BFS with one stage a rank is GPipe; with one microbatch 1F1B is GPipe, too. Of several
    the most promising is run."""
    search = SearchSpace(schedules=["gpipe", "loopedbfs"], stages_per_rank=[1], microbatches=[2, 4])
    words = [*MODEL, "pp=2", "batch_size=64"]
    found = filter_layouts(composed, [words], replace(search, most=1), Machine(2, None), RUNNER)
    assert [words[-1] for words in found.combinations] == [
        "schedule.microbatches=2", "schedule.microbatches=4",
    ]  # fmt: skip
    configs = [composed(words) for words in found.combinations]
    times = [make_estimate(config, plan=make_plan(config)).step_seconds for config in configs]
    (skipped,) = found.skipped
    assert composed(list(skipped)) == configs[times.index(max(times))]
    search = SearchSpace(schedules=["gpipe", "1f1b"], microbatches=[1])
    found = filter_layouts(composed, [[*MODEL, "pp=2"]], search, Machine(2, None), RUNNER)
    assert found.to_run == len(found.combinations) == 1
