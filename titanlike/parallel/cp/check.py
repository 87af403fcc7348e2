"""Whether a model computes with a part of the tokens what it does with all, before anything starts.

As for tensor parallelism (`parallel/tp/check.py`): a forward runs on meta twice, with whole sequences and
with a rank's part, and of each operation the second run finds whether it gives its part of the result.
Attention alone sees other tokens. So attention that is no scaled_dot_product_attention is found here,
and a convolution or recurrence over tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from titanlike.distributed.placement import Placement
from titanlike.parallel.cp.attention import ContextAttention, Looking
from titanlike.parallel.tp.divided_run import DividedRun
from titanlike.parallel.tp.layout import Division, Layout, Operand, WrongCall, part_of
from titanlike.parallel.tp.seen_run import CallKey, WholeRun, shapes_of, tensors_in

_ATTENTION = "aten::scaled_dot_product_attention"


class TokensMixed(Exception):
    """A call that does not compute each token by itself: where, and why."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}")
        self.module, self.reason = module, reason


class Unchecked(Exception):
    """A forward that meta tensors cannot run as a whole."""


class TokenCheck:
    """Of one model: `whole`, then `parts`."""

    def __init__(
        self, model: nn.Module, key: CallKey, attention: ContextAttention, tokens: int
    ) -> None:
        """key: equal for calls of modules that compute the same, None where that is not known;
        attention: that around the model's modules; tokens: of a whole sequence."""
        self._model, self._key, self._attention = model, key, attention
        self._whole = WholeRun(model, {}, key)
        ranks = attention.ranks.size
        placements = {n: Placement(None, ranks, "never") for n, _ in model.named_parameters()}
        self._placements: Mapping[str, Placement] = placements
        self._run: _PartsRun | None = None
        self._looking = Looking(tokens, self.take)

    def whole(self, forward: Callable[[], Any]) -> None:
        """forward: of whole sequences. Raises Unchecked."""
        run = self._whole
        self._attention.active = False
        self._attention.looking = self._looking
        try:
            with _alone(self._model, run, lambda args, result: None):
                run.output = shapes_of(tensors_in(run.see(forward)))
        except Exception as error:  # whatever a forward raises
            text = str(error).strip().splitlines()[0] if str(error) else repr(error)
            raise Unchecked(text) from error
        finally:
            self._attention.active = True
            self._attention.looking = None
        self._looking.alike = run.alike
        self._run = _PartsRun(self._model, {}, self._key, run.steps, self._placements)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The part that stands in for a rank's tokens of a whole tensor."""
        assert self._run is not None
        return self._run.take(x, dim, self._attention.ranks.size)

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attention.attention(*args, **kwargs)

    def parts(self, forward: Callable[[], Any], trained: Sequence[bool] | None) -> None:
        """forward: of a rank's tokens; trained: of each tensor of the output, whether the loss uses it.
        Raises TokensMixed."""
        run = self._run
        assert run is not None
        self._attention.instead = run.attention
        self._attention.looking = self._looking
        try:
            with _alone(self._model, run, run.tokens_alone):
                output = run.see(forward)
            run.check_output(output, self._whole.output, trained)
        except WrongCall as wrong:
            called = f"calls {run.called}: " if run.called else ""
            raise TokensMixed(run.path, called + wrong.reason) from None
        except Exception as error:  # of the forward's own
            text = str(error).strip().splitlines()[0] if str(error) else ""
            raise TokensMixed(run.path, f"raises {type(error).__name__}: {text}") from error
        finally:
            self._attention.instead = self._attention.looking = None
            calls, modes = self._attention.counted, (True, False)
            for name, like in run.repeated:
                calls |= {
                    (name, mode): calls[like, mode] for mode in modes if (like, mode) in calls
                }
            self._attention.counted = {
                mode: every for mode, every in calls.items() if any(call.dims for call in every)
            }
        for path, drawn in run.draws.items():
            if False in drawn:
                raise TokensMixed(
                    path, "draws random numbers for whole sequences, which ranks have parts of"
                )
        for name, needs in run.needs().items():
            if "never" in needs:
                reason = (
                    "it is used apart from the tokens, and its gradient would count on each rank"
                )
                raise TokensMixed(name, reason)


