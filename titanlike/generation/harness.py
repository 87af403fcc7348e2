"""Tasks of lm-evaluation-harness on a model in this process.

The harness asks for the log-probability of continuations, of whole texts, and for texts up to a
stop; each is computed here, with our tokenizer and model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from titanlike.generation.generate import LoadedModel, generate
from titanlike.models.sampling import Sampling

_TOKENS = 256  # of a generated text, where a task says nothing


def evaluate_tasks(
    loaded: LoadedModel, tasks: list[str], folders: list[str], limit: int | None, batch: int
) -> dict[str, dict[str, Any]]:
    """Task -> its numbers. folders: of task files beside the harness' own. Raises ValueError for a
    task that there is not."""
    manager = TaskManager(include_path=folders or None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(
            f"--tasks {','.join(unknown)}: the harness has no such task; write those that "
            "`lm_eval --tasks list` names, or --task-files DIR"
        )
    model = HarnessModel(loaded, batch)
    if not folders and os.environ.get("HF_HUB_OFFLINE") != "1":
        say = "the tasks' data come from the Hugging Face hub, which is asked again and again where"
        print(say, "there is no network; HF_HUB_OFFLINE=1 takes its cache alone", file=sys.stderr)
    results = simple_evaluate(
        model=model, tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=1000
    )
    return {
        task: {name.removesuffix(",none"): value for name, value in numbers.items()}
        for task, numbers in results["results"].items()
    }


class HarnessModel(LM):
    """What the harness calls a model."""

    def __init__(self, loaded: LoadedModel, batch: int) -> None:
        super().__init__()
        if loaded.coder is None:
            raise ValueError("RUN: it has no tokenizer; export it, and put a tokenizer.json there")
        self._loaded, self._batch = loaded, batch
        self._encode, self._decode, _ = loaded.coder
        # what stands before a text that has nothing before it
        self._first = [loaded.boundary] if loaded.boundary is not None else []

    def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        """A pair for each (context, continuation): log-probability, and whether it is the greedy
        one."""
        pairs = []
        for context, continuation in (request.args for request in requests):
            ids, before = self._encode(context + continuation), len(self._encode(context))
            start = self._first if not before else []
            pairs.append((start + ids, len(start) + before if before or start else 1))
        return self._scores(pairs)

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """Log-probabilities of whole texts, in windows where the model takes no longer ones."""
        totals, most = [], self._loaded.most_tokens or 2**15
        for (text,) in (request.args for request in requests):
            ids = self._first + self._encode(text)
            starts = range(0, max(1, len(ids) - 1), most - 1)
            windows = [(ids[start : start + most], 1) for start in starts]
            totals.append(sum(score for score, _ in self._scores(windows)))
        return totals

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        texts = []
        for context, how in (request.args for request in requests):
            until = how.get("until", [])
            stops = [until] if isinstance(until, str) else list(until)
            tokens = how.get("max_gen_toks", _TOKENS)
            temperature = how.get("temperature", 0.0) if how.get("do_sample") else 0.0
            ids = self._encode(context) or self._first
            if self._loaded.most_tokens is not None:
                ids = ids[-max(1, self._loaded.most_tokens - tokens) :]
            [answer] = generate(self._loaded, [ids], tokens, Sampling(temperature))
            text = self._decode(answer)
            texts.append(text[: min([text.find(s) for s in stops if s in text], default=len(text))])
        return texts

    @torch.inference_mode()
    def _scores(self, pairs: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """A pair for each (ids, first): the log-probability of ids[first:], and whether each is the
        greedy one."""
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]))
        scores: dict[int, tuple[float, bool]] = {}
        most = self._loaded.most_tokens
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            cut = [max(0, len(pairs[n][0]) - 1 - most) if most else 0 for n in numbers]
            rows = [pairs[n][0][left:] for n, left in zip(numbers, cut, strict=True)]
            width = max(map(len, rows)) - 1
            # padded at the end, which no token before it attends to
            inputs = [F.pad(torch.tensor(row[:-1]), (0, width - len(row) + 1)) for row in rows]
            logits = self._loaded.model(torch.stack(inputs).long().to(self._loaded.device))
            logits = logits.logits if hasattr(logits, "logits") else logits
            for n, row, left, lines in zip(numbers, rows, cut, logits, strict=True):
                begin = max(1, pairs[n][1] - left)
                goals = torch.tensor(row[begin:])
                lines = lines[begin - 1 : len(row) - 1].float().cpu()
                total = -F.cross_entropy(lines, goals, reduction="sum").item()
                scores[n] = total, bool((lines.argmax(-1) == goals).all())
        return [scores[number] for number in range(len(pairs))]
