"""How many microbatches a dp rank's batch is cut into."""

from __future__ import annotations

from titanlike.config.schema import CsvSchedule, Custom
from titanlike.pipeline.from_config import (
    AnySchedule,
    csv_order,
    import_schedule,
    microbatch_problem,
    nearest_first,
    stage_count,
    stages_problem,
)


class NoDivision(ValueError):
    """No number of microbatches suits a dp rank's batch; `works` is a batch that has one, if any."""

    def __init__(self, text: str, works: int | None) -> None:
        super().__init__(text)
        self.works = works


def derive_microbatches(schedule: AnySchedule, pp: int, batch_per_dp_rank: int) -> tuple[int, str]:
    """A good number of microbatches and the reason, to be printed.

    The largest divisor of the batch up to 4 * pp that the schedule can run; the smallest above
    where there is none, or none that gives every rank a microbatch. Without a pipeline as few as
    possible. Raises ValueError, with the nearest batch that works, where no divisor does.
    """
    batch = batch_per_dp_rank
    if isinstance(schedule, CsvSchedule):
        count = csv_order(schedule).microbatches
        if batch < 1 or batch % count:
            near = max(1, round(batch / count)) * count
            raise NoDivision(
                f"{schedule.path} cuts a dp rank's batch into {count} microbatches, and it has "
                f"{batch} sequences",
                near,
            )
        return count, f"counted in {schedule.path}"
    if isinstance(schedule, Custom):
        import_schedule(schedule.name)  # a wrong path is not a question of microbatches
    elif problem := stages_problem(schedule):
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


def _no_division(schedule: AnySchedule, pp: int, batch: int) -> tuple[str, int | None]:
    if isinstance(schedule, Custom):
        answer = microbatch_problem(schedule, pp, max(1, batch))
        return f"no division of {batch} suits schedule.name={schedule.name}: {answer}", None
    problem = microbatch_problem(schedule, pp, batch)
    near = next(m for m in nearest_first(batch, pp) if microbatch_problem(schedule, pp, m) is None)
    return f"a dp rank's batch of {batch} has no division that works ({problem})", near
