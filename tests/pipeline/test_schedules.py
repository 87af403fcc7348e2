"""Every schedule gives an order that runs, for all sizes that it does not refuse."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.schema import VARIANTS, CsvSchedule, Custom, LoopedSchedule, Schedule
from titanlike.pipeline.from_config import (
    NoDivision,
    build_order,
    declared_microbatches,
    derive_microbatches,
    microbatch_problem,
    stage_count,
)
from titanlike.pipeline.order import Order, awaited, needs, walk
from titanlike.pipeline.schedules import (
    LOOPED,
    SCHEDULES,
    interleaved_1f1b,
    loop,
    looped_bfs,
    vee,
)
from titanlike.torch_private.pipeline_runtime import generated_order

SPLITTING = {*SCHEDULES} - {"gpipe", "1f1b", "interleaved1f1b", "loopedbfs"}


def chosen(name: str, stages_per_rank: int = 2) -> Schedule | LoopedSchedule:
    if name in LOOPED:
        return LoopedSchedule(name=name, stages_per_rank=stages_per_rank)
    return Schedule(name=name)


schedules = st.builds(chosen, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4))
sizes = st.tuples(st.integers(1, 8), st.integers(1, 24))


def test_every_schedule_that_can_be_declared_has_its_function():
    assert {*SCHEDULES, "csv", "auto"} == set(VARIANTS["schedule"])


@settings(max_examples=250, deadline=None)
@given(schedules, sizes)
def test_a_schedule_that_is_not_refused_gives_an_order_that_runs(schedule, size):
    pp, microbatches = size
    if microbatch_problem(schedule, pp, microbatches):
        with pytest.raises(ValueError, match="schedule"):
            build_order(schedule, pp, microbatches)
        return
    order = build_order(schedule, pp, microbatches).check()
    assert (len(order.ranks), order.microbatches) == (pp, microbatches)
    assert order.stages == stage_count(schedule, pp)
    assert order.splits_backward == (schedule.name in SPLITTING)
    assert len({len(order.local(rank)) for rank in range(pp)}) == 1
    order.forward_only().check()


@settings(max_examples=100, deadline=None)
@given(schedules, sizes)
def test_only_what_torch_cannot_generate_either_is_refused_and_the_remedy_works(schedule, size):
    pp, microbatches = size
    problem = microbatch_problem(schedule, pp, microbatches)
    if not problem:
        return
    assert schedule.name in ("interleavedzerobubble", "dualpipev")
    v = getattr(schedule, "stages_per_rank", 2)
    with pytest.raises((ValueError, AssertionError)):
        generated_order(schedule.name, pp, microbatches, v)
    if remedy := re.search(r"write schedule.microbatches=(\d+)", problem):
        assert microbatch_problem(schedule, pp, int(remedy[1])) is None
    else:
        assert "write schedule.stages_per_rank=2" in problem


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_runs_on_a_single_rank(name):
    count, reason = derive_microbatches(chosen(name), 1, 4)
    order = build_order(chosen(name), 1, count)
    assert count == (2 if name == "dualpipev" else 1)
    assert reason == ("the fewest that dualpipev runs" if count == 2 else "no pipeline to fill")
    assert set(order.place) == {0}


def test_1f1b_is_the_textbook_order():
    assert build_order(Schedule(name="1f1b"), 2, 3).to_csv() == (
        "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    )
    assert build_order(Schedule(name="1f1b"), 1, 2).to_csv() == "0F0,0B0,0F1,0B1\n"


def test_gpipe_is_the_textbook_order():
    assert build_order(Schedule(name="gpipe"), 2, 2).to_csv() == (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    )


@pytest.mark.parametrize(("pp", "microbatches", "v"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 6, 4)])
def test_own_interleaved_order_is_the_one_that_torch_generates(pp, microbatches, v):
    ours = interleaved_1f1b(pp, microbatches, v)
    assert [list(row) for row in ours.ranks] == generated_order(
        "Interleaved1F1B", pp, microbatches, v
    )


@pytest.mark.parametrize(("pp", "microbatches", "v"), [(2, 4, 2), (4, 7, 3)])
def test_own_looped_bfs_has_torchs_forwards_and_runs_backwards_in_microbatch_order(
    pp, microbatches, v
):
    """torch's goes through the microbatches of a stage's backward from the last to the first."""
    ours = looped_bfs(pp, microbatches, v)
    for row, other in zip(
        ours.ranks, generated_order("LoopedBFS", pp, microbatches, v), strict=True
    ):
        assert [a for a in row if a.kind == "F"] == [a for a in other if a[0] == "F"]
        assert [a.stage for a in row] == [a[1] for a in other]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_1f1b_holds_no_more_microbatches_than_ranks_come_after(pp, microbatches):
    for rank, row in enumerate(build_order(Schedule(name="1f1b"), pp, microbatches).ranks):
        held = most = 0
        for act in row:
            held += 1 if act.kind == "F" else -1
            most = max(most, held)
        assert most == min(pp - rank, microbatches)


def test_placements_are_a_loop_or_a_v():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert build_order(chosen("zbvzerobubble"), 2, 4).place == vee(2)
    assert build_order(chosen("interleavedzerobubble"), 2, 4).place == loop(2, 2)


# --- how many microbatches ---------------------------------------------------------------------


def idle(order: Order) -> float:
    """Idle share where every forward takes one step and every whole backward two."""
    end: dict = {}
    free = [0] * len(order.ranks)
    for rank, act in walk(order):
        ready = max((end[need] for need in needs(act, order.stages - 1)), default=0)
        free[rank] = max(free[rank], ready) + (1 if act.kind == "F" else 2)
        end[awaited(act)] = free[rank]
    return 1 - 3 * order.microbatches * order.stages / len(order.ranks) / max(free)


@settings(max_examples=80, deadline=None)
@given(schedules, st.integers(2, 8), st.integers(1, 96))
def test_derived_microbatches_divide_the_batch_and_run(schedule, pp, batch):
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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "loopedbfs"])
@pytest.mark.parametrize(("pp", "batch"), [(2, 8), (4, 16), (4, 8), (4, 2), (8, 1)])
def test_the_bubble_that_is_printed_is_the_orders_own(name, pp, batch):
    count, reason = derive_microbatches(chosen(name), pp, batch)
    printed = int(re.search(r"bubble (?:near )?(\d+)%", reason)[1])
    assert printed == pytest.approx(100 * idle(build_order(chosen(name), pp, count)), abs=0.51)


def test_a_prime_batch_is_not_run_as_one_microbatch_through_an_idle_pipeline():
    assert derive_microbatches(Schedule(name="1f1b"), 4, 17)[0] == 17
    assert derive_microbatches(Schedule(name="1f1b"), 4, 34)[0] == 17
    assert derive_microbatches(Schedule(name="1f1b"), 4, 2)[0] == 2  # nothing better


def test_microbatches_that_were_declared_are_found():
    assert declared_microbatches(Schedule(name="1f1b")) is None
    assert declared_microbatches(LoopedSchedule(microbatches=6)) == 6
    assert declared_microbatches(Custom(name="a.b", args={"microbatches": 3})) == 3


# --- a CSV, a function of one's own ------------------------------------------------------------


def test_a_schedule_from_a_csv_is_the_order_that_was_saved(tmp_path):
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


def test_a_csv_that_is_missing_or_wrong_is_refused_with_its_path(tmp_path):
    for path, content, words in (
        (tmp_path / "none.csv", None, "No such file"),
        (tmp_path, None, "Is a directory"),
        (tmp_path / "bytes.csv", b"\xff\xfe\x00", "decode"),
        (tmp_path / "cell.csv", b"0F0,0B0\n1F0,oops\n", "row 2, column 2: 'oops'"),
        (tmp_path / "short.csv", b"0F0,0B0\n1F0\n", "pipeline rank 1: 1B0 is missing"),
        (tmp_path / "forward.csv", b"0F0\n1F0\n", "would train nothing; add the backwards"),
    ):
        if content:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=words) as error:
            build_order(CsvSchedule(path=str(path)), 2, 4)
        assert str(error.value).startswith(f"schedule.path={path}")


MINE = """
from titanlike.pipeline.order import Act, Order
from titanlike.pipeline.schedules import gpipe

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
    yield "own_schedules"
    sys.modules.pop("own_schedules", None)


