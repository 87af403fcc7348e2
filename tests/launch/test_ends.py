"""A rank that hangs or dies, in whatever phase of a job and however, is the one that is named, within
the limit of what it did; and no process is left."""

from __future__ import annotations

import re
import signal
from itertools import product
from pathlib import Path

import pytest

from support.cells import GRID, slow
from support.launched import Launched
from support.run_files import result
from support.waiting import until

PROGRAM = Path(__file__).parents[1] / "support" / "planted_ends.py"
TEXT = """
    dp=2 model.hidden_size=16 model.intermediate_size=32 model.num_hidden_layers=2 seq_len=16
    batch_size=8 data=synthetic steps=6 validation.every=4 validation.batches=2 logger=none
    checkpoint.every=4 checkpoint.timeout=1800 report=false device=cpu
    launch.timeout=12 launch.step_timeout=5 launch.heartbeat=0.5
"""
WORDS = TEXT.split()
MORE = {
    "export": ["checkpoint.export=hf", "checkpoint.timeout=14"],
    "compile": ["compile=true"],
    "writing": ["checkpoint.timeout=14"],
    "background": ["checkpoint.mode=async", "checkpoint.timeout=14"],
}
ALONE = ("export",)  # rank 0's work
# places where nothing says how long they may take, or where the run goes on without what fails
ENDLESS = {("start", "sleep"), ("background", "raise"), ("background", "scheduler")}
PLACES = ("start", "connect", "build", "load", "step", "validation", "save", "writing")
PLACES += ("background", *ALONE, "end")
HOW = ("stop", "sleep", "kill", "exit0", "raise", "scheduler")
DEFERRED = ("step", "validation", "save", "writing", "background")  # SIGTERM: to the step's end
LIMIT = 90.0  # seconds for the longest: torchrun kills half a minute after SIGTERM

Cell = tuple[str, int, str, int]  # place, rank, how, ranks that torchrun starts
DEFAULT: list[Cell] = [("step", 1, "exit0", 0), ("save", 0, "stop", 0)]
SLOW: list[Cell] = [
    *(("export", 0, "slow", 2), ("connect", 1, "sleep", 0), ("start", 0, "stop", 0)),
    *(("step", 1, "exit0", 2), ("step", 0, "stop", 2), ("step", 1, "kill", 2)),
    *(("end", 1, "sleep", 0), ("start", 1, "kill", 2), ("step", 0, "scheduler", 0)),
    *(("export", 0, "sleep", 0), ("step", 1, "exit1", 0)),
]
ALL: list[Cell] = [
    *product(PLACES, (0, 1), HOW, (0, 2)),
    *product(("export",), (0,), ("slow",), (0, 2)),
    *product(("compile",), (1,), ("stop", "sleep", "kill"), (0,)),
]
REST = [
    (place, rank, how, torchrun)
    for place, rank, how, torchrun in ALL
    if (place, rank, how, torchrun) not in DEFAULT + SLOW
    and not (place in ALONE and rank)
    and (place, how) not in ENDLESS
]


def error(place: str, rank: int, how: str, torchrun: int) -> str:
    """What result.json must say."""
    if how == "slow":
        return "completed: None"
    if how == "scheduler":
        return "stopped: .*SIGTERM" if place in DEFERRED else "interrupted: .*SIGTERM"
    if how == "raise":
        return f"failed: rank {rank} failed: RuntimeError: planted"
    if how in ("kill", "exit0", "exit1"):
        word = "killed by SIGKILL" if how == "kill" else f"exited with code {how[-1]} and wrote"
        # seen by its peers alone, or by them before it has ended
        word = r"its process \(" if torchrun else rf"({word}|its process \()"
        late = place == "end" and torchrun and how == "exit0"  # which torchrun takes for an end
        return f"failed: rank {rank} " + ("did not reach" if late else f"failed: {word}")
    if place == "end":  # the job is over
        return f"failed: rank {rank} did not reach the job's end in 12 s"
    where = {"step": "data", "background": "save", "writing": "save"}.get(place, place)
    if how == "stop":
        return rf"failed: no progress for .*[;:] rank {rank} \(.*, pid \d+\) has not responded for"
    return (
        rf"failed: no progress for .*[;:] rank {rank} has been in {where}.* at planted_ends.py:\d+"
    )


@pytest.mark.parametrize(
    ("place", "rank", "how", "torchrun"),
    [*DEFAULT[:1], *slow(*DEFAULT[1:], *SLOW), *slow(*REST, marks=GRID)],
)
def test_a_rank_that_hangs_or_dies_is_named_wherever_it_does(
    place: str, rank: int, how: str, torchrun: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("PLANTED", f"{place} {rank} {how}")
    words = [*WORDS, *MORE.get(place, []), f"run_dir={tmp_path}"]
    words += {"slow": ["checkpoint.timeout=1800"], "sleep": ["checkpoint.timeout=14"]}.get(how, [])
    launched = Launched(*words, torchrun=torchrun, program=PROGRAM)
    if how == "scheduler":
        until((tmp_path / "reached").exists)
        for process in launched.alive():
            process.send_signal(signal.SIGTERM)
    code, _, err = launched.wait(LIMIT)
    assert launched.all_exit()
    if torchrun and rank == 0 and not (tmp_path / "result.json").exists():
        # the process that writes it was killed: torchrun's report names it
        cause = err.partition("Root Cause")[2]
        assert re.search(r"rank +: 0 |rank 0 (did not reach|ended|failed|\()", cause), err
        return
    end = result(tmp_path)
    assert re.match(error(place, rank, how, torchrun), f"{end['status']}: {end['error']}"), end
    assert (code == 0) == (end["status"] == "completed"), err


@pytest.mark.slow
def test_a_rank_that_does_not_connect_is_named_by_verify_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED", "connect 1 sleep")
    monkeypatch.setenv("JOB", "verify")
    launched = Launched(*WORDS, f"run_dir={tmp_path}", program=PROGRAM)
    assert launched.wait(LIMIT)[0] != 0 and launched.all_exit()
    assert re.match(error("connect", 1, "sleep", 0), "failed: " + result(tmp_path)["error"])
