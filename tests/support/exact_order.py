"""The shortest step that any order of a small problem has, by CP-SAT.

`pip install --no-deps ortools absl-py immutabledict`: it asks for an older protobuf than wandb has, and works
with that one, too."""

from __future__ import annotations

from titanlike.planning.order_search import Found
from titanlike.planning.simulate import simulate

_TICKS = 1000  # of a second: times are whole numbers there


def exact_seconds(known: Found, limit: float = 20.0) -> tuple[float, float]:
    """(seconds of the best order, a lower bound of it); equal where the optimum is proven.

    known: an order of whole numbers of milliseconds, to begin with; limit: seconds of the search.
    """
    from ortools.sat.python import cp_model

    problem = known.problem
    model, place = cp_model.CpModel(), problem.place
    end = int(1.01 * known.seconds * _TICKS) + 1
    rows: list[list] = [[] for _ in range(problem.ranks)]
    alive: list[list] = [[] for _ in range(problem.ranks)]
    starts, ends = {}, {}
    for stage, rank in enumerate(place):
        for mb in range(problem.microbatches):
            for kind, seconds in zip("FIW", problem.seconds[stage], strict=True):
                ticks = round(seconds * _TICKS)
                key = kind, stage, mb
                starts[key] = model.new_int_var(0, end, str(key))
                ends[key] = starts[key] + ticks
                rows[rank].append(
                    model.new_fixed_size_interval_var(starts[key], ticks, f"run {key}")
                )
    for stage in range(len(place)):
        forward, backward = (round(each * _TICKS) for each in problem.messages[stage])
        for mb in range(problem.microbatches):
            if stage + 1 < len(place):
                model.add(starts["F", stage + 1, mb] >= ends["F", stage, mb] + forward)
            else:
                model.add(starts["I", stage, mb] >= ends["F", stage, mb])
            if stage:
                model.add(starts["I", stage - 1, mb] >= ends["I", stage, mb] + backward)
            model.add(starts["W", stage, mb] >= ends["I", stage, mb])
            for kind in "FIW" if mb else "":  # microbatches are alike
                model.add(starts[kind, stage, mb] >= ends[kind, stage, mb - 1])
            begin, stop = starts["F", stage, mb], ends["W", stage, mb]
            size = model.new_int_var(0, end, "")
            interval = model.new_interval_var(begin, size, stop, f"alive {stage} {mb}")
            alive[place[stage]].append((interval, stage))
    for rank in range(problem.ranks):
        model.add_no_overlap(rows[rank])
        held = [round(_TICKS * problem.held[stage]) for _, stage in alive[rank]]
        room = int(_TICKS * min(problem.room(rank), sum(problem.held) * problem.microbatches))
        model.add_cumulative([interval for interval, _ in alive[rank]], held, room)
    last = model.new_int_var(0, end, "end")
    model.add_max_equality(last, [each for key, each in ends.items() if key[0] == "W"])
    model.minimize(last)
    for row in simulate(known.order, problem.times).events:
        for kind, stage, mb, begin, _ in row:
            model.add_hint(starts["I" if kind == "B" else kind, stage, mb], round(begin * _TICKS))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit, 2
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return solver.objective_value / _TICKS, solver.best_objective_bound / _TICKS
