"""Rules between keys, for values of the right type. The checks of other rooms: `job.check`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd, inf, log
from operator import attrgetter
from pathlib import Path
from typing import Any

from titanlike.config.errors import Problem
from titanlike.config.hardware import hardware_problems
from titanlike.config.parse import to_plain
from titanlike.config.profile import profile_problems, timeline_problems
from titanlike.config.schema import (
    AdamW,
    ChunkedCrossEntropy,
    Config,
    DecayLr,
    Muon,
    OwnOptimizer,
    Sgd,
    SyntheticData,
    Wandb,
    WsdLr,
)

MAX_STAGES = 256
MAX_TENSOR_RANKS = 256
MAX_CONTEXT_RANKS = 1024
MAX_RANKS = 1_000_000
MAX_BATCH = 2**20  # sequences of one dp rank a step
MAX_NUMBER = 2**40  # of any count
MAX_SEQ_LEN = 2**27
MAX_VOCAB = 2**31 - 1
_MOST_ITEMS = 10_000  # of a list
MAX_LAYERS = 2_000  # of a model: more take minutes to be checked, and none is as deep
MAX_TIMEOUT = 1e6  # seconds: a system's waits count milliseconds in 32 bits
_WAITS = ("launch.", "checkpoint.timeout", "logger.timeout")
_BOUNDS = {  # of keys, and of a model's keys by these names
    **{"seq_len": MAX_SEQ_LEN, "data.vocab_size": MAX_VOCAB, "model.vocab_size": MAX_VOCAB},
    **{"model.layers": MAX_LAYERS, "model.dim": 2**20, "model.ffn_dim": 2**24},
    **{"model.heads": 2**16, "model.kv_heads": 2**16, "model.max_seq_len": MAX_SEQ_LEN},
    **{"data.workers": 4096, "launch.max_restarts": 1_000_000, "sweep.parallel": 100_000},
    **{"schedule.microbatches": 100_000, "spike_window": 1_000_000},
    **dict.fromkeys(("activation_checkpoint.memory", "schedule.memory_bytes"), 2**60),
    **{"hardware.memory": 2**60},
    **dict.fromkeys([f"hardware.{kind}_flops" for kind in ("bf16", "fp8", "tf32", "fp32")], 1e18),
    **{f"hardware.{link}_bandwidth": 1e15 for link in ("memory", "node", "network")},
    **{"max_time": 1e9, "sweep.wait": 1e9, "seed": 2**63 - 1},
}
_LONGEST_FILE = 200  # bytes of a name: the 255 of file systems, without what temporary names add
_LONGEST_NAME = 128  # characters, in W&B
_MAX_MESHES = 3  # that an error names
_LEAST = {
    **dict.fromkeys(("validation.every", "checkpoint.every", "checkpoint.keep"), 0),
    **dict.fromkeys(("checkpoint.keep_every", "checkpoint.keep_best"), 0),
    **dict.fromkeys(("launch.max_restarts", "launch.step_timeout", "lr.warmup", "gc_every"), 0),
    **{"launch.straggler": 0, "validation.batches": 1, "verify.steps": 1, "spike_window": 2},
    **{"activation_checkpoint.every": 1, "precision.min_features": 1},
    **{
        "evaluate.batches": 0,
        "sample.every": 0,
        "sample.tokens": 1,
        "sample.top_k": 0,
        "sample.temperature": 0,
    },
}
_ABOVE_ZERO = {  # and finite; key -> an example
    **{"launch.timeout": "600", "launch.heartbeat": "10", "checkpoint.timeout": "1800"},
    **{"spike_zscore": "6", "max_time": "11h30m", "max_tokens": "1000000"},
    **{"activation_checkpoint.memory": "80GiB", "schedule.memory_bytes": "40GiB"},
    **{"logger.timeout": "30"},
}


def problems(config: Config, world_size: int | None = None) -> list[Problem]:
    """Every problem of a parsed config; world_size: processes that were started for it."""
    if found := out_of_bounds(config):
        return found  # alone: other checks compute with these numbers
    found = [*_mesh(config, world_size), *_positive(config), *_ranges(config), *_batch(config)]
    found += [*_paths(config), *_resume(config), *_wandb(config)]
    ranks = MAX_RANKS if config.launch.elastic else config.world_size
    found += profile_problems(config.profile, config.last_step, ranks)
    found += timeline_problems(config.timeline, config.last_step)
    found += hardware_problems(config.hardware)
    if config.value == "val_loss" and config.validation.every == 0:
        reason = "nothing is validated with validation.every=0"
        found.append(Problem("value", "val_loss", reason, "value=loss"))
    return [*found, *sweep_problems(config)]


def out_of_bounds(config: Config) -> list[Problem]:
    """Every number that no run can have: further checks would overflow, or take very long."""
    return [
        found if found.fix else replace(found, fix=_default(config, found.key))
        for found in _bounds(to_plain(config))
    ]


def _default(config: Config, key: str) -> str:
    """key=value of the schema's default; "" where it has none."""
    *groups, name = key.split(".")
    owner: Any = config
    for group in groups:
        owner = getattr(owner, group, None)
    default = getattr(type(owner), name, None)
    return f"{key}={default}" if isinstance(default, (int, float)) else ""


