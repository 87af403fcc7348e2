"""launch.elastic: dp follows the number of ranks that torchrun has started (`--nnodes 1:4`).

When machines join or leave, torchrun restarts the ranks, as many as there are machines for. pp, tp,
the model and the global batch size stay as declared; dp becomes ranks / (pp x tp) if the rest of the
config allows it, and the checkpoint is loaded in that layout. So the losses stay those of the
declared layout, up to rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from titanlike.checkpoint.resume import resumed_config
from titanlike.config import validate
from titanlike.config.errors import Problem
from titanlike.config.schema import Config
from titanlike.driver.checks import problems as check
from titanlike.launch.restart_state import RestartState
from titanlike.metrics.events import Events

_MAX_NAMED = 4  # numbers of ranks that an error names
_MAX_CHECKED = 8  # numbers of ranks that are checked for it
_RANKS, _DP = "ranks", "dp"  # keys in RestartState: of the last start


def available_ranks(config: Config, started: int | None, restart_state: RestartState) -> int | None:
    """Ranks that torchrun or srun has started for the run; None if the run starts its own.

    started: number of processes, None if this is the only one. A single process under torchrun
    starts the others itself, unless an earlier start had several.
    """
    if started is None and "TORCHELASTIC_RUN_ID" in os.environ:
        had_several = restart_state.get(_RANKS) not in (None, "1")
        return 1 if config.launch.elastic or had_several else None
    return started


def fit_mesh(config: Config, ranks: int | None) -> tuple[Config, list[Problem]]:
    """The config with dp = ranks / (pp x tp), or the problems that prevent it."""
    if ranks is None or ranks == config.world_size or not config.launch.elastic:
        return config, []
    if min(config.pp, config.dp, config.cp, config.tp, config.replicate) < 1:
        return config, []  # reported by the usual check
    # problems that the declared mesh has, too, are reported by the usual check
    try:
        known = {str(problem) for problem in check(config, config.world_size)}
    except Exception:  # of a user's function, which the usual check calls, too
        return config, []
    fitted = _with_ranks(config, ranks)
    problems = _new_problems(fitted, ranks, known)
    if isinstance(fitted, Config) and not problems:
        return fitted, []
    possible = ", ".join(map(str, _possible_counts(config, ranks, known))) or "none"
    dp = f", so dp={ranks // config.model_ranks}" if not isinstance(fitted, Problem) else ""
    available = f"{_available(ranks)} (launch.elastic){dp}"
    return config, [
        Problem(p.key, p.value, f"{available}: {p.reason}; possible numbers of ranks: {possible}")
        for p in problems
    ]


def _available(ranks: int) -> str:
    return f"{ranks} rank{'s are' if ranks > 1 else ' is'} available"


def _with_ranks(config: Config, ranks: int) -> Config | Problem:
    """The config with the mesh of `ranks`; pure replication stays so."""
    dp = ranks // config.model_ranks
    if dp * config.model_ranks != ranks:
        more = {key: getattr(config, key) for key in ("cp", "tp") if getattr(config, key) > 1}
        if not more:
            return Problem("pp", config.pp, f"does not divide {ranks}")
        key, value = more.popitem()
        names = " x ".join(["pp", *more, key])
        product = f"{names} = {' x '.join(map(str, [config.pp, *more.values(), value]))}"
        return Problem(key, value, f"{product} does not divide {ranks}")
    replicate = dp if config.replicate == config.dp else config.replicate
    if dp % replicate:
        return Problem(
            "replicate", replicate, f"dp={dp} cannot be divided into {replicate} replicas"
        )
    return replace(config, dp=dp, replicate=replicate)


def _new_problems(fitted: Config | Problem, ranks: int, known: set[str]) -> list[Problem]:
    """Problems of a mesh of `ranks` that are not `known` of the declared one."""
    if isinstance(fitted, Problem):
        return [fitted]
    return [found for found in check(fitted, ranks) if str(found) not in known]


def _possible_counts(config: Config, ranks: int, known: set[str]) -> list[int]:
    """A few numbers of ranks that the config allows, the nearest to `ranks`."""
    likely = islice(_likely_counts(config, ranks, known), _MAX_CHECKED)
    fits = (n for n in likely if not _new_problems(_with_ranks(config, n), n, known))
    return sorted(islice(fits, _MAX_NAMED))


def _likely_counts(config: Config, ranks: int, known: set[str]) -> Iterator[int]:
    """Numbers of ranks that pass the quick checks, the nearest first."""
    counts = range(config.model_ranks, max(config.world_size, ranks) + 1, config.model_ranks)
    for count in sorted(counts, key=lambda count: abs(count - ranks)):
        fitted = _with_ranks(config, count)
        if isinstance(fitted, Config):
            found = validate.problems(fitted, count)
            if all(str(problem) in known for problem in found):
                yield count


def report_layout(
    config: Config, declared: Config, ranks: int | None, restart_state: RestartState
) -> None:
    """Report, also in events.jsonl, a layout other than that of the last start, or the declared."""
    if ranks is None:
        return
    before = int(restart_state.get(_DP) or declared.dp)
    if config.dp != before:
        _, step = resumed_config(config)
        where = f"from step {step}" if step else "from the beginning"
        change = f"dp={config.dp} instead of {before}, {where}"
        text = f"{_available(ranks)}: {change} (launch.elastic)"
        events = Events(Path(config.run_dir), lambda line: print(line, file=sys.stderr, flush=True))
        mesh = {"pp": config.pp, "dp": config.dp, "cp": config.cp, "tp": config.tp}
        events.log("layout", step, text, ranks=ranks, **mesh, before=before)
    restart_state.set(_RANKS, str(ranks))
    restart_state.set(_DP, str(config.dp))
