"""The console as a user sees it: in a log, on terminals of two widths, and into a closed pipe."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import titanlike
from titanlike.metrics.console import Console, shorten, step_line, table_lines

ROOT = Path(titanlike.__file__).parents[1]
RUN = """
from titanlike.metrics.console import Console
console = Console(steps=44, log_every=10)
console.start_at(4)
path = "/home/somebody/" + "very/" * 30 + "deep/run"
console.table("Run", (), [("mesh", "pp=2 dp=2"), ("written to", path)])
console.table(
    "Stages",
    ["stage", "modules", "parameters", "bytes"],
    [[0, "embedding, layers.0 to layers.1", "410.2k", 123456], [1, "norm, head", "9.1k", None]],
)
for step in range(5, 45):
    record = dict(step=step, loss=3.2145, grad_norm=1.21, lr=3e-3, tokens=step * 2048)
    record |= dict(tokens_per_second=9123.4, step_seconds=0.1, memory_bytes=412 * 2**20)
    if step == 15:
        record |= dict(val_loss=3.3, mfu=0.423)
    console.step(record)
console.close()
console.line("Done. \u2026 \u4e2d")
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"} | extra


def printed(**env: str) -> bytes:
    """What the run writes to a log."""
    command, env = [sys.executable, "-c", RUN], environment(**env)
    run = subprocess.run(command, env=env, capture_output=True, timeout=20, check=True)
    assert not run.stderr
    return run.stdout


def test_a_log_has_plain_lines_with_everything():
    """First, every tenth, validating and last steps; no bar, no control characters."""
    text = printed().decode()
    lines = text.splitlines()
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    steps = [line for line in lines if line.startswith("step")]
    assert [re.match(r"step +(\d+)/44  ", line).group(1) for line in steps] == [
        *("5", "10", "15", "20", "30", "40", "44")
    ]
    assert re.fullmatch(
        r"step  15/44  loss 3\.2145  val 3\.3000  grad_norm 1\.21  lr 3\.0e-03  "
        r"9\.1k tok/s  mfu 42\.3%  mem 412 MiB  eta \d:\d\d",
        steps[2],
    )
    assert steps[-1].endswith("eta 0:00")
    assert "  stage  modules                          parameters    bytes" in lines
    assert "      0  embedding, layers.0 to layers.1      410.2k  123,456" in lines
    assert "      1  norm, head                             9.1k        -" in lines
    assert lines[-1] == "Done. … 中"


def on_terminal(columns: int) -> str:
    """Everything that the run writes to a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], env=environment(), stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal reads as EIO
        while chunk := os.read(master, 65536):
            output += chunk
    os.close(master)
    assert run.wait(20) == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("columns", [80, 160])
def test_a_terminal_has_a_bar_and_no_line_wider_than_itself(columns):
    """Lines scroll above the bar, which is gone at the end."""
    output = on_terminal(columns)
    drawn = re.split(r"\r\n|\r|\n", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output))
    assert max(map(len, drawn)) <= columns
    bars = [line for line in drawn if "/44 " in line and not line.startswith("step")]
    assert any(re.search(r"█.* eta \d:\d\d  loss 3\.2145  9\.1k tok/s", bar) for bar in bars)
    steps = [line.rstrip() for line in drawn if line.startswith("step")]
    assert len(steps) == 7
    assert all("loss 3.2145" in line and "9.1k tok/s" in line for line in steps)
    assert "val 3.3000" in steps[2]
    (path,) = (line for line in drawn if "written to" in line)
    assert "/home/somebody/" in path
    assert path.rstrip().endswith("deep/run")
    assert drawn[-2:] == ["Done. … 中", ""]
    assert drawn[-3].strip() == "", "the bar is wiped before the last line"


def test_a_reader_that_goes_away_does_not_end_the_run():
    """`python train.py | head -1` trains on, quietly, and ends with 0."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN + "print('also plain prints', flush=True)"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(20) == 0
    assert run.stderr.read() == b""
    run.stderr.close()


def test_an_ascii_terminal_gets_what_it_can_show():
    """No UnicodeEncodeError: shortened cells, rules and foreign letters are replaced."""
    lines = printed(PYTHONIOENCODING="ascii", COLUMNS="80").decode("ascii").splitlines()
    assert "  -----  -------------------------------  ----------  -------" in lines
    assert lines[-1] == "Done. ~ ?"


@given(
    rows=st.lists(st.tuples(st.text(), st.integers(), st.floats(), st.text()), max_size=4),
    width=st.integers(10, 200),
)
@settings(max_examples=50, deadline=None)
def test_no_table_is_wider_than_it_may_be(rows, width):
    """Whatever stands in its cells."""
    lines = table_lines("A title that is longer", ["name", "count", "x", "text"], rows, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 3 + len(rows)


def test_a_narrow_terminal_keeps_what_matters_most():
    """Step, loss and validation stay when the rest has no room; both ends of a path too."""
    record = dict(step=20, loss=3.2, val_loss=3.3, grad_norm=1.0, lr=1e-3)
    record |= dict(tokens_per_second=9e3, memory_bytes=2**30)
    assert step_line(record, 300, "1:02", 45) == "step   20/300  loss 3.2000  val 3.3000"
    line = step_line(record, 300, "", 80)
    assert "val 3.3000" in line and "lr 1.0e-03" in line and len(line) <= 80
    assert shorten("/home/me/a/b/c/run-7", 11) == "/home…run-7"


def test_a_command_to_be_copied_is_one_line_on_any_terminal() -> None:
    """The terminal wraps it, and knows that it is one; texts beside a label are wrapped at words."""
    command = f"W&B offline: wandb sync /home/{'somebody/' * 20}run /home/somebody/run"
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    with os.fdopen(terminal, "w") as stream:
        Console(stream, steps=1).fields(
            [("output", "/home/a"), ("data", "word " * 50), ("", command)]
        )
        text = ""
        while not text.endswith("run\r\n"):  # a terminal gives what has arrived so far
            text += os.read(main, 1 << 16).decode()
    os.close(main)
    lines = text.splitlines()
    assert lines[-1].strip() == command
    assert len(lines) > 3 and max(map(len, lines[:-1])) <= 80
