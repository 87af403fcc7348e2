"""What a run prints, in a log, on terminals and into a closed pipe; metrics.jsonl, result.json, the
choice of sinks, and numbers as people read them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.paths import ROOT
from titanlike.core.metrics import units
from titanlike.core.metrics.console import shorten, step_line, table_lines
from titanlike.core.metrics.run_files import read_result, write_result
from titanlike.core.metrics.sinks import JsonlSink, read_jsonl
from titanlike.watch.tensorboard_sink import TensorBoardSink, tensorboard_problem

COMMAND = f"W&B offline: wandb sync /home/{'somebody/' * 20}run /home/somebody/run"
PLACE = "/tmp/my-first-one/experiments/of-somebody/run-2026"
END = f"training complete: val loss 1.8932, checkpoint at step 300, output in {PLACE}"
RUN = f"""
from titanlike.core.metrics.console import Console
console = Console(steps=44, log_every=10)
console.start_at(4)
path = "/home/somebody/" + "very/" * 30 + "deep/run"
console.text({END!r})
console.table("Run", (), [("mesh", "pp=2 dp=2"), ("written to", path)])
console.fields([("data", "word " * 50), ("", {COMMAND!r})])
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


def test_a_log_file_has_plain_lines():
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
    # a command to be copied is one line, which the terminal wraps and knows to be one
    assert [line.strip() for line in drawn if len(line) > columns] == [COMMAND]
    bars = [line for line in drawn if "/44 " in line and not line.startswith("step")]
    assert any(re.search(r"█.* eta \d:\d\d  loss 3\.2145  9\.1k tok/s", bar) for bar in bars)
    steps = [line.rstrip() for line in drawn if line.startswith("step")]
    assert len(steps) == 7
    assert all("loss 3.2145" in line and "9.1k tok/s" in line for line in steps)
    assert "val 3.3000" in steps[2]
    assert [line.rstrip() for line in drawn if PLACE in line] == [
        f"  {PLACE}" if columns == 80 else END  # a path is whole
    ]
    (path,) = (line for line in drawn if "written to" in line)
    assert "/home/somebody/" in path
    assert path.rstrip().endswith("deep/run")
    assert drawn[-2:] == ["Done. … 中", ""]
    assert drawn[-3].strip() == "", "the bar is wiped before the last line"


