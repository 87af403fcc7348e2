"""Every schedule gives an order that runs, for all sizes that it does not refuse."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.core.config.groups.pipeline import CsvSchedule, LoopedSchedule, Schedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import VARIANTS
from titanlike.core.pipeline.from_config import (
    NoDivision,
    build_order,
    declared_microbatches,
    derive_microbatches,
    microbatch_problem,
    stage_count,
)
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    interleaved_1f1b,
    loop,
    looped_bfs,
    vee,
)
from titanlike.core.torch_private.pipeline_runtime import generated_order
from titanlike.planning.costs.simulate import equal_stages, in_flight, simulate

SPLITTING = {*SCHEDULES} - {"gpipe", "1f1b", "interleaved1f1b", "loopedbfs"}


def chosen(name: str, stages_per_rank: int = 2) -> Schedule | LoopedSchedule:
    sizes = {"stages_per_rank": stages_per_rank} if name in LOOPED else {}
    return VARIANTS["schedule"][name](name=name, **sizes)


schedules = st.builds(chosen, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4))


@settings(max_examples=150)
@given(schedules, st.integers(1, 8), st.integers(1, 24))
def test_a_schedule_gives_an_order_that_runs_or_refuses_what_torch_refuses_too(
    schedule, pp, microbatches
) -> None:
    problem = microbatch_problem(schedule, pp, microbatches)
    if problem:
        with pytest.raises(ValueError, match="schedule"):
            build_order(schedule, pp, microbatches)
        assert schedule.name in ("interleavedzerobubble", "dualpipev")
        with pytest.raises((ValueError, AssertionError)):
            v = getattr(schedule, "stages_per_rank", 2)
            generated_order(schedule.name, pp, microbatches, v)
        if remedy := re.search(r"write schedule.microbatches=(\d+)", str(problem)):
            assert microbatch_problem(schedule, pp, int(remedy[1])) is None
        else:
            assert "write schedule.stages_per_rank=2" in str(problem)
        return
    order = check_order(build_order(schedule, pp, microbatches))
    assert (len(order.ranks), order.microbatches) == (pp, microbatches)
    assert order.stages == stage_count(schedule, pp)
    assert order.splits_backward == (schedule.name in SPLITTING)
    assert len({len(order.local(rank)) for rank in range(pp)}) == 1
    check_order(order.forward_only())


def test_every_schedule_that_can_be_declared_has_its_function_and_runs_on_a_single_rank() -> None:
    assert {*SCHEDULES, "csv", "auto"} == set(VARIANTS["schedule"])
    for name in SCHEDULES:
        count, reason = derive_microbatches(chosen(name), 1, 4)
        assert count == (2 if name == "dualpipev" else 1)
        assert reason == ("the fewest that dualpipev runs" if count == 2 else "no pipeline to fill")
        assert set(build_order(chosen(name), 1, count).stage_to_rank) == {0}


def test_1f1b_and_gpipe_are_the_textbook_orders() -> None:
    assert build_order(chosen("1f1b"), 2, 3).to_csv() == (
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    )
    assert build_order(chosen("1f1b"), 1, 2).to_csv() == "0F0,0B0,0F1,0B1\n"
    assert build_order(chosen("gpipe"), 2, 2).to_csv() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    for pp, microbatches in ((3, 2), (4, 9), (8, 24)):
        held = map(in_flight, build_order(chosen("1f1b"), pp, microbatches).ranks)
        assert [*held] == [min(pp - rank, microbatches) for rank in range(pp)]


def test_looped_orders_are_those_that_torch_generates(capsys: pytest.CaptureFixture[str]) -> None:
    """But for torch's looped BFS, whose backwards go from the last microbatch to the first."""
    for pp, microbatches, v in ((2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 6, 4)):
        torchs = generated_order("Interleaved1F1B", pp, microbatches, v)
        assert [list(row) for row in interleaved_1f1b(pp, microbatches, v).ranks] == torchs
    for pp, microbatches, v in ((2, 4, 2), (4, 7, 3)):
        torchs = generated_order("LoopedBFS", pp, microbatches, v)
        for row, other in zip(looped_bfs(pp, microbatches, v).ranks, torchs, strict=True):
            assert [a for a in row if a.kind == "F"] == [a for a in other if a[0] == "F"]
            assert [a.stage for a in row] == [a[1] for a in other]
    generated_order("ZBVZeroBubble", 2, 4, 2)
    assert capsys.readouterr() == ("", ""), "torch prints while it generates"


def test_placements_are_a_loop_or_a_v() -> None:
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert build_order(chosen("zbvzerobubble"), 2, 4).stage_to_rank == vee(2)
    assert build_order(chosen("interleavedzerobubble"), 2, 4).stage_to_rank == loop(2, 2)


# --- how many microbatches ---------------------------------------------------------------------


@settings(max_examples=50)
@given(schedules, st.integers(2, 8), st.integers(1, 96))
def test_derived_microbatches_divide_the_batch_and_run(schedule, pp, batch) -> None:
    try:
        count, reason = derive_microbatches(schedule, pp, batch)
    except ValueError as error:
        if isinstance(error, NoDivision):
            derive_microbatches(schedule, pp, error.works)
        else:
            assert "write schedule.stages_per_rank=2" in str(error)
        divisors = [m for m in range(1, batch + 1) if batch % m == 0]
        assert all(microbatch_problem(schedule, pp, m) for m in divisors)
        return
    assert batch % count == 0 and microbatch_problem(schedule, pp, count) is None
    assert "per pipeline rank" in reason
    if batch % (4 * pp) == 0:
        assert count == 4 * pp and reason.startswith("4 per pipeline rank")


