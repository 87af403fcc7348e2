"""The layouts of a model on so many ranks: meshes, schedules, stages and microbatches."""

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
from titanlike.parallel.tp.styles import TensorRanks, shard_model
from titanlike.pipeline.from_config import derive_microbatches, microbatch_problem
from titanlike.pipeline.schedules import SCHEDULES

Compose = Callable[[list[str]], Config]  # overrides -> config; raises ConfigError


@dataclass(frozen=True)
class SearchSpace:
    """Which layouts are listed. None = derived."""

    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    microbatches: list[int] | None = None  # None: see `_microbatches`
    stages_per_rank: list[int] = field(default_factory=lambda: [2])


@dataclass(frozen=True)
class Candidate:
    """A layout: a job's overrides, and the config that they give."""

    overrides: list[str]
    config: Config
    refused: str = ""  # why it cannot be


def candidates(
    combination: list[str],
    compose: Compose,
    ranks: int,
    machine: int,
    space: SearchSpace,
) -> Iterator[Candidate]:
    """Every layout of so many ranks that agrees with the overrides in `combination`.

    Without a pipeline there is one schedule, 1f1b, whose microbatches are gradient accumulation.
    What the command line fixes is kept, even where it is invalid: a check gives the reason. A tp
    that cannot be is one candidate. machine: ranks of one. Raises ConfigError where the overrides
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
    """(pp, dp, tp) with pp * dp * cp * tp = ranks, as far as they are not fixed; tensor: tp to
    try."""
    ranks //= base.cp
    for tp in tensor:
        left = max(1, ranks // max(1, tp))
        sizes = [pp for pp in range(1, left + 1) if left % pp == 0]
        if "pp" in fixed:
            sizes = [base.pp]
        elif "dp" in fixed:
            sizes = [max(1, left // max(1, base.dp))]
        for pp in sizes:
            dp = base.dp if "dp" in fixed else max(1, left // max(1, pp))
            if tp == base.tp or pp * dp * tp == ranks:
                yield pp, dp, tp


def _schedule_sizes(
    config: Config, fixed: Collection[str], space: SearchSpace
) -> Iterator[dict[str, Any]]:
    """Each number of stages and microbatches of the config's schedule."""
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
    """Valid numbers of microbatches to try: those given, or what a run derives, 1, 2 and 4 per
    pipeline rank, and microbatches of one sequence, which take the least memory."""
    batch, schedule, pp = config.batch_size // config.dp, config.schedule, config.pp
    if batch < 1 or config.batch_size % config.dp:
        return []
    wanted = space.microbatches
    if wanted is None:
        wanted = [pp, 2 * pp, 4 * pp, batch]
        try:
            wanted.append(derive_microbatches(schedule, pp, batch)[0])
        except ValueError:
            return []  # the check gives the reason
    return sorted(
        n for n in set(wanted) if batch % n == 0 and microbatch_problem(schedule, pp, n) is None
    )


def _tensor_sizes(config: Config, ranks: int, machine: int) -> dict[int, str]:
    """Each tp that divides `ranks` -> why it cannot be, or ""; 1 alone for a model without a plan.

    machine: ranks of one. Raises ConfigError where the plan in the config is wrong.
    """
    from titanlike.parallel.tp.tensor_parallel import tensor_plan

    refused = {1: ""}
    resolved = resolve_model(config)
    for tp in range(2, min(ranks, MAX_TENSOR_RANKS) + 1):
        if ranks % tp:
            continue
        divided = replace(config, tp=tp)
        model = build_model(resolved)
        try:
            modules = tensor_plan(divided, model)
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