def test_a_closed_pipe_does_not_end_the_run():
    """`python train.py | head -1` trains on, quietly, and ends with 0."""
    command = [sys.executable, "-c", RUN + "print('also plain prints', flush=True)"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.wait(20) == 0 and run.stderr.read() == b""


def test_an_ascii_terminal_gets_ascii():
    """No UnicodeEncodeError: shortened cells, rules and foreign letters are replaced."""
    lines = printed(PYTHONIOENCODING="ascii", COLUMNS="80").decode("ascii").splitlines()
    assert "  -----  -------------------------------  ----------  -------" in lines
    assert lines[-1] == "Done. ~ ?"


@given(
    rows=st.lists(st.tuples(st.text(), st.integers(), st.floats(), st.text()), max_size=4),
    width=st.integers(10, 200),
)
@settings(max_examples=50)
def test_no_table_is_wider_than_its_limit(rows, width):
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


@given(losses=st.lists(st.floats(), max_size=20))
@settings(max_examples=50)
def test_metrics_jsonl_keeps_every_bit_of_every_float_as_strict_json(losses):
    """NaN and infinities too, and still every line is JSON that any program reads."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        sink = JsonlSink(path)
        for step, loss in enumerate(losses, 1):
            sink.log({"step": step, "loss": loss, "tokens": step * 2**40})
        lines = path.read_text().splitlines()  # before close: each line is there at once
        sink.close("completed")
        for line in lines:
            json.loads(line, parse_constant=refuse)
        back = [record["loss"] for record in read_jsonl(path)]
    assert len(back) == len(losses)
    for loss, again in zip(losses, back, strict=True):
        same_bits = struct.pack("<d", loss) == struct.pack("<d", again)
        assert same_bits or (math.isnan(loss) and math.isnan(again))


@given(data=st.data(), steps=st.integers(1, 12))
@settings(max_examples=60)
def test_a_resumed_run_continues_metrics_jsonl_without_gap_or_repeat(data, steps):
    """Wherever a crash tore the file, and whichever earlier checkpoint the run resumes from."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        sink = JsonlSink(path)
        ends = [0]
        for step in range(1, steps + 1):
            sink.log({"step": step, "loss": 1 / step})
            ends.append(path.stat().st_size)
        sink.close("failed")
        resume_at = data.draw(st.integers(0, steps))
        torn_at = data.draw(st.integers(ends[resume_at], ends[-1]))
        path.write_bytes(path.read_bytes()[:torn_at])
        sink = JsonlSink(path, start_step=resume_at)
        for step in range(resume_at + 1, steps + 1):
            sink.log({"step": step, "loss": 1 / step})
        sink.close("completed")
        whole = [{"step": step, "loss": 1 / step} for step in range(1, steps + 1)]
        assert read_jsonl(path) == whole
        assert [json.loads(line) for line in path.read_text().splitlines()] == whole
        assert [file.name for file in Path(folder).iterdir()] == ["metrics.jsonl"]


def test_result_json_says_how_a_run_ended(tmp_path):
    """It is there whole, or not at all; a job that left none reads as None."""
    assert read_result(tmp_path) is None
    write_result(tmp_path, status="failed", value=1.0, error="x", seconds=1.0, overrides=[])
    for value in (0.1 + 0.2, math.inf, None):
        expected = {"status": "completed", "value": value, "error": None, "seconds": 1.5}
        expected |= {"overrides": ["pp=2", "schedule=1f1b"], "verification": "verified before"}
        expected |= {"goodput": {"share": 0.5}}
        write_result(tmp_path, **expected)
        assert read_result(tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_tensorboard_is_written_or_named_as_missing(tmp_path):
    """With the package the events can be read back; without it, the extra to install is named."""
    if importlib.util.find_spec("tensorboard") is None:
        assert "pip install 'titanlike[tensorboard]'" in str(tensorboard_problem())
        with pytest.raises(ValueError, match=r"pip install 'titanlike\[tensorboard\]'"):
            TensorBoardSink(tmp_path, 0)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start_step, steps in (0, (1, 2, 3)), (2, (3, 4)):  # killed after 3, resumed at 2
        sink = TensorBoardSink(tmp_path, start_step)
        for step in steps:
            sink.log({"step": step, "loss": step / 4 + start_step})
        sink.close("completed")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(1, 0.25), (2, 0.5), (3, 2.75), (4, 3.0)]


def test_numbers_are_printed_in_readable_units():
    """Also where rounding carries into the next unit."""
    assert [units.count(n) for n in (0, 91.3, 999, 999.6, 1234, 999_949, 999_950)] == [
        *("0", "91", "999", "1.0k", "1.2k", "999.9k", "1.0M")
    ]
    assert [units.count(n) for n in (8.03e9, 405.9e9, 1.5e12)] == ["8.0B", "405.9B", "1.5T"]
    mib = 1024**2
    assert [units.size(n) for n in (0, 512, 412 * mib, 1023.6 * mib, 1.26 * 1024 * mib)] == [
        *("0 B", "512 B", "412 MiB", "1.0 GiB", "1.3 GiB")
    ]
    assert [units.duration(s) for s in (0, 9.4, 62, 59.6, 3784, 183600)] == [
        *("0:00", "0:09", "1:02", "1:00", "1:03:04", "51:00:00")
    ]
    assert [units.decimal(x) for x in (3.21451, 0.0, 1.25e-5, math.nan)] == [
        *("3.2145", "0.0000", "1.250e-05", "nan")
    ]
