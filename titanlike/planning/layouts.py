"""The layouts of a model on a number of ranks: meshes, schedules, stages and microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from titanlike.config.errors import ConfigError
from titanlike.config.overrides import key_of, with_choices
from titanlike.config.schema import Config, CsvSchedule, LoopedSchedule
from titanlike.config.validate import MAX_TENSOR_RANKS
from titanlike.models.registry import build_model, resolve_model
from titanlike.parallel.tp.plan import written_plan
from titanlike.parallel.tp.ranks import TensorRanks
from titanlike.parallel.tp.styles import shard_model
from titanlike.pipeline.from_config import derive_microbatches, microbatch_problem
from titanlike.pipeline.schedules import SCHEDULES

Compose = Callable[[list[str]], Config]  # overrides -> config; raises ConfigError


@dataclass(frozen=True)
class SearchSpace:
    """The values to enumerate. None = derived."""

    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    microbatches: list[int] | None = None  # see `_microbatches`
    stages_per_rank: list[int] = field(default_factory=lambda: [2])


@dataclass(frozen=True)
class Candidate:
    """A layout: overrides and the config with them."""

    overrides: list[str]
    config: Config
    refused: str = ""  # why it is impossible; "" = it is not


def candidates(
    combination: list[str], compose: Compose, ranks: int, machine: int, space: SearchSpace
) -> Iterator[Candidate]:
    """Yield every layout of `ranks` ranks that agrees with the overrides in `combination`.

    Without a pipeline there is one schedule, 1f1b, whose microbatches are gradient accumulation.
    Values fixed by the overrides are kept even if invalid: a later check gives the reason. An
    impossible tp is yielded once. machine: ranks per machine. Raises ConfigError if the overrides
    alone are invalid.
    """
    fixed = {key_of(text) for text in combination}
    base = compose(combination)
    composed = cache(lambda name: compose([*combination, f"schedule={name}"]))
    tensor = {base.tp: ""} if "tp" in fixed else _tensor_sizes(base, ranks, machine)
    for tp in (tp for tp, refused in tensor.items() if refused):
        yield Candidate([*combination, f"tp={tp}"], replace(base, tp=tp), tensor[tp])
    possible = [tp for tp, refused in tensor.items() if not refused]
    for pp, dp, tp in _meshes(base, fixed, ranks, possible):
        mesh = {key: size for key, size in (("pp", pp), ("dp", dp)) if key not in fixed}
        mesh |= {"tp": tp} if tp != base.tp else {}
        names = ["1f1b"] if pp == 1 else space.schedules
        if fixed & {"schedule", "schedule.name"}:
            names = [None]
        for name in dict.fromkeys(names):
            config = replace(base if name is None else composed(name), pp=pp, dp=dp, tp=tp)
            chosen = mesh | ({} if name is None else {"schedule": name})
            for sizes in _schedule_sizes(config, fixed, space):
                words = [f"{key}={value}" for key, value in (chosen | sizes).items()]
                yield Candidate([*combination, *words], with_choices(config, sizes))


def _meshes(
    base: Config, fixed: Collection[str], ranks: int, tensor: Iterable[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (pp, dp, tp) with pp * dp * cp * tp = ranks, unless the overrides fix them; tensor: tp
    to try."""
    ranks //= base.cp
    for tp in tensor:
        remaining = max(1, ranks // max(1, tp))
        sizes = [pp for pp in range(1, remaining + 1) if remaining % pp == 0]
        if "pp" in fixed:
            sizes = [base.pp]
        elif "dp" in fixed:
            sizes = [max(1, remaining // max(1, base.dp))]
        for pp in sizes:
            dp = base.dp if "dp" in fixed else max(1, remaining // max(1, pp))
            if tp == base.tp or pp * dp * tp == ranks:
                yield pp, dp, tp


def _schedule_sizes(
    config: Config, fixed: Collection[str], space: SearchSpace
) -> Iterator[dict[str, Any]]:
    """Yield each combination of stages per rank and microbatches of the config's schedule."""
    stages: list[dict[str, Any]] = [{}]
    if isinstance(config.schedule, LoopedSchedule) and "schedule.stages_per_rank" not in fixed:
        sizes = dict.fromkeys(space.stages_per_rank)
        stages = [{"schedule.stages_per_rank": size} for size in sizes]
    for choices in stages:
        counts = []
        if not isinstance(config.schedule, CsvSchedule) and "schedule.microbatches" not in fixed:
            counts = _microbatches(with_choices(config, choices), space)
        yield from [choices | {"schedule.microbatches": n} for n in counts] or [choices]


def _microbatches(config: Config, space: SearchSpace) -> list[int]:
    """Valid numbers of microbatches to try: the given ones, or what a run derives, 1, 2 and 4 per
    pipeline rank, and microbatches of one sequence, which take the least memory."""
    batch, schedule, pp = config.batch_size // config.dp, config.schedule, config.pp
    if batch < 1 or config.batch_size % config.dp:
        return []
    counts = space.microbatches
    if counts is None:
        counts = [pp, 2 * pp, 4 * pp, batch]
        try:
            counts.append(derive_microbatches(schedule, pp, batch)[0])
        except ValueError:
            return []  # the check gives the reason
    return sorted(
        n for n in set(counts) if batch % n == 0 and microbatch_problem(schedule, pp, n) is None
    )


def _tensor_sizes(config: Config, ranks: int, machine: int) -> dict[int, str]:
    """Map each tp that divides `ranks` to why it is impossible, or ""; only 1 for a model without a
    tensor-parallel plan.

    machine: ranks per machine. Raises ConfigError if the plan in the config is wrong.
    """
    from titanlike.parallel.tp.tensor_parallel import tensor_plan

    refused = {1: ""}
    resolved = resolve_model(config)
    for tp in range(2, min(ranks, MAX_TENSOR_RANKS) + 1):
        if ranks % tp:
            continue
        with_tp = replace(config, tp=tp)
        model = build_model(resolved)
        try:
            modules = tensor_plan(with_tp, model)
        except ConfigError:
            if written_plan(config.model) is not None:
                raise
            return {1: ""}
        if machine % tp:
            why = "activations of every layer would go over the network: a machine has"
            refused[tp] = f"tp={tp}: {why} {machine} ranks"
            continue
        try:
            shard_model(model, modules, TensorRanks(tp, 0), whole_logits=False)
            refused[tp] = ""
        except ConfigError as error:
            refused[tp] = str(error.problems[0])
    return refused
