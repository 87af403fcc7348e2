"""The perplexity job: the loss of a run's newest checkpoint on any data, in any layout.

Every sequence of a part of the data counts once. Nats are summed over tokens; bits a byte are the
same sum over the bytes of the text that these tokens are, so that tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from titanlike.checkpoint.reader import add_evaluation
from titanlike.config.credentials import redact_value
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.data.loader import collate
from titanlike.data.sources import ENDLESS, IGNORE, Batch, Data, Source
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.training.build import Run
from titanlike.training.feed import batches_for
from titanlike.training.sample_job import loaded_run
from titanlike.training.session import open_data_on_every_rank

_TOGETHER = 256  # sequences that are decoded at a time: they may follow each other in the text


@dataclass(frozen=True)
class Evaluation:
    """tokens: that count; bytes: of their text, None where the data cannot be decoded."""

    nats: float
    tokens: int
    bytes: int | None

    @property
    def numbers(self) -> dict[str, float | int]:
        loss = self.nats / self.tokens
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": self.tokens}
        if self.bytes:
            found |= {"bits_per_byte": self.nats / math.log(2) / self.bytes, "bytes": self.bytes}
        return found


def perplexity(config: Config, worker: Worker) -> dict[str, Any]:
    """Evaluate `evaluate.part` of the data; prints the result, and writes it beside the
    checkpoint."""
    data = open_data_on_every_rank(config, worker)
    if data.variable is not None:
        reason = "samples of different lengths are not evaluated here"
        raise ConfigError([Problem("data", config.data.name, reason, "data=text or data=tokens")])
    if not config.evaluate.batches and len(data.validation) >= ENDLESS:
        reason = f"data={config.data.name} has no end; so many batches of it are enough"
        raise ConfigError([Problem("evaluate.batches", 0, reason, "evaluate.batches=100")])
    console = Console(steps=1)
    with loaded_run(config, worker, data, "evaluation") as (run, newest):
        say = console.line if worker.rank == 0 else lambda _: None
        found = evaluate(run, config, data, say)
    if worker.rank == 0:
        source = redact_value("data", to_plain(config.data))
        result = {"data": source, "part": config.evaluate.part, **found.numbers}
        place = add_evaluation(newest, {"kind": "perplexity", **result})
        console.fields([(name, f"{value:,.6g}") for name, value in found.numbers.items()])
        console.line(f"{newest} on {data.description}: written to {place}")
    return {"value": found.numbers["loss"], **found.numbers}


def evaluate(run: Run, config: Config, data: Data, say: Any = lambda _: None) -> Evaluation:
    """The loss of all sequences, or of the first `evaluate.batches` batches. Collective."""
    kind = config.evaluate.part
    parts = {"train": [data.train], "validation": [data.validation]}
    sources = parts.get(kind) or [data.validation, data.train]
    nats = tokens = 0.0
    length: int | None = 0
    run.train_mode(False)
    for source in sources:
        for batch in batches_for(run, config, _batches(source, config, run.mesh.dp_rank)):
            loss, count = run.pipeline.evaluate(batch)
            nats, tokens = nats + loss.item() * count.item(), tokens + count.item()
        if run.mesh.layers_rank == 0 and length is not None:
            more = _bytes(source, config, data)
            length = None if more is None else length + more
    run.train_mode(True)
    return Evaluation(nats, int(tokens), length)


def _count(source: Source, config: Config) -> int:
    """Sequences that are evaluated."""
    limit = config.evaluate.batches
    return min(len(source), limit * config.batch_size) if limit else len(source)


def _batches(source: Source, config: Config, dp_rank: int) -> Iterator[Batch]:
    """All sequences in order, each once; the last batch is filled up with targets that do not
    count."""
    total, local = _count(source, config), config.batch_size // config.dp
    together = collate(source)
    for first in range(0, total, config.batch_size):
        numbers = range(first + dp_rank * local, first + (dp_rank + 1) * local)
        batch = together([source[min(i, total - 1)] for i in numbers])
        beyond = torch.tensor([i >= total for i in numbers])
        targets = batch["targets"].clone()
        targets[beyond] = IGNORE
        yield batch | {"targets": targets}


def _bytes(source: Source, config: Config, data: Data) -> int | None:
    """Bytes of the text that the targets are, up to a few where it is cut within a character."""
    if data.decode is None:
        return None
    total = 0
    for first in range(0, _count(source, config), _TOGETHER):
        last = min(first + _TOGETHER, _count(source, config))
        ids = torch.cat([source[i]["targets"].flatten() for i in range(first, last)])
        total += len(data.decode(ids[ids != IGNORE].tolist()).encode())
    return total
