"""Schedules: functions that return an Order. No torch, but for three that torch generates.

1. `microbatch_problem` and `derive_microbatches` settle into how many parts a batch is cut;
2. `build_order` turns the config's schedule into a checked Order, or says what does not fit.

A schedule of your own is a function in any importable package,

    def mine(pp: int, microbatches: int, ...) -> Order

named by its import path: `schedule.name=package.module.mine`; the group's other keys are passed
to it.

Letters: F forward, B whole backward, I and W its two halves (see `Act`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titanlike.config.imports import import_object
from titanlike.config.schema import CsvSchedule, Custom, LoopedSchedule, Schedule
from titanlike.pipeline.order import Act, Order

AnySchedule = Schedule | LoopedSchedule | CsvSchedule | Custom


# --- placements: which pipeline rank holds a stage ---------------------------------------------


def loop(pp: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """0 1 2 0 1 2: every round of stages visits the ranks in the same direction."""
    return tuple(range(pp)) * stages_per_rank


def vee(pp: int) -> tuple[int, ...]:
    """0 1 2 2 1 0: the first rank holds the first and the last stage, and so has the loss."""
    return (*range(pp), *reversed(range(pp)))


# --- schedules ---------------------------------------------------------------------------------


def gpipe(pp: int, microbatches: int) -> Order:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return looped_bfs(pp, microbatches, stages_per_rank=1)


def one_f_one_b(pp: int, microbatches: int) -> Order:
    """Backward as early as can be: rank r holds at most pp - r microbatches (arXiv 1806.03377)."""
    return interleaved_1f1b(pp, microbatches, stages_per_rank=1)


def interleaved_1f1b(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """1F1B over several stages a rank, for a smaller bubble (arXiv 2104.04473).

    Microbatches go through a rank's stages in rounds of pp, or a little more where pp does not
    divide them: the rounds differ by at most one microbatch, the longer ones first.
    """
    size, longer = divmod(microbatches, max(1, microbatches // pp))
    rounds: list[range] = []
    start = 0
    while start < microbatches:
        stop = start + size + (len(rounds) < longer)
        rounds.append(range(start, stop))
        start = stop
    ranks = []
    for rank in range(pp):
        stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
        forwards = [Act("F", s, mb) for mbs in rounds for s in stages for mb in mbs]
        backwards = [Act("B", s, mb) for mbs in rounds for s in reversed(stages) for mb in mbs]
        # as Megatron-LM does it: the first round on all stages but the last one, and two steps
        # for every rank that comes after; with a single stage one step is enough
        fill = pp - 1 - rank
        warmup = fill if stages_per_rank == 1 else 2 * fill + (stages_per_rank - 1) * len(rounds[0])
        ranks.append(_one_by_one(forwards, backwards, warmup))
    return Order(tuple(ranks), loop(pp, stages_per_rank), microbatches)


def _one_by_one(forwards: list[Act], backwards: list[Act], warmup: int) -> tuple[Act, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then what remains."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [act for pair in pairs for act in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def looped_bfs(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """All microbatches through a rank's first stage, then through its next (arXiv 2211.05953)."""
    ranks = []
    for rank in range(pp):
        stages = [chunk * pp + rank for chunk in range(stages_per_rank)]
        forwards = [Act("F", s, mb) for s in stages for mb in range(microbatches)]
        backwards = [Act("B", s, mb) for s in reversed(stages) for mb in range(microbatches)]
        ranks.append((*forwards, *backwards))
    return Order(tuple(ranks), loop(pp, stages_per_rank), microbatches)


def interleaved_zero_bubble(pp: int, microbatches: int, stages_per_rank: int) -> Order:
    """Interleaved 1F1B whose weight gradients fill the bubble (arXiv 2401.10241, as in torch)."""
    place = loop(pp, stages_per_rank)
    return _generated("InterleavedZeroBubble", pp, microbatches, place)


def zbv_zero_bubble(pp: int, microbatches: int) -> Order:
    """Split backwards on a V of two stages a rank (arXiv 2401.10241 section 6, as in torch)."""
    return _generated("ZBVZeroBubble", pp, microbatches, vee(pp))


def dual_pipe_v(pp: int, microbatches: int) -> Order:
    """DualPipe cut in half: forwards beside backwards on a V (DeepSeek DualPipe, as in torch)."""
    return _generated("DualPipeV", pp, microbatches, vee(pp))


def _generated(class_name: str, pp: int, microbatches: int, place: tuple[int, ...]) -> Order:
    from titanlike.torch_private.pipelining import (
        generated_order,  # imports torch: only where it is needed
    )

    ranks = generated_order(class_name, pp, microbatches, len(place) // pp)
    return Order(tuple(tuple(Act(*act) for act in acts) for acts in ranks), place, microbatches)


# config name -> function of pp, microbatches and, for a LoopedSchedule, stages_per_rank
SCHEDULES: Mapping[str, Callable[..., Order]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved1f1b": interleaved_1f1b,
        "loopedbfs": looped_bfs,
        "interleavedzerobubble": interleaved_zero_bubble,
        "zbvzerobubble": zbv_zero_bubble,
        "dualpipev": dual_pipe_v,
    }
)

