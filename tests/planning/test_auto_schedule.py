"""schedule=auto: found before the start, exact, kept in run_dir, run again from there or from a
CSV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import cells, slow
from support.models import tiny
from support.proven import assert_proven
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.pipeline import AutoSchedule, CsvSchedule
from titanlike.core.config.parse import bytes_of
from titanlike.core.config.schema import Config
from titanlike.core.pipeline.from_config import build_order, microbatch_problem
from titanlike.core.training.train_plan import make_plan
from titanlike.planning import auto_schedule
from titanlike.planning.auto_schedule import find, with_found_order
from titanlike.planning.costs.simulate import in_flight
from titanlike.planning.known_hardware import shipped
from titanlike.run.tools import plan

H100 = {"hardware": shipped("h100_sxm")}
AUTO = AutoSchedule(microbatches=4)
LAYOUTS = {"2 ranks": tiny(pp=2, schedule=replace(AUTO, search="split", memory=0.8), **H100)}
MORE_LAYOUTS = {
    "4 ranks and FSDP, tied": tiny(pp=4, dp=2, schedule=AUTO, tied=True, layers=12, **H100),
    "tp=2, bf16, weight gradients together": tiny(
        pp=2,
        schedule=replace(AUTO, weight_gradients="together"),
        tp=2,
        precision=Precision("bf16"),
        **H100,
    ),
}


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a search gets with its hundreds of trials is proven by test_order_search.py."""
    monkeypatch.setattr(auto_schedule, "trials_for", lambda problems: 30)


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_a_searched_order_trains_the_same_model(config: Config, tmp_path: Path) -> None:
    assert_proven(with_found_order(replace(config, run_dir=str(tmp_path))), tmp_path)


def test_a_searched_order_is_cached_and_runs_as_a_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(pp=2, schedule=replace(AUTO, search="split"), run_dir=str(tmp_path), **H100)
    said: list[str] = []
    first = with_found_order(config, said.append)
    assert "by simulation" in said[0] and (tmp_path / "order.csv").is_file()
    plan = make_plan(first)
    assert len(plan.stages) == plan.order.stages
    csv = replace(first, schedule=CsvSchedule(path=str(tmp_path / "order.csv")))
    assert make_plan(csv).order == plan.order and make_plan(csv).stages == plan.stages

    found, searched = find(config), []
    monkeypatch.setattr(auto_schedule, "find", lambda config: searched.append(config) or found)
    assert with_found_order(config) == first
    assert with_found_order(first) == first  # a run from its own config.yaml
    assert not searched
    with_found_order(replace(config, seq_len=32))
    assert len(searched) == 1
    for text in ("", "{}", json.dumps({"for": 1})):  # damaged
        (tmp_path / "order.json").write_text(text)
        assert with_found_order(config) == first
    assert len(searched) == 4


def test_a_plan_searches_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "pp=2 schedule=auto schedule.search=order hardware=h100_sxm data=synthetic"
    assert (
        plan([*words.split(), "model.num_hidden_layers=4", "model.hidden_size=32", "seq_len=16"])
        == 0
    )
    assert "schedule=auto: " in capsys.readouterr().out and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("limits", [{"memory": 0.1}, *slow({"memory_bytes": 2**20})])
def test_too_little_memory_is_refused_with_the_least_that_works(
    limits: dict[str, float], tmp_path: Path
) -> None:
    schedule = replace(AUTO, **limits)
    config = tiny(pp=2, schedule=schedule, run_dir=str(tmp_path), seq_len=2048, **H100)
    with pytest.raises(ConfigError) as error:
        with_found_order(config)
    (problem,) = error.value.problems
    assert "holds at least a microbatch" in problem.reason
    key, _, least = problem.fix.removeprefix("schedule.").partition("=")
    enough = float(least) if key == "memory" else bytes_of(least)
    with_found_order(replace(config, schedule=replace(schedule, **{key: enough})))


def test_memory_is_limited_in_bytes_and_in_microbatches_in_flight(tmp_path: Path) -> None:
    """Of the first rank, which holds the most; each of several limits holds."""
    search = AutoSchedule(8, stages_per_rank=1, placement="loop", search="order")
    most = []
    for changes in (
        {},
        {"in_flight": 2.0},
        {"in_flight": 16.0, "memory": 1.0},
        {"memory_bytes": 2**40},
        {"memory_bytes": 2**40, "in_flight": 1.0},
    ):
        config = tiny(
            pp=3, schedule=replace(search, **changes), batch_size=8, layers=3, seq_len=2048
        )
        found = find(replace(config, run_dir=str(tmp_path), **H100))
        most.append(in_flight(found.order.ranks[0]))
    assert most[1] == 2 and most[4] == 1
    assert 2 < most[0] == most[2] < most[3]  # 1f1b's memory, and as much as is of use


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            AutoSchedule(memory=0.0),
            "schedule.memory=0.0: must be above 0; write schedule.memory=1.0",
        ),
        (
            AutoSchedule(in_flight=0.5),
            "in_flight=0.5: must be at least 1; write schedule.in_flight=1",
        ),
        (AutoSchedule(stages_per_rank=0), "stages_per_rank=0: must be at least 1"),
    ],
)
def test_a_schedule_search_that_cannot_work_is_refused(schedule: AutoSchedule, words: str) -> None:
    assert words in str(microbatch_problem(schedule, 2, 8))
    with pytest.raises(ValueError, match="schedule"):
        build_order(schedule, 2, 8)
