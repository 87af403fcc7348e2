"""The layouts of a model on a number of ranks: meshes, schedules, stages and microbatches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.pipeline import CsvSchedule, LoopedSchedule
from titanlike.core.config.overrides import key_of, with_choices
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import MAX_TENSOR_RANKS
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.pipeline.from_config import microbatch_problem
from titanlike.techniques.tp.plan import written_plan
from titanlike.techniques.tp.ranks import TensorRanks
from titanlike.techniques.tp.styles import shard_model

SCHEDULES = [
    *("1f1b", "interleaved1f1b", "interleavedzerobubble", "zbvzerobubble", "dualpipev"),
    *("vhalf", "vmin"),
]
_STAGES_PER_RANK = [2, 3, 4]


def candidates(
    config: Config, words: list[str], ranks: int, machine: int
) -> Iterator[tuple[list[str], Config | None]]:
    """Yield the overrides and the config of every layout of `ranks` ranks that agrees with the
    overrides `words`, which the config has already.

    Without a pipeline there is one schedule, 1f1b, whose microbatches are gradient accumulation.
    Values fixed by the overrides are kept even if invalid: a later check gives the reason. An
    impossible tp is yielded once, without a config. machine: ranks per machine. Raises ConfigError
    if the model's tensor-parallel plan in the config is wrong.
    """
    fixed = {key_of(word) for word in words}
    composed = cache(lambda name: _with_schedule(config, name, fixed))
    base = composed(None)
    tensor = {base.tp: True} if "tp" in fixed else _tensor_sizes(base, ranks, machine)
    for tp in (tp for tp, possible in tensor.items() if not possible):
        yield [*words, f"tp={tp}"], None
    sizes_of_tp = [tp for tp, possible in tensor.items() if possible]
    for pp, dp, tp in _meshes(base, fixed, ranks, sizes_of_tp):
        mesh: dict[str, Any] = {"pp": pp, "dp": dp}
        mesh = {key: size for key, size in mesh.items() if key not in fixed}
        mesh |= {"tp": tp} if tp != base.tp else {}
        names: list[str | None] = ["1f1b"] if pp == 1 else [*SCHEDULES]
        if fixed & {"schedule", "schedule.name"}:
            names = [None]
        for name in names:
            layout = replace(composed(name), pp=pp, dp=dp, tp=tp)
            chosen = mesh | ({} if name is None else {"schedule": name})
            for sizes in _schedule_sizes(layout, fixed):
                overrides = [f"{key}={value}" for key, value in (chosen | sizes).items()]
                yield [*words, *overrides], with_choices(layout, sizes)


def _with_schedule(config: Config, name: str | None, fixed: Collection[str]) -> Config:
    """The config with another schedule (None = its own), of which what is fixed stays."""
    if name is not None:
        before, config = config.schedule, with_choices(config, {"schedule": name})
        has = vars(config.schedule)
        typed = {key: key.partition("schedule.")[2] for key in fixed}
        kept = {key: getattr(before, of, None) for key, of in typed.items() if of in has}
        config = with_choices(config, kept)
    # microbatches set by an experiment's file, not by the user, are derived anew
    written = getattr(config.schedule, "microbatches", None) is not None
    if written and config.schedule.name != "csv" and "schedule.microbatches" not in fixed:
        return with_choices(config, {"schedule.microbatches": None})
    return config


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


def _schedule_sizes(config: Config, fixed: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield each combination of stages per rank and microbatches of the config's schedule."""
    stages: list[dict[str, Any]] = [{}]
    if isinstance(config.schedule, LoopedSchedule) and "schedule.stages_per_rank" not in fixed:
        stages = [{"schedule.stages_per_rank": size} for size in _STAGES_PER_RANK]
    derived = not isinstance(config.schedule, CsvSchedule) and "schedule.microbatches" not in fixed
    rows = 0 if config.batch_size % config.dp else config.batch_size // config.dp
    for choices in stages:
        schedule = with_choices(config, choices).schedule
        counts = [
            n
            for n in range(1, rows + 1 if derived else 1)
            if rows % n == 0 and microbatch_problem(schedule, config.pp, n) is None
        ]
        yield from [choices | {"schedule.microbatches": n} for n in counts] or [choices]


def _tensor_sizes(config: Config, ranks: int, machine: int) -> dict[int, bool]:
    """Map each tp that divides `ranks` to whether it is possible; only 1 for a model without a
    tensor-parallel plan.

    machine: ranks per machine. Raises ConfigError if the plan in the config is wrong.
    """
    from titanlike.techniques.tp.tensor_parallel import tensor_plan

    possible = {1: True}
    resolved = resolve_model(config)
    for tp in range(2, min(ranks, MAX_TENSOR_RANKS) + 1):
        if ranks % tp:
            continue
        model = build_model(resolved)
        try:
            modules = tensor_plan(replace(config, tp=tp), model)
        except ConfigError:
            if written_plan(config.model) is not None:
                raise
            return {1: True}
        # over several machines activations of every layer would go over the network
        possible[tp] = machine % tp == 0
        if possible[tp]:
            try:
                shard_model(model, modules, TensorRanks(tp, 0), whole_logits=False)
            except ConfigError:
                possible[tp] = False
    return possible