V_SCHEDULES = ("zbvzerobubble", "dualpipev")  # always two stages a rank


# --- from the config ---------------------------------------------------------------------------


def build_order(schedule: AnySchedule, pp: int, microbatches: int) -> Order:
    """The checked Order of a config's schedule.

    Raises ValueError naming the key, its value and what works: for sizes that the schedule cannot
    do (`microbatch_problem`), an unreadable CSV or one of other sizes, an import path that leads to
    no such function, and an Order that fails its `check`.
    """
    if isinstance(schedule, Custom):
        return _custom_order(schedule, pp, microbatches)
    if problem := microbatch_problem(schedule, pp, microbatches):
        raise ValueError(problem)
    if isinstance(schedule, CsvSchedule):
        return _csv_order(schedule)
    looped = isinstance(schedule, LoopedSchedule)
    kwargs = {"stages_per_rank": schedule.stages_per_rank} if looped else {}
    return SCHEDULES[schedule.name](pp=pp, microbatches=microbatches, **kwargs).check()


def stage_count(schedule: AnySchedule, pp: int, microbatches: int | None = None) -> int:
    """Stages on all pipeline ranks together.

    A function of the user's own is called to find out, with `microbatches` or, where that is not
    known yet, with those declared or four a rank. Raises what `build_order` raises.
    """
    match schedule:
        case Custom():
            microbatches = microbatches or declared_microbatches(schedule) or 4 * pp
            return _custom_order(schedule, pp, microbatches).stages
        case CsvSchedule():
            return _csv_order(schedule).stages
        case LoopedSchedule():
            return pp * schedule.stages_per_rank
        case _:
            return pp * (2 if schedule.name in V_SCHEDULES else 1)


def declared_microbatches(schedule: AnySchedule) -> int | None:
    """The microbatches that the user gave, or that are counted in the CSV; None = to be derived."""
    match schedule:
        case Custom():
            return schedule.args.get("microbatches")
        case CsvSchedule():
            return _csv_order(schedule).microbatches
        case _:
            return schedule.microbatches


def microbatch_problem(schedule: AnySchedule, pp: int, microbatches: int) -> str | None:
    """Why the schedule cannot run so many microbatches on pp ranks, and what works; None = it can.

    GPipe, 1F1B, interleaved 1F1B, looped BFS and ZB-V run any number, also fewer than stages.
    DualPipeV overlaps two directions and needs 2 * pp. The interleaved zero-bubble schedule needs
    rounds of equal length and at least two stages a rank. Any pp from 1 works.
    """
    key = f"schedule.microbatches={microbatches}"
    if microbatches < 1:
        return f"{key}: a batch has at least 1 microbatch"
    if isinstance(schedule, Custom):
        try:
            _custom_order(schedule, pp, microbatches)
        except ValueError as error:
            return str(error)
        return None
    if isinstance(schedule, CsvSchedule):
        order = _csv_order(schedule)
        for asked, has, what in (
            (pp, len(order.ranks), "pp"),
            (microbatches, order.microbatches, "microbatches"),
        ):
            if asked != has:
                return f"schedule.path={schedule.path}: its order has {what}={has}, not {asked}"
        return None
    if problem := _stages_problem(schedule):
        return problem
    if schedule.name == "dualpipev" and microbatches < 2 * pp:
        return (
            f"{key}: dualpipev with pp={pp} needs at least 2 * pp = {2 * pp}; write "
            f"schedule.microbatches={2 * pp}"
        )
    if schedule.name == "interleavedzerobubble" and not _equal_rounds(pp, microbatches):
        near = next(m for m in _outwards(microbatches, pp) if _equal_rounds(pp, m))
        return (
            f"{key}: {schedule.name} with pp={pp} makes {microbatches // pp} rounds of equal "
            f"length of them; write schedule.microbatches={near} (any multiple of pp works)"
        )
    return None


def derive_microbatches(schedule: AnySchedule, pp: int, batch_per_dp_rank: int) -> tuple[int, str]:
    """A good number of microbatches and the reason, to be printed.

    The largest divisor of the batch up to 4 * pp that the schedule can run; the smallest above
    where there is none, or none that gives every rank a microbatch. Without a pipeline as few as
    possible. Raises ValueError, with the nearest batch that works, where no divisor does.
    """
    batch = batch_per_dp_rank
    if isinstance(schedule, CsvSchedule):
        count = _csv_order(schedule).microbatches
        if batch < 1 or batch % count:
            near = max(1, round(batch / count)) * count
            raise NoDivision(
                f"{schedule.path} cuts a dp rank's batch into {count} microbatches, and it has "
                f"{batch} sequences",
                near,
            )
        return count, f"counted in {schedule.path}"
    if isinstance(schedule, Custom):
        _imported(schedule.name)  # a wrong path is not a question of microbatches
    elif problem := _stages_problem(schedule):
        raise ValueError(problem)

    def runs(count: int) -> bool:
        return microbatch_problem(schedule, pp, count) is None

    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    target = 4 * pp if pp > 1 else 0
    below = next((d for d in reversed(divisors) if d <= target and runs(d)), None)
    above = None
    if below is None or below < pp:
        above = next((d for d in divisors if d > target and runs(d)), None)
    count = above or below
    if count is None:
        raise NoDivision(*_no_division(schedule, pp, batch))
    if pp == 1:
        return (
            count,
            "no pipeline to fill" if count == 1 else f"the fewest that {schedule.name} runs",
        )
    reason = f"{count / pp:.3g} per pipeline rank"
    if schedule.name in ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs"):
        # a rank computes v * M steps out of those until the last rank has had its last microbatch
        v = stage_count(schedule, pp) // pp
        bubble = 1 - v * count / (v * max(count, pp) + min(count, pp) - 1)
        reason += f" keep the bubble near {bubble:.0%}" if count >= pp else f": bubble {bubble:.0%}"
    if count == batch:
        reason += ", one sequence each"
    return count, reason


