"""Rules between the keys of a parsed config that need no other package (`RULES`). Other packages have
rules of the same form; `driver.checks` collects all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import gcd
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.core.config.errors import Problem, nearest, override_text
from titanlike.core.config.groups.computation import ScaledPrecision
from titanlike.core.config.groups.data import MixtureData, SyntheticData
from titanlike.core.config.groups.pipeline import AutoSchedule, CsvSchedule, CustomSchedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.groups.watching import MemoryProfile, Timeline
from titanlike.core.config.keys import value_problems
from titanlike.core.config.schema import MESH_AXES, OBJECTIVES, Config

MAX_STAGES = 256
MAX_TENSOR_RANKS = 256
MAX_BATCH = 2**20  # sequences per dp rank and step
_MAX_MESHES = 3  # meshes that an error proposes
MESH_KEYS = (*MESH_AXES, "ep", "replicate", "batch_size", "seq_len")  # keys that define the mesh


def problems(config: Config, world_size: int | None = None) -> list[Problem]:
    """Return every problem of a parsed config. world_size: processes that were launched for it."""
    if wrong := [*value_problems(config)]:  # of a config that was not parsed, but made in Python
        return wrong
    rules = MESH_RULES + STEP_RULES + (EXACT_RULES if config.exact else ()) + RULES
    return [*broken_rules(rules, config), *_not_started(config, world_size), *_ramp(config)]


# --- rules between keys ---------------------------------------------------------------------------


class Rule(NamedTuple):
    """A rule between keys: a problem of `key` where `broken(config, *facts)` is truthy.

    reason, fix: `str.format` texts with the config as `c`, the result of `broken` as {0}, and the
    facts as {1}, {2}, .... fix: overrides or a sentence; alternatives are separated by " or ".
    """

    key: str
    broken: Callable[..., Any]
    reason: str
    fix: str = ""


def broken_rules(rules: Iterable[Rule], config: Config, *facts: Any) -> Iterator[Problem]:
    """Yield the problem of each key that breaks a rule, only the first per key.

    facts: what the rules depend on besides the config.
    """
    reported = set()
    for rule in rules:
        if rule.key not in reported and (shown := rule.broken(config, *facts)):
            reported.add(rule.key)
            reason, fix = (text.format(shown, *facts, c=config) for text in (rule.reason, rule.fix))
            value = attrgetter(rule.key)(config)
            yield Problem(rule.key, getattr(value, "name", value), reason, fix)


def _objectives(config: Config) -> list[str]:
    """Return the valid values of `value`."""
    sets = [name for name, own in (config.validation.data or {}).items() if isinstance(own, dict)]
    names = [f"val_{metric}" for metric in config.metrics.own or ()]
    names = [n for name in names for n in (name, *(f"{name}/{each}" for each in sets))]
    own = [*(config.metrics.own or ()), *names]
    return [*OBJECTIVES, *(f"val_loss/{name}" for name in sets), *own, *(f"-{n}" for n in own)]


# fmt: off
RULES = (
    Rule("numerics.digest_every", lambda c: c.numerics.digest_every and c.tp > 1,
         "is computed of parameters that no tp rank has a part of",
         "numerics.digest_every=0"),
    Rule("value", lambda c: c.value is not None and c.value not in (known := _objectives(c))
         and (nearest(c.value, known) or "val_loss", ", ".join(known)),
         "is no number of the run; there are {0[1]}", "value={0[0]}"),
    Rule("value", lambda c: c.value == "val_loss" and c.validation.every == 0,
         "nothing is validated with validation.every=0", "value=loss"),
    Rule("sample.prompts", lambda c: c.sample.every and not c.sample.prompts,
         "there is nothing to continue", "sample.prompts=[def,import]"),
    Rule("sample.every", lambda c: c.sample.every and isinstance(c.data, SyntheticData),
         "random tokens have no text", "sample.every=0"),
    Rule("sample.every", lambda c: c.sample.every and c.cp > 1,
         "a cp rank has a part of each sequence, and samples are written with whole ones",
         "sample.every=0"),
    Rule("schedule.stages_per_rank", lambda c: isinstance(c.schedule, AutoSchedule)
         and (c.schedule.search, c.schedule.placement) == ("order", "v")
         and c.schedule.stages_per_rank != 2,
         "a V has two stages a rank", "schedule.stages_per_rank=2 or schedule.placement=loop"),
    Rule("data", lambda c: c.ramp and isinstance(c.data, MixtureData | Custom),
         "chooses samples by the step, and batches of ramp differ in size", "data=text or ramp=[]"),
    Rule("schedule", lambda c: c.ramp
         and isinstance(c.schedule, CsvSchedule | AutoSchedule | CustomSchedule),
         "is an order for one number of microbatches, and batches of ramp differ in size",
         "schedule=1f1b or ramp=[]"),
    Rule("on_nonfinite", lambda c: c.ramp and c.on_nonfinite == "rollback",
         "with ramp batches that are left out would be of another size", "on_nonfinite=skip"),
    Rule("on_spike", lambda c: c.ramp and c.on_spike == "rollback",
         "with ramp batches that are left out would be of another size", "on_spike=skip"),
    Rule("checkpoint.resume", lambda c: _resumes(c) and "://" not in c.checkpoint.resume
         and not Path(c.checkpoint.resume).expanduser().is_dir(),
         "no such folder", "the path of a checkpoint or run directory, auto, or never"),
    Rule("checkpoint.start_from", lambda c: _resumes(c) and c.checkpoint.start_from is not None,
         "the run resumes from checkpoint.resume={c.checkpoint.resume} already",
         "checkpoint.start_from=null or checkpoint.resume=auto"),
)

MESH_RULES = (  # for a config whose MESH_KEYS are within bounds
    Rule("replicate", lambda c: c.dp % c.replicate and _divisor(c.dp, c.replicate),
         "dp={c.dp} cannot be cut into {c.replicate} equal replicas", "replicate={0}"),
    Rule("ep", lambda c: not c.dp % c.replicate and c.fitting_ep < c.ep and _ranks_of_experts(c),
         "does not divide the ranks that share weights, {0}", "ep={c.fitting_ep}"),
    Rule("batch_size", lambda c: _rows(c) > MAX_BATCH and MAX_BATCH * c.dp,
         f"more than {MAX_BATCH} sequences for a dp rank", "batch_size={0}"),
    Rule("batch_size", lambda c: c.batch_size % c.dp and _rows(c) * c.dp,
         "does not divide among dp={c.dp}", "batch_size={0}"),
    Rule("schedule.microbatches", lambda c: _undivided(c),
         "each dp rank's batch of {c.batch_size} / {c.dp} = {0[0]} does not divide into "
         "{c.schedule.microbatches}", "schedule.microbatches={0[1]} or batch_size={0[2]}"),
)

STEP_RULES = (  # for the same configs
    Rule("profile.steps", lambda c: isinstance(c.profile, MemoryProfile)
         and not_recorded(
             c.profile.steps, c.last_step, (max(1, min(10, c.last_step - 2)), min(12, c.last_step))),
         "{0[0]}", "profile.steps={0[1]}"),
    Rule("profile.ranks", lambda c: isinstance(c.profile, MemoryProfile) and _no_rank(c),
         "there is no rank {0[0]}: the run has ranks 0 to {0[1]}", "profile.ranks={0[2]}"),
    Rule("timeline.steps", lambda c: c.timeline.steps
         and not_recorded(
             c.timeline.steps, c.last_step, replace(c, timeline=Timeline()).timeline_steps, 100),
         "{0[0]}", "timeline.steps={0[1]}"),
)
# features that may compute different bits in different layouts; for numerics=exact
_EXACT = "not with numerics=exact: "
EXACT_RULES = (
    Rule("tp", lambda c: c.tp > 1,
         _EXACT + "sums over the columns of a matrix are added rank by rank",
         "tp=1 pp={c.model_ranks} or numerics=fast"),
    Rule("cp", lambda c: c.cp > 1 and c.dp * c.cp,
         _EXACT + "a rank sums over its part of the tokens, in another order than a whole sequence",
         "cp=1 dp={0} or numerics=fast"),
    Rule("numerics.grain", lambda c: c.batch_size // c.dp % max(1, c.numerics.grain),
         "a dp rank's batch of {c.batch_size} / {c.dp} sequences is no whole number of grains",
         "numerics.grain=1"),
    Rule("batch_size", lambda c: c.batch_size * c.seq_len > 2**24,
         _EXACT + "more tokens than fp32 counts one by one", "numerics=fast"),
    Rule("ramp", lambda c: c.ramp,
         _EXACT + "batches of another size have another tree of sums", "ramp=[] or numerics=fast"),
    Rule("compile", lambda c: c.compile,
         _EXACT + "inductor may choose other kernels for other stages",
         "compile=false or numerics=fast"),
    Rule("precision", lambda c: isinstance(c.precision, ScaledPrecision),
         _EXACT + "a scale is that of what a rank has of a weight, or of tokens",
         "precision=bf16 or numerics=fast"),
    Rule("mixes_samples", lambda c: c.mixes_samples,
         _EXACT + "layouts of such a model differ", "mixes_samples=false or numerics=fast"),
)
# fmt: on


def _resumes(config: Config) -> bool:
    return config.checkpoint.resume not in ("auto", "never")


def _rows(config: Config) -> int:
    """Return the sequences per dp rank and step."""
    return -(-config.batch_size // config.dp)


def _ranks_of_experts(config: Config) -> str:
    ranks = "dp" + " / replicate" * (config.replicate > 1) + " x cp" * (config.cp > 1)
    text = f"{ranks} = {config.shards}"
    return text if config.tp == 1 else f"{text}, nor is it tp={config.tp} times a divisor of them"


def _undivided(config: Config) -> tuple[int, int, int] | None:
    """Return (sequences of a dp rank, microbatches that divide them, batch size that the given
    microbatches divide) if a dp rank's batch cannot be divided."""
    # a CSV file has its own number; a custom function may take it as an argument
    count, rows = getattr(config.schedule, "microbatches", None) or 1, _rows(config)
    if config.batch_size % config.dp or count < 2 or not rows % count:
        return None
    return rows, _divisor(rows, count), -(-rows // count) * count * config.dp


def not_recorded(
    steps: list[int], last: int, proposed: tuple[int, int], longest: int = 2**40
) -> tuple[str, str] | None:
    """Return (reason, steps that are possible) if a first and a last step are not within a run of
    `last` steps."""
    if len(steps) != 2:
        reason = "must be two numbers: the first and the last step that are recorded"
    elif steps[0] < 1:
        reason = "the first step of a run is 1"
    elif steps[1] < steps[0]:
        reason = "the last step is before the first"
        if steps[1] >= 1 and steps[0] <= last:
            proposed = steps[1], steps[0]
    elif steps[1] > last:
        reason = f"the run ends with step {last}"
    elif steps[1] - steps[0] >= longest:
        reason = f"has more than {longest} steps"
    else:
        return None
    return reason, override_text(proposed)


def _no_rank(config: Config) -> tuple[int, int, str] | None:
    """Return (a rank of profile.ranks that does not exist, the largest rank, the valid ones)."""
    profile: Any = config.profile
    if wrong := [rank for rank in profile.ranks if not 0 <= rank < config.world_size]:
        right = sorted({*profile.ranks} - {*wrong}) or [0]
        return wrong[0], config.world_size - 1, override_text(right)
    return None


# --- the mesh and the ranks that were started -----------------------------------------------------


def _divides(config: Config) -> bool:
    """Return whether mesh and batch fit together."""
    return not any(rule.broken(config) for rule in MESH_RULES)


def _not_started(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Yield a problem if the number of launched ranks is not the mesh's."""
    if world_size is None or config.world_size == world_size:
        return
    product = f"{' x '.join(config.axes)} = {' x '.join(map(str, config.axes.values()))}"
    reason = f"{product} = {config.world_size} processes, but {world_size} were started"
    meshes = ", or ".join(_meshes(config, world_size))
    count = f"start with --nproc-per-node {config.world_size} (times nodes)"
    yield Problem("dp", config.dp, reason, f"{meshes}; or {count}" if meshes else count)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`."""
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _meshes(config: Config, world_size: int) -> list[str]:
    """Return overrides of a few meshes of `world_size` ranks, the most similar to `config`'s first.

    tp is only reduced, to a divisor: that divides whatever the config's tp divides.
    """
    meshes = []
    smaller = [n for n in range(1, config.tp + 1) if config.tp % n == 0]
    for pp, tp in product(range(1, min(world_size, MAX_STAGES) + 1), smaller):
        dp = world_size // (pp * config.cp * tp)
        mesh = replace(config, pp=pp, dp=dp, tp=tp, replicate=gcd(config.replicate, dp))
        if mesh.world_size == world_size and _divides(mesh):
            change = math.log(config.tp / tp), abs(math.log(pp / config.pp))
            meshes.append((*change, mesh_words(config, mesh)))
    return [words for _, _, words in sorted(meshes)[:_MAX_MESHES]]


def mesh_words(config: Config, mesh: Config) -> str:
    """Return a mesh as overrides; other axes than pp and dp only if they differ from `config`'s."""
    others = [k for k in (*MESH_AXES[2:], "replicate") if getattr(mesh, k) != getattr(config, k)]
    return " ".join(f"{key}={getattr(mesh, key)}" for key in ("pp", "dp", *others))


def placement_warning(config: Config, local_ranks: int) -> str:
    """Warn of tp groups that span machines of `local_ranks` ranks; name a mesh whose groups do not."""
    tp = config.tp
    if tp == 1 or local_ranks % tp == 0 or config.world_size <= local_ranks:
        return ""
    ranks = f"{local_ranks} rank{'' if local_ranks == 1 else 's'}"
    text = f"tp={tp} on machines of {ranks}: the activations of every layer go over the network"
    fits = gcd(tp, local_ranks)
    for more_dp, more_pp in ((tp // fits, 1), (1, tp // fits)):
        mesh = replace(config, pp=config.pp * more_pp, dp=config.dp * more_dp, tp=fits)
        if _divides(mesh):
            return f"{text}; {mesh_words(config, mesh)} keeps them within a machine"
    return f"{text}; a tp that divides {local_ranks} keeps them within a machine"


def _ramp(config: Config) -> Iterator[Problem]:
    """Yield problems of ramp stages that are out of order, or whose batches do not divide."""
    before = 0
    for at, stage in enumerate(config.ramp):
        key, value = f"ramp[{at}]", {k: v for k, v in vars(stage).items() if v is not None}
        size, length = stage.batch_size or config.batch_size, stage.seq_len or config.seq_len
        reason = fix = ""
        if stage.tokens <= before:
            reason = f"ends with {stage.tokens} tokens, and the stage before with {before}"
            fix = "stages in their order"
        elif size > config.batch_size or length > config.seq_len:
            reason = f"is larger than batch_size={config.batch_size} seq_len={config.seq_len}"
            fix = "stages of smaller batches; the run ends with batch_size and seq_len"
        elif config.seq_len % length:
            reason = f"seq_len={config.seq_len} is not cut into sequences of {length}"
            fix = f"seq_len: {_divisor(config.seq_len, length)}"
        elif size * length % (config.seq_len * config.dp):
            each = config.seq_len // length * config.dp
            reason = f"a batch is no {config.dp} times as many whole samples of {config.seq_len}"
            fix = f"batch_size: {-(-size // each) * each}"
        if reason:
            yield Problem(key, value, reason, fix)
        before = stage.tokens
