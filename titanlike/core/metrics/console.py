"""Console output: a progress bar with lines above it on a terminal, plain lines in a log.

Output errors never end a run: after a broken pipe nothing is printed, and characters that the
encoding lacks are replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm

from titanlike.core.config.errors import printable
from titanlike.core.metrics import units

NUMBER = re.compile(r"[-+~]?\d[\d.,:]*(e[-+]?\d+)?( ?[A-Za-z%/]+)*|nan|-?inf|-")
LOG_WIDTH = 120  # columns of a table without a terminal


class Console:
    """Prints lines and a progress bar.

    steps: the run's last step. A line is printed every `log_every` steps, at the first and the last
    step, and after each validation.
    """

    def __init__(self, *, steps: int, log_every: int = 10, own: Sequence[str] = ()) -> None:
        """own: names of custom metrics, which the step lines include."""
        self._own = own
        self._stream = _SafeStream(sys.stdout)
        self._terminal = sys.stdout.isatty()
        self._steps, self._start_step, self._log_every = steps, 0, log_every
        self._bar: tqdm | None = None
        self._first: tuple[int, float] | None = None  # first step and its clock, for the ETA

    def start_at(self, step: int) -> None:
        """Continue after `step`: the run resumes, or rolls back."""
        self.close()
        self._start_step, self._first = step, None

    def line(self, text: str = "") -> None:
        """Print a line, above the progress bar if there is one."""
        tqdm.write(printable(text), file=self._stream)
        self._stream.flush()

    def text(self, text: str, indent: int = 2, label: str = "") -> None:
        """Print a text, wrapped and indented, in a log only with a label. Paths are not broken, so
        that they can be copied."""
        wrapper = textwrap.TextWrapper(max(indent + 20, self._width()))
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        wrapper.initial_indent, wrapper.subsequent_indent = label, " " * indent
        for line in wrapper.wrap(text) if label or self._terminal else [text]:
            self.line(line)

    def fields(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print labels and texts. Long texts are wrapped and indented, except those without a
        label, which may be commands to copy."""
        indent = 4 + max(len(label) for label, _ in rows)
        for label, text in rows:
            first = f"  {label}".ljust(indent)
            if label:
                self.text(text, indent, first)
            else:
                self.line(first + text)

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print aligned columns that fit the terminal; without headers, only the rows.

        Columns of numbers ("1.2k" and "412 MiB" too) are right-aligned, int and float are
        formatted, None is "-". Long cells are shortened in the middle.
        """
        for text in table_lines(title, headers, rows, self._width()):
            self.line(text)

    def step(self, record: dict[str, Any]) -> None:
        """Move the bar to a metrics record, and print its line if one is due."""
        step, now = record["step"], time.monotonic()
        # measured from the first step on: includes validation and checkpoints, but not warm-up
        first, since = self._first = self._first or (step, now)
        pace = (now - since) / (step - first) if step > first else record["step_seconds"]
        eta = units.duration(pace * max(0, self._steps - step))
        if self._terminal:
            self._move(record, eta)
        due = step % self._log_every == 0 or step in (self._start_step + 1, self._steps)
        if due or "val_loss" in record:
            # the bar shows the ETA already; a log's lines may be long
            width = self._width() if self._terminal else 10_000
            eta = "" if self._terminal else eta
            self.line(step_line(record, self._steps, eta, width, self._own))

    def close(self) -> None:
        """Remove the progress bar; lines can still be printed."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _move(self, record: dict[str, Any], eta: str) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=self._steps,
                initial=self._start_step,
                file=self._stream,
                dynamic_ncols=True,
                leave=False,
                bar_format="{n_fmt}/{total_fmt} {bar} {desc}",
            )
        loss = units.decimal(record["loss"])
        self._bar.set_description_str(f"eta {eta}  loss {loss}  {_speed(record)}", refresh=False)
        self._bar.update(record["step"] - self._bar.n)

    def _width(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._terminal and (columns := os.get_terminal_size(self._stream.fileno()).columns):
                return columns
        return LOG_WIDTH


def step_line(
    record: dict[str, Any], steps: int, eta: str, width: int, own: Sequence[str] = ()
) -> str:
    """Format a step's record in `width` columns, omitting the least important fields. own: names of
    custom metrics."""
    sets = [name for name in record if name.startswith("val_loss/")]
    set_losses = ", ".join(f"{name[9:]} {units.decimal(record[name])}" for name in sets)
    also = [name for each in own for name in (each, f"val_{each}") if name in record]
    parts = [
        # (priority: the lowest is omitted first; text)
        (9, f"step {record['step']:>{len(str(steps)) + 1}}/{steps}"),
        (9, f"loss {units.decimal(record['loss'])}"),
        (8, f"val {units.decimal(record['val_loss'])}" if "val_loss" in record else ""),
        (7, f"({set_losses})" if sets else ""),
        *((7, f"{name} {units.decimal(record[name])}") for name in also),
        (8, f"ema {units.decimal(record['val_loss_ema'])}" if "val_loss_ema" in record else ""),
        (4, f"grad_norm {record['grad_norm']:.2f}"),
        (6, f"lr {record['lr']:.1e}"),
        (7, _speed(record)),
        (5, f"mfu {record['mfu']:.1%}" if record.get("mfu") is not None else ""),
        (3, f"mem {units.size(record['memory_bytes'])}"),
        (2, f"eta {eta}" if eta else ""),
        (1, f"busiest expert {record['busiest_expert']:.2f}" if "busiest_expert" in record else ""),
    ]
    parts = [part for part in parts if part[1]]
    while len(line := "  ".join(text for _, text in parts)) > width and len(parts) > 1:
        parts.remove(min(parts, key=lambda part: part[0]))
    return line[:width]


def _speed(record: dict[str, Any]) -> str:
    if "samples_per_second" in record:
        return f"{units.count(record['samples_per_second'])} samples/s"
    return f"{units.count(record['tokens_per_second'])} tok/s"


def table_lines(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    width: int,
    indent: str = "  ",
) -> list[str]:
    """Format a table as lines of at most `width` characters: title, headers, a rule, rows."""
    cells = [[_cell(value) for value in row] for row in rows]
    columns = list(zip(*([list(headers)] if headers else []), *cells, strict=True))
    numbers = (
        cells and all(not row[i] or NUMBER.fullmatch(row[i]) for row in cells)
        for i in range(len(columns))
    )
    aligns = [">" if number else "<" for number in numbers]
    widths = [max(map(len, column)) for column in columns]
    room = width - len(indent) - sum(widths)
    gap = "  " if room >= 2 * len(widths) - 2 else " "
    available = width - len(indent) - len(gap) * (len(widths) - 1)
    while sum(widths) > available and max(widths) > 1:
        # shorten text before numbers, the widest first
        text = [i for i in range(len(widths)) if aligns[i] == "<" and widths[i] > 8]
        i = max(text or range(len(widths)), key=lambda i: widths[i])
        widths[i] -= 1

    def layout(row: Sequence[str]) -> str:
        columns = zip(row, widths, aligns, strict=True)
        padded = [f"{shorten(text, size):{align}{size}}" for text, size, align in columns]
        return (indent + gap.join(padded)).rstrip()[:width]

    lines = [shorten(title, width)] if title else []
    if headers:
        lines += [layout(headers), (indent + gap.join("─" * size for size in widths))[:width]]
    return lines + [layout(row) for row in cells]


def shorten(text: str, width: int) -> str:
    """Shorten `text` to at most `width` characters, with "…" in place of its middle."""
    if len(text) <= width:
        return text
    head = width // 2
    return text[:head] + "…" + text[len(text) - width + head + 1 :] if width > 1 else "…"[:width]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split())


class _SafeStream:
    """A text stream that ignores broken pipes and replaces characters that its encoding lacks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate({ord("…"): "~", ord("─"): "-"})
            text = text.encode(encoding, "replace").decode(encoding)
        with self._ignoring_errors():
            self._stream.write(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _ignoring_errors(self) -> Any:
        try:
            with contextlib.suppress(ValueError):  # a closed file
                yield
        except OSError:
            # Broken pipe, or a closed terminal: Python's buffer would raise again at the next flush
            # and at exit. From now on the null device takes the output.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