def _bounds(plain: Any, key: str = "") -> Iterator[Problem]:
    if isinstance(plain, list):
        if len(plain) > _MOST_ITEMS:
            yield Problem(key, f"[{len(plain)} items]", f"has more than {_MOST_ITEMS}, the maximum")
            return
        plain = {f"[{i}]": item for i, item in enumerate(plain)}
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield from _bounds(value, f"{key}.{name}".lstrip(".").replace(".[", "["))
    elif isinstance(plain, (int, float)) and not isinstance(plain, bool):
        timeout = key.startswith(_WAITS) and "restarts" not in key
        most = _BOUNDS.get(key, MAX_TIMEOUT if timeout else MAX_NUMBER)
        if plain != plain or plain in (inf, -inf):
            yield Problem(key, plain, "must be finite")
        elif abs(plain) > most:
            reason = f"is more than {most:g}, the maximum" if plain > 0 else "is too far below 0"
            yield Problem(key, plain, reason, f"{key}={round(most)}" if plain > 0 else "")


def sweep_problems(config: Config) -> Iterator[Problem]:
    """Problems of how a sweep is run, whatever its jobs are."""
    sweep = config.sweep
    if sweep.parallel < 0:
        yield Problem("sweep.parallel", sweep.parallel, "must be at least 0", "sweep.parallel=0")
    if sweep.wait is not None and not 0 < sweep.wait < inf:
        yield Problem("sweep.wait", sweep.wait, "must be above 0, finite", "sweep.wait=12h")
    if sweep.wait is not None and sweep.submit is None:
        reason = "there is nothing to wait for without sweep.submit"
        yield Problem("sweep.wait", sweep.wait, reason, "sweep.wait=null")
    if sweep.submit is not None:
        try:
            reason = "" if shlex.split(sweep.submit) else "is empty"
        except ValueError as error:
            reason = f"is not a shell command: {error}"
        if reason:
            fix = "sweep.submit='sbatch tools/slurm/train.sbatch'"
            yield Problem("sweep.submit", sweep.submit, reason, fix)
    if sweep.share is not None and parse_share(sweep.share) is None:
        reason = "must be i/n: job i and every n-th after it, i from 0 to n - 1"
        yield Problem("sweep.share", sweep.share, reason, "sweep.share=0/4")


def parse_share(share: str) -> tuple[int, int] | None:
    """sweep.share as (i, n); None if it is not of the form i/n."""
    found = re.fullmatch(r"(\d+)/(\d+)", share)
    return (int(found[1]), int(found[2])) if found and int(found[1]) < int(found[2]) else None


