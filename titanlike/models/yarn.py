"""YaRN: rotary frequencies for longer sequences than a model was pretrained with (arXiv
2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # names of other programs are known without torch
    from torch import Tensor


class Yarn(NamedTuple):
    """YaRN's keys, with transformers' names."""

    factor: float  # by which sequences are longer
    original_max_position_embeddings: int  # tokens of the sequences before
    beta_fast: float = 32.0  # pairs that turn more often in those keep their frequency
    beta_slow: float = 1.0  # the frequency of those that turn less often is divided by `factor`
    mscale: float = 0.0  # of the scale of the table; 0 = of `factor` alone
    mscale_all_dim: float = 0.0  # of the scale of latent attention's scores
    truncate: bool = True  # the bounds between pairs to whole numbers

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """Scale the frequencies of a head's pairs: [E/2] -> [E/2]."""
        pairs, original = len(plain), self.original_max_position_embeddings
        low, high = (
            pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        index = plain.new_ones(pairs).cumsum(0) - 1  # 0, 1, ...
        ramp = ((index - low) / ((high - low) or 0.001)).clamp(0, 1)
        return plain * (1 - ramp) + plain / self.factor * ramp

    @property
    def of_table(self) -> float:
        """The scale of the cos and sin table."""
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1)

    @property
    def of_scores(self) -> float:
        """The scale of latent attention's scores."""
        return self._scale(self.mscale_all_dim) ** 2

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def yarn_of(rope_scaling: Mapping[str, Any] | None) -> Yarn | None:
    """A model's key `rope_scaling` as Yarn; None = unscaled frequencies. Raises ValueError."""
    if rope_scaling is None:
        return None
    given = {key: value for key, value in rope_scaling.items() if key not in ("rope_type", "type")}
    kinds = {rope_scaling.get(key, "yarn") for key in ("rope_type", "type")}
    missing = {"factor", "original_max_position_embeddings"} - given.keys()
    if kinds == {"yarn"} and not missing and not given.keys() - {*Yarn._fields}:
        return Yarn(**given)
    reason = f"must be null or YaRN's {', '.join(Yarn._fields)}, of which the first two are needed"
    fix = "model.rope_scaling={factor:40,original_max_position_embeddings:4096}"
    raise ValueError(f"rope_scaling={dict(rope_scaling)}: {reason}; write {fix}")
