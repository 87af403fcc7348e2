"""The schedule that a config names: its Order, checked, or what is wrong with it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config.imports import import_object
from titanlike.config.schema import CsvSchedule, Custom, LoopedSchedule, Schedule
from titanlike.pipeline.order import Order
from titanlike.pipeline.schedules import SCHEDULES, V_SCHEDULES

AnySchedule = Schedule | LoopedSchedule | CsvSchedule | Custom


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
        return csv_order(schedule)
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
            return csv_order(schedule).stages
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
            return csv_order(schedule).microbatches
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
        order = csv_order(schedule)
        for asked, has, what in (
            (pp, len(order.ranks), "pp"),
            (microbatches, order.microbatches, "microbatches"),
        ):
            if asked != has:
                return f"schedule.path={schedule.path}: its order has {what}={has}, not {asked}"
        return None
    if problem := stages_problem(schedule):
        return problem
    if schedule.name == "dualpipev" and microbatches < 2 * pp:
        return (
            f"{key}: dualpipev with pp={pp} needs at least 2 * pp = {2 * pp}; write "
            f"schedule.microbatches={2 * pp}"
        )
    if schedule.name == "interleavedzerobubble" and not _equal_rounds(pp, microbatches):
        near = next(m for m in nearest_first(microbatches, pp) if _equal_rounds(pp, m))
        return (
            f"{key}: {schedule.name} with pp={pp} makes {microbatches // pp} rounds of equal "
            f"length of them; write schedule.microbatches={near} (any multiple of pp works)"
        )
    return None


def stages_problem(schedule: Schedule | LoopedSchedule) -> str | None:
    """What is wrong whatever the number of microbatches: the name, the stages a rank."""
    if schedule.name not in SCHEDULES:
        return _unknown_schedule(schedule.name)
    least = 2 if schedule.name == "interleavedzerobubble" else 1
    if isinstance(schedule, LoopedSchedule) and schedule.stages_per_rank < least:
        return (
            f"schedule.stages_per_rank={schedule.stages_per_rank}: {schedule.name} needs at least "
            f"{least}; write schedule.stages_per_rank={least}"
        )
    return None


def nearest_first(value: int, pp: int) -> list[int]:
    """Positive integers, the nearest to `value` first; every schedule runs one of them."""
    return sorted(range(1, value + 2 * pp + 1), key=lambda other: abs(other - value))


def _equal_rounds(pp: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // pp) == 0


def csv_order(schedule: CsvSchedule) -> Order:
    """The order in a CSV file. Raises ValueError."""
    try:
        return _with_backwards(Order.from_csv(Path(schedule.path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"schedule.path={schedule.path}: {reason}. Expected a CSV with a row a pipeline rank "
            "and cells such as 0F0, 0B0"
        ) from error


def _custom_order(schedule: Custom, pp: int, microbatches: int) -> Order:
    """What the user's function returns, checked; `microbatches` replaces the one in `args`."""
    key = f"schedule.name={schedule.name}"
    function = import_schedule(schedule.name)
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
        return _with_backwards(order.check())
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _with_backwards(order: Order) -> Order:
    """Raises ValueError for an order of forwards alone: `Order.check` accepts it, as evaluation."""
    if all(act.kind == "F" for acts in order.ranks for act in acts):
        raise ValueError("it has forwards alone and would train nothing; add the backwards")
    return order


def import_schedule(name: str) -> Callable[..., Any]:
    """The user's function. Raises ValueError."""
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
