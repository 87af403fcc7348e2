"""Attention over the tokens of all context-parallel ranks.

The model is unchanged: within `ContextAttention`, scaled_dot_product_attention receives a rank's
queries, keys and values, and returns its part of the result.

| method | collectives | attention of | |---|---|---| | gather | all-gather of keys and values
(arXiv 2407.21783, section 3.3.2) | the rank's queries | | ulysses | all-to-all of heads for tokens,
twice (arXiv 2309.14509) | full sequences, the rank's heads | | ring | P2P of keys and values,
overlapped (arXiv 2310.01889) | blocks |

Shapes: B batch, T tokens of a sequence, t = T / ranks local tokens, H query heads, K key/value
heads, E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.distributed.collectives import autograd_collective
from titanlike.core.models.attention import undivided_attention
from titanlike.core.models.document_attention import document_mask
from titanlike.core.models.documents import Documents
from titanlike.core.torch_private import block_attention
from titanlike.core.torch_private.block_attention import Block
from titanlike.techniques.cp.context_tokens import (
    Call,
    ContextRanks,
    Counted,
    Take,
    call_of,
    counted,
    with_all_tokens,
)

_TOKENS = 2  # the token dimension of queries, keys and values
Mode = tuple[str, bool]  # the name of a module, whether it is training


@dataclass
class Looking:
    """State of the check that finds which module calls count tokens (`context_parallel.py`)."""

    tokens: int  # of a full sequence
    take: Take
    whole: dict[Mode, list[Call]] = field(default_factory=dict)  # calls with full sequences
    alike: dict[str, str] = field(default_factory=dict)  # module -> an equal one that ran


class ContextAttention(TorchFunctionMode):
    """A mode that replaces attention by attention over all context-parallel ranks' tokens."""

    def __init__(self, ranks: ContextRanks) -> None:
        super().__init__()
        self.ranks = ranks
        self.active = True  # False: modules run as without context parallelism
        # called instead of attention with its named arguments, to record them
        self.instead: Callable[[dict[str, Any]], Tensor] | None = None
        # modules that count tokens -> their calls that may, in order
        self.counted: dict[Mode, list[Counted]] = {}
        self.looking: Looking | None = None
        self._place: list[Any] | None = None  # the running one of these, and its calls so far

    def around(self, module: nn.Module, name: str) -> None:
        """Run a module's forward in this mode; call it before all else that replaces forwards."""
        for part in module.modules():
            if getattr(part, "token_wise", False):
                apart: Any = functools.partial(self._apart, part.forward)
                apart.changes_nothing = True  # for `graph.units.call_key`
                part.forward = apart
        module.forward = functools.partial(self._run, name, module, module.forward)

    def counts(self, name: str) -> bool:
        """Whether a module counts tokens."""
        return any(name == other for other, _ in self.counted)

    def _apart(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a token-wise module, which may count the local tokens."""
        if self._place is None:
            return forward(*args, **kwargs)
        place, self._place = self._place, None
        try:
            return forward(*args, **kwargs)
        finally:
            self._place = place

    def _run(
        self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        mode = name, module.training
        args = tuple(map(self._divided, args))
        kwargs = {key: self._divided(value) for key, value in kwargs.items()}
        if not self.active and self.looking is None:
            return forward(*args, **kwargs)
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
        """Let documents among the arguments attend over all tokens."""
        if isinstance(argument, Documents):
            return argument._replace(attend=self._documents)
        if type(argument) in (tuple, list):
            return type(argument)(map(self._divided, argument))
        if type(argument) is dict:
            return {key: self._divided(value) for key, value in argument.items()}
        return argument

    def __deepcopy__(self, _: dict[int, Any]) -> ContextAttention:
        """A copied module keeps the same mode."""
        return self

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and (self.active or self.instead is not None):
            return self.attention(*args, **kwargs)
        if self._place is not None and (call := call_of(function, args, kwargs)) is not None:
            return self._count(call, function, args, kwargs)
        # within a mode torch.compile cannot trace tensor methods written in Python, and looks
        # functions up by name
        name = getattr(function, "__name__", "")
        if name == "unflatten":
            return torch.unflatten(*args, **kwargs)
        return _split(*args, **kwargs) if name == "split" else function(*args, **kwargs)

    def _count(self, call: Call, function: Any, args: Any, kwargs: Any) -> Any:
        assert self._place is not None
        mode, number = self._place
        self._place[1] += 1
        if not self.active:
            assert self.looking is not None
            self.looking.whole.setdefault(mode, []).append(call)
            return function(*args, **kwargs)
        size, take = self.ranks.size, self.ranks.take
        calls = self.counted.setdefault(mode, [])
        if (looking := self.looking) is not None:
            take = looking.take
            if number == len(calls):
                like = looking.alike.get(mode[0], ""), mode[1]
                whole = looking.whole.get(mode) or looking.whole.get(like, [])
                calls.append(
                    counted(whole[number], call, looking.tokens, size)
                    if number < len(whole)
                    else Counted(call.kind)
                )
        if number >= len(calls) or calls[number].kind != call.kind:
            raise self._other_calls(mode[0])
        dims = calls[number].dims
        if not dims:
            return function(*args, **kwargs)
        return with_all_tokens(function, args, kwargs, dims, size, take)

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
        """scaled_dot_product_attention over all ranks' tokens: [B, H or K, t, E] -> [B, H, t, E].

        attn_mask: [..., T or t, T or t]; a dimension of t is this rank's part.
        """
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        if self.instead is not None:
            options |= {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return self.instead({"query": query, "key": key, "value": value, **options})
        ranks = self.ranks
        mask = attn_mask
        if mask is not None and mask.dim() and mask.shape[-1] == key.shape[_TOKENS]:
            mask = _all_tokens(mask, ranks, mask.dim() - 1)
        if ranks.method == "ulysses":
            if mask is not None and mask.dim() > 1 and mask.shape[-2] == query.shape[_TOKENS]:
                mask = _all_tokens(mask, ranks, mask.dim() - 2)
            mask = _of_heads(mask, query.shape[1], ranks)
            options["is_causal"] = mask is None and is_causal

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                options["enable_gqa"] = q.shape[1] != k.shape[1]
                return F.scaled_dot_product_attention(q, k, v, mask, **options)

            return _by_heads(attend, query, key, value, ranks)
        if ranks.method == "ring":
            assert mask is None, "of the ring's blocks none takes a mask"
            return _Ring.apply(query, key, value, ranks, is_causal, scale)
        options["enable_gqa"] = enable_gqa
        key, value = _gathered(key, value, ranks)
        if mask is None and is_causal:
            return _causal(query, key, value, ranks, options)
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == key.shape[_TOKENS]:
            mask = ranks.take(mask, mask.dim() - 2)
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    def _documents(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Any,
        scale: float | None,
        dropout: float,
        sinks: Tensor | None,
    ) -> Tensor:
        if self._place is not None:  # calls in here are not the module's
            return self._apart(self._documents, q, k, v, documents, scale, dropout, sinks)
        ranks, mask = self.ranks, documents._replace(attend=None)
        assert self.active, "on meta documents are not looked at"
        if ranks.method == "ulysses":
            if sinks is not None:
                heads = len(sinks) // ranks.size
                sinks = sinks.narrow(0, ranks.rank * heads, heads)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return undivided_attention(q, k, v, mask, scale, dropout, sinks=sinks)

            return _by_heads(attend, q, k, v, ranks)
        assert ranks.method == "gather", "of the ring's blocks none takes a mask"
        k, v = _gathered(k, v, ranks)
        tokens = k.shape[_TOKENS]
        positions = ranks.take(torch.arange(tokens, device=q.device), 0)
        mask = document_mask(mask, q.shape[0], tokens, positions)
        return undivided_attention(q, k, v, mask, scale, dropout, sinks=sinks)


def _split(
    tensor: Tensor, split_size_or_sections: int | list[int] = 1, dim: int = 0, **named: Any
) -> Any:
    """torch.split and Tensor.split, which name their arguments differently."""
    return torch.ops.aten.split(tensor, named.get("split_size", split_size_or_sections), dim)


# --- gather: all-gather of keys and values --------------------------------------------------------


def _all_tokens(x: Tensor, ranks: ContextRanks, dim: int) -> Tensor:
    gathered = autograd_collective(x, ranks, "all_gather", "reduce_scatter", dim)
    return ranks.in_order(gathered, dim)


def _gathered(k: Tensor, v: Tensor, ranks: ContextRanks) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, in one collective if their shapes are equal."""
    if k.shape != v.shape:
        return _all_tokens(k, ranks, _TOKENS), _all_tokens(v, ranks, _TOKENS)
    k, v = _all_tokens(torch.stack([k, v]), ranks, 1 + _TOKENS).unbind()
    return k, v


def _causal(
    q: Tensor, k: Tensor, v: Tensor, ranks: ContextRanks, options: dict[str, Any]
) -> Tensor:
    """Attend chunk by chunk, to the keys up to each chunk's last query."""
    starts, chunk = ranks.starts(k.shape[_TOKENS])
    results = []
    for number, start in enumerate(starts):
        queries = q.narrow(_TOKENS, number * chunk, chunk)
        keys, values = (x.narrow(_TOKENS, 0, start + chunk) for x in (k, v))
        results.append(block_attention.causal_lower_right(queries, keys, values, **options))
    return torch.cat(results, _TOKENS)


# --- ulysses: all-to-all of heads for tokens ------------------------------------------------------


def repeated(kv_heads: int, size: int) -> int:
    """How often each key/value head must be repeated for `size` ranks to share them."""
    return size // gcd(kv_heads, size)


def heads_not_shareable(heads: int, kv_heads: int, size: int) -> bool:
    """Whether `size` ranks cannot share these heads."""
    return bool(heads % size or heads % (kv_heads * repeated(kv_heads, size)))


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
    if k.shape[-1] == v.shape[-1]:  # one all-to-all: each rank's heads are contiguous
        sizes = [x.shape[1] // ranks.size for x in (q, k, v)]
        packed = torch.cat([x.unflatten(1, (ranks.size, -1)) for x in (q, k, v)], dim=2)
        q, k, v = _to_heads(packed, ranks).split(sizes, dim=1)
    else:
        q, k, v = (_to_heads(x.unflatten(1, (ranks.size, -1)), ranks) for x in (q, k, v))
    y = attend(q, k, v).unflatten(2, (ranks.size, -1)).movedim(2, 0)  # [ranks, B, h, t, E]
    y = autograd_collective(y, ranks, "all_to_all", "all_to_all", 0)
    return y.movedim(0, 1).flatten(1, 2)  # [B, H, t, E]


def _to_heads(x: Tensor, ranks: ContextRanks) -> Tensor:
    """[B, ranks, h, t, E] -> [B, h, T, E], this rank's heads."""
    x = x.movedim(1, 0)  # [ranks, B, h, t, E]
    x = autograd_collective(x, ranks, "all_to_all", "all_to_all", 0)
    return x.movedim(0, 2).flatten(2, 3)


def _of_heads(mask: Tensor | None, heads: int, ranks: ContextRanks) -> Tensor | None:
    """The rank's heads of a mask or bias that may differ between heads."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    size = heads // ranks.size
    return mask.narrow(mask.dim() - 3, ranks.rank * size, size)


# --- ring: keys and values pass from rank to rank while each attends ------------------------------
#
# Each rank has two chunks of the sequence. In causal attention a chunk of queries attends fully to
# earlier chunks of keys, causally to its own, and to no later one: no kernel needs a mask, and each
# rank computes two blocks a step, three in the first, with its own keys.


class _Ring(torch.autograd.Function):
    """q [B, H, t, E], k and v [B, K, t, E] -> [B, H, t, E]. Collective over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ranks: ContextRanks,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        ctx.ranks, ctx.causal, ctx.scale = ranks, causal, scale
        queries = q.chunk(2, _TOKENS)
        partial: list[Block | None] = [None, None]  # by chunk of queries
        held = torch.stack([k, v])
        for step in range(ranks.size):
            receive = _send_on(held, ranks, True) if step < ranks.size - 1 else None
            halves = held.chunk(2, 1 + _TOKENS)
            for own, theirs, same in _pairs(ranks, step, causal):
                keys, values = halves[theirs]
                block = block_attention.forward(queries[own], keys, values, same, scale)
                partial[own] = _added(partial[own], block)
            if receive is not None:
                held = receive()
        blocks = [block for block in partial if block is not None]
        # heads joined, as kernels write them: a model's flatten of these copies nothing
        results = [block.result.to(q.dtype).transpose(1, _TOKENS) for block in blocks]
        result = torch.cat(results, 1).transpose(1, _TOKENS)
        sums = torch.cat([block.sums for block in blocks], _TOKENS)
        ctx.save_for_backward(q, k, v, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks, causal, scale = ctx.ranks, ctx.causal, ctx.scale
        q, k, v, *results = ctx.saved_tensors
        queries = q.chunk(2, _TOKENS)
        gradients = gradient.chunk(2, _TOKENS)
        wholes = [Block(*parts) for parts in zip(*(x.chunk(2, 2) for x in results), strict=True)]
        query_gradients = [torch.zeros_like(half, dtype=torch.float32) for half in queries]
        held = torch.stack([k, v])
        # sum of the gradients of `held` over the ranks that have had it: it follows `held` around
        # the ring, overlapped with the next step's attention, back to its rank
        receive_gradient: Callable[[], Tensor] | None = None
        for step in range(ranks.size):
            last = step == ranks.size - 1
            receive = None if last else _send_on(held, ranks, True)
            halves = held.chunk(2, 1 + _TOKENS)
            held_gradient = torch.zeros_like(held, dtype=torch.float32)
            parts = held_gradient.chunk(2, 1 + _TOKENS)
            for own, theirs, same in _pairs(ranks, step, causal):
                keys, values = halves[theirs]
                query_gradient, *both = block_attention.backward(
                    gradients[own], queries[own], keys, values, wholes[own], same, scale
                )
                query_gradients[own] += query_gradient
                for total, part in zip(parts[theirs], both, strict=True):
                    total += part
            if receive_gradient is not None:
                held_gradient += receive_gradient()
            receive_gradient = _send_on(held_gradient, ranks, not last)
            if receive is not None:
                held = receive()
        assert receive_gradient is not None
        k_gradient, v_gradient = receive_gradient().to(k.dtype)
        return (
            torch.cat(query_gradients, _TOKENS).to(q.dtype),
            k_gradient,
            v_gradient,
            None,
            None,
            None,
        )


def _pairs(ranks: ContextRanks, step: int, causal: bool) -> Iterator[tuple[int, int, bool]]:
    """Yield (chunk of local queries, chunk of the keys held in this step, whether they have the
    same tokens) where queries attend to keys."""
    last = 2 * ranks.size - 1
    source = (ranks.rank - step) % ranks.size
    for own, query in enumerate((ranks.rank, last - ranks.rank)):
        for theirs, key in enumerate((source, last - source)):
            if not causal or query >= key:
                yield own, theirs, causal and query == key


def _added(sum_: Block | None, block: Block) -> Block:
    """Combine attention of the same queries to two sets of keys."""
    if sum_ is None:
        return Block(block.result.float(), block.sums.float())
    sums = torch.logaddexp(sum_.sums, block.sums)
    a, b = ((part.sums - sums).exp().unsqueeze(-1) for part in (sum_, block))
    return Block(sum_.result * a + block.result * b, sums)


def _send_on(x: Tensor, ranks: ContextRanks, beside: bool = False) -> Callable[[], Tensor]:
    """Send to the next rank; the result waits for what the previous rank sent.

    beside: the rank computes before it waits.
    """
    if ranks.group is None or x.is_meta:
        ranks.count(x.nbytes, beside=beside)
        return lambda: torch.empty_like(x)
    result = torch.empty_like(x)
    before, after = (
        dist.get_global_rank(ranks.group, (ranks.rank + way) % ranks.size) for way in (-1, 1)
    )
    sent = dist.P2POp(dist.isend, x, after, ranks.group)
    works = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, result, before, ranks.group)])

    def arrived(_: Tensor = x) -> Tensor:  # keeps x alive until it is sent
        for work in works:
            work.wait()
        return result

    return arrived
