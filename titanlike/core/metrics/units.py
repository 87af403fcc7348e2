"""Format numbers in readable units: 1.2k, 412 MiB, 1:03:04."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: float) -> str:
    """Format tokens, parameters or FLOPs: 999, 1.2k, 3.4M, 8.0B, 1.5T."""
    return "".join(_scaled(number, ("k", "M", "B", "T")))


def microbatches(number: int) -> str:
    """Format a number of microbatches: 1 microbatch, 4 microbatches."""
    return f"{number} microbatch{'es' * (number != 1)}"


def size(number: float) -> str:
    """Format bytes: 512 B, 96 KiB, 412 MiB, 1.3 GiB, 2.0 TiB (powers of 1024)."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) >= 1023.5:
            value, unit = value / 1024, larger
    return f"{value:.{1 if unit in ('GiB', 'TiB') else 0}f} {unit}"


def duration(seconds: float) -> str:
    """Format seconds, rounded: 0:09, 1:02, 1:03:04, 51:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def decimal(value: float) -> str:
    """Format a loss or a norm: 3.2145; 1.250e-05 if four decimals would hide it; nan, inf."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def flop(number: float) -> str:
    """Format floating-point operations: 999 FLOP, 1.2 kFLOP, 3.4 TFLOP, 12.0 EFLOP."""
    value, prefix = _scaled(number, ("k", "M", "G", "T", "P", "E"))
    return f"{value} {prefix}FLOP"


def _scaled(number: float, prefixes: Sequence[str]) -> tuple[str, str]:
    """Return the scaled number as text, and its prefix; each prefix is 1000 times the previous one."""
    value, prefix = float(number), ""
    for larger in prefixes:
        # 999.95 would print as 1000.0, so the next prefix is used
        if abs(value) >= (999.95 if prefix else 999.5):
            value, prefix = value / 1000, larger
    return f"{value:.{1 if prefix else 0}f}", prefix


def short_time(seconds: float) -> str:
    """Format a duration below about a minute: 12.3 us, 4.5 ms, 6.7 s."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if abs(seconds) * scale < 999.95:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds:.1f} s"