def test_the_printed_bubble_is_the_orders() -> None:
    for name in ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs"):
        for pp, batch in ((2, 8), (4, 16), (4, 8), (4, 2), (8, 1)):
            count, reason = derive_microbatches(chosen(name), pp, batch)
            printed = int(re.search(r"bubble (?:near )?(\d+)%", reason)[1])
            order = build_order(chosen(name), pp, count)
            bubble = simulate(order, equal_stages(order)).bubble
            assert printed == pytest.approx(100 * bubble, abs=0.51), (name, pp, batch)


def test_a_prime_batch_is_not_run_as_one_microbatch_through_an_idle_pipeline() -> None:
    for batch, count in ((17, 17), (34, 17), (2, 2)):  # of 2 there is nothing better
        assert derive_microbatches(chosen("1f1b"), 4, batch)[0] == count
    assert declared_microbatches(chosen("1f1b")) is None
    assert declared_microbatches(LoopedSchedule(microbatches=6)) == 6
    assert declared_microbatches(Custom(name="a.b", args={"microbatches": 3})) == 3


# --- a CSV, a function of one's own ------------------------------------------------------------


def test_a_schedule_from_a_csv_is_the_order_that_was_saved(tmp_path) -> None:
    saved = interleaved_1f1b(2, 4, 2)
    path = tmp_path / "order.csv"
    path.write_text(saved.to_csv())
    schedule = CsvSchedule(path=str(path))
    assert build_order(schedule, 2, 4) == saved
    assert stage_count(schedule, 2) == 4 and declared_microbatches(schedule) == 4
    assert derive_microbatches(schedule, 2, 8) == (4, f"counted in {path}")
    with pytest.raises(ValueError, match=r"schedule.path=.* has pp=2, not 4"):
        build_order(schedule, 4, 4)
    with pytest.raises(ValueError, match=r"schedule.path=.* has microbatches=4, not 8"):
        build_order(schedule, 2, 8)
    with pytest.raises(ValueError, match=r"into 4 microbatches, and it has 6 sequences"):
        derive_microbatches(schedule, 2, 6)


def test_a_csv_that_is_missing_or_wrong_is_refused_with_its_path(tmp_path) -> None:
    for content, words in {
        None: "No such file",
        b"\xff\xfe\x00": "decode",
        b"0F0,0B0\n1F0,oops\n": "row 2, column 2: 'oops'",
        b"0F0\n1F0\n": "would train nothing; add the backwards",
    }.items():
        path = tmp_path / "order.csv"
        if content:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=words) as error:
            build_order(CsvSchedule(path=str(path)), 2, 4)
        assert str(error.value).startswith(f"schedule.path={path}")


MINE = """
from titanlike.core.pipeline.order import Action, Order
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import gpipe

def backwards_last(pp, microbatches, lazy=False):
    if microbatches % 2:
        raise ValueError("pairs of microbatches only")
    return gpipe(pp, microbatches)

def nothing(pp, microbatches): pass
def other(pp, microbatches): return gpipe(pp, microbatches + 1)
def wrong(pp, microbatches): return Order(gpipe(pp, microbatches).ranks, (0,) * pp, microbatches)
def forward(pp, microbatches): return gpipe(pp, microbatches).forward_only()
def crash(pp, microbatches): return 1 // 0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "own_schedules.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_schedules", None)


def test_a_custom_function_is_a_schedule(mine) -> None:
    args = {"lazy": True, "microbatches": None}
    schedule = Custom(name="own_schedules.backwards_last", args=args)
    assert build_order(schedule, 2, 4) == build_order(chosen("gpipe"), 2, 4)
    assert stage_count(schedule, 2) == 2
    assert "pairs of microbatches" in str(microbatch_problem(schedule, 2, 3))
    assert derive_microbatches(schedule, 2, 6)[0] == 6
    assert derive_microbatches(schedule, 2, 18)[0] == 6
    with pytest.raises(ValueError, match=r"no division of 9 .*pairs of microbatches only"):
        derive_microbatches(schedule, 2, 9)


def test_a_failing_schedule_function_is_refused_by_name(mine) -> None:
    for name, args, words in (
        ("own_schedules.nothing", {}, "returned a NoneType; return an Order"),
        ("own_schedules.other", {}, "asked for 2 pipeline ranks and 4 microbatches"),
        ("own_schedules.wrong", {}, "pipeline rank 1 has no stage"),
        ("own_schedules.forward", {}, "would train nothing"),
        ("own_schedules.crash", {}, "raised ZeroDivisionError"),
        ("own_schedules.crash", {"speed": 2}, "unexpected keyword argument 'speed'"),
        ("own_schedules.crahs", {}, "write schedule.name=own_schedules.crash"),
        ("no_such_package.f", {}, "importing no_such_package failed with ModuleNotFoundError"),
        ("1f1bb", {}, "write schedule=1f1b"),
        ("own_schedules.crash", {"pp": 3}, "schedule.pp=3: remove it"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            build_order(Custom(name=name, args=args), 2, 4)
        assert "pp" in args or str(error.value).startswith(f"schedule.name={name}")


def test_planning_a_pipeline_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from titanlike.core.config.groups.pipeline import LoopedSchedule\n"
        "from titanlike.core.pipeline import from_config, order, schedules\n"
        "from titanlike.core.graph import partition\n"
        "s = LoopedSchedule()\n"
        "from_config.build_order(s, 4, from_config.derive_microbatches(s, 4, 16)[0])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
