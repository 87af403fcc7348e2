"""gpu_check's cells: each is one or two command lines, run in processes ended at its time limit.

They are the lines of `cells.yaml`, in its order. If there are more ranks than GPUs, several
share one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.gpu_check.stacks import where_ranks_stand
from titanlike.core.config.schema import MESH_AXES
from titanlike.core.launch.environment import child_environment
from titanlike.core.launch.heartbeat import Beat, read_beats
from titanlike.core.launch.signals import die_with_parent
from titanlike.core.metrics.summary import jsonl_records

KINDS = {  # kind of check -> what passes
    "verify": "the layout trains as one process in plain torch: schedules, ZeRO levels, bf16, compile",
    "determinism": "two runs with deterministic=true are equal to the last bit",
    "hangs": "a rank is stopped: the run ends in time and names it",
    "kills": "a rank is killed: the run restarts, and no number changes",
    "resumes": "what one layout saves another continues, in each mode of saving",
    "waits": "the host waits for the device nowhere in a step of a dense model",
    "speed": "tokens/s, MFU and memory of 1B and 8B, with recommended settings; one rank beside a plain "
    "loop",
}


@dataclass(frozen=True)
class Cell:
    """One check, which passes or fails on its own."""

    kind: str  # of KINDS
    name: str  # what distinguishes it
    overrides: tuple[str, ...]  # of train.py
    ranks: int
    timeout: float  # seconds
    then: tuple[str, ...] = ()  # overrides of the command that resumes the run
    phase: str = "data"  # in which a rank is stopped or killed
    seconds: float = 0.0  # expected
    gpus: tuple[str, ...] = ()  # that it may use, by their names; () = all


def plan(
    ranks: int, kinds: tuple[str, ...] = tuple(KINDS), *, cpu: bool = False, gpus: int = 0
) -> list[Cell]:
    """The cells of at most `ranks` ranks, on `gpus` GPUs (0: one for each); with `cpu` tiny models,
    and few cells after the queue's."""
    text = Path(__file__).with_name("cells.yaml").read_text(encoding="utf-8")
    tables = yaml.safe_load(text)
    refused = {*tables["gpu_only"]} if cpu else set()
    rest = tables["rest"][:2] if cpu else tables["rest"]
    cells: dict[tuple[Any, ...], Cell] = {}
    for line in (line for lines in (*tables["queue"], *rest) for line in _each(lines)):
        if refused & {*line.split()}:
            continue
        cell = _cell(line, tables, cpu, gpus or ranks)
        # no speed of layouts whose ranks share a GPU
        runs = cell.kind != "speed" or cpu or cell.ranks in (1, gpus or ranks)
        if runs and cell.kind in kinds and cell.ranks <= ranks:
            words = frozenset(cell.overrides), frozenset(cell.then)
            cells.setdefault((cell.kind, *words, cell.phase), cell)
    return list(cells.values())


def _each(line: str) -> list[str]:
    """Expand {a|b} in a line to several lines."""
    if "{" not in line:
        return [line]
    before, _, after = line.partition("{")
    ways, _, after = after.partition("}")
    return [before + way + rest for way in ways.split("|") for rest in _each(after)]


def _cell(line: str, tables: dict[str, Any], cpu: bool, gpus: int) -> Cell:
    kind, _, name = line.partition(" ")
    words, arrow, then = name.partition("->")
    words, _, phase = words.partition("@")
    overrides = _overrides(kind, words, tables, cpu, gpus)
    more = _overrides(kind, then, tables, cpu, gpus) if arrow else ()
    ranks, seconds = max(map(_ranks, (overrides, more))), tables["seconds"]
    likely = seconds[kind] + seconds["rank"] * ranks
    likely += sum(seconds.get(word, 0.0) for word in overrides)
    return Cell(
        kind,
        name or "one process",
        overrides,
        ranks,
        5 * likely,
        more,
        phase.strip() or "data",
        likely,
    )