def _mesh(config: Config, world_size: int | None) -> Iterator[Problem]:
    pp, dp, cp, tp, replicate = config.pp, config.dp, config.cp, config.tp, config.replicate
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": config.ep, "replicate": replicate}
    for key, value in sizes.items():
        if value < 1:
            yield Problem(key, value, "must be at least 1", f"{key}=1")
    bounds = ("pp", pp, MAX_STAGES), ("dp", dp, MAX_RANKS), ("cp", cp, MAX_CONTEXT_RANKS)
    bounds += (("tp", tp, MAX_TENSOR_RANKS),)
    for key, value, most in bounds:
        if value > most:
            yield Problem(key, value, f"is more than {most}, the maximum", f"{key}={most}")
    if replicate >= 1 and 1 <= dp <= MAX_RANKS and dp % replicate:
        fits = max(n for n in range(1, dp + 1) if dp % n == 0 and n <= replicate)
        reason = f"dp={dp} cannot be cut into {replicate} equal replicas"
        yield Problem("replicate", replicate, reason, f"replicate={fits}")
    least = min(pp, dp, cp, tp, config.ep, replicate)
    if least >= 1 and dp <= MAX_RANKS and dp % replicate == 0 and config.shards % config.ep:
        fits = max(
            n for n in range(1, config.shards + 1) if config.shards % n == 0 and n <= config.ep
        )
        ranks = "dp" + " / replicate" * (replicate > 1) + " x cp" * (cp > 1)
        reason = f"does not divide the ranks that share weights, {ranks} = {config.shards}"
        yield Problem("ep", config.ep, reason, f"ep={fits}")
    if world_size is not None and min(pp, dp, cp, tp) >= 1 and config.world_size != world_size:
        more = {name: size for name, size in (("cp", cp), ("tp", tp)) if size > 1}
        names, sizes = ["pp", "dp", *more], map(str, [pp, dp, *more.values()])
        reason = f"{' x '.join(names)} = {' x '.join(sizes)} = {config.world_size} processes, but {world_size} were started"
        meshes = ", or ".join(_meshes(config, world_size))
        count = f"start with --nproc-per-node {config.world_size} (times nodes)"
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size % config.model_ranks == 0:
            count += "; or with launch.elastic=true, so that dp follows the number of ranks"
        yield Problem("dp", dp, reason, f"{meshes}; or {count}" if meshes else count)


def _meshes(config: Config, world_size: int) -> list[str]:
    """Overrides of a few meshes of `world_size` ranks, the ones most similar to `config`'s first.

    tp only becomes less, by a divisor: that divides all that the config's divides.
    """
    found = []
    smaller = [n for n in range(1, min(config.tp, MAX_TENSOR_RANKS) + 1) if config.tp % n == 0]
    for pp, tp in product(range(1, min(world_size, MAX_STAGES) + 1), smaller):
        dp = world_size // (pp * config.cp * tp)
        if pp * dp * config.cp * tp != world_size:
            continue
        replicate = gcd(config.replicate, dp) if config.replicate >= 1 else 1
        mesh = replace(config, pp=pp, dp=dp, tp=tp, replicate=replicate)
        if not [*_mesh(mesh, world_size), *_batch(mesh)]:
            found.append((log(config.tp / tp), abs(log(pp / config.pp)), mesh_words(config, mesh)))
    return [words for _, _, words in sorted(found)[:_MAX_MESHES]]


def mesh_words(config: Config, mesh: Config) -> str:
    """A config's mesh as overrides; what is the same as in `config` only of pp and dp."""
    words = f"pp={mesh.pp} dp={mesh.dp}"
    for key in ("cp", "tp", "replicate"):
        if getattr(mesh, key) != getattr(config, key):
            words += f" {key}={getattr(mesh, key)}"
    return words


