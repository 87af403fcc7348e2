"""Jobs on a run's newest checkpoint, in any layout: `sample` generates text with a model that does
not fit one process; `perplexity` computes the loss on any data.

Perplexity counts every sequence of a part of the data once. Nats are summed over tokens; bits per
byte divide the same sum by the bytes of their text, to compare tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlike.core.checkpoint.discovery import checkpoint_folder, resolve, step_of
from titanlike.core.checkpoint.integrity import open_header
from titanlike.core.checkpoint.reader import add_evaluation, read
from titanlike.core.checkpoint.state_dict import warm_start
from titanlike.core.checkpoint.storage import INDEX, Moved, Storage
from titanlike.core.config.credentials import redact_value
from titanlike.core.config.errors import ConfigError, Problem, Refused
from titanlike.core.config.groups.data import HFData, StreamData, TextData, TokenData
from titanlike.core.config.groups.jobs import Validation
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import READERS
from titanlike.core.data.sources import ENDLESS, IGNORE, Data, Source, Stream, no_targets
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.torch_private.process_groups import abort_groups
from titanlike.core.training.build import Run, build
from titanlike.core.training.session import connected, open_data_on_every_rank, watch_long_steps
from titanlike.core.training.step import evaluate
from titanlike.formats.stream import read_by_index
from titanlike.use.samples import Sampler


def sample(config: Config, worker: Worker) -> dict[str, Any]:
    """Print continuations of `sample.prompts`. Raises ConfigError without a checkpoint."""
    if not config.sample.prompts:
        fix = "sample.prompts=['def main']"
        raise ConfigError([Problem("sample.prompts", [], "there is nothing to continue", fix)])
    data = open_data_on_every_rank(replace(config, validation=Validation()), worker)
    with loaded_run(config, worker, data, "samples") as (run, newest):
        texts = Sampler(run, config, data).sample(config.seed)
    if worker.rank == 0:
        step, console = step_of(newest) if newest.name.startswith("step-") else 0, Console(steps=1)
        for prompt, text in zip(config.sample.prompts, texts, strict=True):
            console.line(f"\n--- step {step}, {prompt!r}")
            console.line(prompt + text)
    return {"value": None, "texts": texts}


@contextmanager
def loaded_run(
    config: Config, worker: Worker, data: Data, phase: str
) -> Iterator[tuple[Run, Storage]]:
    """A context with the run whose directory is the parent of the job's, the weights of its newest
    checkpoint loaded, and that checkpoint. The watchdog calls the phase `phase`. Collective.

    The run may still be training: its checkpoints are only read. Raises ConfigError if it has none.
    """
    run_config = replace(config, run_dir=str(Path(config.run_dir).parent))
    with Watchdog(worker, config.launch, abort_groups) as watchdog:
        watchdog.enter_phase(0, "connect", config.launch.timeout)
        with connected(config, worker, watchdog, Console(steps=1).line) as mesh:
            moved = watch_long_steps(watchdog, data)
            watchdog.enter_phase(0, "build", config.launch.timeout)
            run = build(config, mesh, data)
            watchdog.enter_phase(0, "load", config.checkpoint.timeout)
            newest = _load_newest(run_config, run, moved)
            watchdog.enter_phase(0, phase, config.launch.timeout)
            yield run, newest


def _load_newest(config: Config, run: Run, moved: Moved) -> Storage:
    """Load only the weights of a run's newest checkpoint, counted in `moved`. With checkpoint.resume=never load
    nothing: the weights are those of the transformers folder that the model was built from."""
    folder = getattr(config.model, "args", {}).get("path")
    if config.checkpoint.resume == "never" and config.model.name == "hf" and folder:
        return Storage(folder).at("model")
    try:
        newest = resolve("run_dir", str(checkpoint_folder(config)))
    except Refused as error:
        raise ConfigError([error.problem]) from None
    timeout = timedelta(seconds=config.checkpoint.timeout)
    group = dist.new_group(backend="gloo", timeout=timeout)
    settings = replace(config.checkpoint, start_from=str(newest), rename=[], strict=True)
    warm_start(settings, run.stage_states, group, moved)
    return newest


# --- perplexity ---------------------------------------------------------------------------------

_TOGETHER = 256  # sequences that are decoded together, as they may be consecutive in the text


@dataclass(frozen=True)
class Evaluation:
    """tokens: those that count in the loss; bytes: their text's, None if it cannot be decoded."""

    nats: float
    tokens: int
    bytes: int | None

    @property
    def numbers(self) -> dict[str, float | int]:
        if not self.tokens:
            return {}
        loss = self.nats / self.tokens
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": self.tokens}
        if self.bytes:
            metrics |= {"bits_per_byte": self.nats / math.log(2) / self.bytes, "bytes": self.bytes}
        return metrics


