"""Input is measured beside the default model."""

from __future__ import annotations

import pytest

from titanlike.proof.benchmark_data import main


@pytest.mark.slow
def test_each_kind_of_data_is_measured_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--files", "300", "--seconds", "0.05", "--workers", "0"]
    assert main(words) == 0, "input is slower than five times the model"
    printed = capsys.readouterr().out
    for name in ("text", "tokens", "mixture", "synthetic", "default model", "300 files"):
        assert name in printed
    assert main([*words, "--least", "1e9"]) == 1
