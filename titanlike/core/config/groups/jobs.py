"""What a run does beside its steps, and how its processes are launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titanlike.core.config import keys
from titanlike.core.config.keys import Batches, key


@dataclass
class Validation:
    """Loss on the validation data."""

    every: int = key(100, "steps between validations, and after the last step; 0 = never", ge=0)
    batches: Batches = key(
        4, "global batches per set, the same each time; all (or 0) = the whole set"
    )
    data: dict[str, Any] | None = key(
        None,
        "separate validation set, by keys of data: {path: val/}, {name: tokens, path: val.bin}, or"
        " several: {code: {path: a/}, web: {path: b/}}; null = data's held-out share",
    )


@dataclass
class Sample:
    """Texts that the model continues during training; written to the console, samples.jsonl and
    W&B."""

    every: int = key(0, "steps between samples, and after the last step; 0 = never", ge=0)
    prompts: list[str] = key([], "texts to continue: ['def main','import os']")
    tokens: int = key(64, "maximum number of tokens of a sample", ge=1)
    temperature: float = key(0.8, "0 = the most probable token each time", ge=0)
    top_p: float = key(
        0.95, "sample from the most probable tokens with this total probability", gt=0, le=1
    )
    top_k: int = key(0, "sample from this many most probable tokens; 0 = from all", ge=0)


@dataclass
class Evaluate:
    """The data that `titanlike evaluate` evaluates."""

    part: Literal["validation", "train", "all"] = key("validation", "part of the data")
    batches: Batches = key(0, "first batches of it; 0 = all")


@dataclass
class Verify:
    """The comparison with one process, by `titanlike verify` and before a first launch."""

    name: Literal["auto", "required", "off"] = key(
        "auto",
        "verify before the first launch of a layout: auto = if it has custom code, and one process"
        " holds the model and takes up to 30 s by estimate; required = always; off = never",
    )
    steps: int = key(3, "training steps, each on its own batch", ge=1)
    as_is: bool = key(False, "verify bf16 or float8 only as it is, not also in fp32")
    against: str | None = key(
        None, "folder with another framework's weights, gradients and losses, compared as well"
    )
    names: str | None = key(
        None, "YAML or JSON file: its parameter names -> the model's; # is any number"
    )
    json: bool = key(
        False, "print the verdict as JSON in the last line, as in run_dir/verify/verdict.json"
    )


@dataclass
class Bench:
    """What `python tools/bench.py` measures."""

    loop: Literal["both", "titanlike", "plain"] = key(
        "both", "both = interleaved, for times; titanlike, plain = only one, for its memory"
    )


@dataclass
class Checkpoint:
    """Distributed checkpoints."""

    folder: str | None = key(
        None,
        "path, or URL of an object store (s3://...); null = run_dir/checkpoints",
        keys.PATH,
        example="outputs/NAME",
    )
    every: int = key(100, "steps between saves; 0 = none during training", ge=0)
    last: bool = key(True, "save after the last step")
    mode: Literal["sync", "async", "async_pinned"] = key(
        "sync",
        "async = training overlaps writing, from a copy in memory; async_pinned = also copying, "
        "into a reused buffer (pinned with a GPU)",
    )
    keep: int = key(10, "newest checkpoints to retain; 0 = all", ge=0)
    keep_every: int = key(0, "also retain checkpoints at multiples of this step; 0 = none", ge=0)
    keep_best: int = key(0, "also retain this many with the lowest validation loss", ge=0)
    model_only: Literal["none", "fp32", "bf16", "fp16"] = key(
        "none", "after the last step also save the model alone in this dtype (model-XXXXXXXX)"
    )
    export: Literal["none", "hf"] = key(
        "none",
        "hf = after the last step also write a folder for transformers, run_dir/hf-XXXXXXXX, of "
        "what model_only has, or in fp32",
    )
    resume: str = key("auto", "auto = newest complete checkpoint; never; or the path of one")
    start_from: str | None = key(
        None,
        "checkpoint or run directory whose weights initialize a new run (warm start), or "
        "hf:/path of a folder of transformers (llama, gpt2, moe)",
    )
    strict: bool = key(
        True, "start_from must have exactly the model's parameters; false = list differences"
    )
    rename: list[str] = key(
        [],
        "prefixes of parameter names in start_from to change: [old:new]",
        keys.RENAME,
        example="[old.:new.]",
    )
    timeout: float = key(1800.0, "seconds until a save or load fails", gt=0, le=1e6)


@dataclass
class Launch:
    """Launching and monitoring the workers."""

    timeout: float = key(
        600.0, "seconds until a wait for another rank, or the first step, fails", gt=0, le=1e6
    )
    step_timeout: float = key(
        300.0,
        "seconds without progress in a later step that count as a hang; 0 = never",
        ge=0,
        le=1e6,
    )
    heartbeat: float = key(10.0, "seconds between writes of logs/rankN.heartbeat", gt=0, le=1e6)
    straggler: float = key(
        0.25,
        "report a rank that is busy for this share longer than others, over 50 steps; 0 = never",
        ge=0,
    )
    max_restarts: int = key(
        0, "restarts of failed workers, from the newest checkpoint", ge=0, le=1_000_000
    )
    ranks_per_device: int = key(
        1, "ranks that share a GPU, to check a layout (slow)", ge=1, le=1024
    )


@dataclass
class Sweep:
    """How the jobs of a sweep (`-m`) run."""

    resume: bool = key(False, "run the unfinished jobs of run_dir's sweep, and resume stopped ones")
    parallel: int = key(
        1,
        "concurrent jobs of this command; on several GPUs run one for each GPU, in its own run_dir",
        ge=1,
        le=100_000,
    )
