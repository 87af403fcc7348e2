"""The cost of one recorded node, run alone on meta: FLOPs and saved bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from titanlike.costs.fused_attention import FusedAttention
from titanlike.graph.pytree import tree_flatten, tree_map
from titanlike.graph.recording import DEVICE, Node
from titanlike.torch_private.operators import TorchDispatchMode

# What scaled_dot_product_attention on meta stands for, on one device or another.
_ATTENTION = (
    "aten._scaled_dot_product_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
    "flex_attention",
)
META = torch.device("meta")
EXPERTS_PRODUCT = "titanlike.expert_linear"  # the operator of `models/expert_linear.py`


def flops(node: Node, model: nn.Module) -> int:
    """FLOPs of forward and backward: matrix products, convolutions and attention (without the
    saving of causal kernels)."""
    with FlopCounterMode(display=False) as counter:
        Call(node, module_of(node, model), META, empty_like).forward_backward()
    return counter.get_total_flops()


def saved_bytes(node: Node, model: nn.Module) -> int:
    """Bytes that the forward saves for the backward, without parameters, with fused attention."""
    module = module_of(node, model)
    call = Call(node, module, META, empty_like)
    weights = [*(module.parameters() if module else ()), *call.weights]
    of_weights = {id(p.untyped_storage()): p.untyped_storage() for p in weights}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so ids stay unique

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in of_weights:
            saved[id(storage)] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, FusedAttention():
        call.forward()
    return sum(storage.nbytes() for storage in saved.values())


def recomputed_bytes(node: Node, model: nn.Module, save: Sequence[str]) -> int:
    """Bytes that are kept of a unit whose forward runs again in the backward: what it is given, and
    the results of the operators `save` (as "aten.mm")."""
    call = Call(node, module_of(node, model), META, empty_like)
    given = sum(use.tensor.nbytes for use in dict.fromkeys(node.input_nodes) if _is_made(use))
    if not save:
        return given
    results = _Results(save)
    attention = FusedAttention()
    with results, attention:
        call.forward()
    fused = any(fnmatchcase(kernel, name) for name in save for kernel in _ATTENTION)
    return given + results.nbytes + (attention.nbytes if fused else 0)


def queued_bytes(node: Node, model: nn.Module, compiled: bool) -> int:
    """Bytes of the inputs of a unit's linear layers and of the gradients of their results.

    compiled: each layer queues a copy of an input that several share.
    """
    module = module_of(node, model)
    if module is None:
        return 0
    storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so ids stay unique

    def add(_: nn.Module, args: Any, kwargs: Any, result: Tensor) -> None:
        for tensor in (*args, *kwargs.values(), result):
            storage = tensor.untyped_storage()
            storages[len(storages) if compiled else id(storage)] = storage

    linear = [part for part in module.modules() if type(part) is nn.Linear]
    trained = [part for part in linear if all(p.requires_grad for p in part.parameters())]
    handles = [part.register_forward_hook(add, with_kwargs=True) for part in trained]
    try:
        with FusedAttention():
            Call(node, module, META, empty_like).forward()
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for storage in storages.values())


class Call:
    """A node's function, with its own copies of the arguments."""

    def __init__(
        self,
        node: Node,
        module: nn.Module | None,
        device: torch.device,
        make: Callable[[Tensor], Tensor],
    ) -> None:
        self._node, self._device = node, device
        self._inputs = {use: make(use.tensor) for use in dict.fromkeys(node.input_nodes)}
        self.inputs = [*self._inputs.values()]
        self.weights = [self._inputs[use] for use in self._inputs if _is_weight(use)]
        if node.chunked_head is not None:
            self._function = node.chunked_head.loss_function(module)
        else:
            self._function = node.target if module is None else module
        wanted = [*self._inputs.values(), *(module.parameters() if module else ())]
        self._wanted = [tensor for tensor in wanted if tensor.requires_grad]

    def arguments(self) -> Any:
        """For a forward: (args, kwargs)."""

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Node):
                return self._device if leaf is DEVICE else leaf
            tensor = self._inputs[leaf]
            # a clone: a leaf that requires a gradient must not be changed in place
            return tensor.clone() if tensor.requires_grad and not _is_weight(leaf) else tensor

        return tree_map((self._node.args, self._node.kwargs), real)

    def forward(self, arguments: Any = None) -> list[Tensor]:
        """The results that require a gradient."""
        args, kwargs = self.arguments() if arguments is None else arguments
        with torch.set_grad_enabled(self._node.grad_enabled), self._device:
            result = self._function(*args, **kwargs)
        leaves, _ = tree_flatten(result)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def forward_backward(self) -> None:
        results = self.forward()
        if results and self._wanted:
            ones = [torch.ones_like(result) for result in results]
            torch.autograd.grad(results, self._wanted, ones, allow_unused=True)


def module_of(node: Node, model: nn.Module) -> nn.Module | None:
    return model.get_submodule(node.target) if node.kind == "unit" else None


def _is_made(node: Node) -> bool:
    """Whether it is a value of the forward whose gradient is computed: no weight, no mask."""
    return node.value is not None and node.value.requires_grad and not _is_weight(node)


def _is_weight(node: Node) -> bool:
    return isinstance(node.value, nn.Parameter)


def empty_like(tensor: Tensor) -> Tensor:
    """Without values, with the same need of a gradient; a parameter itself."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


def random_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Random floats; 0 as integer, which is a valid index anywhere; True."""
    if tensor.is_floating_point():
        scale = 0.02 if isinstance(tensor, nn.Parameter) else 1.0
        values = scale * torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return values.requires_grad_(tensor.requires_grad)
    full = 1 if tensor.dtype == torch.bool else 0
    return torch.full(tensor.shape, full, dtype=tensor.dtype, device=device)


class _Results(TorchDispatchMode):
    """Counts the bytes of the results of some operators."""

    def __init__(self, operators: Sequence[str]) -> None:
        super().__init__()
        self.nbytes = 0
        self._operators = operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        called = str(function.overloadpacket)
        called = "aten.mm" if called == EXPERTS_PRODUCT else called
        if any(fnmatchcase(called, name) for name in self._operators):
            leaves = tree_flatten(result)[0]
            self.nbytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result
