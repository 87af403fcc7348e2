"""Loss, learning rate, and the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.core.config.keys import key


@dataclass
class Ema:
    """An exponential moving average of the weights, kept as optimizer state."""

    decay: float | None = key(
        None, "decay of the average per step, such as 0.999; null = no average", ge=0, lt=1
    )


@dataclass
class ConstantLr:
    """Warm-up, then the peak."""

    name: str = key("constant", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)


@dataclass
class DecayLr:
    """Warm-up, then a decay (linear or cosine) over all remaining steps."""

    name: str = key("cosine", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    final: float = key(0.1, "learning rate of the last step, as a share of the peak", ge=0, le=1)


@dataclass
class WsdLr:
    """Warm-up, stable, decay (arXiv 2404.06395): the peak until the last part of the run."""

    name: str = key("wsd", "choice")
    warmup: int = key(20, "steps of linear warm-up from 0", ge=0)
    decay: float = key(0.2, "share of all steps, at the end, with a linear decay", gt=0, le=1)
    final: float = key(0.05, "learning rate of the last step, as a share of the peak", ge=0, le=1)


@dataclass
class CrossEntropy:
    """Token cross entropy in nats: the sum divided by the global number of valid tokens."""

    name: str = key("cross_entropy", "choice")
    z_loss: float = key(
        0.0, "weight of log(sum(exp(logits)))^2, added to each training loss: 1e-4", ge=0
    )
    mtp_weight: float = key(
        0.0,
        "weight of the multi-token-prediction losses (model.num_nextn_predict_layers): 0.3",
        ge=0,
    )


@dataclass
class ChunkedCrossEntropy(CrossEntropy):
    """Token cross entropy, computed for a few tokens at a time: the whole batch's logits are never
    in memory."""

    name: str = key("chunked_cross_entropy", "choice")
    chunk: int = key(2048, "tokens of a microbatch whose logits are in memory at a time", ge=1)


@dataclass
class Mse:
    """Squared error, averaged over all elements of the batch."""

    name: str = key("mse", "choice")
