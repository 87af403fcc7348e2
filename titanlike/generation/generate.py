"""Token by token in one process, several prompts at a time.

Our own families keep keys and values of the tokens before (`models/cache.py`), those of transformers
are left to their own `generate`, and any other model computes its whole forward for each token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from titanlike.generation.loaded_model import LoadedModel
from titanlike.generation.sampling import Sampling, next_tokens
from titanlike.models.cache import KeyValueCache

Prompts = list[list[int]]  # ids of each
OnToken = Callable[[int, int], object]  # (prompt, id)


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    prompts: Prompts,
    tokens: int,
    sampling: Sampling,
    *,
    cached: bool = True,
    on_token: OnToken = lambda prompt, token: None,
) -> Prompts:
    """Up to `tokens` more ids of each prompt; one ends before an id that ends a text.

    cached: False = a whole forward for each token, also where there could be a cache. Raises ValueError
    for a prompt without tokens, and for more tokens than the model takes.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens; write some text")
    longest = max(map(len, prompts)) + tokens
    if loaded.most_tokens is not None and longest > loaded.most_tokens:
        fits = loaded.most_tokens - max(map(len, prompts))
        fix = f"write --tokens {fits}" if fits > 0 else "write a shorter prompt"
        raise ValueError(f"the model takes {loaded.most_tokens} tokens, not {longest}; {fix}")
    if loaded.transformers:
        found = _by_transformers(loaded, prompts, tokens, sampling, cached)
        for number, ids in enumerate(found):
            for token in ids:
                on_token(number, token)
        return found
    step = _cached(loaded, prompts, longest) if cached and loaded.takes_cache else _whole(loaded)
    random = sampling.generators(len(prompts))
    texts, ended = [list(ids) for ids in prompts], [False] * len(prompts)
    for _ in range(tokens):
        chosen = next_tokens(step(texts), sampling, random).tolist()
        for number, token in enumerate(chosen):
            texts[number].append(token)
            if not ended[number]:
                ended[number] = token in loaded.all_ends
                if not ended[number]:
                    on_token(number, token)
        if all(ended):
            break
    ours = [ids[len(prompt) :] for ids, prompt in zip(texts, prompts, strict=True)]
    return [_until(ids, loaded.all_ends) for ids in ours]


def _until(ids: list[int], ends: frozenset[int]) -> list[int]:
    return [*itertools.takewhile(lambda token: token not in ends, ids)]


def _cached(loaded: LoadedModel, prompts: Prompts, size: int) -> Callable[[Prompts], torch.Tensor]:
    """The logits after texts that are one token longer at each call."""
    width = max(map(len, prompts))
    padding = torch.tensor([width - len(ids) for ids in prompts], device=loaded.device)
    cache = KeyValueCache(padding, size)
    before = 0

    def step(texts: Prompts) -> torch.Tensor:
        nonlocal before
        if not before:
            rows = [[0] * (width - len(ids)) + ids for ids in texts]
        else:
            rows = [ids[-1:] for ids in texts]
        before += 1
        return loaded.model(torch.tensor(rows, device=loaded.device), cache=cache)[:, -1]

    return step


def _whole(loaded: LoadedModel) -> Callable[[Prompts], torch.Tensor]:
    """The logits after any texts: nothing is known of the model's padding, so each goes alone."""

    def step(texts: Prompts) -> torch.Tensor:
        each = [loaded.model(torch.tensor([ids], device=loaded.device)) for ids in texts]
        return torch.cat([logits[:, -1] for logits in each])

    return step


def _by_transformers(
    loaded: LoadedModel, prompts: Prompts, tokens: int, sampling: Sampling, cached: bool
) -> Prompts:
    width = max(map(len, prompts))
    pad = 0 if loaded.boundary is None else loaded.boundary
    rows = [[pad] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    how: dict[str, object] = {"do_sample": sampling.temperature > 0, "use_cache": cached}
    if sampling.temperature > 0:
        how |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    else:  # a folder's own settings for sampling, of which it would warn
        how |= {"temperature": None, "top_p": None, "top_k": None}
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        found = loaded.model.generate(  # type: ignore[operator]
            torch.tensor(rows, device=loaded.device),
            attention_mask=torch.tensor(mask, device=loaded.device),
            max_new_tokens=tokens,
            eos_token_id=sorted(loaded.all_ends) or None,
            pad_token_id=pad,
            **how,
        )
    return [_until(ids, loaded.all_ends) for ids in found[:, width:].tolist()]
