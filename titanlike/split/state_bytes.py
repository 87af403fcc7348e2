"""Parameters, gradients and optimizer state: bytes on a rank for each parameter of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.config.schema import AdamW, Config, Muon, Sgd
from titanlike.parallel.sharding import compute_dtype, wrapped_in_fsdp


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank's device, for each parameter."""

    fsdp: bool  # whether stages are wrapped, see `shard_stage`
    shards: int
    weights: float  # always: the parameter
    optimizer: float  # always: its moments
    gathered: float  # for a step
    gradient: float  # in a step, from the first backward on
    reduced_gradient: float  # after a step

    @classmethod
    def of(
        cls, config: Config, zero: int, hidden: bool = False, expert: bool = False
    ) -> StateBytes:
        """hidden: of a parameter that Muon updates, if that is the optimizer; expert: of an expert."""
        match config.optimizer:
            case Sgd(momentum=momentum):
                optimizer = 4 * (momentum > 0)
            case Muon() if hidden:
                optimizer = 4
            case AdamW(state_dtype="bf16") | Muon(state_dtype="bf16"):
                optimizer = 4
            case _:  # of the user's own, as AdamW
                optimizer = 8
        shards = config.shards // config.ep if expert else config.shards
        offload = config.fsdp.cpu_offload
        computing = compute_dtype(config).itemsize
        fsdp = wrapped_in_fsdp(config)
        weights, moments = (0.0, 0.0) if offload else (4 / shards, optimizer / shards)
        if computing < 4 and not fsdp:
            weights += computing  # see `CastParameters`
        reduced = 0.0 if offload else 4 / shards
        gathered = computing if fsdp and (zero < 3 or shards == 1) else 0
        gradient = 4 if fsdp and zero == 1 else reduced
        return cls(fsdp, shards, weights, moments, gathered, gradient, reduced)

    @property
    def kept(self) -> float:
        """Always."""
        return self.weights + self.optimizer

    @property
    def whole(self) -> float:
        """In a step, with gradients, between activations."""
        return self.kept + self.gathered + self.gradient


def state_bytes(config: Config, zero: int, hidden: bool, expert: bool = False) -> float:
    """Bytes of parameter, gradient and optimizer state on one rank, for each parameter."""
    return StateBytes.of(config, zero, hidden, expert).whole
