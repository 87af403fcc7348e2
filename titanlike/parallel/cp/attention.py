"""Attention of a rank's tokens with those of all context-parallel ranks.

A model knows nothing of it: within `ContextAttention` each call of scaled_dot_product_attention is
given a rank's queries, keys and values, and gives its part of the result.

| method | what ranks exchange | attention |
|---|---|---|
| gather | keys and values, before (arXiv 2407.21783, section 3.3.2) | of the rank's queries |
| ulysses | heads for tokens, before and after (arXiv 2309.14509) | of whole sequences, of its heads |
| ring | keys and values, while it computes (arXiv 2310.01889), see `ring.py` | of blocks |

Shapes: B batch, T tokens of a sequence, t = T / ranks of this rank, H query heads, K key/value heads,
E head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlike.config.errors import ConfigError, Problem
from titanlike.distributed.collectives import exchange
from titanlike.parallel.cp.positions import (
    Call,
    Counted,
    Observer,
    Take,
    call_of,
    counted,
    of_all_tokens,
)
from titanlike.parallel.cp.ring import ring_attention
from titanlike.parallel.cp.tokens import ContextRanks
from titanlike.torch_private import block_attention


def _split(
    tensor: Tensor, split_size_or_sections: int | list[int] = 1, dim: int = 0, **named: Any
) -> Any:
    """torch.split and Tensor.split, which name their arguments differently."""
    return torch.ops.aten.split(tensor, named.get("split_size", split_size_or_sections), dim)


_TOKENS = 2  # the dimension of tokens of queries, keys and values


@dataclass(frozen=True)
class Attended:
    """A call of attention, of heads [B, H, T, E] and [B, K, T, E]."""

    heads: int  # 0 = there is no such dimension
    kv_heads: int
    width: int  # of a head; 0 = keys and values differ
    causal: bool
    masked: bool
    dropout: bool


@dataclass(frozen=True)
class DocumentAttention:
    """Attention of the models that takes documents by their offsets, a NamedTuple with an `attend`."""

    documents: type[Any]
    # (q, k, v, documents or a mask, scale, dropout), which `ContextAttention` does not replace
    function: Callable[..., Tensor]
    # (documents, B, T, places [t] of this rank's queries) -> bool [B, 1, t, T]
    mask: Callable[[Any, int, int, Tensor], Tensor]


Mode = tuple[str, bool]  # the name of a module, whether it is training


@dataclass
class Looking:
    """While it is found out which calls of modules count tokens (`check.py`)."""

    tokens: int  # of a whole sequence
    take: Take
    whole: dict[Mode, list[Call]] = field(default_factory=dict)  # with whole sequences
    alike: dict[str, str] = field(default_factory=dict)  # modules that compute as another one

    def counted(self, mode: Mode, number: int, call: Call, ranks: int) -> Counted:
        """What the call is, the one of that number in a module."""
        like = self.alike.get(mode[0], ""), mode[1]
        whole = self.whole.get(mode) or self.whole.get(like, [])
        if number >= len(whole):
            return Counted(call.kind)
        return counted(whole[number], call, self.tokens, ranks)


class ContextAttention(TorchFunctionMode):
    """Replaces attention within it by that of all context-parallel ranks' tokens."""

    def __init__(self, ranks: ContextRanks, of_documents: DocumentAttention | None = None) -> None:
        super().__init__()
        self.ranks, self._of_documents = ranks, of_documents
        self.active = True  # or else modules run as if there was no context parallelism
        # called in place of attention, with its arguments by name: to look at them
        self.instead: Callable[[dict[str, Any]], Tensor] | None = None
        # of modules that count tokens themselves: their calls that may, in order
        self.counted: dict[Mode, list[Counted]] = {}
        self.looking: Looking | None = None
        self._place: list[Any] | None = None  # the module that runs, if it is one of these; calls
        self._observer: Observer | None = None

    def around(self, module: nn.Module, name: str) -> None:
        """Let a module's forward run within it; call it before all else that replaces forwards."""
        for part in module.modules():
            if getattr(part, "token_wise", False):
                apart: Any = functools.partial(self._apart, part.forward)
                apart.changes_nothing = True  # for `equal_units.call_key`
                part.forward = apart
        module.forward = functools.partial(self._run, name, module, module.forward)

    def counts(self, name: str) -> bool:
        """Whether a module counts tokens itself."""
        return any(name == other for other, _ in self.counted)

    def _apart(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module that computes each token by itself: what it counts are the tokens that are here."""
        if self._place is None and self._observer is None:
            return forward(*args, **kwargs)
        place, self._place = self._place, None
        if self._observer is not None:
            self._observer.muted += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._place = place
            if self._observer is not None:
                self._observer.muted -= 1

    def _run(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        mode = name, module.training
        if not self.active and self.looking is not None:
            self._observer = Observer(self.looking.whole.setdefault(mode, []))
            try:
                with self._observer:
                    return forward(*args, **kwargs)
            finally:
                self._observer = None
        if not self.active:
            return forward(*args, **kwargs)
        if self._of_documents is not None:
            args = tuple(map(self._divided, args))
            kwargs = {key: self._divided(value) for key, value in kwargs.items()}
        if self.looking is None and mode not in self.counted:
            with self:
                return forward(*args, **kwargs)
        before, self._place = self._place, [mode, 0]
        try:
            with self:
                result = forward(*args, **kwargs)
            if self.looking is None and self._place[1] != len(self.counted[mode]):
                raise self._other_calls(name)
            return result
        finally:
            self._place = before

    def _other_calls(self, name: str) -> ConfigError:
        reason = f"{name} counts its tokens by other calls than when it was checked"
        return ConfigError([Problem("cp", self.ranks.size, reason, "cp=1")])

    def _divided(self, argument: Any) -> Any:
        """An argument, in which documents know that they are those of all tokens."""
        own = self._of_documents
        if own is not None and isinstance(argument, own.documents):
            return argument._replace(attend=self._documents)
        if type(argument) in (tuple, list):
            return type(argument)(map(self._divided, argument))
        if type(argument) is dict:
            return {key: self._divided(value) for key, value in argument.items()}
        return argument

    def __deepcopy__(self, _: dict[int, Any]) -> ContextAttention:
        """A copy of a module runs its own forward within the same."""
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if self._place is not None and (call := call_of(function, args, kwargs)) is not None:
            return self._with_all_tokens(call, function, args, kwargs)
        # within a mode torch.compile cannot trace what is written in Python on tensors, and it looks
        # functions up by name alone
        name = getattr(function, "__name__", "")
        if name == "unflatten":
            return torch.unflatten(*args, **kwargs)
        return _split(*args, **kwargs) if name == "split" else function(*args, **kwargs)

    def _with_all_tokens(self, call: Call, function: Any, args: Any, kwargs: Any) -> Any:
        assert self._place is not None
        mode, number = self._place
        self._place[1] += 1
        size, take = self.ranks.size, self.ranks.take
        known = self.counted.setdefault(mode, [])
        if self.looking is not None:
            take = self.looking.take
            if number == len(known):
                known.append(self.looking.counted(mode, number, call, size))
        if number >= len(known) or known[number].kind != call.kind:
            raise self._other_calls(mode[0])
        dims = known[number].dims
        if not dims:
            return function(*args, **kwargs)
        return of_all_tokens(function, args, kwargs, dims, size, take)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As scaled_dot_product_attention of [B, H or K, t, E] -> [B, H, t, E].

        attn_mask: [..., T or t, T or t]; a dimension of t is this rank's part.
        """
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        if self.instead is not None:
            given = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return self.instead({"query": query, "key": key, "value": value, **given, **options})
        ranks = self.ranks
        mask = attn_mask
        if mask is not None and mask.dim() and mask.shape[-1] == key.shape[_TOKENS]:
            mask = _all_tokens(mask, ranks, mask.dim() - 1)
        if ranks.method == "ulysses":
            if mask is not None and mask.dim() > 1 and mask.shape[-2] == query.shape[_TOKENS]:
                mask = _all_tokens(mask, ranks, mask.dim() - 2)
            mask = _of_heads(mask, query.shape[1], ranks)
            whole = mask is None and is_causal

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                grouped = {"enable_gqa": q.shape[1] != k.shape[1]}
                return F.scaled_dot_product_attention(
                    q, k, v, mask, is_causal=whole, **options, **grouped
                )

            return _by_heads(attend, query, key, value, ranks)
        if ranks.method == "ring":
            assert mask is None, "of the ring's blocks none takes a mask"
            return ring_attention(query, key, value, ranks, is_causal, scale)
        options["enable_gqa"] = enable_gqa
        key, value = _gathered(key, value, ranks)
        if mask is None and is_causal:
            return _causal(query, key, value, ranks, options)
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == key.shape[_TOKENS]:
            mask = ranks.take(mask, mask.dim() - 2)
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    def _documents(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Any, scale: float | None, dropout: float
    ) -> Tensor:
        own, ranks = self._of_documents, self.ranks
        assert own is not None
        if self._place is not None:  # what is counted here is no call of the module
            return self._apart(self._documents, q, k, v, documents, scale, dropout)
        function, mask = own.function, documents._replace(attend=None)
        if ranks.method == "ulysses":
            attend = lambda q, k, v: function(q, k, v, mask, scale, dropout)  # noqa: E731
            return _by_heads(attend, q, k, v, ranks)
        assert ranks.method == "gather", "of the ring's blocks none takes a mask"
        k, v = _gathered(k, v, ranks)
        tokens = k.shape[_TOKENS]
        places = ranks.take(torch.arange(tokens, device=q.device), 0)
        return function(q, k, v, own.mask(mask, q.shape[0], tokens, places), scale, dropout)


def _all_tokens(x: Tensor, ranks: ContextRanks, dim: int) -> Tensor:
    gathered = exchange(x, ranks, "all_gather", "reduce_scatter", dim)
    return ranks.in_order(gathered, dim)


def _gathered(k: Tensor, v: Tensor, ranks: ContextRanks) -> tuple[Tensor, Tensor]:
    """Those of all ranks, in one message where they have one size."""
    if k.shape != v.shape:
        return _all_tokens(k, ranks, _TOKENS), _all_tokens(v, ranks, _TOKENS)
    k, v = _all_tokens(torch.stack([k, v]), ranks, 1 + _TOKENS).unbind()
    return k, v


def _causal(
    q: Tensor, k: Tensor, v: Tensor, ranks: ContextRanks, options: dict[str, Any]
) -> Tensor:
    """A call for each of the rank's chunks, with the keys that its last query sees."""
    starts, chunk = ranks.starts(k.shape[_TOKENS])
    results = []
    for number, start in enumerate(starts):
        queries = q.narrow(_TOKENS, number * chunk, chunk)
        keys, values = (x.narrow(_TOKENS, 0, start + chunk) for x in (k, v))
        results.append(block_attention.of_last_queries(queries, keys, values, **options))
    return torch.cat(results, _TOKENS)


# --- heads for tokens --------------------------------------------------------------------------


def repeated(kv_heads: int, size: int) -> int:
    """How many times each key/value head must be there for so many ranks to share them."""
    return size // gcd(kv_heads, size)


def _by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: ContextRanks,
) -> Tensor:
    times = repeated(k.shape[1], ranks.size)
    if times > 1:
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    if k.shape[-1] == v.shape[-1]:  # in one message: each rank's heads are next to each other
        sizes = [x.shape[1] // ranks.size for x in (q, k, v)]
        every = torch.cat([x.unflatten(1, (ranks.size, -1)) for x in (q, k, v)], dim=2)
        q, k, v = _to_heads(every, ranks).split(sizes, dim=1)
    else:
        q, k, v = (_to_heads(x.unflatten(1, (ranks.size, -1)), ranks) for x in (q, k, v))
    return _to_tokens(attend(q, k, v), ranks)


def _to_heads(x: Tensor, ranks: ContextRanks) -> Tensor:
    """[B, ranks, h, t, E] -> [B, h, T, E], this rank's heads."""
    x = exchange(x.movedim(1, 0), ranks, "all_to_all", "all_to_all", 0)  # [ranks, B, h, t, E]
    return x.movedim(0, 2).flatten(2, 3)


def _to_tokens(x: Tensor, ranks: ContextRanks) -> Tensor:
    """[B, h, T, E] -> [B, H, t, E]."""
    x = x.unflatten(2, (ranks.size, -1)).movedim(2, 0)  # [ranks, B, h, t, E]
    return exchange(x, ranks, "all_to_all", "all_to_all", 0).movedim(0, 1).flatten(1, 2)


def _of_heads(mask: Tensor | None, heads: int, ranks: ContextRanks) -> Tensor | None:
    """The part of a mask or bias, which may differ between heads, of this rank's."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    each = heads // ranks.size
    return mask.narrow(mask.dim() - 3, ranks.rank * each, each)