@contextlib.contextmanager
def _alone(model: nn.Module, run: Any, done: Callable[[Any, Any], None]) -> Iterator[None]:
    """Within it, what modules that compute each token by itself (`token_wise`) do is not looked at."""
    handles = []
    for module in model.modules():
        if getattr(module, "token_wise", False):

            def begin(module: nn.Module, args: Any) -> None:
                run._muted += 1

            def end(module: nn.Module, args: Any, result: Any) -> None:
                run._muted -= 1
                done((module, *args), result)

            handles.append(module.register_forward_pre_hook(begin))
            handles.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _PartsRun(DividedRun):
    def take(self, x: Tensor, dim: int, ranks: int) -> Tensor:
        self._muted += 1
        result = x.narrow(dim, 0, x.shape[dim] // ranks).clone()
        self._muted -= 1
        layout: list[Division | None] = [None] * x.dim()
        layout[dim] = Division("tokens", (x.shape[dim],))
        # each rank's part of the gradient is its own
        self._settle(self._waiting([x]), {"tokens"})
        self._learn(result, tuple(layout))
        return result

    def attention(self, given: dict[str, Any]) -> Tensor:
        """In place of a call of scaled_dot_product_attention."""
        tensors = [x for x in given.values() if isinstance(x, Tensor)]
        if (step := self._find("operation", _ATTENTION, self.path)) is None:
            raise self._lost()
        self.called = "scaled_dot_product_attention"
        if len(tensors) != len(step.shapes):
            raise WrongCall("it is given other tensors than with whole sequences")
        q, k, v, *masks = (
            Operand(whole, tuple(x.shape), self._layout(x, whole))
            for x, whole in zip(tensors, step.shapes, strict=True)
        )
        for x, what in ((q, "queries"), (k, "keys"), (v, "values")):
            if len(x.whole) != 4:
                raise WrongCall(f"its {what} have {len(x.whole)} dimensions, and 4 are expected")
            if not _tokens_at(x.layout, 2):
                raise WrongCall(f"its {what} are not those of the rank's tokens")
        for mask in masks:
            if (
                any(one is not None for one in mask.layout[:-2])
                or not all(one is None or one.kind == "tokens" for one in mask.layout[-2:])
                or all(mask.layout[-2:])
            ):
                raise WrongCall("its mask is not that of the rank's tokens")
        for name in ("is_causal", "scale", "dropout_p"):
            if given[name] != step.given.get(name, given[name]):
                raise WrongCall(
                    f"its {name} is {given[name]}, and {step.given[name]} with all tokens"
                )
        self._muted += 1
        query, value = tensors[0], tensors[2]
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        self._muted -= 1
        self._settle(self._waiting(tensors), {"tokens"})
        self._learn(result, q.layout)
        self.called = ""
        return result

    def tokens_alone(self, given: Any, result: Any) -> None:
        """A module that computes each token by itself is done; given: it, and its arguments."""
        module, x, *_ = given
        self._settle(self._waiting([x, *module.parameters()]), {"tokens"})
        for tensor in tensors_in(result):
            known = self._now(x)
            alike = len(known) == tensor.dim()
            self._learn(tensor, known if alike else None, "constant" if alike else "tokens")

    def check_output(
        self, output: Any, wholes: Sequence[Any], trained: Sequence[bool] | None
    ) -> None:
        tensors = tensors_in(output)
        used = trained if trained is not None and len(trained) == len(tensors) else None
        for at, (tensor, whole) in enumerate(zip(tensors, wholes, strict=True)):
            if used is not None and not used[at]:
                continue
            layout = self._layout(tensor, whole)
            if not _tokens_at(layout, 1):
                wrong = next((one for one in layout if one is not None), None)
                what = "a whole tensor" if wrong is None else part_of(wrong)
                raise WrongCall(f"it returns {what}, and the loss is of tokens [B, T, ...]")


def _tokens_at(layout: Layout, dim: int) -> bool:
    """Whether a rank's tokens are along this dimension, and all else is whole."""
    others = [one for at, one in enumerate(layout) if at != dim]
    own = layout[dim] if dim < len(layout) else None
    return own is not None and own.kind == "tokens" and own.plain and not any(others)
