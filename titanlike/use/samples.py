"""Generate text from a training model in the run's layout: stages and shards stay where they are.

Each token takes a forward of the full pipeline, without a KV cache: correct for any causal model,
and slow. The last stage's ranks have the logits; every rank appends the same ids.

Shapes: B prompts at a time (a microbatch each), T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from titanlike.core.config import files
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Data
from titanlike.core.metrics.run_files import append_line
from titanlike.core.metrics.sinks import Sink
from titanlike.core.optim.loss import logits_of
from titanlike.core.training.build import Run
from titanlike.use.sampling import Sampling, continue_texts, next_tokens

FILE = "samples.jsonl"
_LENGTH = 64  # lengths are padded to a multiple: each one needs its own pipeline runtime


class Sampler:
    """Continues `sample.prompts`. All methods are collective."""

    def __init__(self, run: Run, config: Config, data: Data) -> None:
        """Raises ConfigError if the data have no tokenizer."""
        if data.encode is None or data.decode is None:
            reason = "the data have no tokenizer, which a prompt needs"
            fix = "sample.every=0, or data with a tokenizer (data=text)"
            raise ConfigError([Problem("sample.prompts", config.sample.prompts, reason, fix)])
        self._run, self._config, self._decode = run, config, data.decode
        self._ends = data.ends | {data.boundary}
        self._prompts = [data.encode(text) for text in config.sample.prompts]
        if not all(self._prompts):
            given, reason = config.sample.prompts, "one of them has no tokens"
            raise ConfigError([Problem("sample.prompts", given, reason, "some text")])

    def sample(self, seed: int) -> list[str]:
        """The text after each prompt, the same on all ranks."""
        settings = self._config.sample
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, seed)
        count, continued = self._run.plan.microbatches, []
        random = sampling.generators(len(self._prompts))
        self._run.train_mode(False)
        try:
            with torch.no_grad():
                for first in range(0, len(self._prompts), count):
                    part = slice(first, first + count)
                    continued += continue_texts(
                        partial(self._next, sampling, random[part]),
                        self._prompts[part],
                        settings.tokens,
                        self._ends,
                    )
        finally:
            self._run.train_mode(True)
        return [self._decode(ids) for ids in continued]

    def _next(
        self, sampling: Sampling, random: list[torch.Generator], texts: list[list[int]]
    ) -> list[int]:
        """Choose the next id of each text on one rank of the last stage, and broadcast them."""
        mesh, longest = self._run.mesh, self._config.seq_len
        shown = [ids[-longest:] for ids in texts]  # at most the sequence length of training
        length = min(-(-max(map(len, shown)) // _LENGTH) * _LENGTH, longest)
        rows = shown + shown[:1] * (self._run.plan.microbatches - len(shown))
        ids = torch.stack([F.pad(torch.tensor(row), (0, length - len(row))) for row in rows])
        marks = torch.zeros_like(ids)
        marks[range(len(rows)), [len(row) - 1 for row in rows]] = 1
        batch = {"inputs": ids.to(mesh.device), "targets": marks.to(mesh.device)}
        marked = lambda output, targets: logits_of(output)[targets == 1]  # noqa: E731
        outputs = self._run.pipeline.outputs(batch, marked, size=1)
        chosen = torch.zeros(len(texts), dtype=torch.int64)
        if outputs:
            logits = torch.cat(outputs)  # [B, V or part of it]
            for transform in self._run.plan.transforms.values():
                logits = transform.logits(logits)
            logits = logits[: len(texts)]
            if mesh.dp_rank == 0 and mesh.layer_part == 0:
                chosen = next_tokens(logits, sampling, random)
        chosen = chosen.to(mesh.device)
        return (mesh.sum(chosen) if mesh.world_size > 1 else chosen).tolist()


def write_samples(
    sampler: Sampler,
    config: Config,
    step: int,
    sinks: list[Sink],
    run_dir: Any,
    say: Callable[[str], object] | None,
) -> None:
    """Generate samples; on rank 0, which has `say`, print them, append them to samples.jsonl and
    send them to the sinks."""
    texts = sampler.sample(config.seed + step)
    if say is None:
        return
    prompts = config.sample.prompts
    rows: list[dict[str, Any]] = [
        {"step": step, "prompt": prompt, "text": text}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    how = {key: getattr(config.sample, key) for key in ("temperature", "top_p", "top_k")}
    for row in rows:
        append_line(run_dir / FILE, files.dumps({"time": time.time(), **row, **how}))
        shown = (row["prompt"] + row["text"]).rstrip().replace("\n", "\n    | ")
        say(f"sample at step {step}:\n    | {shown}")
    for sink in sinks:
        sink.table("samples", step, rows)
