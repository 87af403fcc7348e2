"""What a built-in optimizer is: keys, bytes, and what applies it, one class in a file of
`optimizers/`, which is found by the file's name. There is no default for what costs depend on."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from titanlike.core.config import optimizers
from titanlike.core.config.keys import key

if TYPE_CHECKING:  # the config is plain data: torch is imported with the implementation
    from torch import Tensor

    Kind = str
else:
    Kind = Literal[tuple(sorted(file.name for file in pkgutil.iter_modules(optimizers.__path__)))]


@cache
def optimizer_kinds() -> dict[str, type[Optimizer]]:
    """Name of an optimizer -> its class, the one that its file defines."""
    kinds: dict[str, type[Optimizer]] = {}
    for name in get_args(Kind):
        file = import_module(f"{optimizers.__name__}.{name}")
        classes = (kind for kind in vars(file).values() if isinstance(kind, type))
        mine = (kind for kind in classes if kind.__module__ == file.__name__)
        (kinds[name],) = (kind for kind in mine if issubclass(kind, Optimizer))
        assert kinds[name].name == name, f"the optimizer in {file.__file__} is not named {name}"
    return kinds


@dataclass
class ParameterGroup:
    """How the parameters that a pattern of `optimizer.groups` names are updated; null = as they
    would be without it."""

    lr: float | None = key(None, "peak learning rate", ge=0, example=1e-3)
    weight_decay: float | None = key(None, "decay, of vectors too", ge=0, example=0.0)
    betas: list[float] | None = key(
        None, "of AdamW: decay of the two running means", ge=0, lt=1, items=2, example=[0.9, 0.95]
    )
    momentum: float | None = key(None, "of SGD and Muon", ge=0, lt=1, example=0.9)
    optimizer: Kind | None = key(
        None, "which updates them; muon = matrices of blocks, with optimizer=muon"
    )


@dataclass
class Optimizer:
    """What all optimizers have. An instance also says how one parameter is updated
    (`parameter_update` in `titanlike/core/optim/optimizer.py`)."""

    name: str = key("", "choice")
    lr: float = key(3e-3, "peak learning rate", ge=0)
    weight_decay: float = key(0.1, "decoupled decay; vectors (norms, biases) have none", ge=0)
    clip: float | None = key(1.0, "largest global gradient norm; null = no clipping", gt=0)
    groups: dict[str, ParameterGroup] | None = key(
        None,
        "pattern of parameter names -> {lr, weight_decay, betas, momentum, optimizer} of these "
        "parameters: {*norm*: {lr: 1e-3}}",
    )

    group_keys: ClassVar[tuple[str, ...]] = ()  # keys that a parameter group may have of its own
    # state tensors like the parameter, fp32, zeros at first, of an optimizer that has an `update`
    state: ClassVar[tuple[str, ...]] = ()
    # updates whole matrices of blocks alone; `other_kind` updates everything else
    whole_matrices: ClassVar[bool] = False
    other_kind: ClassVar[str] = ""

    @property
    def implementation(self) -> str:
        """Import path of what is called as `(groups, self, context)`, see `OptimizerContext`, and
        returns a torch.optim.Optimizer."""
        return "titanlike.core.optim.fused.Elementwise"

    @property
    def state_bytes(self) -> int:
        """Bytes of state for each element of a parameter."""
        if not self.state:  # none is said, too: plans take no figure for granted
            raise NotImplementedError(f"optimizer {self.name} has neither state nor state_bytes")
        return 4 * len(self.state)

    @property
    def touched_bytes(self) -> int:
        """Bytes of memory traffic of an update, for each element: the parameter is read and
        written, and so is the state; the gradient is read."""
        return 12 + 2 * self.state_bytes

    def matrix_flops(self, rows: int, columns: int) -> float:
        """FLOPs of updating a matrix, where these take longer than the memory traffic."""
        return 0.0

    def update(
        self, options: dict[str, Any], weights: Tensor, gradient: Tensor, *state: Tensor
    ) -> None:
        """Update an elementwise optimizer's plain tensors in place; options: of the parameter
        group, `lr` among them. Not called where another implementation is named."""
        raise NotImplementedError(f"optimizer {self.name} has neither implementation nor update")

    def of_kind(self, kind: str) -> Optimizer:
        """The settings of another optimizer that updates some of the parameters."""
        kinds = optimizer_kinds()
        if kind not in kinds:
            raise ValueError(f"optimizer={kind} is none of {', '.join(kinds)}")
        if kind == self.name:
            return self
        return replace(kinds[kind](), lr=self.lr, weight_decay=self.weight_decay)
