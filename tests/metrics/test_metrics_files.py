"""metrics.jsonl, result.json, the choice of sinks, and numbers as people read them."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config import schema
from titanlike.metrics import units
from titanlike.metrics.result import read_result, write_result
from titanlike.metrics.sinks import (
    JsonlSink,
    TensorBoardSink,
    open_sinks,
    read_jsonl,
    tensorboard_problem,
)


@given(losses=st.lists(st.floats(), max_size=20))
@settings(max_examples=50, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_a_resumed_run_goes_on_in_metrics_jsonl_without_gap_or_repeat(data, steps):
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
        expected["overrides"] = ["pp=2", "schedule=1f1b"]
        write_result(tmp_path, **expected)
        assert read_result(tmp_path) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_the_config_chooses_the_sinks_and_metrics_jsonl_is_always_there(tmp_path):
    """logger=none leaves metrics.jsonl alone; W&B offline comes beside it."""
    config = schema.Config(logger=schema.NoLogger())
    sinks = open_sinks(config, {"pp": 1}, tmp_path, 0, print)
    assert [sink.location for sink in sinks] == [str(tmp_path / "metrics.jsonl")]
    for sink in sinks:
        sink.log({"step": 1, "loss": 1.0})
        sink.close("completed")
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_tensorboard_is_written_or_named_as_missing(tmp_path):
    """With the package the events can be read back; without it, the extra to install is named."""
    if importlib.util.find_spec("tensorboard") is None:
        assert "pip install 'titanlike[tensorboard]'" in tensorboard_problem()
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


def test_numbers_read_as_people_write_them():
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
