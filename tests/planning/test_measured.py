"""Plans for this machine (`hardware=measure`) beside real runs on its cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import slow
from support.models import tiny
from support.planned_runs import compared
from titanlike.config.hardware import MeasuredHardware
from titanlike.config.schema import (
    BalanceSplit,
    Config,
    Custom,
    EvenSplit,
    LoopedSchedule,
    Schedule,
    SyntheticData,
    ZeroBubbleSchedule,
)
from titanlike.pipeline.order import needs
from titanlike.planning.known_hardware import shipped
from titanlike.planning.plan import make_plan

# stages that take some 20 ms a microbatch, so that they dominate
HEAVY = {"dim": 256, "heads": 4, "kv_heads": 4, "ffn_dim": 704, "layers": 8, "vocab_size": None}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


def config_of(schedule, split, kept: Path, pp: int = 2) -> Config:
    return tiny(
        pp,
        1,
        schedule,
        split=split,
        model=Custom("llama", HEAVY),
        seq_len=128,
        batch_size=16,
        data=SyntheticData(),
        hardware=MeasuredHardware(folder=str(kept)),
    )


@pytest.mark.slow
@pytest.mark.grid  # for a machine that does nothing else
@pytest.mark.parametrize("blocks", [None, [5, 3]])
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("1f1b", 8),
        LoopedSchedule("interleaved1f1b", 8),
        ZeroBubbleSchedule("zbvzerobubble", 8),
    ],
    ids=lambda schedule: schedule.name,
)
def test_step_and_bubble_are_those_of_the_real_actions(schedule, blocks, kept, tmp_path) -> None:
    split = EvenSplit()
    if blocks is not None:
        one = schedule.name == "1f1b"
        split = BalanceSplit(balance=blocks if one else [3, 2, 2, 1])
    plan, real, _ = compared(config_of(schedule, split, kept), tmp_path / "run")
    step, bubble = plan.simulation.pipeline, plan.simulation.bubble
    print(f"{schedule.name} {blocks}: step {step:.3f} of {real.pipeline:.3f} s", end=", ")
    print(f"bubble {bubble:.3f} of {real.bubble:.3f}")
    # CPU time of a core that is shared with other programs varies by some percent
    assert step == pytest.approx(real.pipeline, rel=0.15)
    assert bubble == pytest.approx(real.bubble, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways",
    [[(2, "ulysses", 1), (1, "auto", 1)], [(2, "gather", 2)]],
)
def test_units_of_a_rank_with_a_part_of_each_sequence_are_measured(
    ways: list[tuple[int, str, int]], tmp_path: Path
) -> None:
    """Each way to attend to the others' tokens by itself; with divided layers, too."""
    hardware = MeasuredHardware(folder=str(tmp_path))
    for count, (cp, method, tp) in enumerate(ways, 1):
        # as many tokens of each sequence on a rank, whatever cp
        config = tiny(1, layers=1, batch_size=4, seq_len=16 * cp, hardware=hardware)
        plan = make_plan(replace(config, cp=cp, context_parallel=method, tp=tp), shipped("cpu"))
        assert not plan.times.estimated and plan.step_seconds > 0
        assert len([*(tmp_path / "units").iterdir()]) == count, "measured by itself"


@pytest.mark.parametrize("pp", [2, *slow(4)])
def test_real_ranks_compute_in_the_order_that_is_simulated(pp: int, tmp_path: Path) -> None:
    """By one clock: what an action needs has ended on another rank when it ends."""
    schedule = LoopedSchedule("interleaved1f1b", 8)
    config = tiny(pp, 1, schedule, layers=8)
    config = replace(config, hardware=shipped("cpu"))
    plan, _, ranks = compared(config, tmp_path / "run")
    ended = {event[:3]: event for rank in ranks for event in rank.events}
    for rank, simulated in zip(ranks, plan.simulation.events, strict=True):
        order = [event[:3] for event in rank.events]
        assert order == [event[:3] for event in simulated if event.kind in "FBIW"]
    for acts in plan.order.ranks:
        for act in acts:
            for need in needs(act, plan.order.stages - 1):
                found = ended.get(tuple(need)) or ended[("B", *need[1:])]
                assert found[4] < ended[tuple(act)][4], (need, act)
