"""launch.elastic: dp follows the number of ranks that torchrun has started (`--nnodes 1:4`).

Machines come and go, and each time torchrun starts the ranks again: so many as there are machines
for. pp, the model and the global batch stay as declared; dp becomes ranks / pp, where the rest of
the config allows it, and the checkpoint is loaded in that layout. So the losses stay those of the
declared layout, up to rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from titanlike.checkpoint.restart import resumed_config
from titanlike.config import validate
from titanlike.config.errors import Problem
from titanlike.config.schema import Config
from titanlike.job.check import problems as check
from titanlike.launch.restart_state import RestartState
from titanlike.metrics.events import Events

_MOST_COUNTS = 4  # numbers of ranks that an error names
_MOST_TRIED = 8  # that are drafted for it
_RANKS, _DP = "ranks", "dp"  # of the last start, in RestartState


def available_ranks(config: Config, started: int | None, restart_state: RestartState) -> int | None:
    """Ranks that torchrun or srun has for the run; None where the run starts its own.

    started: processes of a start with several, None where this one is alone. Alone under torchrun,
    a process starts the others itself, unless it is the one that is left of several.
    """
    if started is None and "TORCHELASTIC_RUN_ID" in os.environ:
        left_alone = restart_state.get(_RANKS) not in (None, "1")
        return 1 if config.launch.elastic or left_alone else None
    return started


def fit_mesh(config: Config, ranks: int | None) -> tuple[Config, list[Problem]]:
    """The config with the dp that `ranks` make, or what forbids it."""
    if ranks is None or ranks == config.world_size or not config.launch.elastic:
        return config, []
    if config.pp < 1 or config.dp < 1 or config.replicate < 1:
        return config, []  # the usual check tells
    # mistakes that the declared mesh has, too, are told by the usual check
    try:
        own = {str(problem) for problem in check(config, config.world_size)}
    except Exception:  # of a function of the user's own, which the usual check calls, too
        return config, []
    fitted = _with_ranks(config, ranks)
    forbids = _forbidding(fitted, ranks, own)
    if isinstance(fitted, Config) and not forbids:
        return fitted, []
    would = ", ".join(map(str, _counts_that_fit(config, ranks, own))) or "none"
    there = f"{ranks} rank{'s are' if ranks > 1 else ' is'} there (launch.elastic)"
    dp = f", so dp={ranks // config.pp}" if not isinstance(fitted, Problem) else ""
    return config, [
        Problem(p.key, p.value, f"{there}{dp}: {p.reason}; numbers of ranks that would do: {would}")
        for p in forbids
    ]


def _with_ranks(config: Config, ranks: int) -> Config | Problem:
    """The mesh of `ranks`; replicas of the whole model stay that."""
    dp = ranks // config.pp
    if dp * config.pp != ranks:
        return Problem("pp", config.pp, f"does not divide {ranks}")
    replicate = dp if config.replicate == config.dp else config.replicate
    if dp % replicate:
        return Problem("replicate", replicate, f"dp={dp} cannot be cut into {replicate} replicas")
    return replace(config, dp=dp, replicate=replicate)


def _forbidding(fitted: Config | Problem, ranks: int, own: set[str]) -> list[Problem]:
    """What forbids a mesh of `ranks`, apart from mistakes of the config's `own`."""
    if isinstance(fitted, Problem):
        return [fitted]
    return [found for found in check(fitted, ranks) if str(found) not in own]


def _counts_that_fit(config: Config, ranks: int, own: set[str]) -> list[int]:
    """A few numbers of ranks that the config allows, those nearest to `ranks`."""
    likely = islice(_likely(config, ranks, own), _MOST_TRIED)
    fits = (count for count in likely if not _forbidding(_with_ranks(config, count), count, own))
    return sorted(islice(fits, _MOST_COUNTS))


def _likely(config: Config, ranks: int, own: set[str]) -> Iterator[int]:
    """Those that the quick rules allow, the nearest first."""
    counts = range(config.pp, max(config.world_size, ranks) + 1, config.pp)
    for count in sorted(counts, key=lambda count: abs(count - ranks)):
        fitted = _with_ranks(config, count)
        if isinstance(fitted, Config):
            found = validate.problems(fitted, count)
            if all(str(problem) in own for problem in found):
                yield count


def report_layout(
    config: Config, declared: Config, ranks: int | None, restart_state: RestartState
) -> None:
    """Tell the user, and events.jsonl, where the layout is not the last start's, or the declared."""
    if ranks is None:
        return
    before = int(restart_state.get(_DP) or declared.dp)
    if config.dp != before:
        _, step = resumed_config(config)
        there = f"{ranks} rank{'s are' if ranks > 1 else ' is'} there"
        where = f"from step {step}" if step else "from the beginning"
        text = f"{there}: dp={config.dp} instead of {before}, {where} (launch.elastic)"
        events = Events(Path(config.run_dir), lambda line: print(line, file=sys.stderr, flush=True))
        events.log("layout", step, text, ranks=ranks, pp=config.pp, dp=config.dp, before=before)
    restart_state.set(_RANKS, str(ranks))
    restart_state.set(_DP, str(config.dp))