class NoDivision(ValueError):
    """No number of microbatches suits a dp rank's batch; `works` is a batch that has one, if any."""

    def __init__(self, text: str, works: int | None) -> None:
        super().__init__(text)
        self.works = works


def _no_division(schedule: AnySchedule, pp: int, batch: int) -> tuple[str, int | None]:
    if isinstance(schedule, Custom):
        answer = microbatch_problem(schedule, pp, max(1, batch))
        return f"no division of {batch} suits schedule.name={schedule.name}: {answer}", None
    problem = microbatch_problem(schedule, pp, batch)
    near = next(m for m in _outwards(batch, pp) if microbatch_problem(schedule, pp, m) is None)
    return f"a dp rank's batch of {batch} has no division that works ({problem})", near


def _stages_problem(schedule: Schedule | LoopedSchedule) -> str | None:
    """What no number of microbatches can mend."""
    if schedule.name not in SCHEDULES:
        return _unknown_schedule(schedule.name)
    least = 2 if schedule.name == "interleavedzerobubble" else 1
    if isinstance(schedule, LoopedSchedule) and schedule.stages_per_rank < least:
        return (
            f"schedule.stages_per_rank={schedule.stages_per_rank}: {schedule.name} needs at least "
            f"{least}; write schedule.stages_per_rank={least}"
        )
    return None


def _equal_rounds(pp: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // pp) == 0


def _outwards(value: int, pp: int) -> list[int]:
    """The positive integers, the nearest to `value` first, up to where every schedule runs one."""
    return sorted(range(1, value + 2 * pp + 1), key=lambda other: abs(other - value))


def _csv_order(schedule: CsvSchedule) -> Order:
    try:
        return _training(Order.from_csv(Path(schedule.path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"schedule.path={schedule.path}: {reason}. Expected a CSV with a row a pipeline rank "
            "and cells such as 0F0, 0B0"
        ) from error


def _custom_order(schedule: Custom, pp: int, microbatches: int) -> Order:
    """Call the user's function. `microbatches` stands above the one in `args`."""
    key = f"schedule.name={schedule.name}"
    function = _imported(schedule.name)
    if "pp" in schedule.args:
        raise ValueError(f"schedule.pp={schedule.args['pp']}: remove it; the mesh's pp is passed")
    kwargs: dict[str, Any] = {**schedule.args, "pp": pp, "microbatches": microbatches}
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"{key}: called with pp, microbatches and the keys of schedule: {error}; it takes "
            f"{inspect.signature(function)}"
        ) from None
    try:
        order = function(**kwargs)
    except Exception as error:
        raise ValueError(f"{key}: raised {type(error).__name__}: {error}") from error
    if not isinstance(order, Order):
        raise ValueError(f"{key}: returned a {type(order).__name__}; return an Order")
    if (len(order.ranks), order.microbatches) != (pp, microbatches):
        raise ValueError(
            f"{key}: asked for {pp} pipeline ranks and {microbatches} microbatches, returned an "
            f"Order of {len(order.ranks)} and {order.microbatches}"
        )
    try:
        return _training(order.check())
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _training(order: Order) -> Order:
    """An order of forwards alone is right too, but as evaluation."""
    if all(act.kind == "F" for acts in order.ranks for act in acts):
        raise ValueError("it has forwards alone and would train nothing; add the backwards")
    return order


def _imported(name: str) -> Callable[..., Any]:
    if "." not in name:
        raise ValueError(_unknown_schedule(name))
    try:
        function = import_object(name)
    except ValueError as error:
        raise ValueError(f"schedule.name={name}: {error}") from error
    if not callable(function):
        raise ValueError(f"schedule.name={name}: it is no function, but {function!r}")
    return function


def _unknown_schedule(name: str) -> str:
    known = [*SCHEDULES, "csv"]
    near = difflib.get_close_matches(name, known, n=1)
    return (
        f"schedule.name={name}: no such schedule{f'; did you mean {near[0]}?' if near else ''} "
        f"Known: {', '.join(known)}, or an import path package.module.function"
    )
