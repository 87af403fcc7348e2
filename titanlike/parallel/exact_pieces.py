"""Sequences in pieces: what lets `numerics=exact` leave the same bits with cp and without.

A cp rank has a part of each sequence. What a kernel computes of another number of tokens may have
other bits, and so has a sum over them. So with `numerics.parts=p` each layer computes 1/p of a
sequence at a time in every layout: a module with parameters a piece of the tokens, attention a part
of the heads, the loss a piece of the targets. A rank of cp has p / cp of the pieces. The gradient of
a piece is a leaf of its own in the tree of `exact.py`.

Operations on single elements and on rows do not depend on how many there are, as long as a tensor
fills whole vector registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from titanlike.config.schema import Config
from titanlike.distributed.placement import experts_of
from titanlike.graph.model_graph import ModelGraph
from titanlike.graph.recording import Node, tensors, tree_flatten, with_values
from titanlike.optim.loss import Loss, logits_of
from titanlike.parallel.context_attention import ContextAttention, undividable
from titanlike.parallel.context_tokens import ContextRanks

# on CPUs two vector registers at a time, of at most 64 bytes: what is left over at the end of a
# tensor is computed by other instructions
_REGISTERS = 128
_TOKEN_WISE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


class Pieces:
    """Modules with parameters, each of which computes its input in pieces."""

    tokens = 0  # of this rank's part of the sequences that come

    def __init__(self, parts: int, cp: int) -> None:
        self.count = parts // cp  # of this rank
        # cp ranks attend in parts where they exchange heads
        ranks = ContextRanks(1, 0, method="ulysses", parts=parts)
        self._attention = ContextAttention(ranks) if cp == 1 else None
        # of a parameter of a module: the one that it computes with, and for each piece a leaf of
        # autograd in the same memory
        self._leaves: dict[tuple[nn.Module, str], tuple[Tensor, list[nn.Parameter]]] = {}

    def on_stage(self, stage: nn.Module, units: Sequence[str]) -> None:
        """Replace the forwards of a stage's modules."""
        for _, module in _with_parameters(stage):
            module.forward = partial(self._run, module, module.forward)
        if self._attention is not None:
            for name in units:
                self._attention.around(stage.get_submodule(name), name)

    def take(self, places: Sequence[tuple[nn.Module, str]]) -> dict[tuple[int, int], Tensor | None]:
        """The gradients of parameters of modules, by (piece, place); afterwards there are none."""
        found: dict[tuple[int, int], Tensor | None] = {}
        for at, place in enumerate(places):
            for piece, leaf in enumerate(self._leaves.get(place, (None, ()))[1]):
                found[piece, at], leaf.grad = leaf.grad, None
        return found

    def _run(
        self, module: nn.Module, forward: Callable[..., Tensor], x: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        dim = token_dim(x, self.tokens)
        if dim is None:  # outside of training, as of a text that is continued
            assert not torch.is_grad_enabled(), "checked by the plan"
            return forward(x, *args, **more)
        parameters: Any = module._parameters
        before, results = dict(parameters), []
        try:
            for at, piece in enumerate(x.split(x.shape[dim] // self.count, dim)):
                if torch.is_grad_enabled():
                    for name, weight in before.items():
                        if weight is not None and weight.requires_grad:
                            parameters[name] = self._leaf(module, name, weight, at)
                results.append(_result(forward(_plain(piece), *args, **more)))
        finally:
            parameters.update(before)
        return torch.cat(results, dim)

    def _leaf(self, module: nn.Module, name: str, weight: Tensor, at: int) -> nn.Parameter:
        known, leaves = self._leaves.get((module, name), (None, []))
        if known is not weight:
            leaves = [nn.Parameter(weight.detach()) for _ in range(self.count)]
            self._leaves[module, name] = weight, leaves
        return leaves[at]


def _plain(x: Tensor) -> Tensor:
    """The same values row after row, from the begin of a vector register on: kernels may compute
    with others in another order."""
    aligned = x.storage_offset() * x.element_size() % _REGISTERS == 0
    return x if aligned and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _result(y: Tensor) -> Tensor:
    """The result of a kernel, whose backward is given such a gradient."""
    if y.requires_grad:
        y.register_hook(_plain)
    return y


def attend_in_parts(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    count: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attention of heads [B, H, T, E], so many groups of them one after the other."""
    groups = zip(*(x.chunk(count, 1) for x in (q, k, v)), strict=True)
    return torch.cat([_result(attend(*map(_plain, group))) for group in groups], 1)


class LossInPieces(Loss):
    """A loss of each token, of one piece of the targets after the other."""

    def __init__(self, loss: Loss, pieces: Pieces) -> None:
        super().__init__()
        self._loss, self._pieces = loss, pieces
        self._kept: list[Tensor] = []

    def __call__(self, output: Any, targets: Tensor) -> Tensor:
        count, total = self._pieces.count, self._loss.total_now()
        pairs = zip(logits_of(output).chunk(count, 1), targets.chunk(count, 1), strict=True)
        each = torch.stack([total(_plain(x), goals) for x, goals in pairs]) * self.scale
        self._kept.extend(each.detach())
        return each.sum()

    def each(self, output: Any, targets: Tensor) -> Tensor:
        return self._loss.each(output, targets)

    def count(self, targets: Tensor) -> Tensor | None:
        return self._loss.count(targets)

    def take(self) -> list[Tensor]:
        """Of each microbatch since the last call the loss of each piece."""
        kept, self._kept = self._kept, []
        return kept


def token_dim(x: Tensor, tokens: int) -> int | None:
    """The dimension of tokens of a module's input: the one before the last that has that size,
    behind the batch's; of ids the last. None = there is none, or there are several."""
    if x.is_floating_point():
        dims = range(min(1, max(0, x.dim() - 2)), x.dim() - 1)
    else:
        dims = range(x.dim() - 1, x.dim())
    found = [dim for dim in dims if x.shape[dim] == tokens]
    return found[0] if len(found) == 1 else None


def _with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters themselves."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield name, module


# --- before a run ---------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a module that has parameters itself, on meta."""

    name: str
    module: nn.Module
    given: list[Tensor]
    result: Any


def reasons_against(config: Config, model_graph: ModelGraph) -> list[str]:
    """Why a model cannot compute in `numerics.parts`; [] = it can."""
    model, fields, parts = model_graph.model, model_graph.fields, config.numerics.parts
    recording = model_graph.recording(fields, True)
    nodes, (leaves, _) = recording.nodes, tree_flatten(recording.output)
    # with what is returned the loss computes row by row
    returned = {leaf.target for leaf in leaves if isinstance(leaf, Node)}
    weights = dict(model.named_parameters(remove_duplicate=False))
    tokens = fields["inputs"].shape[0] // config.cp if fields["inputs"].shape else 0  # of a rank
    output, reasons = logits_of(model_graph.meta_output(fields, True)), []
    least = 3 if config.loss.name == "cross_entropy" else 2
    if output.dim() < least or output.shape[1] != tokens:
        reasons.append(f"it returns {[*output.shape]}, and the loss is of {tokens} tokens each")
    if experts_of(model):
        reasons.append("its experts compute the tokens of all pieces together")
    for node in nodes:
        if node.random:
            reasons.append(f"its {node.name} draws random numbers, for all pieces together")
        elif node.kind == "weight" and node.target in weights:
            reasons.append(f"its {node.target} is used outside of the module that has it")
        elif node.target is F.scaled_dot_product_attention:
            reasons.append("it calls attention outside of its blocks")
    if reasons:
        return [*dict.fromkeys(reasons)]
    model.train()
    looking = _Looking(model, parts if config.cp == 1 else 0)  # else the method of cp says it
    try:
        for unit in (node for node in nodes if node.kind == "unit"):
            looking.run(unit)
    except Exception as error:  # whatever a forward raises
        text = (str(error).strip().splitlines() or [repr(error)])[0]
        return [f"its {unit.target} cannot be called on meta tensors alone: {text}"]
    checked: dict[str, str] = {}  # by what a module prints
    for call in looking.calls:
        if (printed := f"{call.module} {[x.shape for x in call.given]}") not in checked:
            filled = call.name not in returned
            checked[printed] = _reason(call, tokens, parts // config.cp, filled)
    return [*dict.fromkeys(filter(None, (*looking.reasons, *checked.values())))]


class _Looking(TorchFunctionMode):
    """Notes what units do that run on meta."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        """parts: of heads; 0 = it is not asked whether they can be divided."""
        super().__init__()
        self._model, self._parts = model, parts
        self._owner = {id(p): n for n, m in _with_parameters(model) for p in m._parameters.values()}
        self._inside = 0  # modules with parameters
        self.calls: list[_Call] = []
        self.reasons: list[str] = []

    def run(self, unit: Node) -> None:
        """Run a unit as it was recorded."""
        module = self._model.get_submodule(unit.target)
        values = {node: node.value for node in unit.input_nodes}
        args, kwargs = with_values((unit.args, unit.kwargs), values, torch.device("meta"))
        with ExitStack() as stack:
            for name, part in _with_parameters(module):
                path = f"{unit.target}.{name}".rstrip(".")
                stack.callback(part.register_forward_pre_hook(self._enter).remove)
                leave = partial(self._leave, path)
                stack.callback(part.register_forward_hook(leave, with_kwargs=True).remove)
            with self, torch.device("meta"):
                module(*args, **kwargs)

    def _enter(self, *_: Any) -> None:
        self._inside += 1

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        self._inside -= 1
        self.calls.append(_Call(name, module, tensors(args, kwargs), result))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = tensors(args, kwargs)
        if function is F.scaled_dot_product_attention:
            self._attention(given[0], given[1], kwargs.get("dropout_p", 0.0))
        if not self._inside and isinstance(result, Tensor) and result.requires_grad:
            names = (self._owner[id(x)] for x in given if id(x) in self._owner)
            self.reasons += [f"parameters of its {name} are used outside of it" for name in names]
        return result

    def _attention(self, q: Tensor, k: Tensor, dropout: float) -> None:
        if dropout:
            self.reasons.append("its attention has dropout")
        if self._parts and q.dim() != 4:
            self.reasons.append("a call of attention has no dimension of heads")
        elif self._parts and undividable(q.shape[1], k.shape[1], self._parts):
            heads = f"{q.shape[1]} heads and {k.shape[1]} key/value heads"
            self.reasons.append(f"{heads} cannot be divided into numerics.parts={self._parts}")


def _reason(call: _Call, tokens: int, count: int, filled: bool) -> str:
    """Why a module cannot compute a rank's tokens in so many pieces; "" = it can. filled: whether a
    piece must fill registers."""
    name, module, given, result = call
    dim = token_dim(given[0], tokens) if given else None
    if next(module.children(), None) is not None:
        return f"its {name} has parameters beside modules"
    if len(given) != 1 or not isinstance(result, Tensor):
        return f"its {name} is not called with one tensor, for another one"
    if dim is None or dim >= result.dim() or result.shape[dim] != tokens:
        shapes = f"{[*given[0].shape]} for {[*result.shape]}"
        return f"its {name} is called with {shapes}: which are the {tokens} tokens is not known"
    size, full = result.numel() // count, _REGISTERS // result.element_size()
    if filled and size % full:
        text = f"a piece of what its {name} returns has {size} elements, no multiple of {full}"
        return f"{text}, which fill vector registers"
    known = isinstance(module, _TOKEN_WISE)
    wise = known or _is_token_wise(module, given[0], dim)
    return "" if wise else f"its {name} does not compute each token by itself"


def _is_token_wise(module: nn.Module, like: Tensor, dim: int) -> bool:
    """Whether a module gives of four random tokens what it gives of each alone."""
    shape = [4 if at == dim else size for at, size in enumerate(like.shape)]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        real = {
            name: (torch.rand(tensor.shape) + 0.5).to(tensor.dtype)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        x = torch.rand(shape).to(like.dtype)
        try:
            alone = [functional_call(module, real, (token,)) for token in x.split(1, dim)]
            together = functional_call(module, real, (x,))
            return torch.allclose(together.float(), torch.cat(alone, dim).float(), rtol=1e-2)
        except Exception:  # whatever a forward raises
            return False
