"""What real ranks ask of their process groups, as `rehearse` records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.runs import train_one
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import Mesh, axes_along
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.recorded_ranks import (
    _OBJECTS,
    _REDUCTIONS,
    Call,
    Recorder,
    _of_objects,
    _reducing,
    described,
    operation_of,
)
from titanlike.core.training import session

Asked = tuple[str, tuple[int, ...], Any, str, int]


def asked(calls: list[Call]) -> list[Asked]:
    """What can be compared: not the store's barriers, nor messages of objects; of an exchange between
    experts not the sizes, which depend on the routing."""
    return [
        (
            call.operation,
            call.ranks,
            call.sizes if call.operation != "all_to_all" else (),
            call.detail,
            call.peer,
        )
        for call in calls
        if call.group != "store" and "objects" not in call.operation + call.detail
        # torch's runtime asks its neighbours first, with one number
        if call.operation != "new_group" and call.sizes != (((1,), "int32"),)
    ]


def calls_of_ranks(config: Config, worker: Worker) -> list[Asked]:
    """Train, and return what this rank asked from its mesh on."""
    recorder = Recorder(worker.rank, worker.world_size, partial(axes_along, config), {})
    opened, quiet = session.open_mesh, [0]
    with ExitStack() as stack:

        def open_mesh(*args: Any) -> Mesh:
            mesh = opened(*args)
            stack.enter_context(_recording(recorder, quiet))
            return mesh

        stack.enter_context(patch.object(session, "open_mesh", open_mesh))
        train_one(config, worker)
    return asked(recorder.program.calls)


@contextmanager
def _recording(recorder: Recorder, quiet: list[int]) -> Iterator[None]:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if function.namespace == "c10d" and operation_of(function) and not quiet[0]:
                leaves = tree_leaves((args, kwargs))
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                operation, group, more = described(function, args, kwargs, recorder.reduction)
                recorder.add(operation, group, tensors if operation != "barrier" else (), **more)
            own = OPDEFS.get(function._schema.name)  # which may communicate
            if own is not None and not any(getattr(arg, "is_meta", False) for arg in args):
                with self:
                    return own._init_fn(*args, **kwargs)
            return function(*args, **kwargs)

    def noted(name: str) -> Callable[..., Any]:
        right, note = getattr(dist, name), _of_objects(recorder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not quiet[0]:
                note(
                    *[_copied(each) for each in args], **{k: _copied(v) for k, v in kwargs.items()}
                )
            quiet[0] += 1
            try:
                return right(*args, **kwargs)
            finally:
                quiet[0] -= 1

        return call

    with ExitStack() as stack:
        for name in _OBJECTS:
            stack.enter_context(patch.object(dist, name, noted(name)))
        for name in _REDUCTIONS:
            stack.enter_context(patch.object(dist, name, _reducing(recorder, getattr(dist, name))))
        stack.enter_context(Passing())
        yield


def _copied(value: Any) -> Any:
    return [*value] if isinstance(value, list) else value