def perplexity(config: Config, worker: Worker) -> dict[str, Any]:
    """Evaluate `evaluate.part` of the data; prints the result, and writes it next to the
    checkpoint."""
    section = config.data
    if config.evaluate.part == "all" and isinstance(section, StreamData) and not section.sources:
        config = replace(config, data=read_by_index(section))
    if config.evaluate.part == "all" and isinstance(config.data, TextData | HFData | TokenData):
        # nothing is held out
        config = replace(config, data=replace(config.data, validation_fraction=0.0))
    data = open_data_on_every_rank(config, worker)
    if data.variable is not None:
        reason = "samples of different lengths are not evaluated here"
        raise ConfigError([Problem("data", config.data.name, reason, "data=text or data=tokens")])
    if isinstance(data.train, Stream) and config.evaluate.part != "validation":
        reason, fix = "of a stream what was held out is evaluated, or validation.data", "validation"
        key = "evaluate.part"
        raise ConfigError([Problem(key, config.evaluate.part, reason, f"{key}={fix}")])
    if isinstance(data.train, Stream) and not (config.validation.every or config.validation.data):
        reason, fix = "of the stream nothing was held out", "validation.data={path: another file}"
        raise ConfigError([Problem("validation.every", 0, reason, fix)])
    if not config.evaluate.batches and len(data.validation) >= ENDLESS:
        reason = f"data={config.data.name} has no end; so many batches of it are enough"
        raise ConfigError([Problem("evaluate.batches", 0, reason, "evaluate.batches=100")])
    console = Console(steps=1)
    with loaded_run(config, worker, data, "evaluation") as (run, newest):
        own = newest.exists(INDEX)  # not a transformers folder
        if own and isinstance(data.train, Stream) and not config.validation.data:
            _hold_out_as_the_run(data.train, config, newest, run.mesh.dp_rank)
        sources = _sources(config, data)
        each = {}
        for name, source in sources.items():
            sums = evaluate(run, config, source, config.evaluate.batches)
            assert sums is not None, "it is not stopped"
            nats, tokens = sums["loss"]
            length = _bytes(source, config, data) if run.mesh.layers_rank == 0 else None
            each[name] = Evaluation(nats, round(tokens), length)
    lengths = [one.bytes for one in each.values()]
    known = [length for length in lengths if length is not None]
    evaluation = Evaluation(
        sum(one.nats for one in each.values()),
        sum(one.tokens for one in each.values()),
        sum(known) if len(known) == len(lengths) else None,
    )
    if not evaluation.tokens:
        of = f"the {config.evaluate.part} data"
        raise ConfigError([no_targets(config.data, of, "evaluate.part=all")])
    numbers = dict(evaluation.numbers)
    for name, one in each.items() if len(data.validation_sets) > 1 else ():
        numbers |= {f"{key}/{name}": value for key, value in one.numbers.items()}
    if worker.rank == 0:
        source = redact_value("data", to_plain(config.data))
        result = {"data": source, "part": config.evaluate.part, **numbers}
        place = add_evaluation(newest, {"kind": "perplexity", **result})
        console.fields([(name, f"{value:,.6g}") for name, value in numbers.items()])
        of = newest.parent if newest.name == "model" else newest
        console.line(f"{of} on {data.description}: written to {place}")
    return {"value": numbers["loss"], **numbers}


def _hold_out_as_the_run(stream: Stream, config: Config, checkpoint: Storage, dp_rank: int) -> None:
    """Raise ConfigError if the run was trained on what the config holds out of its stream."""
    header = open_header(checkpoint)
    shapes = {n: saved.shape for n, saved in header.tensors.items() if n.startswith(READERS)}
    try:
        entries = stream.wanted(shapes, config, dp_rank)
        read(header, entries, None)
        stream.restore(entries)
    except Refused as error:
        raise ConfigError([error.problem]) from None


def _sources(config: Config, data: Data) -> dict[str, Source]:
    """Name -> what is evaluated of the data; that of a validation set is its own."""
    kind, train = config.evaluate.part, data.train
    if kind == "validation" or isinstance(train, Stream):
        return data.validations
    if kind == "train":
        return {"train": train}
    return data.validations | ({} if data.validation is train else {"train": train})


def _bytes(source: Source, config: Config, data: Data) -> int | None:
    """Count the bytes of the targets' text, up to a few where it is cut within a character."""
    if data.decode is None:
        return None
    total, count, limit = 0, len(source), config.evaluate.batches
    numbers = range(min(count, limit * config.batch_size) if limit else count)
    for first in range(0, len(numbers), _TOGETHER):
        together = numbers[first : first + _TOGETHER]
        ids = torch.cat([source[i]["targets"].flatten() for i in together])
        total += len(data.decode(ids[ids != IGNORE].tolist()).encode())
    return total
