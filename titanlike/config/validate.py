"""Rules for a parsed config: bounds of numbers, which are declared with the keys (`keys.key`), and
rules between keys. The checks of other rooms: `driver.checks`."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd
from operator import attrgetter
from pathlib import Path
from typing import Any

from titanlike.config.errors import Problem, override_text
from titanlike.config.keys import BOUNDS, MAX_RANKS, MAX_VOCAB
from titanlike.config.schema import (
    MESH_AXES,
    TIMELINE,
    AutoSchedule,
    Config,
    CsvSchedule,
    Custom,
    MemoryProfile,
    MixtureData,
    OwnSchedule,
    RunHardware,
    SyntheticData,
    Timeline,
    Wandb,
)

MAX_STAGES = 256
MAX_TENSOR_RANKS = 256
MAX_BATCH = 2**20  # sequences of one dp rank a step
_MOST_ITEMS = 10_000  # of a list
_MOST_OF_ARGUMENT = {  # of a model's constructor, and of a user's own data
    **dict.fromkeys(("num_hidden_layers", "n_layer", "layers"), 2_000),
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), 2**20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2**16),
    **{"intermediate_size": 2**24, "max_seq_len": 2**27, "n_positions": 2**27},
    "vocab_size": MAX_VOCAB,
}
_LONGEST_FILE = 200  # bytes of a name: the 255 of file systems, without what temporary names add
_LONGEST_NAME = 128  # characters, in W&B
_MAX_MESHES = 3  # that an error names
MESH_KEYS = (*MESH_AXES, "ep", "replicate", "batch_size", "seq_len")  # without which there is none


def problems(config: Config, world_size: int | None = None) -> list[Problem]:
    """Every problem of a parsed config; world_size: processes that were started for it."""
    if impossible := out_of_bounds(config):
        return impossible  # alone: other checks compute with these numbers
    numbers = [problem for problem, _ in _number_problems(config)]
    if not {*MESH_KEYS} & {problem.key for problem in numbers}:
        numbers += [*_mesh(config, world_size), *_batch(config), *_ramp(config)]
        numbers += _steps(config)
    return [*numbers, *_rules(config), *_names(config), *_sweep(config)]


# --- numbers, by themselves -----------------------------------------------------------------------

_NONE = dataclasses.MISSING  # as a proposal
_SIDES = {  # name of a bound -> how it is said, what holds inside of it
    **{"ge": ("at least", operator.ge), "gt": ("above", operator.gt)},
    **{"le": ("at most", operator.le), "lt": ("below", operator.lt)},
}


def out_of_bounds(config: Config) -> list[Problem]:
    """Every number that no run can have: further checks would overflow, or take very long."""
    return [problem for problem, fatal in _number_problems(config) if fatal]


def _number_problems(owner: Any, prefix: str = "") -> Iterator[tuple[Problem, bool]]:
    """What is wrong with each number, and whether nothing can be computed with it."""
    for key, value, bounds, default in _numbers(owner, prefix):
        if isinstance(value, list):
            yield Problem(key, f"[{len(value)} items]", f"has more than {_MOST_ITEMS}"), True
            continue
        finite, is_bytes = value - value == 0, bounds["le"] == BOUNDS["Bytes"]["le"]
        sides = (side for side in _SIDES if side in bounds and finite)
        side = next((side for side in sides if not _SIDES[side][1](value, bounds[side])), "")
        if side:
            limit = f"{bounds[side] >> 20}MiB" if is_bytes else bounds[side]
            reason = f"must be {_SIDES[side][0]} {limit}"
        elif finite and value >= -bounds["le"]:
            continue
        else:
            reason = "is too far below 0" if finite else "must be finite"
        fix = default
        if isinstance(value, int) and side in ("ge", "le") and "[" not in key:
            fix = bounds[side] if side == "le" else bounds.get("example", bounds["ge"])
        if is_bytes and 0 < value < 1024:
            fix = f"{value}GiB"
        fix = "" if fix in ([], _NONE) else f"{key.partition('[')[0]}={override_text(fix)}"
        yield Problem(key, value, reason, fix), side in ("", "le")


def _numbers(owner: Any, key: str) -> Iterator[tuple[str, Any, dict[str, Any], Any]]:
    """(key, value, bounds, proposal) of each number in a config, and of each list that is too
    long."""

    def inside(value: Any, key: str, bounds: dict[str, Any], default: Any) -> Iterator[Any]:
        if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
            for i, item in enumerate(value):
                yield from inside(item, f"{key}[{i}]", bounds, default)
        elif isinstance(value, dict):
            for name, item in value.items():
                most = _MOST_OF_ARGUMENT.get(name, BOUNDS["int"]["le"])
                yield from inside(item, f"{key}.{name}", {"le": most}, _NONE)
        elif dataclasses.is_dataclass(value):
            yield from _numbers(value, key)
        elif isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool):
            yield key, value, bounds, default

    for field in dataclasses.fields(owner):
        arguments = isinstance(owner, Custom) and field.name == "args"
        name = key if arguments else f"{key}.{field.name}".lstrip(".")
        kind = next((kind for kind in BOUNDS if kind in str(field.type)), "float")
        bounds = BOUNDS[kind] | field.metadata.get("bounds", {})
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is None or default is _NONE:  # null, or required
            default = bounds.get("example", default)
        yield from inside(getattr(owner, field.name), name, bounds, default)


# --- rules between keys ---------------------------------------------------------------------------


def _problem(config: Config, key: str, reason: str, fix: str) -> Problem:
    return Problem(key, attrgetter(key)(config), reason, fix)


def _rules(config: Config) -> Iterator[Problem]:
    broken, sample = partial(_problem, config), config.sample
    if len(getattr(config.optimizer, "betas", [0, 0])) != 2:
        yield broken("optimizer.betas", "must be two numbers", "optimizer.betas=[0.9,0.95]")
    for pattern, group in (getattr(config.optimizer, "groups", None) or {}).items():
        if len(betas := group.betas or [0, 0]) != 2:
            key = f"optimizer.groups.{pattern}.betas"
            fix = f"'optimizer.groups={{{pattern}:{{betas:[0.9,0.95]}}}}'"
            yield Problem(key, betas, "must be two numbers", fix)
    if config.value == "val_loss" and config.validation.every == 0:
        yield broken("value", "nothing is validated with validation.every=0", "value=loss")
    if sample.every and not sample.prompts:
        fix = "sample.prompts=[def,import]"
        yield broken("sample.prompts", "there is nothing to continue", fix)
    if sample.every and isinstance(config.data, SyntheticData):
        yield broken("sample.every", "random tokens have no text", "sample.every=0")
    if sample.every and config.cp > 1:
        reason = "a cp rank has a part of each sequence, and samples are written with whole ones"
        yield broken("sample.every", reason, "sample.every=0")
    run = config.hardware.path if isinstance(config.hardware, RunHardware) else None
    if run is not None and not (Path(run) / TIMELINE).is_file():
        reason = f"cannot be read: there is no {TIMELINE} in it, which timeline=true writes"
        yield broken("hardware.path", reason, "hardware=measure")


def _steps(config: Config) -> Iterator[Problem]:
    """Steps and ranks that are recorded, and that a run does not have."""
    last, profile = config.last_step, config.profile
    if isinstance(profile, MemoryProfile):
        first = f"[{max(1, min(10, last - 2))},{min(12, last)}]"
        yield from recorded_steps("profile.steps", profile.steps, last, first)
        ranks = MAX_RANKS if config.launch.elastic else config.world_size
        if wrong := [rank for rank in profile.ranks if not 0 <= rank < ranks]:
            reason = f"there is no rank {wrong[0]}: the run has ranks 0 to {ranks - 1}"
            fix = override_text(sorted({*profile.ranks} - {*wrong}) or [0])
            yield Problem("profile.ranks", profile.ranks, reason, f"profile.ranks={fix}")
    if config.timeline.steps:
        window = override_text(replace(config, timeline=Timeline()).timeline_steps)
        yield from recorded_steps("timeline.steps", config.timeline.steps, last, window, 100)


def recorded_steps(
    key: str, steps: list[int], last: int, proposed: str, longest: int = 2**40
) -> Iterator[Problem]:
    """Whether a first and a last step are those of a run of `last` steps."""
    if len(steps) != 2:
        reason = "must be two numbers: the first and the last step that are recorded"
    elif steps[0] < 1:
        reason = "the first step of a run is 1"
    elif steps[1] < steps[0]:
        reason = "the last step is before the first"
        if steps[1] >= 1 and steps[0] <= last:
            proposed = override_text([steps[1], steps[0]])
    elif steps[1] > last:
        reason = f"the run ends with step {last}"
    elif steps[1] - steps[0] >= longest:
        reason = f"has more than {longest} steps"
    else:
        return
    yield Problem(key, steps, reason, f"{key}={proposed}")


def sweep_problems(config: Config) -> list[Problem]:
    """Problems of how a sweep is run, whatever its jobs are."""
    return [*(p for p, _ in _number_problems(config.sweep, "sweep")), *_sweep(config)]


def _sweep(config: Config) -> Iterator[Problem]:
    broken, sweep = partial(_problem, config), config.sweep
    if sweep.wait is not None and sweep.submit is None:
        reason = "there is nothing to wait for without sweep.submit"
        yield broken("sweep.wait", reason, "sweep.wait=null")
    try:
        reason = "" if sweep.submit is None or shlex.split(sweep.submit) else "is empty"
    except ValueError as error:
        reason = f"is not a shell command: {error}"
    if reason:
        yield broken("sweep.submit", reason, "sweep.submit='sbatch tools/slurm/train.sbatch'")
    if sweep.share is not None and parse_share(sweep.share) is None:
        reason = "must be i/n: job i and every n-th after it, i from 0 to n - 1"
        yield broken("sweep.share", reason, "sweep.share=0/4")


def parse_share(share: str) -> tuple[int, int] | None:
    """sweep.share as (i, n); None if it is not of the form i/n."""
    match = re.fullmatch(r"(\d+)/(\d+)", share)
    return (int(match[1]), int(match[2])) if match and int(match[1]) < int(match[2]) else None


def _names(config: Config) -> Iterator[Problem]:
    """Names that no file system, no W&B and no checkpoint has.

    And paths with a line break or another control character, which no printed command could name.
    """
    for key, path in (("run_dir", config.run_dir), ("checkpoint.folder", config.checkpoint.folder)):
        longest = max(len(name.encode()) for name in (path or "").split("/"))
        if longest > _LONGEST_FILE:
            reason = f"a name in it has {longest} bytes, of which {_LONGEST_FILE} can be used"
            yield Problem(key, path, reason, f"{key}=outputs/NAME")
        elif path is not None and re.search(r"[\x00-\x1f\x7f]", path):
            reason = "a path with a line break or another control character cannot be printed"
            yield Problem(key, repr(path)[1:-1], reason, f"{key}=outputs/NAME")
    if isinstance(logger := config.logger, Wandb):  # it would refuse them after the start
        for name in ("project", "entity", "run_name", "group"):
            key, value = f"logger.{name}", getattr(logger, name)
            if value is not None and not 1 <= len(value) <= _LONGEST_NAME:
                reason = f"must have 1 to {_LONGEST_NAME} characters"
                yield Problem(key, value, reason, f"{key}=NAME")
            wrong = sorted({*(value or "")} & {*"/\\#?%:"})
            if wrong and name in ("project", "entity"):
                reason = f"cannot have {' '.join(wrong)} in it"
                yield Problem(key, value, reason, f"{key}=NAME")
        for tag in logger.tags:
            if not 1 <= len(tag) <= 64:
                reason = "a tag has 1 to 64 characters"
                yield Problem("logger.tags", tag, reason, "logger.tags=[a,b]")
    resume, start_from = config.checkpoint.resume, config.checkpoint.start_from
    is_path = resume not in ("auto", "never")
    if is_path and "://" not in resume and not Path(resume).expanduser().is_dir():
        fix = "the path of a checkpoint or run directory, auto, or never"
        yield Problem("checkpoint.resume", resume, "no such folder", fix)
    if is_path and start_from is not None:
        reason = f"the run resumes from checkpoint.resume={resume} already"
        fix = "checkpoint.start_from=null or checkpoint.resume=auto"
        yield Problem("checkpoint.start_from", start_from, reason, fix)
    for rule in config.checkpoint.rename:
        if ":" not in rule:
            fix = "checkpoint.rename=[old.:new.]"
            yield Problem("checkpoint.rename", rule, "is not old:new", fix)


# --- mesh and batch -------------------------------------------------------------------------------


def _mesh(config: Config, world_size: int | None) -> Iterator[Problem]:
    dp, replicate, shards = config.dp, config.replicate, config.shards
    if dp % replicate:
        reason = f"dp={dp} cannot be cut into {replicate} equal replicas"
        fix = f"replicate={_divisor(dp, replicate)}"
        yield Problem("replicate", replicate, reason, fix)
    elif shards % config.ep:
        ranks = "dp" + " / replicate" * (replicate > 1) + " x cp" * (config.cp > 1)
        reason = f"does not divide the ranks that share weights, {ranks} = {shards}"
        yield Problem("ep", config.ep, reason, f"ep={_divisor(shards, config.ep)}")
    if world_size is not None and config.world_size != world_size:
        product = f"{' x '.join(config.axes)} = {' x '.join(map(str, config.axes.values()))}"
        reason = f"{product} = {config.world_size} processes, but {world_size} were started"
        meshes = ", or ".join(_meshes(config, world_size))
        count = f"start with --nproc-per-node {config.world_size} (times nodes)"
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size % config.model_ranks == 0:
            count += "; or with launch.elastic=true, so that dp follows the number of ranks"
        yield Problem("dp", dp, reason, f"{meshes}; or {count}" if meshes else count)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`."""
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _meshes(config: Config, world_size: int) -> list[str]:
    """Overrides of a few meshes of `world_size` ranks, the ones most similar to `config`'s first.

    tp only becomes less, by a divisor: that divides all that the config's divides.
    """
    meshes = []
    smaller = [n for n in range(1, config.tp + 1) if config.tp % n == 0]
    for pp, tp in product(range(1, min(world_size, MAX_STAGES) + 1), smaller):
        dp = world_size // (pp * config.cp * tp)
        mesh = replace(config, pp=pp, dp=dp, tp=tp, replicate=gcd(config.replicate, dp))
        if mesh.world_size == world_size and not [*_mesh(mesh, None), *_batch(mesh)]:
            change = math.log(config.tp / tp), abs(math.log(pp / config.pp))
            meshes.append((*change, mesh_words(config, mesh)))
    return [words for _, _, words in sorted(meshes)[:_MAX_MESHES]]


