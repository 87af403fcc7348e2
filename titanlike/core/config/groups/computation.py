"""How a stage computes: precision, recomputation, sharding, the order of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titanlike.core.config.keys import Bytes, key


@dataclass
class Precision:
    """fp32, or bf16: compute and activations in bf16, master weights and reductions in fp32."""

    name: Literal["fp32", "bf16", "float8", "mxfp8"] = key("fp32", "choice")

    @property
    def low(self) -> bool:
        """Whether activations are bf16, and weights are cast to it."""
        return self.name != "fp32"


@dataclass
class ScaledPrecision(Precision):
    """bf16, and the matrix products of linear layers in float8 by torchao (titanlike[float8])."""

    recipe: str = key("", "of torchao")
    skip: list[str] = key(
        [], "linear layers that stay in bf16, by patterns of their names: [*.layers.0.*,*.o_proj]"
    )
    min_features: int = key(64, "linear layers with fewer inputs or outputs stay in bf16", ge=1)

    @property
    def weight_gradients(self) -> bool:
        """Whether those are products in float8, too."""
        return not self.recipe.endswith("_hp")


@dataclass
class Float8Precision(ScaledPrecision):
    """bf16, and matmuls of linear layers in float8, with a scale per tensor or row."""

    name: Literal["float8"] = key("float8", "choice")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise",
        "torchao's scaling: per tensor, per row, or per row with weight gradients in bf16",
    )


@dataclass
class Mxfp8Precision(ScaledPrecision):
    """bf16, and matmuls of linear layers in MXFP8: a scale per 32 elements of the summed dimension."""

    name: Literal["mxfp8"] = key("mxfp8", "choice")
    recipe: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"] = key(
        "mxfp8_rceil", "torchao's recipe: all matmuls in MXFP8, or weight gradients in bf16"
    )


@dataclass
class ActivationCheckpoint:
    """Activations are kept for the backward (none), or recomputed in it (full)."""

    name: str = key("none", "choice")

    @property
    def saved(self) -> list[str]:
        """Patterns of operators whose results a recomputed block keeps."""
        return []


@dataclass
class SelectiveActivationCheckpoint(ActivationCheckpoint):
    """Every block is recomputed except its slowest operators: matrix products, attention,
    collectives."""

    name: str = key("selective", "choice")
    save: list[str] = key(
        # titanlike.*_tokens: ep's all-to-all and its routing; *_attn*: torch_attn._varlen_attn
        ["aten.*mm", "aten.convolution", "titanlike.*_tokens", "*attention*", "*_attn*"],
        "operators whose results are saved, by name patterns",
    )

    @property
    def saved(self) -> list[str]:
        return self.save


@dataclass
class EveryActivationCheckpoint(ActivationCheckpoint):
    """Every n-th block is recomputed."""

    name: str = key("every", "choice")
    every: int = key(2, "1 = every block, 2 = every second one, ...", ge=1)


@dataclass
class FitActivationCheckpoint(ActivationCheckpoint):
    """As few blocks are recomputed as memory allows, a number for each rank."""

    name: str = key("fit", "choice")
    memory: Bytes | None = key(
        None, "memory budget of a device, such as 75GiB; null = its memory, less 8%"
    )


@dataclass
class Fsdp:
    """FSDP2 inside each stage."""

    zero: Literal["auto", 1, 2, 3] = key(
        "auto",
        "sharded during a step: 1 optimizer state, 2 also gradients, 3 also parameters; auto = 1 "
        "if it fits and a step has several microbatches, and under zero-bubble schedules; else 3 "
        "without a pipeline, 2 with one",
    )
    cpu_offload: bool = key(False, "keep parameter shards and optimizer state in CPU memory")


@dataclass
class Numerics:
    """Whether results are bitwise equal in all layouts."""

    name: Literal["fast", "exact"] = key(
        "fast", "exact = the same bits in every layout of pp, dp, ep, replicate, ZeRO, schedule"
    )
    grain: int = key(
        1, "exact: sequences per microbatch, the same in all layouts that must be equal", ge=1
    )
    digest_every: int = key(
        0, "steps between digests of all weights in metrics.jsonl; 0 = none", ge=0
    )
