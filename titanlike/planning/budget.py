"""`plan search` within a budget: which devices, how many, and in which layout, end a whole run in
so many days for so much money. For each number of each device the fastest layout is searched
(`search.py`), and its whole run planned with its failures (`whole_run.py`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.core.config import files
from titanlike.core.config.errors import ConfigError, Problem, Refused
from titanlike.core.config.keys import key
from titanlike.core.config.schema import Config
from titanlike.core.metrics import units
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.planning.estimate_text import as_data, mesh_text, table
from titanlike.planning.known_hardware import planned_hardware
from titanlike.planning.search import Ranked, search
from titanlike.planning.whole_run import DAY, RunTerms, plan_run

_BEST_MFU = 0.6  # no published run has more
_COUNTS = 3  # of each device that are tried, each twice the one before


@dataclass(kw_only=True)
class Budget(RunTerms):
    """What a whole run may take. 9 of 10 runs have to stay within."""

    days: float | None = key(None, "days that the run may take", gt=0, example=30)
    money: float | None = key(None, "money that it may cost, with price", gt=0, example=1e7)


@dataclass(frozen=True)
class Offer:
    """A number of devices, with its fastest layout and the whole run of it."""

    gpus: int
    hardware: str
    best: Ranked
    run: dict[str, Any]  # see `plan_run`
    within: bool

    @property
    def cost(self) -> float:
        """Money, or device-days if no price is known."""
        each = self.run.get("cost", self.run["days"])["mean"]
        return each if "cost" in self.run else each * self.gpus

    def as_data(self) -> dict[str, Any]:
        command = {"command": self.best.command_line, **as_data(self.best.estimate)}
        own = {"gpus": self.gpus, "hardware": self.hardware, "within": self.within}
        return own | {"run": self.run, "layout": command}


def offers(
    devices: Sequence[tuple[Config, list[str], Budget]],
    gpus: Sequence[int],
    say: Callable[[str], object],
) -> list[Offer]:
    """Search the layouts and runs of each device; those within the budget first, then the cheapest.

    devices: a config with its hardware, its overrides, and the budget with its price; gpus: how many
    are tried; none = as many as may end in time. Raises ConfigError if no layout is possible, and
    Refused if failures would let no run end.
    """
    found, refusal = list[Offer](), None
    for config, words, budget in devices:
        if budget.money is not None and budget.price is None:
            reason = "of a device and an hour is needed to tell what a run costs"
            raise Refused("price", None, reason, "price=2.5")
        for count in gpus or _counts(config, budget):
            hardware = planned_hardware(config, count)
            say(f"layouts of {count:,} x {hardware.title}")
            try:
                ranked = search(config, words, count, 1, say).ranked
            except ConfigError as error:
                refusal = error
                continue
            if ranked:
                run = plan_run(ranked[0].estimate, budget)
                limits = ("days", budget.days), ("cost", budget.money)
                within = all(run[name]["p90"] <= most for name, most in limits if most is not None)
                found.append(Offer(count, hardware.name, ranked[0], run, within))
    if not found:
        reason = "no layout fits into the memory of these devices"
        numbers = ",".join(map(str, gpus)) or None
        raise refusal or ConfigError([Problem("gpus", numbers, reason, "more, or larger devices")])
    return sorted(found, key=lambda offer: (not offer.within, offer.cost))


def _counts(config: Config, budget: Budget) -> Iterator[int]:
    """Yield numbers of devices, a power of two of nodes each: from the fewest that could end in
    time. Raises ConfigError if nothing says when that is."""
    hardware = planned_hardware(config)
    if budget.days is None:
        reason = "is needed for a search of how many devices"
        raise ConfigError([Problem("days", None, reason, f"days=30, or gpus={config.world_size}")])
    model: Any = build_model(resolve_model(config))
    per_token = 6.0 * sum(parameter.numel() for parameter in model.parameters())
    if hasattr(model, "flops_per_token"):
        per_token = model.flops_per_token(config.seq_len)
    tokens = config.last_step * config.batch_size * config.seq_len
    if budget.tokens is not None:
        tokens = round(budget.tokens)
    low = config.precision.name in ("float8", "mxfp8")
    peak = max(hardware.bf16_flops, hardware.fp8_flops * low)
    node = hardware.devices_per_node
    least = tokens * per_token / (_BEST_MFU * peak * budget.days * DAY)
    first = node * 2 ** max(0, math.floor(math.log2(max(least, 1) / node)))
    yield from (first * 2**i for i in range(_COUNTS))


# --- output ---------------------------------------------------------------------------------------


def offers_text(found: Sequence[Offer], budget: Budget, width: int) -> str:
    """Format the offers as a table, with the command line of the first."""
    priced = budget.price is not None
    rows = [
        [
            f"{offer.gpus:,}",
            offer.hardware,
            mesh_text(offer.best.estimate),
            *(f"{offer.run['days'][q]:.3g}" for q in ("p10", "p50", "p90")),
            *([units.count(offer.run["cost"]["p90"])] if priced else []),
            f"{offer.run['goodput']['mean']:.1%}",
            *(["yes" if offer.within else "no"] if budget.days or budget.money else []),
        ]
        for offer in found
    ]
    header = [
        "GPUs",
        "device",
        "mesh",
        "days: p10",
        "p50",
        "p90",
        *["cost p90"] * priced,
        "goodput",
    ]
    header += ["within"] * bool(budget.days or budget.money)
    limits = [f"{budget.days:.3g} days"] if budget.days is not None else []
    limits += [f"{units.count(budget.money)} of money"] if budget.money is not None else []
    asked = f" within {' and '.join(limits)}, for 9 of 10 runs" if limits else ""
    model, best = found[0].best.estimate, found[0].best.command_line
    count, tokens = sum(offer.within for offer in found), found[0].run["steps"] * model.tokens
    what = f"offers for {units.count(tokens)} tokens of {model.config.model.name}"
    first = f"{count} of {len(found)} {what} are{asked}" if asked else f"{len(found)} {what}"
    lines = [*textwrap.wrap(first, width), "", table(header, rows, width), "", best]
    return "\n".join(lines)


def draw_offers(found: Sequence[Offer], budget: Budget, path: Path) -> None:
    """Draw cost against days, with the middle 8 of 10 runs of each offer, to an .svg or .png file."""
    import io

    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 6), dpi=110, layout="constrained", facecolor="white")
    axes = figure.add_subplot(xscale="log", yscale="log")
    for offer in found:
        days = offer.run["days"]
        colour = "#1b7f5c" if offer.within else "#9a9a9a"
        spread = [[days["p50"] - days["p10"]], [days["p90"] - days["p50"]]]
        axes.errorbar(days["p50"], offer.cost, xerr=spread, fmt="o", color=colour, capsize=4)
        text = f"{offer.gpus:,} x {offer.hardware}\n{mesh_text(offer.best.estimate)}"
        where: Any = {"textcoords": "offset points", "xytext": (6, 8), "fontsize": 8}
        axes.annotate(text, (days["p50"], offer.cost), **where)
    for limit, line in ((budget.days, axes.axvline), (budget.money, axes.axhline)):
        if limit is not None:
            line(limit, color="#c0392b", linestyle="--", linewidth=1)
    shown = FuncFormatter(lambda value, _: f"{value:.3g}" if value < 1000 else units.count(value))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set(major_formatter=shown, minor_formatter=shown)
    axes.set(xlabel="days", ylabel="cost" if budget.price is not None else "device-days")
    axes.margins(0.3)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lstrip("."))
    files.atomic_write_bytes(path, content.getvalue())