def mesh_words(config: Config, mesh: Config) -> str:
    """A config's mesh as overrides; what is the same as in `config` only of pp and dp."""
    others = [k for k in (*MESH_AXES[2:], "replicate") if getattr(mesh, k) != getattr(config, k)]
    return " ".join(f"{key}={getattr(mesh, key)}" for key in ("pp", "dp", *others))


def placement_warning(config: Config, local_ranks: int) -> str:
    """Warn of tp groups that span machines of so many ranks; names the mesh whose groups would
    not."""
    tp = config.tp
    if tp == 1 or local_ranks % tp == 0 or config.world_size <= local_ranks:
        return ""
    ranks = f"{local_ranks} rank{'' if local_ranks == 1 else 's'}"
    text = f"tp={tp} on machines of {ranks}: the activations of every layer go over the network"
    fits = gcd(tp, local_ranks)
    for more_dp, more_pp in ((tp // fits, 1), (1, tp // fits)):
        mesh = replace(config, pp=config.pp * more_pp, dp=config.dp * more_dp, tp=fits)
        if not [*_mesh(mesh, None), *_batch(mesh)]:
            return f"{text}; {mesh_words(config, mesh)} keeps them within a machine"
    return f"{text}; a tp that divides {local_ranks} keeps them within a machine"


def _ramp(config: Config) -> Iterator[Problem]:
    """Stages that do not follow each other, or whose batches do not divide."""
    if not config.ramp:
        return
    refused = {
        f"data={config.data.name} chooses samples by the step": ("data=text", MixtureData | Custom),
        f"schedule={config.schedule.name} is an order for one number of microbatches": (
            "schedule=1f1b",
            CsvSchedule | AutoSchedule | OwnSchedule,
        ),
    }
    for reason, (fix, kind) in refused.items():
        if isinstance(config.data, kind) or isinstance(config.schedule, kind):
            yield Problem("ramp", "", reason, f"{fix}, or ramp=[]")
    for key in ("on_nonfinite", "on_spike"):
        if getattr(config, key) == "rollback":
            reason = "batches that are left out would be of another size"
            yield Problem("ramp", "", f"{key}=rollback: {reason}", f"{key}=skip")
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


def _batch(config: Config) -> Iterator[Problem]:
    size, dp = config.batch_size, config.dp
    each = -(-size // dp)
    # a CSV has its own, a custom function may take them as an argument
    count = getattr(config.schedule, "microbatches", None) or 1
    if each > MAX_BATCH:
        reason = f"more than {MAX_BATCH} sequences for a dp rank"
        yield Problem("batch_size", size, reason, f"batch_size={MAX_BATCH * dp}")
    elif size % dp:
        reason = f"does not divide among dp={dp}"
        yield Problem("batch_size", size, reason, f"batch_size={each * dp}")
    elif count > 1 and each % count:
        batch = f"{size} / {dp} = {each}"
        reason = f"each dp rank's batch of {batch} does not divide into {count}"
        more = -(-each // count) * count * dp
        fix = f"schedule.microbatches={_divisor(each, count)} or batch_size={more}"
        yield Problem("schedule.microbatches", count, reason, fix)
