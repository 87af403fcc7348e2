"""Build and check a config's schedule, and choose the number of microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, TypeGuard

from titanlike.core.config.errors import Problem, Refused, nearest
from titanlike.core.config.files import open_regular
from titanlike.core.config.groups.pipeline import (
    AutoSchedule,
    CsvSchedule,
    LoopedSchedule,
    Schedule,
)
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.imports import import_fix, import_object, of_a_library
from titanlike.core.config.keys import value_problems
from titanlike.core.config.schema import Config
from titanlike.core.pipeline.order import Order
from titanlike.core.pipeline.order_check import check_order
from titanlike.core.pipeline.schedules import SCHEDULES, V_SCHEDULES

_LONGEST_CSV = 1 << 26  # characters: twice the cells of 1,024 ranks and as many microbatches

AnySchedule = Schedule | LoopedSchedule | CsvSchedule | AutoSchedule | Custom


def choose_order(config: Config) -> tuple[Order | None, str, list[Problem]]:
    """Return (Order or None, why this number of microbatches, problems). Even with an order there
    may be problems with the number of microbatches."""
    schedule, problems = config.schedule, []
    rows = config.batch_size // config.dp
    try:
        microbatches, why = declared_microbatches(schedule), "asked for"
        if config.exact:
            grains, why = (
                rows // max(1, config.numerics.grain),
                "one grain each, see numerics.grain",
            )
            if microbatches not in (None, grains):
                grain = max(1, rows // max(1, microbatches))
                fix = f"schedule.microbatches={grains} or numerics.grain={grain}"
                reason = f"a microbatch is one grain of numerics.grain={config.numerics.grain}"
                problems.append(Problem("schedule.microbatches", microbatches, reason, fix))
            microbatches = max(1, grains)
        elif microbatches is None:
            microbatches, why = derive_microbatches(schedule, config.pp, rows)
        return build_order(schedule, config.pp, microbatches), why, problems
    except NoDivision as error:
        fix = "" if error.works is None else f"batch_size={error.works * config.dp}"
        return None, "", [Problem("batch_size", config.batch_size, str(error), fix)]
    except Refused as error:
        problem = error.problem
        if config.exact and problem.key == "schedule.microbatches":
            smaller = (
                grain
                for grain in range(rows, 0, -1)
                if rows % grain == 0 and not microbatch_problem(schedule, config.pp, rows // grain)
            )
            fix = f"numerics.grain={grain}" if (grain := next(smaller, None)) else "numerics=fast"
            reason = f"a grain is a microbatch, and {problem.reason}"
            problem = Problem("numerics.grain", config.numerics.grain, reason, fix)
        return None, "", [*problems, problem]


def build_order(schedule: AnySchedule, pp: int, microbatches: int) -> Order:
    """Build and check the Order of a config's schedule.

    Raises Refused for sizes that the schedule does not support, an unreadable CSV, a wrong import
    path, and an Order that `check_order` rejects.
    """
    if isinstance(schedule, Custom):
        return _custom_order(schedule, pp, microbatches)
    if problem := microbatch_problem(schedule, pp, microbatches):
        raise Refused(*astuple(problem))
    if _in_a_file(schedule):
        return csv_order(schedule)
    schedule = _until_found(schedule)
    sizes = {"pp": pp, "microbatches": microbatches}
    if isinstance(schedule, LoopedSchedule):
        sizes["stages_per_rank"] = schedule.stages_per_rank
    return check_order(SCHEDULES[schedule.name](**sizes))


def stage_count(schedule: AnySchedule, pp: int, microbatches: int | None = None) -> int:
    """The number of stages on all pipeline ranks.

    A custom schedule function is called for it, with `microbatches` or, if None, with those
    declared or four per rank. Raises what `build_order` raises.
    """
    if isinstance(schedule, Custom):
        microbatches = microbatches or declared_microbatches(schedule) or 4 * pp
        return _custom_order(schedule, pp, microbatches).stages
    if _in_a_file(schedule):
        return csv_order(schedule).stages
    schedule = _until_found(schedule)
    if isinstance(schedule, LoopedSchedule):
        return pp * schedule.stages_per_rank
    return pp * (2 if schedule.name in V_SCHEDULES else 1)


def _in_a_file(schedule: AnySchedule) -> TypeGuard[CsvSchedule | AutoSchedule]:
    return getattr(schedule, "path", None) is not None


def _until_found(schedule: Any) -> Any:
    """A placeholder for schedule=auto until `planning/auto_schedule.py` has found its order."""
    if not isinstance(schedule, AutoSchedule):
        return schedule
    if schedule.placement == "v" and schedule.stages_per_rank == 2:
        return Schedule("vhalf", schedule.microbatches)
    return LoopedSchedule("interleaved1f1b", schedule.microbatches, schedule.stages_per_rank)


def defers_weight_gradients(schedule: AnySchedule) -> bool:
    """Whether split backwards compute weight gradients in W where possible, else in I."""
    return getattr(schedule, "weight_gradients", "deferred") == "deferred"


def declared_microbatches(schedule: AnySchedule) -> int | None:
    """The number of microbatches from the config or the CSV; None = to be derived."""
    if isinstance(schedule, Custom):
        return schedule.args.get("microbatches")
    if _in_a_file(schedule):
        return csv_order(schedule).microbatches
    assert not isinstance(schedule, CsvSchedule), "it always has a file"
    return schedule.microbatches


def microbatch_problem(schedule: AnySchedule, pp: int, microbatches: int) -> Problem | None:
    """Why the schedule cannot run this number of microbatches on pp ranks; None = it can.

    GPipe, 1F1B, interleaved 1F1B, looped BFS and ZB-V run any number, even fewer than stages.
    DualPipeV overlaps two directions and needs 2 * pp. The interleaved zero-bubble schedule needs
    rounds of equal length and at least two stages per rank. Any pp from 1 works.
    """

    def problem(reason: str, works: int) -> Problem:
        key = "schedule.microbatches"
        return Problem(key, microbatches, reason, f"{key}={works}")

    if microbatches < 1:
        return problem("a batch has at least 1 microbatch", 1)
    if isinstance(schedule, Custom):
        try:
            _custom_order(schedule, pp, microbatches)
            return None
        except Refused as error:
            return error.problem
    if _in_a_file(schedule):
        order = csv_order(schedule)
        sizes = {"pp": (len(order.ranks), pp), "microbatches": (order.microbatches, microbatches)}
        for what, (size, asked) in sizes.items():
            if asked != size:
                reason = f"its order has {what}={size}, not {asked}"
                return Problem("schedule.path", schedule.path, reason)
        return None
    if wrong := _stages_problem(schedule):
        return wrong
    if schedule.name == "dualpipev" and microbatches < (least := 2 * pp):
        return problem(f"dualpipev with pp={pp} needs at least 2 * pp = {least}", least)

    def equal_rounds(count: int) -> bool:
        return count % max(1, count // pp) == 0

    if schedule.name == "interleavedzerobubble" and not equal_rounds(microbatches):
        rounds = f"makes {microbatches // pp} rounds of equal length of them"
        reason = f"{schedule.name} with pp={pp} {rounds}; any multiple of pp works"
        return problem(reason, next(filter(equal_rounds, _nearest_first(microbatches, pp))))
    return None


def _stages_problem(schedule: Schedule | CsvSchedule | AutoSchedule) -> Problem | None:
    """Problems that do not depend on the number of microbatches: schedule name, stages per rank."""
    if not isinstance(schedule, AutoSchedule) and schedule.name not in SCHEDULES:
        return _unknown_schedule(schedule.name)
    return next(value_problems(schedule, "schedule"), None)


def _nearest_first(value: int, pp: int) -> list[int]:
    """Positive integers, nearest to `value` first; every schedule can run one of them."""
    return sorted(range(1, value + 2 * pp + 1), key=lambda other: abs(other - value))


def csv_order(schedule: CsvSchedule | AutoSchedule) -> Order:
    """Read the Order in a CSV file. Raises Refused."""
    assert schedule.path is not None
    try:
        with open_regular(schedule.path, "r", encoding="utf-8") as file:
            return _with_backwards(check_order(Order.from_csv(file.read(_LONGEST_CSV))))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "a CSV has a row for each pipeline rank, and cells such as 0F0, 0B0"
        raise Refused("schedule.path", schedule.path, str(reason), fix) from error


def _custom_order(schedule: Custom, pp: int, microbatches: int) -> Order:
    """Call a custom schedule function and check the result; `microbatches` overrides `args`."""

    def wrong(reason: str, fix: str = "") -> Refused:
        return Refused("schedule.name", schedule.name, reason, fix)

    function = _import_schedule(schedule.name)
    if "pp" in schedule.args:
        raise Refused("schedule.pp", schedule.args["pp"], "remove it; the mesh's pp is passed")
    kwargs: dict[str, Any] = {**schedule.args, "pp": pp, "microbatches": microbatches}
    signature = inspect.signature(function)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        called = "called with pp, microbatches and the keys of schedule"
        raise wrong(f"{called}: {error}", f"it takes {signature}") from None
    try:
        order = function(**kwargs)
    except Exception as error:
        raise wrong(f"raised {type(error).__name__}: {error}") from error
    if not isinstance(order, Order):
        raise wrong(f"returned a {type(order).__name__}", "return an Order")
    if (len(order.ranks), order.microbatches) != (pp, microbatches):
        asked = f"asked for {pp} pipeline ranks and {microbatches} microbatches"
        raise wrong(f"{asked}, returned an Order of {len(order.ranks)} and {order.microbatches}")
    try:
        return _with_backwards(check_order(order))
    except ValueError as error:
        raise wrong(str(error)) from error


def _with_backwards(order: Order) -> Order:
    """Raise ValueError for a forward-only order, which `check_order` accepts for evaluation."""
    if all(act.kind == "F" for acts in order.ranks for act in acts):
        raise ValueError("it has forwards alone and would train nothing; add the backwards")
    return order


def _import_schedule(name: str) -> Callable[..., Any]:
    """Import a custom schedule function. Raises Refused."""
    if "." not in name:
        raise Refused(*astuple(_unknown_schedule(name)))
    try:
        function = import_object(name)
    except ValueError as error:
        fix = import_fix("schedule.name", error, "name it as package.module.function")
        raise Refused("schedule.name", name, str(error), fix) from error
    if not callable(function):
        raise Refused("schedule.name", name, f"it is no function, but {function!r}")
    if kind := of_a_library(name, function, Order):
        raise Refused("schedule.name", name, f"is a {kind}", "name a function of your own")
    return function


def _unknown_schedule(name: str) -> Problem:
    names = [*SCHEDULES, "csv", "auto"]
    known = f"{', '.join(names)}, or an import path package.module.function"
    near = nearest(name, names)
    fix = f"schedule={near}" if near else ""
    return Problem("schedule.name", name, f"no such schedule; known: {known}", fix)


class NoDivision(ValueError):
    """A dp rank's batch cannot be split into microbatches; `works`: the nearest batch size that
    can, or None."""

    def __init__(self, text: str, works: int | None) -> None:
        super().__init__(text)
        self.works = works


def derive_microbatches(schedule: AnySchedule, pp: int, batch_per_dp_rank: int) -> tuple[int, str]:
    """Choose the number of microbatches; returns it and the reason to print.

    The largest divisor of the batch up to 4 * pp that the schedule can run; if there is none, or
    fewer than pp, the smallest above. With pp=1 as few as possible. Raises Refused; NoDivision,
    with the nearest batch that works, if no divisor does.
    """
    batch = batch_per_dp_rank
    if _in_a_file(schedule):
        count = csv_order(schedule).microbatches
        if batch < 1 or batch % count:
            cuts = f"{schedule.path} cuts a dp rank's batch into {count} microbatches"
            near = max(1, round(batch / count)) * count
            raise NoDivision(f"{cuts}, and it has {batch} sequences", near)
        return count, f"counted in {schedule.path}"
    if isinstance(schedule, Custom):
        _import_schedule(schedule.name)  # report a wrong path as such
    elif problem := _stages_problem(schedule):
        raise Refused(*astuple(problem))

    def runs(count: int) -> bool:
        return microbatch_problem(schedule, pp, count) is None

    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    target = 4 * pp if pp > 1 else 0
    count = next((d for d in reversed(divisors) if d <= target and runs(d)), None)
    if count is None or count < pp:
        count = next((d for d in divisors if d > target and runs(d)), count)
    if count is None and isinstance(schedule, Custom):
        answer = microbatch_problem(schedule, pp, max(1, batch))
        text = f"no division of {batch} suits schedule.name={schedule.name}: {answer}"
        raise NoDivision(text, None)
    if count is None:
        text = f"no division that works ({microbatch_problem(schedule, pp, batch)})"
        raise NoDivision(
            f"a dp rank's batch of {batch} has {text}",
            next(filter(runs, _nearest_first(batch, pp))),
        )
    if pp == 1:
        fewest = f"the fewest that {schedule.name} runs"
        return count, "no pipeline to fill" if count == 1 else fewest
    reason = f"{count / pp:.3g} per pipeline rank"
    if type(schedule) in (Schedule, LoopedSchedule):  # backwards are not split
        # a rank computes in v * M of the steps until the last rank finishes its last microbatch
        v = stage_count(schedule, pp) // pp
        bubble = 1 - v * count / (v * max(count, pp) + min(count, pp) - 1)
        reason += f" keep the bubble near {bubble:.0%}" if count >= pp else f": bubble {bubble:.0%}"
    if count == batch:
        reason += ", one sequence each"
    return count, reason
