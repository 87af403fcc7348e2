"""One cell of gpu_check: its commands in processes of their own, ended at its time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import titanlike
from titanlike.launch.heartbeat import read_beats
from titanlike.launch.signals import die_with_parent
from titanlike.metrics.sinks import read_jsonl
from titanlike.proof.gpu_plan import Cell

_GRACE = 15.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.2  # seconds
_TAIL = 3000  # characters of a failed command's output that the report has
_VARYING = (
    "time",
    "tokens_per_second",
    "step_seconds",
    "memory_bytes",
    "memory_reserved_bytes",
    "mfu",
    "save_stall_seconds",
    *("busy_seconds", "busiest_rank", "busiest_seconds"),
)
_ALIKE = 1e-3  # relative: fp32 in two layouts, after some steps of Adam
_QUIET = "validation.every=0 checkpoint.last=false"


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    status: str  # "ok", "FAILED", "TIMEOUT"
    text: str  # one line
    seconds: float = 0.0
    output: str = ""  # of what failed, its end
    command: str = ""  # that can be typed again
    figures: dict[str, Any] = field(default_factory=dict)


class CellFailed(Exception):
    """The line that says why, and the output of the command."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


class Command:
    """`titanlike COMMAND ...` in a session of its own, its output in a file."""

    def __init__(self, command: str, overrides: list[str], log: Path, deadline: float) -> None:
        self._log, self._deadline = log, deadline
        root = str(Path(titanlike.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "disabled"}
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "TORCHELASTIC_RUN_ID",
            "TITANLIKE_PROGRAM",
        ):
            environment.pop(name, None)  # this command starts its ranks itself
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "titanlike", command, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it is left: its workers end with the process that started them."""
        for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        """Its exit code. Raises TimeoutError at the cell's limit."""
        self.wait_for(lambda: self._process.poll() is not None)
        return self._process.returncode

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Raises TimeoutError at the cell's limit, CellFailed where the command ends before."""
        while not condition():
            if self._process.poll() is not None and not condition():
                raise CellFailed(f"ended with {self._process.returncode} too early", self.output)
            if time.monotonic() > self._deadline:
                raise TimeoutError
            time.sleep(_POLL)


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Run a cell; its commands write into `folder`, which is new. Raises nothing of theirs."""
    start = time.monotonic()
    shown = f"{'verify' if cell.kind == 'verify' else 'train'} {' '.join(cell.overrides)}"
    runs = {"verify": _verify, "determinism": _determinism, "hangs": _hangs}
    runs |= {"kills": _kills, "resumes": _resumes, "speed": _speed}
    folder = folder.absolute()
    figures: dict[str, Any] = {}
    status, output = "ok", ""
    try:
        text, figures = runs[cell.kind](cell, folder, start + cell.timeout)
    except CellFailed as failed:
        status, text, output = "FAILED", str(failed), failed.output
    except TimeoutError:
        logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        output = logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
        status, text = "TIMEOUT", f"not done in {cell.timeout:.0f} s"
    except Exception as error:  # a file that is missing or odd is a failure of this cell alone
        status, text = "FAILED", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    return Outcome(status, text, seconds, output[-_TAIL:], f"titanlike {shown}", figures)


def _verify(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    words = [*cell.overrides, f"run_dir={folder / 'run'}"]
    with Command("verify", words, folder / "verify.log", deadline) as command:
        code = command.wait()
        lines = command.output.splitlines()
    said = [line for line in lines if line.startswith(("PASS", "FAIL"))]
    if code or not said or not said[-1].startswith("PASS"):
        raise CellFailed(said[-1] if said else f"exit code {code}", "\n".join(lines))
    worst = json.loads((folder / "run/verify/result.json").read_text())["value"]
    return f"{said[-1].removeprefix('PASS: ')}, largest gradient error {worst:.1e}", {}


def _train(cell: Cell, folder: Path, name: str, deadline: float) -> list[dict[str, Any]]:
    """A whole run, or what is left of one; its metrics."""
    words = [*cell.overrides, *_QUIET.split(), f"run_dir={folder / name}"]
    with Command("train", words, folder / f"{name}.log", deadline) as command:
        if code := command.wait():
            raise CellFailed(f"exit code {code}", command.output)
    return _records(folder / name)


def _records(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def _same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str:
    """ "" where two runs have the same numbers to the last bit, else the first difference."""
    numbers = [
        [{k: v for k, v in record.items() if k not in _VARYING} for record in records]
        for records in (first, second)
    ]
    steps = [[record["step"] for record in records] for records in numbers]
    if steps[0] != steps[1]:
        return f"steps {steps[1]} instead of {steps[0]}"
    for a, b in zip(*numbers, strict=True):
        for key in a:
            if a[key] != b.get(key):
                return f"{key} of step {a['step']}: {b.get(key)} instead of {a[key]}"
    return ""


def _determinism(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    first, second = (_train(cell, folder, name, deadline) for name in ("first", "second"))
    if difference := _same(first, second):
        raise CellFailed(difference)
    return f"{len(first)} steps, twice the same to the last bit", {}


def _hangs(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    run_dir, rank = folder / "run", cell.ranks - 1
    limit = float(next(w for w in cell.overrides if "step_timeout" in w).partition("=")[2])
    words = [*cell.overrides, *_QUIET.split(), f"run_dir={run_dir}"]
    with Command("train", words, folder / "run.log", deadline) as command:
        with _stopped(command, run_dir, cell.ranks, rank):
            start = time.monotonic()
            code = command.wait()
            seconds = time.monotonic() - start
        output = command.output
    error = json.loads((run_dir / "result.json").read_text())["error"] or ""
    if code == 0 or f"rank {rank} (" not in error or "has not responded" not in error:
        raise CellFailed(f"rank {rank} is not named: exit code {code}, {error}", output)
    if seconds > limit + 30:
        raise CellFailed(f"named after {seconds:.0f} s, launch.step_timeout={limit:g}", output)
    return f"rank {rank} named and the run ended {seconds:.0f} s after it (limit {limit:g} s)", {}


@contextlib.contextmanager
def _stopped(command: Command, run_dir: Path, ranks: int, rank: int) -> Iterator[None]:
    """A rank is stopped, once training goes, and goes on afterwards, so that it can be ended."""
    pid = _pid_of(command, run_dir, ranks, rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pid_of(command: Command, run_dir: Path, ranks: int, rank: int, steps: int = 3) -> int:
    """The process of a rank of a run that has trained for so many steps."""
    command.wait_for(lambda: len(_records(run_dir)) >= steps)
    return read_beats(run_dir, ranks)[rank].pid


def _kills(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    whole = _train(cell, folder, "whole", deadline)
    run_dir, rank = folder / "killed", cell.ranks - 1
    words = [*cell.overrides, *_QUIET.split(), f"run_dir={run_dir}"]
    with Command("train", words, folder / "killed.log", deadline) as command:
        # some steps after the first checkpoint
        pid = _pid_of(command, run_dir, cell.ranks, rank, steps=_every(cell) + 2)
        os.kill(pid, signal.SIGKILL)
        code, output = command.wait(), command.output
    events = (run_dir / "events.jsonl").read_text().splitlines()
    restarts = [event for event in map(json.loads, events) if event["event"] == "restart"]
    if code or len(restarts) != 1:
        raise CellFailed(f"exit code {code} after {len(restarts)} restarts", output)
    if difference := _same(whole, _records(run_dir)):
        raise CellFailed(f"other numbers than without the kill: {difference}", output)
    return f"restarted by itself from step {restarts[0]['step']}, no number changed", {}


def _resumes(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    again = replace(cell, overrides=cell.then)
    whole = _train(again, folder, "whole", deadline)
    _train(cell, folder, "resumed", deadline)
    resumed = _train(again, folder, "resumed", deadline)
    if "resuming from step " not in (folder / "resumed.log").read_text(errors="replace"):
        raise CellFailed("it began anew")
    steps = [record["step"] for record in resumed]
    if steps != [record["step"] for record in whole]:
        raise CellFailed(f"steps {steps} instead of 1 to {len(whole)}")
    for key in ("loss", "grad_norm"):
        for one, other in zip(whole, resumed, strict=True):
            if abs(one[key] - other[key]) > _ALIKE * abs(one[key]):
                raise CellFailed(f"{key} of step {one['step']}: {other[key]} instead of {one[key]}")
    return f"{_every(cell)} steps, saved and continued: as {len(whole)} without a stop", {}


def _every(cell: Cell) -> int:
    """Steps between the checkpoints of a cell."""
    return int(next(w for w in cell.overrides if "checkpoint.every" in w).partition("=")[2])


def _speed(cell: Cell, folder: Path, deadline: float) -> tuple[str, dict[str, Any]]:
    records = _train(cell, folder, "run", deadline)
    settled = records[len(records) // 2 :]  # the first steps compile, allocate, connect
    figures = {
        "tokens_per_second": median(r["tokens_per_second"] for r in settled),
        "step_seconds": median(r["step_seconds"] for r in settled),
        "memory_bytes": max(r["memory_bytes"] for r in records),
        "mfu": median(r["mfu"] for r in settled) if "mfu" in settled[-1] else None,
        "devices": cell.ranks,
    }
    speed = figures["tokens_per_second"]
    text = f"{speed:,.0f} tokens/s, {speed / cell.ranks:,.0f} a device"
    if figures["mfu"] is not None:
        text += f", MFU {figures['mfu']:.1%}"
    return f"{text}, {figures['memory_bytes'] / 2**30:.1f} GiB", figures
