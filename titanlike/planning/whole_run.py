"""`plan run`: days, money and goodput of a whole run, with its failures.

A run is a chain of launches. Each trains in intervals that end with a save, until it fails; the work
since the last complete checkpoint is lost, and after a pause the next launch begins:

    start, interval, save, interval, save, ... failure, down, start, ...

Times between failures are exponential. The interval is the best one for them: J. W. Young, A first
order approximation to the optimum checkpoint interval, CACM 17 (1974), in the higher order of
J. T. Daly, FGCS 22 (2006), whose expected time the mean of the simulated runs meets.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from titanlike.core.config.errors import Refused
from titanlike.core.config.keys import Seconds, key
from titanlike.core.metrics import units
from titanlike.planning.estimate import Estimate
from titanlike.planning.estimate_text import mesh_text, table
from titanlike.planning.uncertainty import SPREADS

DAY = 86400.0
# Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783, 3.3.4)
GPU_MTBF = 54 * DAY * 16_384 / 419
_GPU_STORAGE = 2e12 / 16_384  # bytes/s a device, sustained for Llama 3 (the same, 3.3.1)
_RUNS = 2000  # that are simulated
_MOST_FAILURES = 10_000  # a run with more is not simulated
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(kw_only=True)
class RunTerms:
    """What the plan of a whole run is told in addition to a config."""

    tokens: float | None = key(None, "tokens of the run; null = the config's steps", ge=1)
    price: float | None = key(None, "money for a device and an hour", gt=0, example=2.5)
    mtbf: Seconds | None = key(None, "mean time between failures of the job; null = by GPU_MTBF")
    start: Seconds = key(180.0, "time from a launch to its first step, without its checkpoint")
    down: Seconds = key(300.0, "time from a failure to the next launch")
    storage: float | None = key(None, "bytes/s; null = 122e6 a device", gt=0, example=2e12)
    step: Seconds | None = key(None, "measured time of a step; null = as planned")


# --- launches and failures ------------------------------------------------------------------------


@dataclass(frozen=True)
class RunTimes:
    """A run in numbers; all times in seconds."""

    steps: int
    step: float  # with its part of validations
    stall: float  # of training by a save
    save: float  # until its checkpoint is complete: the stall, or longer in the background
    start: float  # from a launch to its first step
    down: float  # from a failure to the next launch
    mtbf: float
    error: float = 0.0  # standard deviation of the logarithm of the step's time

    @property
    def best_interval(self) -> int:
        """Steps between saves with which a run is expected to end first (Daly's optimum)."""
        part = self.stall / (2 * self.mtbf)
        best = self.mtbf  # saves take as long as launches live
        if part < 1:
            best = math.sqrt(2 * self.stall * self.mtbf) * (1 + math.sqrt(part) / 3 + part / 9)
            best -= self.stall
        # one background save at a time
        steps = round(max(best, self.save - self.stall) / self.step)
        return min(max(1, steps), self.steps)


@dataclass(frozen=True)
class SimulatedRuns:
    """Runs that differ in when they failed; arrays have an entry for each run."""

    failures: np.ndarray
    seconds: dict[str, np.ndarray]  # by kind, as `core/metrics/goodput.py` counts a real run's

    @property
    def total(self) -> np.ndarray:
        return sum(self.seconds.values(), np.zeros(_RUNS))

    @property
    def goodput(self) -> np.ndarray:
        return self.seconds["steps"] / self.total


def simulate_runs(run: RunTimes, interval: int, seed: int = 0) -> SimulatedRuns:
    """Simulate runs that save every `interval` steps. Raises Refused if they would fail too often
    to get anywhere."""
    # Daly's number of failures, or more: exp(x) - 1 < x exp(x)
    exponent = min(500, (run.start + interval * run.step + run.stall) / run.mtbf)
    expected = run.steps * (run.step + run.stall / interval) / run.mtbf * math.exp(exponent)
    if expected > _MOST_FAILURES:
        reason = f"is so short that a run would fail over {_MOST_FAILURES:,} times"
        least = 20 * (run.start + run.save) + 2 * run.steps * run.step / _MOST_FAILURES
        raise Refused("mtbf", f"{run.mtbf:.0f}s", reason, f"mtbf={math.ceil(least / 3600)}h")
    random = np.random.default_rng(seed)
    step = run.step * np.exp(run.error * random.standard_normal(_RUNS))
    work, goal = interval * step, run.steps * step
    left, (failures, redone, start, save) = goal, np.zeros((4, _RUNS))
    while (going := left > 0).any():
        life = random.exponential(run.mtbf, _RUNS)  # of this launch
        trained = np.maximum(life - run.start, 0)
        complete, rest = np.divmod(trained, work + run.stall)
        done = complete * work + np.minimum(rest, work)
        saved = np.maximum(trained - run.save + run.stall, 0) // (work + run.stall) * work
        ends, fails = going & (done >= left), going & (done < left)
        saves = (np.ceil(left / work) - 1) * run.stall + run.save
        failures += fails
        redone += fails * (done - saved)
        start += ends * run.start + fails * (life - trained)
        save += ends * saves + fails * (trained - done)
        left = fails * (left - saved)
    seconds = {"steps": goal, "redone": redone, "start": start, "save": save}
    return SimulatedRuns(failures, seconds | {"down": failures * run.down})


# --- the run of an estimate -----------------------------------------------------------------------


def plan_run(estimate: Estimate, terms: RunTerms) -> dict[str, Any]:
    """Plan the whole run of an estimate, as a JSON object: days, cost if there is a price, goodput
    and failures, the mean and quantiles of each; shares of the expected time by kind; `RunTimes`,
    seconds; sizes in bytes. Raises Refused for terms in which it would never end."""
    config, hardware = estimate.config, estimate.hardware
    # a checkpoint's part of a rank: its shards of fp32 weights and optimizer state
    parts = [rank.weights + rank.optimizer for rank in estimate.memory]
    saved, copied = sum(parts) * config.tp * config.shards, max(parts) / hardware.host_bandwidth
    storage = terms.storage or _GPU_STORAGE * config.world_size
    save = copied + saved / storage
    steps, step = config.last_step, terms.step or estimate.step_seconds
    if terms.tokens is not None:
        steps = replace(config, max_tokens=round(terms.tokens), steps=2**40).last_step
    if config.validation.every:  # a forward is about a third of a step
        step += step / 3 * config.validation.batches / config.validation.every
    # a kind that no published run is of is as uncertain as the one that varies most
    spread = estimate.spread or max(SPREADS.values(), key=lambda each: each.deviation)
    times = RunTimes(
        steps=steps,
        step=step,
        stall={"sync": save, "async": copied, "async_pinned": 0.0}[config.checkpoint.mode],
        save=save,
        start=terms.start + copied + config.replicate * saved / storage,
        down=terms.down,
        mtbf=terms.mtbf or GPU_MTBF / config.world_size,
        error=spread.deviation if terms.step is None else 0.0,
    )
    interval = times.best_interval
    runs = simulate_runs(times, interval)
    outcomes = {"days": runs.total / DAY}
    if terms.price is not None:
        outcomes["cost"] = runs.total / 3600 * config.world_size * terms.price
    outcomes |= {"goodput": runs.goodput, "failures": runs.failures}
    return {
        **{
            name: {"mean": each.mean(), **{q: np.quantile(each, p) for q, p in _QUANTILES.items()}}
            for name, each in outcomes.items()
        },
        "shares": {kind: s.mean() / runs.total.mean() for kind, s in runs.seconds.items()},
        **vars(times),
        "checkpoint_every": interval,
        "checkpoint_bytes": saved,
        "storage": storage,
        "fits": estimate.fits,
    }


def run_text(run: dict[str, Any], estimate: Estimate, warning: str, width: int = 80) -> str:
    """Format `plan_run` as a table, and what it rests on. warning: of memory."""
    config, every = estimate.config, run["checkpoint_every"]
    rows = [
        [name, *(_shown(name, value) for value in run[name].values())]
        for name in ("days", "cost", "goodput", "failures")
        if name in run
    ]
    basis = {
        "step": "with its part of validations",
        "save": f"{units.size(run['checkpoint_bytes'])} at {units.size(run['storage'])}/s",
        "stall": f"of training by a save: checkpoint.mode={config.checkpoint.mode}",
        "start": "from a launch to its first step, with reading the checkpoint",
        "down": "from a failure to the next launch",
        "mtbf": "between failures of the job",
    }
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in run["shares"].items())
    best = f"checkpoint.every={every}, {_time(every * run['step'])}: the best for these times"
    lines = [
        f"{config.model.name}, {units.count(estimate.plan.whole_numel)} parameters, on "
        f"{config.world_size:,} x {estimate.hardware.title}: {mesh_text(estimate)}; "
        f"{run['steps']:,} steps of {units.count(estimate.tokens)} tokens",
        "",
        *table(["", "expected", *_QUANTILES], rows, width).split("\n"),
        "",
        f"time      {shares}",
        *(f"{name:10}{_time(run[name])}, {text}" for name, text in basis.items()),
        f"interval  {best}",
        *[f"memory    {warning}"] * bool(warning),
    ]
    wrapped = (textwrap.wrap(line, width, subsequent_indent=" " * 10) or [""] for line in lines)
    return "\n".join(line for lines in wrapped for line in lines)


def _time(seconds: float) -> str:
    return units.short_time(seconds) if seconds < 60 else units.duration(seconds)


def _shown(name: str, value: float) -> str:
    if name == "goodput":
        return f"{value:.1%}"
    return units.count(value) if value >= 999.5 else f"{value:.3g}"
