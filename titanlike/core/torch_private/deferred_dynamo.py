"""Imports torch's compiler frontend (`torch._dynamo`) only when something is compiled.

Symptom without it: `import torch` leaves out torch._dynamo, which costs nearly as much CPU time as
all of torch; but the first pipeline schedule, process group or meta operator with a Python
decomposition imports it to call `disable`, though nothing is compiled. Test:
tests/torch_private/test_deferred_dynamo.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch

NAME = "torch._dynamo"


def defer_dynamo() -> None:
    """Install a stand-in for torch._dynamo that answers what eager code asks for; any other
    attribute imports the real module, which replaces it. Does nothing if torch._dynamo is imported
    already."""
    if NAME not in sys.modules:
        stand_in = _StandIn()
        sys.modules[NAME] = torch._dynamo = stand_in
        sys.meta_path.insert(0, stand_in.finder)


@contextmanager
def force_eager() -> Iterator[None]:
    """A context in which compiled functions run eagerly, even if the compiler is imported within
    it."""
    module: Any = sys.modules.get(NAME)
    with ExitStack() as stack:
        if not isinstance(module, _StandIn):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            return
        module.eager.append(stack)
        try:
            yield
        finally:
            module.eager.remove(stack)


class _StandIn(ModuleType):
    __path__: list[str] = []  # a package, whose modules `_Finder` finds

    def __init__(self) -> None:
        super().__init__(NAME)
        self._lock = threading.RLock()
        self.finder = _Finder(self.real)
        self.eager: list[ExitStack] = []  # contexts of `force_eager`, outermost first
        self._disabled: WeakKeyDictionary[Callable[..., Any], SimpleNamespace] = WeakKeyDictionary()
        self.OptimizedModule = _IsOptimized("OptimizedModule", (), {})
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection, which must not import the compiler
            raise AttributeError(name)
        return getattr(self.real(), name)

    def disable(self, fn: Any = None, *how: Any, **more: Any) -> Any:
        """Call fn until the compiler is imported, and torch's `disable(fn)` from then on."""
        if not callable(fn) or isinstance(fn, type) or sys.modules[NAME] is not self:
            return self.real().disable(fn, *how, **more)
        holder = SimpleNamespace(function=fn, options=(how, more))

        @functools.wraps(fn)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            return holder.function(*args, **kwargs)

        self._disabled[disabled] = holder
        return disabled

    def real(self) -> ModuleType:
        """The real module, imported if it is not yet."""
        with self._lock:
            if sys.modules[NAME] is self:
                sys.meta_path.remove(self.finder)
                spec = PathFinder.find_spec(NAME, torch.__path__)
                assert spec is not None and spec.loader is not None
                real: Any = module_from_spec(spec)
                if f"{NAME}.config" in sys.modules:
                    real.config = sys.modules[f"{NAME}.config"]
                sys.modules[NAME] = torch._dynamo = real
                spec.loader.exec_module(real)
                for holder in self._disabled.values():
                    how, more = holder.options
                    holder.function = real.disable(holder.function, *how, **more)
                for stack in self.eager:
                    stack.enter_context(real.set_stance("force_eager"))
            return sys.modules[NAME]


class _Finder:
    """Imports the real package before any of its modules, except `config`, which meta tensors read
    and which stands alone."""

    def __init__(self, real: Callable[[], ModuleType]) -> None:
        self._real = real

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        if name == f"{NAME}.config":
            return PathFinder.find_spec(name, [f"{torch.__path__[0]}/_dynamo"])
        real = self._real()
        if name not in sys.modules:
            return PathFinder.find_spec(name, real.__path__)
        loader: Any = _Imported(sys.modules[name])
        # importlib takes the spec of a module that came meanwhile, and would load it twice
        vars(sys.modules[name])["__spec__"] = None
        return ModuleSpec(name, loader)


class _Imported:
    """A loader of a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _IsOptimized(type):
    """Stands for the class of torch.compile's results, of which there are none before the import."""

    def __instancecheck__(cls, module: Any) -> bool:
        real = sys.modules[NAME]
        return not isinstance(real, _StandIn) and isinstance(module, real.OptimizedModule)
