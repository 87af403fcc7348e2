"""Run tasks of lm-evaluation-harness on a model in this process.

The harness asks for log-probabilities of continuations and of full texts, and for generated texts
up to a stop string.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm_eval import evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

from titanlike.use.generate import LoadedModel, generate
from titanlike.use.sampling import Sampling

_TOKENS = 256  # length of a generated text by default


def evaluate_tasks(
    loaded: LoadedModel, tasks: list[str], folders: list[str], limit: int | None, batch: int
) -> dict[str, dict[str, Any]]:
    """Return task -> metric -> value.

    folders: of task files, in addition to the harness' own. Raises ValueError for an unknown task.
    """
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
    # its `simple_evaluate` does the same, and asks git and pip about the working directory: either
    # runs code that lies there, git by a repository's config
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    chosen = manager.load(tasks)
    for task in chosen["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    how = {"limit": limit, "bootstrap_iters": 1000, "fewshot_as_multiturn": True}
    results = evaluate(lm=model, task_dict=chosen, **how)
    return {
        task: {name.removesuffix(",none"): value for name, value in numbers.items()}
        for task, numbers in results["results"].items()
    }


class HarnessModel(TemplateLM):
    """The model interface of the harness. Tokenizes and splits long texts exactly as the harness'
    HFLM does on an exported folder: by transformers' tokenizer and the harness' functions."""

    def __init__(self, loaded: LoadedModel, batch: int) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise ValueError("RUN: it has no tokenizer; export it, and put a tokenizer.json there")
        self._loaded, self._batch, self.tokenizer = loaded, batch, loaded.tokenizer()
        self._longest = loaded.most_tokens or loaded.seq_len
        if loaded.transformers:
            self._longest = resolve_max_length(loaded.model.config, self.tokenizer)

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        for token in (self.tokenizer.bos_token_id, self.eot_token_id, self._loaded.boundary):
            if token is not None:
                return token
        raise ValueError("RUN: its tokenizer has no token that begins or ends a text")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:  # avoids a second BOS token
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, owners = list[Any](), list[int]()
        for number, (text,) in enumerate(request.args for request in requests):
            tokens, first = self.tok_encode(text), self.prefix_token_id
            rolling = get_rolling_token_windows(tokens, first, self._longest, context_len=1)
            for pair in map(make_disjoint_window, rolling):
                windows.append((text, *pair))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += score
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts, end = [], self.eot_token_id
        end_text = None if end is None else self.tokenizer.decode(end)
        for context, given in (request.args for request in requests):
            how: Any = normalize_gen_kwargs(given, _TOKENS)
            stops = handle_stop_sequences(how["until"], end_text)
            tokens, temperature = how["max_gen_toks"], how.get("temperature", 0.0)
            if (prompt_tokens := self._longest - tokens) < 1:
                reason = f"a task asks for {tokens} tokens, and the model takes {self._longest}"
                raise ValueError(f"--tasks: {reason}; max_gen_toks in its generation_kwargs")
            ids = (self.tok_encode(context) or [self.prefix_token_id])[-prompt_tokens:]
            sampling = Sampling(temperature if how["do_sample"] else 0.0)
            [answer] = generate(self._loaded, [ids], tokens, sampling)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, stops, None))
        return texts

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each (text, context, continuation), return the log-probability of the continuation
        after as much context as fits, and whether greedy decoding would produce it."""
        rows, longest = list[list[int]](), self._longest
        for text, context, continuation in requests:
            if not 0 < len(continuation) <= longest:
                reason = f"{len(continuation)} tokens, and the model scores 1 to {longest}"
                raise ValueError(f"--tasks: the answer of {str(text)[-200:]} has {reason}")
            rows.append(((context or [self.prefix_token_id]) + continuation)[-longest - 1 :])
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        scores: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            # right padding: causal attention never attends to it
            inputs = pad_sequence([torch.tensor(rows[n][:-1]) for n in numbers], batch_first=True)
            logits = self._loaded.model(inputs.to(self._loaded.device))
            logits = logits.logits if hasattr(logits, "logits") else logits
            for n, lines in zip(numbers, logits, strict=True):
                goals = torch.tensor(requests[n][2])
                lines = lines[len(rows[n]) - 1 - len(goals) : len(rows[n]) - 1].float().cpu()
                total = -F.cross_entropy(lines, goals, reduction="sum").item()
                scores[n] = total, bool((lines.argmax(-1) == goals).all())
        return [scores[number] for number in range(len(rows))]
