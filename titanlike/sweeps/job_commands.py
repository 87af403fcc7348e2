"""Shell lines that run one job of a sweep, or all that are left."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from titanlike.config.program import program_length, train_program
from titanlike.sweeps.job_status import JobRow
from titanlike.sweeps.plan import Plan

_SEARCH = "throughput"  # conf/experiment/throughput.yaml


def resume_command(plan: Plan | None, left: list[JobRow]) -> str:
    """The shell line that runs the jobs left; "" where there are none, or it is unknown."""
    if plan is None or not plan.command:
        return ""
    if all(row.status == "running" for row in left):
        return ""
    command = plan.command
    return command if "sweep.resume=true" in command else f"{command} sweep.resume=true"


def job_command(plan: Plan | None, row: JobRow) -> str:
    """The shell line that runs one job by itself; of a throughput search, a full training."""
    overrides = list(_without_search(row.job.overrides))
    words = _words(plan.command if plan else "")
    count = program_length(words)
    if not count:
        return shlex.join([*train_program(), *overrides])
    program, rest, options = words[:count], words[count:], []
    for i, word in enumerate(rest):  # where the config is
        if word.startswith("--config") or word in ("-cp", "-cn", "-cd"):
            options += [word] if "=" in word else rest[i : i + 2]
    start = [
        word if "=" in word and i == 0 else shlex.quote(word) for i, word in enumerate(program)
    ]
    if not {"-m", "--multirun"} & set(rest) and any("experiment=" in text for text in overrides):
        overrides.append("hydra.mode=RUN")  # the experiment's file says that it is a sweep
    return " ".join([*start, shlex.join([*options, *overrides])]).rstrip()


def _without_search(overrides: list[str]) -> Iterator[str]:
    """Overrides without experiment=throughput, which sets the search and its few steps."""
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if key != "experiment":
            yield text
            continue
        names = [name.strip() for name in value.strip("[]").split(",")]
        if _SEARCH not in names:
            yield text
        elif others := [name for name in names if name != _SEARCH]:
            yield f"experiment=[{','.join(others)}]"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that is not closed
        return []