def placement_warning(config: Config, local_ranks: int) -> str:
    """Of tp groups that span machines of so many ranks, and the mesh whose groups would not."""
    tp = config.tp
    if tp == 1 or local_ranks % tp == 0 or config.world_size <= local_ranks:
        return ""
    ranks = f"{local_ranks} rank{'' if local_ranks == 1 else 's'}"
    text = f"tp={tp} on machines of {ranks}: the activations of every layer go over the network"
    fits = gcd(tp, local_ranks)
    for more_dp, more_pp in ((tp // fits, 1), (1, tp // fits)):
        mesh = replace(config, pp=config.pp * more_pp, dp=config.dp * more_dp, tp=fits)
        if not [*_mesh(mesh, config.world_size), *_batch(mesh)]:
            return f"{text}; {mesh_words(config, mesh)} keeps them within a machine"
    return f"{text}; a tp that divides {local_ranks} keeps them within a machine"


def _positive(config: Config) -> Iterator[Problem]:
    for key in ("batch_size", "seq_len", "steps", "log_every"):
        value = getattr(config, key)
        if value < 1:
            yield Problem(key, value, "must be at least 1", f"{key}=1")
        elif value > MAX_NUMBER:
            reason = f"is more than {MAX_NUMBER}, the maximum"
            yield Problem(key, value, reason, f"{key}={MAX_NUMBER}")
    stages = getattr(config.schedule, "stages_per_rank", 1)
    if not 1 <= stages <= MAX_STAGES:
        reason = f"a rank has from 1 to {MAX_STAGES} stages"
        yield Problem("schedule.stages_per_rank", stages, reason, "schedule.stages_per_rank=2")
    if isinstance(config.loss, ChunkedCrossEntropy) and config.loss.chunk < 1:
        yield Problem("loss.chunk", config.loss.chunk, "must be at least 1", "loss.chunk=2048")
    for key, least in _LEAST.items():
        group, _, name = key.rpartition(".")
        settings = attrgetter(group)(config) if group else config
        if (value := getattr(settings, name, least)) < least:  # the user's own lr has no warmup
            yield Problem(key, value, f"must be at least {least}", f"{key}={least}")
    if config.sample.every and not config.sample.prompts:
        reason = "there is nothing to continue"
        yield Problem("sample.prompts", [], reason, "sample.prompts=[def,import]")
    if config.sample.every and isinstance(config.data, SyntheticData):
        reason = "random tokens have no text"
        yield Problem("sample.every", config.sample.every, reason, "sample.every=0")
    if config.sample.every and config.cp > 1:
        reason = "a cp rank has a part of each sequence, and samples are written with whole ones"
        yield Problem("sample.every", config.sample.every, reason, "sample.every=0")
    if not 0 < config.sample.top_p <= 1:
        reason = "must be above 0 and at most 1"
        yield Problem("sample.top_p", config.sample.top_p, reason, "sample.top_p=0.95")
    for key in ("activation_checkpoint.memory", "schedule.memory_bytes"):
        group, _, name = key.rpartition(".")
        memory = getattr(getattr(config, group), name, None)
        if memory is not None and 0 < memory < 2**20:
            example = f"{memory}GiB" if memory < 2**10 else _ABOVE_ZERO[key]
            yield Problem(key, memory, "is less than 1 MiB", f"{key}={example}")
    for key, example in _ABOVE_ZERO.items():
        group, _, name = key.rpartition(".")
        settings = attrgetter(group)(config) if group else config
        value = getattr(settings, name, None)  # not every choice of a group has it
        if value is not None and not 0 < value < inf:
            yield Problem(key, value, "must be above 0, finite", f"{key}={example}")


def _ranges(config: Config) -> Iterator[Problem]:
    """Ranges of the optimizer's and the learning rate's numbers."""
    optimizer, lr = config.optimizer, config.lr
    clip = optimizer.clip is None or optimizer.clip > 0
    checks: list[tuple[str, bool, str, Any]] = [
        ("optimizer.lr", 0 <= optimizer.lr < inf, "must be at least 0, finite", 3e-4),
        ("optimizer.clip", clip, "must be above 0, or null for no clipping", "null"),
    ]
    if not isinstance(optimizer, OwnOptimizer):
        good = 0 <= optimizer.weight_decay < inf
        checks += [("optimizer.weight_decay", good, "must be at least 0, finite", 0.1)]
    if isinstance(optimizer, (AdamW, Muon)):
        good = len(optimizer.betas) == 2 and all(0 <= beta < 1 for beta in optimizer.betas)
        checks += [
            ("optimizer.betas", good, "must be two numbers in [0, 1)", "[0.9,0.95]"),
            ("optimizer.eps", optimizer.eps > 0, "must be above 0", 1e-8),
        ]
    if isinstance(optimizer, Muon):
        good = optimizer.adamw_lr is None or 0 <= optimizer.adamw_lr < inf
        checks += [
            ("optimizer.adamw_lr", good, "must be at least 0, or null for optimizer.lr", "null"),
            ("optimizer.ns_steps", 1 <= optimizer.ns_steps <= 20, "must be from 1 to 20", 5),
        ]
    if isinstance(optimizer, (Muon, Sgd)):
        checks += [("optimizer.momentum", 0 <= optimizer.momentum < 1, "must be in [0, 1)", 0.9)]
    if isinstance(lr, (DecayLr, WsdLr)):
        checks += [("lr.final", 0 <= lr.final <= 1, "must be in [0, 1]", 0.1)]
    if isinstance(lr, WsdLr):
        checks += [("lr.decay", 0 < lr.decay <= 1, "must be in (0, 1]", 0.2)]
    for key, good, reason, example in checks:
        if not good:
            yield Problem(key, attrgetter(key)(config), reason, f"{key}={example}")


def _batch(config: Config) -> Iterator[Problem]:
    size, dp = config.batch_size, config.dp
    if not (1 <= size <= MAX_NUMBER and 1 <= dp <= MAX_RANKS):
        return
    if size // dp > MAX_BATCH:
        reason = f"more than {MAX_BATCH} sequences for a dp rank"
        yield Problem("batch_size", size, reason, f"batch_size={MAX_BATCH * dp}")
        return
    if size % dp:
        fit = -(-size // dp) * dp
        yield Problem("batch_size", size, f"does not divide among dp={dp}", f"batch_size={fit}")
        return
    # a CSV has its own, a custom function may take them as an argument
    count = getattr(config.schedule, "microbatches", None)
    if count is not None and count >= 1 and size // dp % count:
        each = -(-size // dp // count) * count
        batch = f"{size} / {dp} = {size // dp}"
        reason = f"each dp rank's batch of {batch} does not divide into {count}"
        divisors = [n for n in range(1, count + 1) if size // dp % n == 0]
        fix = f"schedule.microbatches={divisors[-1]} or batch_size={each * dp}"
        yield Problem("schedule.microbatches", count, reason, fix)


def _wandb(config: Config) -> Iterator[Problem]:
    """Names that W&B would refuse, after the start."""
    if not isinstance(config.logger, Wandb):
        return
    for name in ("project", "entity", "run_name", "group"):
        value = getattr(config.logger, name)
        if value is not None and not 1 <= len(value) <= _LONGEST_NAME:
            reason = f"must have 1 to {_LONGEST_NAME} characters"
            yield Problem(f"logger.{name}", value, reason, f"logger.{name}=NAME")
    for name in ("project", "entity"):
        value = getattr(config.logger, name) or ""
        if wrong := sorted(set(value) & set("/\\#?%:")):
            reason = f"cannot have {' '.join(wrong)} in it"
            yield Problem(f"logger.{name}", value, reason, f"logger.{name}=NAME")
    for tag in config.logger.tags:
        if not 1 <= len(tag) <= 64:
            yield Problem("logger.tags", tag, "a tag has 1 to 64 characters", "logger.tags=[a,b]")


def _paths(config: Config) -> Iterator[Problem]:
    """Paths that no file system takes; with a line break or another control character, which no printed
    command could name."""
    for key, path in (("run_dir", config.run_dir), ("checkpoint.folder", config.checkpoint.folder)):
        longest = max(len(name.encode()) for name in (path or "").split("/"))
        if longest > _LONGEST_FILE:
            reason = f"a name in it has {longest} bytes, of which {_LONGEST_FILE} can be used"
            yield Problem(key, path, reason, f"{key}=outputs/NAME")
        elif path is not None and re.search(r"[\x00-\x1f\x7f]", path):
            shown = repr(path)[1:-1]
            reason = "a path with a line break or another control character cannot be printed"
            yield Problem(key, shown, reason, f"{key}=outputs/NAME")


def _resume(config: Config) -> Iterator[Problem]:
    settings, resume = config.checkpoint, config.checkpoint.resume
    known = resume in ("auto", "never") or "://" in resume
    if not known and not Path(resume).expanduser().is_dir():
        fix = "the path of a checkpoint or run directory, auto, or never"
        yield Problem("checkpoint.resume", resume, "no such folder", fix)
    if settings.start_from is not None and resume not in ("auto", "never"):
        reason = f"the run resumes from checkpoint.resume={resume} already"
        fix = "checkpoint.start_from=null or checkpoint.resume=auto"
        yield Problem("checkpoint.start_from", settings.start_from, reason, fix)
    for rule in settings.rename:
        if ":" not in rule:
            fix = "checkpoint.rename=[old.:new.]"
            yield Problem("checkpoint.rename", rule, "is not old:new", fix)
