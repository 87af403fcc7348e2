"""Whether a model computes with a part of the tokens what it does with all, before anything starts.

As for tensor parallelism (`parallel/tp/check.py`): a forward runs on meta twice, with whole sequences and
with a rank's part, and of each operation the second trace finds whether it gives its part of the result.
Attention alone sees other tokens. So attention that is no scaled_dot_product_attention is found here,
and a convolution or recurrence over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from titanlike.distributed.placement import Placement
from titanlike.parallel.cp.attention import ContextAttention, Looking
from titanlike.parallel.tp.check import first_line
from titanlike.parallel.tp.plan import Entry
from titanlike.parallel.tp.shards import Layout, Shape, Shard, ShardingError
from titanlike.parallel.tp.traces import ReferenceTrace, ShardedTrace, shapes_of, tensors_in


class Unchecked(Exception):
    """A forward that meta tensors cannot run as a whole."""


class TokenCheck:
    """Of one model: `whole`, then `parts`."""

    def __init__(self, model: nn.Module, attention: ContextAttention, tokens: int) -> None:
        """attention: that around the model's modules; tokens: of a whole sequence."""
        self._model, self._attention = model, attention
        # what they do is not looked at: to tensor parallelism they are leaves, too
        self._token_wise: dict[str, Entry] = {}
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{other}.") for other in self._token_wise)
            if getattr(module, "token_wise", False) and not inside:
                self._token_wise[name] = Entry(name, "sequence")
        self._looking = Looking(tokens, self.take)

    def whole(self, forward: Callable[[], Any]) -> None:
        """forward: of whole sequences. Raises Unchecked."""
        trace = ReferenceTrace(self._model, self._token_wise)
        self._attention.active = False
        self._attention.looking = self._looking
        try:
            self._outputs = shapes_of(tensors_in(trace.run(forward)))
        except Exception as error:  # whatever a forward raises
            raise Unchecked(first_line(error) or repr(error)) from error
        finally:
            self._attention.active = True
            self._attention.looking = None
        self._looking.alike = trace.alike
        copies = Placement(None, self._attention.ranks.size)
        placements = {name: copies for name, _ in self._model.named_parameters()}
        self._trace = _TokenTrace(self._model, self._token_wise, trace.steps, placements)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The part that stands in for a rank's tokens of a whole tensor."""
        return self._trace.take(x, dim, self._attention.ranks.size)

    def parts(self, forward: Callable[[], Any], trained: Sequence[bool] | None) -> None:
        """forward: of a rank's tokens; trained: of each tensor of the output, whether the loss uses it.
        Raises ShardingError for a call that does not compute each token by itself."""
        trace, attention = self._trace, self._attention
        attention.instead, attention.looking = trace.attention, self._looking
        try:
            trace.check_outputs(tensors_in(trace.run(forward)), self._outputs, trained)
            trace.complete([])
        except ShardingError as error:
            called = f"calls {trace.called}: " if trace.called else ""
            raise ShardingError(called + error.reason, module=trace.path) from None
        except Exception as error:  # of the forward's own
            reason = f"raises {type(error).__name__}: {first_line(error)}"
            raise ShardingError(reason, module=trace.path) from error
        finally:
            attention.instead = attention.looking = None
            calls = attention.counted
            for name, like in trace.repeated:
                modes = [mode for mode in (True, False) if (like, mode) in calls]
                calls |= {(name, mode): calls[like, mode] for mode in modes}
            attention.counted = {
                mode: every for mode, every in calls.items() if any(call.dims for call in every)
            }
        if path := next((path for path, parts in trace.draws.items() if False in parts), None):
            reason = "draws random numbers for whole sequences, which ranks have parts of"
            raise ShardingError(reason, module=path)
        if name := next((name for name, needs in trace.needs.items() if "never" in needs), None):
            reason = "it is used apart from the tokens, and its gradient would count on each rank"
            raise ShardingError(reason, module=name)


class _TokenTrace(ShardedTrace):
    def take(self, x: Tensor, dim: int, ranks: int) -> Tensor:
        with self.muted():
            result = x.narrow(dim, 0, x.shape[dim] // ranks).clone()
        layout: list[Shard | None] = [None] * x.dim()
        layout[dim] = Shard("tokens", (x.shape[dim],))
        # each rank's part of the gradient is its own
        self._resolve(self._pending([x]), {"tokens"})
        self._track(result, tuple(layout))
        return result

    def attention(self, given: dict[str, Any]) -> Tensor:
        """In place of a call of scaled_dot_product_attention."""
        tensors = [x for x in given.values() if isinstance(x, Tensor)]
        step = self._must_find("operation", "aten::scaled_dot_product_attention", self.path)
        self.called = "scaled_dot_product_attention"
        q, k, v, *masks = self.operands(tensors, step)
        for x, what in ((q, "queries"), (k, "keys"), (v, "values")):
            if len(x.whole) != 4:
                raise ShardingError(
                    f"its {what} have {len(x.whole)} dimensions, and 4 are expected"
                )
            if not _tokens_at(x.layout, 2):
                raise ShardingError(f"its {what} are not those of the rank's tokens")
        for mask in masks:
            pairs = mask.layout[-2:]
            others = any(mask.layout[:-2]) or any(
                s is not None and s.kind != "tokens" for s in pairs
            )
            if others or all(pairs):
                raise ShardingError("its mask is not that of the rank's tokens")
        for name in ("is_causal", "scale", "dropout_p"):
            here, there = given[name], step.given.get(name, given[name])
            if here != there:
                raise ShardingError(f"its {name} is {here}, and {there} with all tokens")
        query, value = tensors[0], tensors[2]
        with self.muted():
            result = query.new_empty(*query.shape[:-1], value.shape[-1])
        self._resolve(self._pending(tensors), {"tokens"})
        self._track(result, q.layout)
        self.called = ""
        return result

    def check_outputs(
        self, outputs: list[Tensor], wholes: tuple[Shape, ...], trained: Sequence[bool] | None
    ) -> None:
        used = trained if trained is not None and len(trained) == len(outputs) else None
        for at, (tensor, whole) in enumerate(zip(outputs, wholes, strict=True)):
            if used is not None and not used[at]:
                continue
            layout = self.layout(tensor, whole)
            if not _tokens_at(layout, 1):
                wrong = next(filter(None, layout), None) or "a whole tensor"
                raise ShardingError(f"it returns {wrong}, and the loss is of tokens [B, T, ...]")


def _tokens_at(layout: Layout, dim: int) -> bool:
    """Whether a rank's tokens are along this dimension, and all else is whole."""
    others = [shard for at, shard in enumerate(layout) if at != dim]
    shard = layout[dim] if dim < len(layout) else None
    return shard is not None and shard.kind == "tokens" and shard.plain and not any(others)
