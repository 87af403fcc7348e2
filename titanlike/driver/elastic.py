"""Fits the layout to a number of ranks that the launcher decides (launch.elastic).

dp follows the number of ranks that torchrun launched (`--nnodes 1:4`). When machines join or leave,
torchrun restarts the ranks. pp, tp, the model and the global batch size stay as declared; dp
becomes ranks / (pp x cp x tp) if the rest of the config allows it, and the checkpoint is loaded in
that layout. So losses equal those of the declared layout, up to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

from titanlike.checkpoint.discovery import resumed_config
from titanlike.config import validate
from titanlike.config.errors import Problem
from titanlike.config.schema import MESH_AXES, Config
from titanlike.driver.checks import RANKS, problems
from titanlike.launch.environment import RestartState
from titanlike.metrics.run_files import Events

_DP = "dp"  # key in RestartState: dp of the last launch
_MAX_NAMED = 4  # alternative numbers of ranks in an error
_MAX_CHECKED = 8  # numbers of ranks tried to find these
Check = Callable[[Config, int], list[Problem]]


def fit_mesh(config: Config, ranks: int) -> tuple[Config, list[Problem]]:
    """Return the config with dp = ranks / (pp x cp x tp), or the problems that prevent it."""
    if ranks == config.world_size or not config.launch.elastic:
        return config, []
    if min(*config.axes.values(), config.replicate) < 1:
        return config, []  # reported by the usual check
    # problems that the declared mesh has, too, are reported by the usual check
    try:
        known = {str(problem) for problem in problems(config, config.world_size)}
    except Exception:  # raised by a user's function; the usual check reports it
        return config, []

    def fit(count: int, check: Check) -> tuple[Config, list[Problem]]:
        """The config with the mesh of so many ranks; pure replication stays so."""
        dp = count // config.model_ranks
        if dp * config.model_ranks != count:
            axes = {axis: n for axis, n in config.axes.items() if axis != "dp"}
            sizes = f"{' x '.join(axes)} = {' x '.join(map(str, axes.values()))} "
            reason = f"{sizes if len(axes) > 1 else ''}does not divide {count}"
            return config, [Problem([*axes][-1], [*axes.values()][-1], reason)]
        replicate = dp if config.replicate == config.dp else config.replicate
        fitted = replace(config, dp=dp, replicate=replicate)
        return fitted, [problem for problem in check(fitted, count) if str(problem) not in known]

    fitted, unfit = fit(ranks, problems)
    if not unfit:
        return fitted, []
    counts = range(config.model_ranks, max(config.world_size, ranks) + 1, config.model_ranks)
    nearest = sorted(counts, key=lambda count: abs(count - ranks))
    likely = islice((n for n in nearest if not fit(n, validate.problems)[1]), _MAX_CHECKED)
    fits = islice((n for n in likely if not fit(n, problems)[1]), _MAX_NAMED)
    possible = ", ".join(map(str, sorted(fits))) or "none"
    dp = f", so dp={fitted.dp}" if fitted is not config else ""
    available = f"{_available(ranks)} (launch.elastic){dp}"
    return config, [
        Problem(p.key, p.value, f"{available}: {p.reason}; possible numbers of ranks: {possible}")
        for p in unfit
    ]


def _available(ranks: int) -> str:
    return f"{ranks} rank{'s are' if ranks > 1 else ' is'} available"


def report_layout(
    config: Config, declared: Config, ranks: int, restart_state: RestartState
) -> None:
    """Report, also in events.jsonl, a layout that differs from the last launch's or the declared
    one."""
    before = int(restart_state.get(_DP) or declared.dp)
    if config.dp != before:
        _, step = resumed_config(config)
        where = f"from step {step}" if step else "from the beginning"
        change = f"dp={config.dp} instead of {before}, {where}"
        text = f"{_available(ranks)}: {change} (launch.elastic)"
        events = Events(Path(config.run_dir), lambda line: print(line, file=sys.stderr, flush=True))
        mesh = {axis: getattr(config, axis) for axis in MESH_AXES}
        events.log("layout", step, text, ranks=ranks, **mesh, before=before)
    restart_state.set(RANKS, str(ranks))
    restart_state.set(_DP, str(config.dp))
