"""A command line is proven not to hang, or what would hang it is named by its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import desynchronized
from support.desynchronized import LOSSES, PLACES, STEP, marked, with_loss
from support.families import moe
from support.models import SCHEDULES, tiny
from support.recorded_run import asked, calls_of_ranks
from support.world import run_world
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Float8Precision,
    Fsdp,
    Numerics,
    Precision,
)
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import axis_sizes
from titanlike.proof.agreement import Classes
from titanlike.proof.rehearsal import shortened
from titanlike.proof.rehearse import SCENARIOS, Rehearsal, as_data, as_text, rehearse

SMALL: dict[str, Any] = {
    "layers": 4,
    "batch_size": 4,
    "checkpoint": Checkpoint(every=2),
    "validation": Validation(every=2, batches=1),
}


def named(result: Rehearsal) -> set[str]:
    """The lines of what was found, without folders."""
    assert result.found is not None, result.failed or "nothing was found"
    calls = [place.call for place in result.found.places if place.call is not None]
    lines = {line for call in calls for line in (call.line, call.user_line)}
    return {line.rpartition("/")[2] for line in (*lines, result.found.text.partition(": ")[0])}


def planted(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[Any, str, Any]], config: Config
) -> Rehearsal:
    for place, name, value in places:
        monkeypatch.setattr(place, name, value)
    return rehearse(config)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "config"), STEP, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_in_a_step_is_named(fault: Any, config: Config, monkeypatch: Any) -> None:
    result = planted(monkeypatch, desynchronized._before_a_step(fault), config)
    assert result.exit_code == 1 and named(result) & marked(), (result.failed, result.found)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "of"), LOSSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_in_a_loss_of_ones_own_is_named(loss: Any, of: Any) -> None:
    assert named(rehearse(with_loss(loss, of))) & marked()


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "config"), PLACES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_elsewhere_is_named(plant: Any, config: Config, monkeypatch: Any) -> None:
    result = planted(monkeypatch, plant(), config)
    assert result.exit_code == 1 and named(result) & marked(), (result.failed, result.found)


LAYOUTS = {
    "dp": tiny(1, 2, **SMALL),
    "zero 3": tiny(1, 2, fsdp=Fsdp(zero=3), **SMALL),
    "zero 1": tiny(1, 2, fsdp=Fsdp(zero=1), **SMALL),
    "HSDP": tiny(1, 4, replicate=2, fsdp=Fsdp(zero=3), **SMALL),
    "offload": tiny(1, 2, fsdp=Fsdp(cpu_offload=True), **SMALL),
    **{f"pp {name}": tiny(2, 1, name, **SMALL) for name in SCHEDULES if name != "csv"},
    "pp x dp": tiny(2, 2, **SMALL),
    "tied": tiny(2, 2, "zbh1", tied=True, **SMALL),
    "tp": tiny(tp=2, **SMALL),
    "tp x pp": tiny(2, 1, tp=2, **SMALL),
    "tp without sequence": tiny(tp=2, tp_sequence=False, **SMALL),
    "cp gather": tiny(cp=2, context_parallel="gather", **SMALL),
    "cp ring": tiny(cp=2, context_parallel="ring", **SMALL),
    "cp ulysses": tiny(cp=2, context_parallel="ulysses", **SMALL),
    "recomputation": tiny(1, 2, activation_checkpoint=ActivationCheckpoint("full"), **SMALL),
    "exact": tiny(1, 2, numerics=Numerics("exact"), **SMALL),
    "bf16": tiny(2, 2, precision=Precision("bf16"), **SMALL),
    "float8": tiny(1, 2, precision=Float8Precision(), **SMALL),
    "mixture": tiny(1, 2, ep=2, model=moe(), **SMALL),
    "mixture in a pipeline": tiny(2, 2, ep=2, model=moe(), **SMALL),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_alarm_and_each_rank_asks_what_real_ranks_do(name: str, tmp_path: Path) -> None:
    config = shortened(LAYOUTS[name], str(tmp_path / "run"))
    result = rehearse(config)
    assert result.exit_code == 0, (result.failed, result.found)
    real = run_world(calls_of_ranks, config, tmp_path / "real")
    for rank, (program, calls) in enumerate(zip(result.programs, real, strict=True)):
        rehearsed = asked(program.calls)
        assert len(calls) > 20 and rehearsed == calls, rank


def test_a_rank_that_skips_a_barrier_is_named_with_its_line(monkeypatch: Any) -> None:
    fault = desynchronized.skips_a_barrier
    result = planted(monkeypatch, desynchronized._before_a_step(fault), desynchronized.DP())
    first, *rows = as_text(result, 100)
    assert "would hang, in a run" in first and result.exit_code == 1
    (line,) = {row.split()[-1].rpartition("/")[2] for row in rows if "barrier" in row}
    assert line in marked()
    data = as_data(result)
    assert not data["agrees"] and {place["rank"] for place in data["places"]} == {0, 1}


@pytest.mark.slow
def test_ranks_that_agree_cannot_hang() -> None:
    result = rehearse(tiny(2, layers=2, batch_size=2), scenarios=SCENARIOS[:1])
    assert result.exit_code == 0 and as_text(result, 80)[0].startswith("cannot hang")
    assert as_data(result)["messages_a_step"] == 4  # two microbatches, there and back


@pytest.mark.grid
def test_a_rank_asks_the_same_as_the_one_that_is_run_for_it() -> None:
    config = tiny(2, 4, tp=2, **SMALL | {"layers": 2, "batch_size": 8})
    every = rehearse(config, every_rank=True, scenarios=SCENARIOS[:1])
    assert every.exit_code == 0 and len(every.programs) == 16
    few = Classes(axis_sizes(config), most=1)
    assert len(few.ranks) == 4
    for program in every.programs:
        twin = every.programs[few.of(program.rank)]
        pairs = zip(program.calls, twin.calls, strict=True)
        for call, other in pairs:
            same = ["operation", "group", "sizes", "splits", "line", "phase", "queue", "batch"]
            assert all(getattr(call, name) == getattr(other, name) for name in same)
