"""Plans of published runs beside what was measured of them: `pytest -m grid -s` prints all.

Fitted to the whole table were five numbers that all rows share, whatever the device or program:
which share of the peaks of matrix products, attention (FlashAttention 2), memory and links is
reached (the defaults of `config.hardware.Hardware`), and what compiling leaves of the bytes of
operators that are no products. All else is of data sheets, or counted; the share of cuDNN's
attention on Hopper, which later rows have, was measured.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from support.command_lines import problems_of
from support.published import DECLARED, LATER, ROWS, Row, planned, predicted


def row(name: str) -> Row:
    return next(row for row in ROWS if row.name.endswith(name))


@pytest.mark.slow
@pytest.mark.grid
def test_all_published_runs_are_predicted() -> None:
    """Those that nothing was fitted to, too; and what a schedule gains the 405B: 100 tokens/s a GPU
    with 1F1B, 128 interleaved."""
    for rows, most in (ROWS, 0.05), (LATER, 0.05):
        median, largest = table(rows)
        assert median < most and largest < 0.12
    one, loops = row("1f1b, float8"), row("interleaved, float8")
    gain = predicted(loops, planned(loops)) / predicted(one, planned(one))
    assert gain == pytest.approx(1.28, rel=0.05)
    fast = row("torchtitan 8B, 8")
    slower = replace(fast, words=fast.words.replace("h100_sxm", "h100_pcie"))
    assert planned(slower).step_seconds > 1.2 * planned(fast).step_seconds


@pytest.mark.parametrize("row", DECLARED, ids=lambda row: row.name)
def test_the_largest_published_runs_are_a_command_line_each(row: Row) -> None:
    assert problems_of(row.words.split()) == []


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("row", DECLARED, ids=lambda row: row.name)
def test_the_largest_published_runs_can_be_planned(row: Row) -> None:
    """How near it comes is printed, and not yet held to anything."""
    value = planned(row).tokens_per_second_per_gpu
    print(f"\n{row.name:<42}{row.measured:>10.1f}{value:>11.1f}{value / row.measured - 1:>8.1%}")
    assert value > 0


def table(rows: list[Row]) -> tuple[float, float]:
    """(the median of the errors' sizes, the largest); printed."""
    print(f"\n{'run':<42}{'published':>10}{'predicted':>11}{'error':>8}")
    errors = []
    for row in rows:
        value = predicted(row, planned(row))
        errors.append(value / row.measured - 1)
        print(f"{row.name:<42}{row.measured:>10.1f}{value:>11.1f}{errors[-1]:>8.1%}")
    sizes = [abs(error) for error in errors]
    print(f"median of the errors' sizes: {statistics.median(sizes):.1%}")
    return statistics.median(sizes), max(sizes)