def _overrides(
    kind: str, words: str, tables: dict[str, Any], cpu: bool, gpus: int
) -> tuple[str, ...]:
    common = f"SMALL BATCH device=auto {tables['common'].get(kind, '')}"
    if cpu:
        common = f"TINY BATCH device=cpu {tables['common'].get(kind, '')} "
        common += tables["cpu"].get(kind, "")
    if kind == "speed" and cpu:  # of its layout alone
        words = " ".join(f"{axis}={n}" for axis, n in _axes(words.split()).items())
    elif kind == "speed":
        common = tables["common"][kind]
    texts = f"{common} {words}".split()
    while short := {*texts} & {*tables["short"]}:
        texts = " ".join(tables["short"][t] if t in short else t for t in texts).split()
    # the last value of each key
    overrides = tuple({text.partition("=")[0]: text for text in texts}.values())
    each = -(-_ranks(overrides) // gpus)
    return (*overrides, f"launch.ranks_per_device={each}") if each > 1 else overrides


def _axes(words: Sequence[str]) -> dict[str, int]:
    pairs = (word.partition("=") for word in words)
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


def _ranks(overrides: tuple[str, ...]) -> int:
    return prod(_axes(overrides).get(axis, 1) for axis in MESH_AXES)


# --- running a cell ----------------------------------------------------------------------------

_TOOLS = Path(__file__).parents[2] / "tools"
_PROGRAMS = {name: [str(_TOOLS / f"{name}.py")] for name in ("bench", "waits")}
_GRACE = 15.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.2  # seconds
_TAIL = 3000  # characters of a failed command's output in the report
_VARYING = {"time", "tokens_per_second", "step_seconds", "memory_bytes", "memory_reserved_bytes"}
_VARYING |= {
    "mfu",
    "data_seconds",
    "save_stall_seconds",
    "busy_seconds",
    "busiest_rank",
    "busiest_seconds",
}
_ALIKE = 1e-3  # relative difference of fp32 losses in two layouts, after some steps
_BEFORE = ("build", "compile")  # phases that precede the first step
_MANY = 100  # steps after which every phase has run
_LOOK = 0.02  # seconds between polls for a short phase

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    status: str  # "ok", "FAILED", "TIMEOUT"
    text: str  # one line
    seconds: float = 0.0
    output: str = ""  # the end of a failed command's
    command: str = ""  # to repeat it
    figures: dict[str, Any] = field(default_factory=dict)


class CellFailed(Exception):
    """Carries the reason in one line, and the command's output."""

    def __init__(self, text: str, output: str = "") -> None:
        super().__init__(text)
        self.output = output


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Run a cell, whose commands write into `folder`, a new one. Raises nothing of theirs."""
    start = time.monotonic()
    run = _Run(cell, folder.absolute(), start + cell.timeout)
    status, output = "ok", ""
    try:
        text = getattr(run, cell.kind)()
    except CellFailed as failed:
        status, text, output = "FAILED", str(failed), failed.output
    except TimeoutError as late:
        where, output = late.args
        status, text = "TIMEOUT", f"not done in {cell.timeout:.0f} s; {where}".rstrip("; ")
    except Exception as error:  # such as a missing or damaged file
        status, text = "FAILED", f"{type(error).__name__}: {error}"
    tool = "python", f"tools/{run.job}.py"
    words = *(tool if run.job in _PROGRAMS else ("titanlike", run.job)), *cell.overrides
    seconds = time.monotonic() - start
    return Outcome(status, text, seconds, output[-_TAIL:], " ".join(words), run.figures)


class Command:
    """`titanlike COMMAND ...`, or a tool, in its own session, with its output in a file."""

    def __init__(
        self,
        command: str,
        overrides: Sequence[str],
        log: Path,
        deadline: float,
        gpus: Sequence[str] = (),
    ) -> None:
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        self._log, self._deadline = log, deadline
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *_PROGRAMS.get(command, ("-m", "titanlike", command)), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment() | {"WANDB_MODE": "disabled"} | shown,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process that started the workers; they end with it."""
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
        """Return the exit code. Raises TimeoutError at the cell's limit, with stacks and output."""
        self.wait_for(lambda: self._process.poll() is not None)
        return self._process.returncode

    def wait_for(self, condition: Callable[[], bool], poll: float = _POLL) -> None:
        """Poll. Raises TimeoutError at the cell's limit, CellFailed if the command ends before."""
        while not condition():
            if self._process.poll() is not None and not condition():
                raise CellFailed(f"ended with {self._process.returncode} too early", self.output)
            if time.monotonic() > self._deadline:
                where, stacks = where_ranks_stand(self._process.pid, self._log.parent)
                raise TimeoutError(where, f"{self.output[-_TAIL // 4 :]}\n{stacks}")
            time.sleep(poll)


class _Run:
    """A method per kind of cell; it returns a line of results, and raises what run_cell catches."""

    def __init__(self, cell: Cell, folder: Path, deadline: float) -> None:
        self.cell, self.folder, self._deadline = cell, folder, deadline
        self.figures: dict[str, Any] = {}
        self._last_rank = cell.ranks - 1
        self.job = {"verify": "verify", "waits": "waits"}.get(cell.kind, "train")
        if cell.kind == "speed" and cell.ranks == 1:  # compared with a plain loop
            self.job = "bench"

    def _command(self, name: str, overrides: Sequence[str] = ()) -> Command:
        """Start a command with a run_dir and a log of this name."""
        words = *(overrides or self.cell.overrides), f"run_dir={self.folder / name}"
        return Command(self.job, words, self.folder / f"{name}.log", self._deadline, self.cell.gpus)

    def _run(self, name: str, overrides: Sequence[str] = ()) -> list[Record]:
        """Run or resume a training run to its end; return its metrics."""
        with self._command(name, overrides) as command:
            if code := command.wait():
                raise CellFailed(f"exit code {code}", command.output)
        return _records(self._run_dir(name))

    def _in_phase(self, command: Command, name: str, steps: int) -> int:
        """Wait until a run is in the cell's phase, after `steps` steps if training has begun by
        then; return the process id of its last rank."""
        run_dir, rank, phase = self._run_dir(name), self._last_rank, self.cell.phase
        beat: Beat | None = None

        def reached() -> bool:
            nonlocal beat
            beat = read_beats(run_dir, range(rank, rank + 1)).get(rank)
            done = len(_records(run_dir))
            if done > _MANY + steps and phase != "data":
                raise CellFailed(f"{phase} was too short to be seen in {done} steps")
            now = beat is not None and beat.doing == phase and not beat.ended
            return now and (phase in _BEFORE or done >= steps)

        command.wait_for(reached, _LOOK)
        assert beat is not None
        return beat.pid

    def _run_dir(self, name: str = "run") -> Path:
        return self.folder / name / ("" if self.job == "train" else self.job)

    def _result(self, name: str = "result") -> dict[str, Any]:
        return json.loads((self._run_dir() / f"{name}.json").read_text())

    def _setting(self, key: str) -> float:
        return float(next(w for w in self.cell.overrides if key in w).partition("=")[2])

    def verify(self) -> str:
        with self._command("run") as command:
            code, output = command.wait(), command.output
        lines = [line for line in output.splitlines() if line.startswith(("PASS", "FAIL"))]
        if code or not lines or not lines[-1].startswith("PASS"):
            raise CellFailed(lines[-1] if lines else f"exit code {code}", output)
        worst = self._result()["value"]
        return f"{lines[-1].removeprefix('PASS: ')}, largest gradient error {worst:.1e}"

    def determinism(self) -> str:
        first, second = self._run("first"), self._run("second")
        if difference := _same(first, second):
            raise CellFailed(difference)
        return f"{len(first)} steps, twice the same to the last bit"

    def hangs(self) -> str:
        rank, limit = self._last_rank, self._setting("step_timeout")
        with self._command("run") as command:
            with _stopped(self._in_phase(command, "run", steps=3)):
                start = time.monotonic()
                code = command.wait()
                seconds = time.monotonic() - start
            output = command.output
        error = self._result()["error"] or ""
        if code == 0 or f"rank {rank} (" not in error or "has not responded" not in error:
            raise CellFailed(f"rank {rank} is not named: exit code {code}, {error}", output)
        if seconds > limit + 30:
            raise CellFailed(f"named after {seconds:.0f} s, launch.step_timeout={limit:g}", output)
        return f"rank {rank} named and the run ended {seconds:.0f} s after it (limit {limit:g} s)"

    def kills(self) -> str:
        undisturbed = self._run("whole")
        steps = int(self._setting("checkpoint.every")) + 2  # some after the first checkpoint
        with self._command("killed") as command:
            os.kill(self._in_phase(command, "killed", steps), signal.SIGKILL)
            code, output = command.wait(), command.output
        events = (self.folder / "killed/events.jsonl").read_text().splitlines()
        restarts = [event for event in map(json.loads, events) if event["event"] == "restart"]
        if code or len(restarts) != 1:
            raise CellFailed(f"exit code {code} after {len(restarts)} restarts", output)
        if difference := _same(undisturbed, _records(self._run_dir("killed"))):
            raise CellFailed(f"other numbers than without the kill: {difference}", output)
        return f"restarted by itself from step {restarts[0]['step']}, no number changed"

    def resumes(self) -> str:
        undisturbed = self._run("whole", self.cell.then)
        self._run("resumed")
        resumed = self._run("resumed", self.cell.then)
        if "resuming from step " not in (self.folder / "resumed.log").read_text(errors="replace"):
            raise CellFailed("it began anew")
        steps = [record["step"] for record in resumed]
        if steps != [record["step"] for record in undisturbed]:
            raise CellFailed(f"steps {steps} instead of 1 to {len(undisturbed)}")
        for key in ("loss", "grad_norm"):
            for a, b in zip(undisturbed, resumed, strict=True):
                if abs(a[key] - b[key]) > _ALIKE * abs(a[key]):
                    raise CellFailed(f"{key} of step {a['step']}: {b[key]} instead of {a[key]}")
        saved = int(self._setting("checkpoint.every"))
        return f"{saved} steps, saved and continued: as {len(undisturbed)} without a stop"

    def waits(self) -> str:
        self._run("run")
        self.figures = result = self._result("waits")
        if broken := result["not_compiled_as_a_whole"]:
            raise CellFailed(f"not compiled as a whole: {broken}")
        if result["value"] is None:
            return "a CPU has none to count; the steps ran"
        text = f"{result['value']:g} a step"
        if result["value"] and not any("experts" in word for word in self.cell.overrides):
            raise CellFailed(f"{text}: {result['places']}")  # a mixture waits for its routes
        return text

    def speed(self) -> str:
        records = self._run("run")
        if self.job == "bench":
            keys = "step_seconds", "mfu", "plain_step_seconds", "ratio", "step_by_kind"
            result = self._result("bench")
            figures: Record = {key: result.get(key) for key in keys}
            figures["tokens_per_second"] = result["value"]
            memory = max(result["memory_bytes"])
        else:
            settled = records[len(records) // 2 :]  # the first steps compile, allocate, connect
            keys = "tokens_per_second", "step_seconds", "mfu"
            figures = {
                key: median(record[key] for record in settled) if key in settled[-1] else None
                for key in keys
            }
            memory = max(record["memory_bytes"] for record in records)
        self.figures = figures | {"memory_bytes": memory, "devices": self.cell.ranks}
        speed, mfu, ratio = figures["tokens_per_second"], figures["mfu"], figures.get("ratio")
        text = f"{speed:,.0f} tokens/s, {speed / self.cell.ranks:,.0f} a device"
        text += "" if mfu is None else f", MFU {mfu:.1%}"
        beside = f", {ratio:.3f} of the plain loop's time" if ratio else ""
        return f"{text}, {memory / 2**30:.1f} GiB{beside}"


def _records(run_dir: Path) -> list[Record]:
    return [*jsonl_records(run_dir / "metrics.jsonl")]


def _same(first: list[Record], second: list[Record]) -> str:
    """ "" if two runs have bitwise equal metrics, else the first difference."""
    steps = [[record["step"] for record in records] for records in (first, second)]
    if steps[0] != steps[1]:
        return f"steps {steps[1]} instead of {steps[0]}"
    for a, b in zip(first, second, strict=True):
        for key in (key for key in a if key not in _VARYING):
            if a[key] != b.get(key):
                return f"{key} of step {a['step']}: {b.get(key)} instead of {a[key]}"
    return ""


@contextlib.contextmanager
def _stopped(process: int) -> Iterator[None]:
    """A context in which a process is stopped (SIGSTOP); it continues afterwards."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