def test_a_function_of_ones_own_is_a_schedule(mine):
    schedule = Custom(name=f"{mine}.backwards_last", args={"lazy": True, "microbatches": None})
    assert build_order(schedule, 2, 4) == build_order(Schedule(name="gpipe"), 2, 4)
    assert stage_count(schedule, 2) == 2
    assert "pairs of microbatches" in microbatch_problem(schedule, 2, 3)
    assert derive_microbatches(schedule, 2, 6)[0] == 6
    assert derive_microbatches(schedule, 2, 18)[0] == 6
    with pytest.raises(ValueError, match=r"no division of 9 .*pairs of microbatches only"):
        derive_microbatches(schedule, 2, 9)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("own_schedules.nothing", {}, "returned a NoneType; return an Order"),
        ("own_schedules.other", {}, "asked for 2 pipeline ranks and 4 microbatches"),
        ("own_schedules.wrong", {}, "pipeline rank 1 has no stage"),
        ("own_schedules.forward", {}, "would train nothing"),
        ("own_schedules.crash", {}, "raised ZeroDivisionError"),
        ("own_schedules.crash", {"speed": 2}, "unexpected keyword argument 'speed'"),
        ("own_schedules.crahs", {}, "did you mean own_schedules.crash?"),
        ("no_such_package.f", {}, "importing no_such_package failed with ModuleNotFoundError"),
        ("1f1bb", {}, "did you mean 1f1b?"),
    ],
)
def test_a_function_that_does_not_work_is_refused_with_its_name(mine, name, args, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        build_order(Custom(name=name, args=args), 2, 4)
    assert str(error.value).startswith(f"schedule.name={name}")


def test_the_mesh_size_cannot_be_given_twice(mine):
    with pytest.raises(ValueError, match=r"schedule\.pp=3: remove it"):
        build_order(Custom(name=f"{mine}.crash", args={"pp": 3}), 2, 4)


def test_planning_a_pipeline_needs_no_torch():
    program = (
        "import sys\n"
        "from titanlike.config.schema import LoopedSchedule\n"
        "from titanlike.pipeline import from_config, order, schedules\n"
        "from titanlike.split import partition\n"
        "s = LoopedSchedule()\n"
        "from_config.build_order(s, 4, from_config.derive_microbatches(s, 4, 16)[0])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_torch_prints_nothing_while_it_generates(capsys):
    generated_order("ZBVZeroBubble", 2, 4, 2)
    assert capsys.readouterr() == ("", "")
