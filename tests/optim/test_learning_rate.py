"""The learning rate over the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlike.config.schema import ConstantLr, DecayLr, WsdLr
from titanlike.optim.learning_rate import lr_factor


@given(
    lr=st.one_of(
        st.builds(ConstantLr, warmup=st.integers(0, 50)),
        st.builds(
            DecayLr,
            name=st.sampled_from(["linear", "cosine"]),
            warmup=st.integers(0, 50),
            final=st.floats(0, 1),
        ),
        st.builds(
            WsdLr, warmup=st.integers(0, 50), decay=st.floats(0.01, 1), final=st.floats(0, 1)
        ),
    ),
    steps=st.integers(60, 500),
)
def test_the_learning_rate_rises_then_never_rises_again(lr, steps) -> None:
    factors = [lr_factor(lr, step, steps) for step in range(1, steps + 1)]
    warm, rest = factors[: lr.warmup], factors[max(0, lr.warmup - 1) :]
    assert warm == sorted(warm)
    assert all(a >= b - 1e-12 for a, b in zip(rest, rest[1:], strict=False))
    assert max(factors) <= 1 and min(factors) >= 0
    assert factors[-1] == pytest.approx(getattr(lr, "final", 1.0))


def test_wsd_keeps_its_peak_when_a_run_is_made_longer() -> None:
    lr = WsdLr(warmup=10, decay=0.2)
    before_decay = [lr_factor(lr, step, 100) for step in range(1, 80)]
    assert before_decay == [lr_factor(lr, step, 1000) for step in range(1, 80)]
