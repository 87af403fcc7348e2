"""One rank of a job without the others, whose communication is recorded.

Large tensors have no memory (fake tensors); small ones are real, so that what the host reads is a
number. A small result of fake tensors gets a value that is made up, and counts as different on each
rank until a collective has made it the same.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from titanlike.core.torch_private.fake_ranks import fake_tensors, without_peers
from titanlike.core.torch_private.operators import arguments_of, written_by
from titanlike.core.torch_private.tensors import tensors_in

_SMALL = 4096  # elements of the largest tensor of floating-point numbers that has memory
_REAL = 2**22  # of integers: a batch of data

# collectives and messages; operators of the namespace c10d begin with these, apart from underscores
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
_KINDS += ("gather", "scatter", "barrier", "send", "recv")
_SAME_ON_ALL = ("all_reduce", "all_gather", "broadcast")  # results
_OBJECTS = [name for name in dir(dist) if "_object" in name] + ["monitored_barrier"]
_REDUCTIONS = [n for n in dir(dist) if n.startswith(("all_reduce", "reduce")) and n != "reduce_op"]
_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__}
_READS |= {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_CALLER = os.path.join(_PACKAGE, "proof", "")  # which runs the ranks
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


@dataclass(frozen=True)
class Call:
    """A collective or message that a rank asks for."""

    operation: str
    group: str  # its axes in words, and a number if several groups have them
    axes: tuple[str, ...]  # along which its ranks differ
    ranks: tuple[int, ...]  # of the group
    sizes: tuple[tuple[tuple[int, ...], str], ...] = ()  # (shape, dtype) of each tensor
    detail: str = ""  # root, reduction
    peer: int = -1  # rank of a message's other end
    splits: tuple[tuple[int, ...], ...] = ()  # of an all-to-all: what is received, and sent
    line: str = ""  # the innermost line outside of torch
    user_line: str = ""  # the innermost one outside of titanlike, too
    phase: str = ""
    queue: str = ""  # "" = the training thread
    batch: int = -1  # messages with the same number are begun together


@dataclass
class Program:
    """What a rank asks for, in order, and what its host reads of tensors."""

    rank: int
    calls: list[Call] = field(default_factory=list)
    # line -> axes along which the values may differ; of values that are not known beforehand
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    results: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)  # of collectives


class _Group(NamedTuple):
    name: str  # as in `Call`
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


class Recorder:
    """Records what this process, as one rank, asks of its process groups.

    axes_along: maps the ranks of a group to the axes along which they differ. objects: what ranks have
    broadcast, by group and number of the call. flipped: a line; the values that it reads are `other`,
    while the results of collectives are those of `before`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        axes_along: Callable[[Sequence[int]], tuple[str, ...]],
        objects: dict[tuple[str, int], Any],
        flipped: str = "",
        other: float = 0.0,
        before: Program | None = None,
    ) -> None:
        self.program, self.world_size, self.objects = Program(rank), world_size, objects
        self.phase = self.queue = ""
        self.step = 0
        self.reduction = ""  # of the call in progress: an operator's is opaque
        self.unknown = 1.0  # floating-point numbers that are made up
        self._axes_along = axes_along
        self._store = _Group("store", axes_along(range(world_size)), tuple(range(world_size)))
        self.every = frozenset(self._store.axes)
        self._flipped, self._other, self._before = flipped, other, before
        self._groups: dict[str, _Group] = {}  # by torch's name
        self._made: Counter[tuple[str, ...]] = Counter()  # groups by axes
        self._numbers: Counter[str] = Counter()  # calls by group
        # storage -> axes
        self._differs: WeakKeyDictionary[torch.UntypedStorage, frozenset[str]] = WeakKeyDictionary()
        self.batch = -1  # of the messages that are being begun together

    # --- calls -------------------------------------------------------------------------------

    def know(self, group: dist.ProcessGroup) -> _Group:
        """Name a group when it is made, or first used."""
        if group.group_name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            axes = self._axes_along(ranks)
            self._made[axes] += 1
            name = " x ".join(axes) or "alone"
            name += f" #{self._made[axes]}" * (self._made[axes] > 1)
            self._groups[group.group_name] = _Group(name, axes, ranks)
        return self._groups[group.group_name]

    def add(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        tensors: Sequence[Tensor] = (),
        **more: Any,
    ) -> tuple[str, int]:
        """Record a call; returns the group's name, and the call's number in it. group: None = the
        job's store."""
        name, axes, ranks = self._store if group is None else self.know(group)
        number = self._numbers[name]
        self._numbers[name] += 1
        if len(ranks) > 1:
            sizes = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
            line, user_line = lines()
            more |= {"line": line, "user_line": user_line, "batch": self.batch}
            more |= {"phase": self.phase, "queue": self.queue}
            self.program.calls.append(Call(operation, name, axes, ranks, sizes, **more))
        return name, number

    def finish(
        self,
        operation: str,
        key: tuple[str, int],
        group: dist.ProcessGroup,
        tensors: Sequence[Tensor],
    ) -> None:
        """Note what a collective has made of tensors."""
        axes, real = frozenset(self.know(group).axes), []
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                real.append(tensor)
            if operation not in _SAME_ON_ALL:
                self.set_differs(tensor, self.differs(tensor) | axes)
            elif self.differs(tensor):
                self.set_differs(tensor, self.differs(tensor) - axes)
        if self._before is not None:
            for tensor, value in zip(real, self._before.results.get(key, ()), strict=False):
                if tensor.shape == value.shape:
                    tensor.copy_(value)
        elif all(tensor.numel() <= _SMALL for tensor in real):
            self.program.results[key] = [tensor.clone() for tensor in real]

    # --- values ------------------------------------------------------------------------------

    def differs(self, tensor: Tensor) -> frozenset[str]:
        """The axes along which values may differ that are not known beforehand."""
        default = self.every if isinstance(tensor, FakeTensor) else frozenset()
        return self._differs.get(tensor.untyped_storage(), default)

    def set_differs(self, tensor: Tensor, axes: frozenset[str]) -> None:
        self._differs[tensor.untyped_storage()] = axes

    def is_made_up(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or tensor.untyped_storage() in self._differs

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A real tensor in place of a fake one: of ones, or zeros if they are integers."""
        value = self.unknown if tensor.is_floating_point() else 0
        made = torch.full(tensor.shape, value, dtype=tensor.dtype)
        self.set_differs(made, self.differs(tensor))
        return made

    def read(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a function by which the host reads a tensor's values."""
        if self.is_made_up(tensor):
            axes, (line, user_line) = self.differs(tensor), lines()
            line = user_line or line
            self.program.reads[line] = self.program.reads.get(line, frozenset()) | axes
            if isinstance(tensor, FakeTensor):
                tensor = self.stand_in(tensor)
            if line == self._flipped:
                number = self._other if tensor.is_floating_point() else self._other == 1e9
                tensor = torch.full_like(tensor, number)
        return function(tensor, *args, **kwargs)


@functools.cache
def operation_of(function: Any) -> str:
    """The collective or message that an operator of c10d begins; "" for none."""
    name = function._opname.replace("_", "")
    return next((kind for kind in _KINDS if name.startswith(kind.replace("_", ""))), "")


@functools.cache
def _is_skipped(file: str) -> bool:
    """Whether a file's lines tell a user nothing: torch's, its fences', and Python's own."""
    if file.startswith((_TORCH, "<", os.path.dirname(__file__) + os.sep)):
        return True
    return file.startswith(_LIBRARY) and "site-packages" not in file


def lines() -> tuple[str, str]:
    """(the innermost line outside of torch, the innermost one outside of titanlike, too), as
    FILE:LINE; the latter "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None and not frame.f_code.co_filename.startswith(_CALLER):
        name = frame.f_code.co_filename
        if not _is_skipped(name):
            here = f"{os.path.relpath(name)}:{frame.f_lineno}"
            if not name.startswith(_PACKAGE):
                return found or here, here
            found = found or here
        frame = frame.f_back
    return found, ""


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.fake = fake_tensors()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = FakeTensor, *(k for k in types if k.__torch_dispatch__ is Tensor.__torch_dispatch__)
        if any(kind not in plain for kind in types):
            return NotImplemented  # a DTensor's own operators come here again
        tensors = tensors_in(args, kwargs)
        namespace, name = function.namespace, function._opname
        if namespace == "c10d" and operation_of(function):
            return self._communicate(function, tensors, args, kwargs)
        if namespace == "_c10d_functional":
            return self._functional(function, tensors, args, kwargs)
        device = kwargs.get("device") or (tensors[0].device if tensors else None)
        if device is not None and torch.device(device).type == "meta":
            return function(*args, **kwargs)  # a plan
        if function is torch.ops.aten._local_scalar_dense.default:
            return self.recorder.read(function, args[0])
        if (definition := OPDEFS.get(f"{namespace}::{name}")) is not None:
            # its code, not its shapes alone, may communicate; without values it may fail
            with suppress(RuntimeError, ValueError), self:
                return definition._init_fn(*args, **kwargs)
            with self.fake:
                return function(*args, **kwargs)
        return self._compute(function, tensors, args, kwargs)

    def _compute(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        schema, recorder = function._schema, self.recorder
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            makes = function._opname.startswith(("new_", "repeat", "one_hot"))
            if not tensors or makes or sum(tensor.numel() for tensor in tensors) > _SMALL:
                with self.fake:
                    result = function(*args, **kwargs)
                made = tensors_in(result)
                if any(t.numel() > (_SMALL if t.is_floating_point() else _REAL) for t in made):
                    return result
            return self._really(function, tensors, args, kwargs)
        written = [*written_by(function, args, kwargs)]
        try:
            if not all(isinstance(leaf, FakeTensor) for leaf in written):
                raise fake_tensor.UnsupportedOperatorException(function)
            with self.fake:
                result = function(*args, **kwargs)
            if written or any(returned.alias_info is not None for returned in schema.returns):
                return result
            one = isinstance(result, Tensor) and result.dim() < 2 and result.numel() <= _SMALL
            if one and not any(tensor.is_floating_point() for tensor in tensors):
                raise fake_tensor.UnsupportedOperatorException(function)  # as many as there are
        except _NEEDS_VALUES:
            args, kwargs = tree_map_only(FakeTensor, recorder.stand_in, (args, kwargs))
            return self._really(function, tensors_in(args, kwargs), args, kwargs)
        axes = frozenset().union(*map(recorder.differs, tensors))

        def with_value(tensor: Tensor) -> Tensor:
            # others stay without until the host reads them
            if tensor.dim() and (tensor.dim() > 1 or tensor.is_floating_point()):
                return tensor
            if tensor.numel() > _SMALL:
                return tensor
            made = recorder.stand_in(tensor)
            recorder.set_differs(made, axes)
            return made

        return tree_map_only(FakeTensor, with_value, result)

    def _really(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        result = function(*args, **kwargs)
        if "empty" in function._opname and isinstance(result, Tensor):
            result.zero_()  # the same in each rehearsal
        if any(map(recorder.is_made_up, tensors)):
            axes = frozenset().union(*map(recorder.differs, tensors))
            written = tensors[:1] if function._schema.is_mutable else []
            for tensor in (*tensors_in(result), *written):
                recorder.set_differs(tensor, axes | recorder.differs(tensor))
                if tensor.is_floating_point() and self._has_nan(tensor):
                    # of numbers made up; `data`: autograd counts writes to what it keeps
                    tensor.data.masked_fill_(tensor.isnan(), recorder.unknown)
        return result

    def _has_nan(self, tensor: Tensor) -> bool:
        """Whether made-up numbers gave NaN, in a tensor that can be written, and none is wanted."""
        wanted = self.recorder.unknown != self.recorder.unknown
        return not wanted and 0 not in tensor.stride() and bool(tensor.isnan().any())

    def _communicate(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        operation, group, more = described(function, args, kwargs, recorder.reduction)
        key = recorder.add(operation, group, tensors if operation != "barrier" else (), **more)
        if any(more.get("splits", ())):
            # the fake backend refuses to send nothing; what a rank sends depends on values
            even = torch.zeros(group.size())
            result = function(even, even.clone(), args[2], [], [], *args[5:], **kwargs)
            tensors[0].zero_()
        elif any(isinstance(tensor, FakeTensor) for tensor in tensors):
            given = tree_map_only(Tensor, self._as_fake, (args, kwargs))
            with self.fake:
                result = function(*given[0], **given[1])
            for made in tensors_in(args[0]) if operation != "send" else ():
                if not isinstance(made, FakeTensor):  # of values that nobody knows
                    made.fill_(recorder.unknown if made.is_floating_point() else 0)
                    recorder.set_differs(made, recorder.every)
        else:
            result = function(*args, **kwargs)
            _fill(operation, recorder.reduction, tensors, group)
        recorder.finish(operation, key, group, tensors)
        return result

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _functional(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Collectives without a handle, as DTensor and compiled code call them."""
        operation = function._opname.partition("_into")[0].partition("_tensor")[0].rstrip("_")
        name = next((arg for arg in reversed(args) if isinstance(arg, str)), None)
        result = self._compute(function, tensors, args, kwargs)
        if name is not None and operation in _KINDS:
            group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
            key = self.recorder.add(operation, group, tensors)
            self.recorder.finish(operation, key, group, tensors_in(result))
        return result


def described(
    function: Any, args: Any, kwargs: Any, reduction: str
) -> tuple[str, dist.ProcessGroup, dict[str, Any]]:
    """(operation, group, further fields of `Call`) of an operator of c10d."""
    given, more = arguments_of(function, args, kwargs), dict[str, Any]()
    operation, group = operation_of(function), dist.ProcessGroup.unbox(given["process_group"])
    root = next((given[name] for name in ("root_rank", "dst", "src") if name in given), None)
    end = None if root is None else dist.get_global_rank(group, root)
    if operation in ("send", "recv"):
        more["peer"] = end
    else:
        details = [] if end is None else [f"root {end}"]
        more["detail"] = " ".join(details + [reduction] * ("reduce_op" in given))
    if "output_split_sizes" in given:
        splits = given["output_split_sizes"], given["input_split_sizes"]
        more["splits"] = tuple(tuple(map(int, each)) for each in splits)
    return operation, group, more


def _fill(operation: str, reduction: str, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give real tensors what the fake backend does not: results as if all ranks had the same, but
    where this one has nothing (no loss, no tokens) another has something."""
    result, *given = tensors or [torch.empty(0)]
    rank, size = group.rank(), group.size()
    if operation == "all_reduce" and reduction == "sum":
        for tensor in tensors:
            tensor.masked_fill_(tensor == 0, 1)
    elif operation == "all_gather":
        for tensor in tensors[:-1]:
            if tensor.shape == tensors[-1].shape:  # of a list
                tensor.copy_(tensors[-1])
    elif operation == "reduce_scatter":
        rows = result.numel()
        result.view(-1).copy_(given[0].reshape(-1)[rank * rows : (rank + 1) * rows])
    elif operation == "all_to_all" and given and given[0].numel() == result.numel():
        rows = given[0].reshape(size, -1)  # of even splits: the counts that others follow from
        result.view(size, -1).copy_(rows[rank])
    elif operation in ("all_to_all", "recv", "scatter"):
        result.zero_()


class _Reads(TorchFunctionMode):
    """Reads of real tensors, of which the dispatcher knows nothing."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _READS:
            held = getattr(args[0], "_local_tensor", args[0]).detach()
            with _disable_current_modes():
                return self.recorder.read(function, held, *args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def recorded_rank(recorder: Recorder) -> Iterator[FakeTensorMode]:
    """A context in which this process is a rank of a job without the others, and `recorder` records
    what it asks of them. Yields the mode of fake tensors. Needs that no process group exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, new, batch = dist.init_process_group, dist.new_group, dist.batch_isend_irecv
    rank, batches = recorder.program.rank, itertools.count()

    def initialize(*_: Any, **__: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=recorder.world_size)

    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        group = new(ranks, timeout, "fake", *args, **kwargs)
        alone = kwargs.get("use_local_synchronization", False)  # only its ranks call this
        if alone or rank in (ranks or [rank]):
            recorder.know(group)
        every = None if alone else dist.group.WORLD
        recorder.add("new_group", every or group, detail="" if alone else f"{ranks or 'all'}")
        return group

    def begin_together(operations: Any) -> Any:
        recorder.batch = next(batches)
        try:
            return batch(operations)
        finally:
            recorder.batch = -1

    replaced: dict[str, Any] = {"init_process_group": initialize, "new_group": new_group}
    replaced["batch_isend_irecv"] = begin_together
    for name in _OBJECTS:
        replaced[name] = _of_objects(recorder, name)
    for name in _REDUCTIONS:
        replaced[name] = _reducing(recorder, getattr(dist, name))
    operators = _Operators(recorder)
    silent = patch.object(fake_tensor.log, "disabled", True)  # a trial may fail
    with without_peers(), silent, patch.multiple(dist, **replaced), _Reads(recorder), operators:
        yield operators.fake


def _reducing(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        operation = signature.bind(*args, **kwargs).arguments.get("op", dist.ReduceOp.SUM)
        recorder.reduction = str(operation).rpartition(".")[2].lower()
        return function(*args, **kwargs)

    return reduce


def _of_objects(recorder: Recorder, name: str) -> Callable[..., Any]:
    """A function of torch.distributed that sends Python objects, as one call: a rank gets what a rank
    that ran before has sent, or else its own."""
    signature = inspect.signature(getattr(dist, name))

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group: Any = given.get("group") or dist.group.WORLD
        sent = recorder.objects
        ends = [given[key] for key in ("src", "dst") if given.get(key) is not None]
        within = [given[key] for key in ("group_src", "group_dst") if given.get(key) is not None]
        end = dist.get_global_rank(group, within[0]) if within else ends[0] if ends else 0
        if name in ("send_object_list", "recv_object_list"):
            recorder.add(name.partition("_")[0], group, peer=end, detail="objects")
            return end
        rooted = {"src", "dst"} & signature.parameters.keys()
        key = recorder.add(name, group, detail=f"root {end}" if rooted else "")
        if name == "broadcast_object_list":
            if end == recorder.program.rank:
                sent[key] = copy.deepcopy(given["object_list"])
            given["object_list"][:] = copy.deepcopy(sent.get(key, given["object_list"]))
        elif name == "scatter_object_list":
            if end == recorder.program.rank:
                sent[key] = given["scatter_object_input_list"]
            rows = sent.get(key) or [None] * group.size()
            given["scatter_object_output_list"][0] = rows[group.rank()]
        elif (gathered := given.get("object_list", given.get("object_gather_list"))) is not None:
            gathered[:] = [given["obj"] for _ in gathered]
        return None

    return call
