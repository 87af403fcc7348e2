"""`titanlike rehearse`: whether the ranks of this command line can get out of step and wait for each
other for ever, found without devices and without the other ranks."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlike.core.checkpoint.storage import error_line
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import axis_sizes
from titanlike.core.metrics.console import table_lines
from titanlike.core.torch_private.recorded_ranks import Call, Program
from titanlike.proof.agreement import Classes, Disagreement, Place, disagreement
from titanlike.proof.rehearsal import STEPS, Scenario, Shared, run_rank, shortened

SCENARIOS = (
    Scenario("a run"),
    Scenario("a stop request", stops_at=2),
    Scenario("a step with NaN", bad_step=2),
    Scenario("a resume", resumes=True),
)
_ALL = 16  # ranks of a job that are all run
_OTHERS = float("nan"), 1e9, -1e9, 0.0  # in place of a value that a rank has read


@dataclass
class Rehearsal:
    """What was run, and what was found."""

    config: Config
    classes: Classes
    ran: list[str] = field(default_factory=list)  # scenarios
    programs: list[Program] = field(default_factory=list)  # of the ranks run, in the first scenario
    collectives: int = 0  # in a step, of the ranks that were run
    messages: int = 0
    found: Disagreement | None = None
    where: str = ""  # the scenario of what was found
    agreed: int = 0  # lines that read what collectives have made the same on all ranks
    failed: str = ""  # why a rank could not be run

    @property
    def exit_code(self) -> int:
        """0: the ranks agree; 1: they do not; 2: that could not be found out."""
        return 2 if self.failed else int(self.found is not None)


def rehearse(
    config: Config, every_rank: bool = False, scenarios: tuple[Scenario, ...] = SCENARIOS
) -> Rehearsal:
    """Run the ranks of a config in each scenario and compare what they ask of each other, up to the
    first disagreement. Raises ConfigError for an error in the data.

    every_rank: not one rank for each class alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = shortened(config, str(Path(folder) / "run"))
        try:
            shared = Shared(config, open_data(config))
        except DataError as error:
            raise ConfigError([error.problem]) from None
        most = config.world_size if every_rank else _ALL
        result = Rehearsal(config, Classes(axis_sizes(config), most))
        for scenario in scenarios:
            if scenario.resumes and not shared.state:  # nothing is saved
                continue
            programs = _run(shared, scenario, result)
            if scenario is scenarios[0]:
                result.programs = programs
                _count(result, programs)
            found = disagreement(programs, result.classes)
            if result.failed:  # as a rank may that is out of step before
                if found is None or not all(place.call for place in found.places):
                    break
                result.failed = ""
            if found is None and scenario is scenarios[0]:
                found = _by_values(shared, scenario, programs, result)
            if found is not None:
                result.found, result.where = found, scenario.name
                break
            result.ran.append(scenario.name)
    return result


def _run(shared: Shared, scenario: Scenario, result: Rehearsal) -> list[Program]:
    programs = []
    for rank in result.classes.ranks:
        program, error = run_rank(shared, rank, scenario)
        programs.append(program)
        if error is not None and not result.failed:
            name = type(error).__name__
            result.failed = f"rank {rank}, {scenario.name}: {name}: {error_line(error)}"
    return programs


def _count(result: Rehearsal, programs: list[Program]) -> None:
    """Count the calls of a step without saves and validation, the first one."""
    for program in programs:
        for call in program.calls:
            if call.phase == "data of step 1" and not call.queue:
                message = call.operation in ("send", "recv")
                result.messages += call.operation == "send"
                result.collectives += not message


def _by_values(
    shared: Shared, scenario: Scenario, programs: list[Program], result: Rehearsal
) -> Disagreement | None:
    """Try other values where a rank's host reads what may differ between ranks, and see whether it
    then asks for something else; what collectives make the same stays as it was."""
    alone = replace(scenario, stops_at=2)
    changed, _ = run_rank(shared, programs[0].rank, alone, before=programs[0])
    if places := _first_other(programs[0], changed):
        return Disagreement("a stop request that one rank alone has decides", places)
    first = {line: program for program in reversed(programs) for line in program.reads}
    for line, program in first.items():
        axes = frozenset().union(*(each.reads.get(line, ()) for each in programs))
        result.agreed += not axes
        for other in _OTHERS if axes else ():
            flips = {"flipped": line, "other": other, "before": program}
            changed, error = run_rank(shared, program.rank, scenario, **flips)
            places = _first_other(program, changed)
            if places and (error is None or places[1].call is not None):
                along = ", ".join(sorted(axes))
                text = f"{line}: a value that differs along {along} decides about a collective"
                return Disagreement(text, places)
    return None


def _first_other(program: Program, changed: Program) -> list[Place]:
    """Where a rank asks for something else, with the values of before and with others."""

    def asked(call: Call | None) -> object:
        where = call and (call.line, call.user_line, call.queue)
        return call and (call.operation, call.group, call.peer, where)

    both = [*program.calls, None], [*changed.calls, None]
    for one, other in zip(*both, strict=False):
        if asked(one) != asked(other):
            return [Place(program.rank, one), Place(program.rank, other)]
    return []


def as_text(result: Rehearsal, width: int) -> list[str]:
    """Lines for the terminal, at most `width` columns where names allow."""
    config, classes = result.config, result.classes
    ran = f"{len(classes.ranks)} of {config.world_size}"
    ranks = f"all {config.world_size}" if classes.complete else f"{ran}, one for each class,"
    if result.failed:
        return [f"cannot say: {result.failed}"]
    if result.found is None:
        calls = f"{result.collectives} collectives and {result.messages} messages a step agree"
        *others, last = result.ran
        scenarios = f"{', '.join(others)} and {last}" if others else last
        return [
            f"cannot hang: {calls}",
            f"  ranks      {ranks} ({' x '.join(map(str, classes.sizes.values()))})",
            f"  rehearsed  {STEPS} steps in each of: {scenarios}",
            f"  values     {result.agreed} lines read what collectives have made equal",
        ]
    rows = [_row(place) for place in result.found.places]
    by_row: dict[tuple[str, ...], list[int]] = {}
    for place, row in zip(result.found.places, rows, strict=True):
        by_row.setdefault(row, []).append(place.rank)
    shown = [(_ranks(found), *row) for row, found in [*by_row.items()][:12]]
    headers = ("rank", "asks for", "group", "shape", "line")
    return [
        f"would hang, in {result.where}: {result.found.text}",
        *table_lines("", headers, shown, width),
    ]


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + ", ..." * (len(ranks) > 4)


def _row(place: Place) -> tuple[str, ...]:
    call = place.call
    if call is None:
        return "nothing: it has ended", "", "", ""
    what = f"{call.operation} {call.detail}".strip()
    what += f" to rank {call.peer}" if call.operation == "send" else ""
    what += f" from rank {call.peer}" if call.operation == "recv" else ""
    sizes = " ".join(f"{[*shape]} {dtype}" for shape, dtype in call.sizes[:2])
    return what, call.group, sizes, call.user_line or call.line


def as_data(result: Rehearsal) -> dict[str, Any]:
    """The same for `--json`."""
    places = [] if result.found is None else result.found.places
    return {
        "agrees": result.exit_code == 0,
        "ranks": result.config.world_size,
        "ranks_run": len(result.classes.ranks),
        "scenarios": result.ran,
        "collectives_a_step": result.collectives,
        "messages_a_step": result.messages,
        "disagreement": None if result.found is None else result.found.text,
        "scenario": result.where,
        "places": [
            {"rank": place.rank, **(vars(place.call) if place.call else {})} for place in places
        ],
        "failed": result.failed,
    }
