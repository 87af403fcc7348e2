"""torch.compile of each block of a stage.

Equal blocks share one graph: parameters are its inputs. FSDP's hooks run outside, around a block's
forward. A block that breaks the graph is compiled in pieces, and reported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.distributed.placement import has_statistics, style_of
from titanlike.core.distributed.transform import Transform
from titanlike.core.torch_private import compiler
from titanlike.core.torch_private.known_code import has_hooks

MOST_GRAPHS = 256  # of a function that blocks share; their settings may differ


class CompiledBlocks(Transform):
    """The compiled blocks of this rank's stages."""

    def __init__(
        self,
        dynamic: bool,
        blocks: Callable[[int], Iterable[str]],
        why_not: Callable[[str], str] = lambda block: "",
    ) -> None:
        """dynamic: sizes of activations differ between batches, and one graph serves all. blocks:
        those of a stage; why_not: why a block must stay eager, "" = compile it."""
        self._blocks, self._why_not = blocks, why_not
        # None: torch compiles once more if a size changes nevertheless
        self._dynamic = dynamic or None
        self.eager: dict[str, str] = {}  # block -> why it is not compiled
        self.broken: dict[str, str] = {}  # block -> where it breaks the graph
        self._reasons: dict[type[nn.Module], str] = {}  # by class of blocks
        self._graphs = compiler.graph_count()
        compiler.allow_graphs(MOST_GRAPHS)
        compiler.hide_checkpoint_warning()

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        """Compile its blocks at their first run; call it before `fully_shard`, after all else that
        replaces forwards."""
        for name in self._blocks(index):
            block = stage.get_submodule(name)
            if any(map(has_statistics, block.modules())):
                self.eager[name] = "its batch norm collects statistics"
            elif inner := _hooked(block):
                # equal blocks share a graph, whose guards ignore hooks
                self.eager[name] = f"its {inner} has a hook"
            elif reason := self._why_not(name):
                self.eager[name] = reason
            else:
                block.forward = self._forward(name, type(block), block.forward)

    def _forward(
        self, name: str, kind: type[nn.Module], forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        compiled = torch.compile(forward, fullgraph=True, dynamic=self._dynamic)

        def in_pieces() -> Callable[..., Any]:
            self.broken[name] = self._reasons[kind]
            return torch.compile(forward, dynamic=self._dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if name not in self.broken and kind in self._reasons:
                compiled = in_pieces()
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                inner = getattr(error, "inner_exception", None)
                if isinstance(inner, ConfigError):  # raised by titanlike during tracing
                    raise inner from None
                if name in self.broken or not compiler.is_graph_break(error):
                    raise
                self._reasons[kind] = compiler.graph_break_reason(error)
            compiled = in_pieces()
            return compiled(*args, **kwargs)

        return call

    def new_graphs(self) -> int:
        """The number of graphs compiled since the last call."""
        before, self._graphs = self._graphs, compiler.graph_count()
        return self._graphs - before

    @property
    def notes(self) -> list[str]:
        """Why blocks are not compiled, or not without graph breaks, a line per reason."""
        lines = []
        for reasons, what in (
            (self.eager, "not compiled"),
            (self.broken, "not compiled as a whole"),
        ):
            for reason in dict.fromkeys(reasons.values()):
                names = [name for name, why in reasons.items() if why == reason]
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{names[0]}{more} {what}: {reason}")
        return lines


def _hooked(block: nn.Module) -> str:
    """A module in a block that has a hook other than tensor parallelism's; "" = none."""
    parts = (item for item in block.named_modules() if item[0] and not style_of(item[1]))
    return next((path for path, part in parts if has_hooks(part)), "")


def compiler_problem(device: torch.device) -> Problem | None:
    """What torch.compile lacks on this machine."""
    if device.type == "cpu":
        name = os.environ.get("CXX", "g++")
        missing = shutil.which(name) is None
        reason = f"a C++ compiler is needed to compile for the CPU, and {name} is not found"
    else:
        missing = importlib.util.find_spec("triton") is None
        reason = "the package triton is needed to compile for GPUs, and is not installed"
    return Problem("compile", True, reason, "compile=false") if missing else None
