"""Rotary frequencies for longer sequences than a model was pretrained with: a config's
`rope_scaling`, with transformers' keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # names of other programs are known without torch
    from torch import Tensor

# by rope_type: keys that it needs, and further ones that it has
_LENGTH = "original_max_position_embeddings"
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),  # arXiv 2306.15595
    "dynamic": ({"factor"}, set()),  # scales sequences beyond max_position_embeddings alone
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", _LENGTH}, set()),  # 2407.21783
    "yarn": (  # 2309.00071
        {"factor", _LENGTH},
        {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"},
    ),
}


_MAY_BE_ZERO = ("low_freq_factor", "mscale", "mscale_all_dim", "truncate")


class RopeScaling(NamedTuple):
    """A config's `rope_scaling`."""

    rope_type: str
    factor: float  # by which sequences are longer
    original_max_position_embeddings: int = 0  # tokens of the sequences before
    low_freq_factor: float = 0.0  # pairs that turn less often in those: divided by `factor`
    high_freq_factor: float = 0.0  # pairs that turn more often keep their frequency
    beta_fast: float = 32.0  # the same two bounds of YaRN
    beta_slow: float = 1.0
    mscale: float = 0.0  # of the scale of the table; 0 = of `factor` alone
    mscale_all_dim: float = 0.0  # of the scale of latent attention's scores
    truncate: bool = True  # the bounds between pairs to whole numbers
    attention_factor: float | None = None  # the scale of the table; None = by `factor` and `mscale`

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """Scale the frequencies of a head's pairs, in radians per token: [E/2] -> [E/2]."""
        if self.rope_type == "dynamic":
            return plain
        if self.rope_type == "linear":
            return plain / self.factor
        pairs, original = len(plain), self.original_max_position_embeddings
        if self.rope_type == "llama3":
            turns, low = original * plain / (2 * math.pi), self.low_freq_factor
            ramp = 1 - ((turns - low) / (self.high_freq_factor - low)).clamp(0, 1)
        else:
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
        if self.rope_type != "yarn" or self.attention_factor is not None:
            return self.attention_factor or 1.0
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1)

    @property
    def of_scores(self) -> float:
        """The scale of latent attention's scores."""
        return self._scale(self.mscale_all_dim) ** 2

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def as_config(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults."""
        values, defaults = self._asdict(), self._field_defaults
        needed = _KEYS[self.rope_type][0]
        return {k: v for k, v in values.items() if k in needed or v != defaults.get(k)}


def scaling_of(rope_scaling: Mapping[str, Any] | None) -> RopeScaling | None:
    """A config's `rope_scaling`; None = unscaled frequencies. Raises ValueError."""
    given = {key: value for key, value in (rope_scaling or {}).items() if value is not None}
    kind = " or ".join(
        sorted({str(given.pop(key)) for key in ("type", "rope_type") if key in given})
    )
    if kind in ("", "default") and not given:
        return None
    needed, more = _KEYS.get(kind, (set(), set()))
    numbers = all(
        isinstance(value, (int, float))
        and (0 < value < math.inf or key in _MAY_BE_ZERO and not value)
        for key, value in given.items()
    )
    grows = kind != "llama3" or given.get("high_freq_factor", 0) > given.get("low_freq_factor", 0)
    if kind in _KEYS and numbers and grows and needed <= given.keys() <= needed | more:
        return RopeScaling(kind, **given)
    reason = f"rope_type must be one of {', '.join(_KEYS)}, or null for no scaling"
    if kind in _KEYS:
        reason = f"{kind} has the numbers {', '.join(sorted(needed | more))}"
        reason += f" and needs {', '.join(sorted(needed))}"
    wanted = {"factor": 40, _LENGTH: 4096, "low_freq_factor": 1, "high_freq_factor": 4}
    kind = kind if kind in _KEYS else "yarn"
    needed = _KEYS[kind][0]
    fixed = {key: given.get(key) or value for key, value in wanted.items() if key in needed}
    shown = ",".join(f"{key}:{value}" for key, value in {"rope_type": kind, **fixed}.items())
    fix = f"model.rope_scaling={{{shown}}}"
    text = ",".join(f"{key}:{value}" for key, value in (rope_scaling or {}).items())
    raise ValueError(f"rope_scaling={{{text}}}: {reason}; write {fix}")
