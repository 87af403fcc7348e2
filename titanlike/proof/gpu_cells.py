"""What gpu_check runs: cells, each a command line (or two) of its own, chosen by the devices, in
processes of their own that are ended at its time limit.

The layouts are those of `gpu_cells.yaml`, for each number of devices that is a power of two. In
those of the largest number every schedule is verified in fp32 and in bf16, with another ZeRO level
each time, and every second time with compiled blocks; the smaller meshes have a schedule or two.
What has kernels of its own on a GPU (documents, rings, experts, float8) is verified in the layouts
called `others`.
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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from titanlike.config.schema import MESH_AXES
from titanlike.launch.environment import child_environment
from titanlike.launch.heartbeat import read_beats
from titanlike.launch.signals import die_with_parent
from titanlike.metrics.summary import jsonl_records

KINDS = {  # of checks -> what passes
    "verify": "the layout trains as one process in plain torch: schedules, ZeRO levels, bf16, compile",
    "determinism": "two runs with deterministic=true are equal to the last bit",
    "hangs": "a rank is stopped: the run ends in time and names it",
    "kills": "a rank is killed: the run restarts, and no number changes",
    "resumes": "what one layout saves another continues, in each mode of saving",
    "speed": "tokens/s, MFU and memory of 1B and 8B, with recommended settings",
}
# the backward: ZeRO 1 alone
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev", "zbh1", "vhalf", "vmin")
_SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b", "loopedbfs", *_SPLIT)


@dataclass(frozen=True)
class Cell:
    """One check: it passes or fails by itself."""

    kind: str  # of KINDS
    name: str  # what is different in it, for people
    overrides: tuple[str, ...]  # of train.py
    ranks: int
    timeout: float  # seconds
    then: tuple[str, ...] = ()  # more, of the command that goes on with the run


def plan(devices: int, kinds: tuple[str, ...] = tuple(KINDS), *, cpu: bool = False) -> list[Cell]:
    """The cells for so many devices of a machine; with `cpu` few and tiny ones, for as many
    ranks."""
    cells = _Cells(devices, cpu)
    return [cell for kind in KINDS if kind in kinds for cell in getattr(cells, kind)()]


class _Cells:
    """A method for each kind."""

    def __init__(self, devices: int, cpu: bool) -> None:
        text = Path(__file__).with_name("gpu_cells.yaml").read_text(encoding="utf-8")
        tables = yaml.safe_load(text)
        self._short: dict[str, str] = tables["short"]
        self._meshes: dict[int, list[str]] = tables["meshes"]
        self._sizes = [size for size in self._meshes if size <= devices]
        self._divided, self._others = (
            [words for size in self._sizes for words in tables[key].get(size, ())]
            for key in ("divided", "others")
        )
        self._divided_fast: str = tables["divided_fast"]
        self._cpu = cpu
        # up to two meshes of all devices: a pipeline, and data parallel
        meshes = self._meshes[self._sizes[-1]]
        piped = [mesh for mesh in meshes if "pp" in mesh]
        self._largest = [*piped[:1], *[mesh for mesh in meshes if mesh not in piped][:1]]

    def _cell(self, kind: str, name: str, words: str, timeout: float = 600.0) -> Cell:
        common = "" if kind == "speed" and not self._cpu else "BATCH"
        if common:
            common = f"TINY {common} device=cpu" if self._cpu else f"SMALL {common} device=auto"
        texts = self._in_full(f"{common} {words}").split()
        overrides = tuple({text.partition("=")[0]: text for text in texts}.values())
        ranks = prod(_axes(overrides).get(axis, 1) for axis in MESH_AXES)
        return Cell(kind, self._in_full(name) or "one process", overrides, ranks, timeout)

    def _in_full(self, words: str) -> str:
        return " ".join(self._short.get(word, word) for word in words.split())

    def verify(self) -> Iterator[Cell]:
        for words in self._schedules():
            yield self._cell("verify", words, words)
        ways = ("", " precision=bf16 compile=true", " compile=true tp_async=true")
        texts = [words + more for words in self._divided for more in ways[: 1 if self._cpu else 3]]
        for words in [] if self._cpu else self._others:
            both = [words, f"{words} precision=bf16"]
            texts += both[:1] if "precision=" in words else both
        for words in texts:
            yield self._cell("verify", words, words)

    def _schedules(self) -> Iterator[str]:
        for size in self._sizes:
            for mesh in self._meshes[size][: 2 if self._cpu else None]:
                axes = _axes(mesh.split())
                shards = axes.get("dp", 1) > axes.get("replicate", 1)
                compiled = cycle((False, True, True, False))
                schedules = _SCHEDULES if "pp" in axes else ("1f1b",) * (3 if shards else 1)
                if self._cpu or size < self._sizes[-1]:
                    few = ("1f1b", "zbvzerobubble")
                    schedules = tuple(name for name in schedules if name in few)[:2]
                for number, schedule in enumerate(schedules):
                    for turn, precision in enumerate(("fp32", "bf16")[: 1 if self._cpu else 2]):
                        words = [mesh] * bool(mesh)
                        words += [f"schedule={schedule}"] * ("pp" in axes)
                        if shards and not ("pp" in axes and schedule in _SPLIT):
                            words.append(f"fsdp.zero={1 + (number + turn) % 3}")
                        words += ["precision=bf16"] * (precision == "bf16")
                        words += ["compile=true"] * (not self._cpu and next(compiled))
                        yield " ".join(words)

    def determinism(self) -> Iterator[Cell]:
        for mesh in self._largest[: 1 if self._cpu else 2]:
            words = f"{mesh} deterministic=true precision=bf16 steps=6"
            yield self._cell("determinism", mesh, words)

    def hangs(self) -> Iterator[Cell]:
        limit = 4 if self._cpu else 30
        for mesh in filter(None, self._largest[: 1 if self._cpu else 2]):
            words = f"{mesh} steps=100000 launch.step_timeout={limit} launch.heartbeat=1"
            yield self._cell("hangs", f"{mesh}, the last rank is stopped", words)

    def kills(self) -> Iterator[Cell]:
        for mesh in filter(None, self._largest[: 1 if self._cpu else 2]):
            steps = 40 if self._cpu else 200  # the kill comes after the first checkpoint
            restarts = "launch.max_restarts=1 checkpoint.every=10"
            words = f"{mesh} deterministic=true steps={steps} {restarts}"
            yield self._cell("kills", f"{mesh}, the last rank is killed", words)

    def resumes(self) -> Iterator[Cell]:
        """Saved in each way by one process, or in one layout, and loaded in another."""
        meshes = self._largest
        pairs = [*dict.fromkeys([*(("", mesh) for mesh in meshes), (meshes[-1], "")])]
        for mode in ("async", "async_pinned", "async_process")[: 1 if self._cpu else 3]:
            # a small eps would turn the rounding of a small gradient into a whole update
            steady = "deterministic=true lr=constant optimizer.eps=1e-4"
            common = f"{steady} checkpoint.every=6 checkpoint.mode={mode}"
            for before, after in pairs[: 1 if self._cpu else None]:
                name = f"{before or 'one process'}, then {after or 'one process'}, {mode}"
                saved = self._cell("resumes", name, f"{before} {common} steps=6")
                resumed = self._cell("resumes", name, f"{after} {common} steps=12")
                ranks = max(saved.ranks, resumed.ranks)
                yield replace(saved, then=resumed.overrides, ranks=ranks)

    def speed(self) -> Iterator[Cell]:
        if self._cpu:
            words = f"{self._meshes[self._sizes[-1]][0]} steps=6"
            yield self._cell("speed", "tiny", words)
            return
        for size in sorted({1, self._sizes[-1]}):
            for mesh in self._meshes[size]:
                axes = _axes(mesh.split())
                pp, dp = axes.get("pp", 1), axes.get("dp", 1)
                layout = mesh + " schedule=interleaved1f1b" * (1 < pp < 8)
                count = 4 * pp if pp > 1 else 2  # microbatches, of one sequence
                batch = f"batch_size={count * dp} schedule.microbatches={count} steps=12"
                for model, least in (("llama3_1b", 1), ("llama3_8b", 4)):
                    cells = [
                        (f"{layout} activation_checkpoint={recomputed}", batch)
                        for recomputed in ("selective", "fit")[pp > 1 :]
                        if size >= least
                    ]
                    if size >= 2 and mesh == f"dp={size}":
                        half = f"batch_size={dp} schedule.microbatches=2 steps=12"
                        cells.insert(0, (f"dp={dp // 2} {self._divided_fast}", half))
                    for words, sizes in cells:
                        name = f"model={model} {words}"
                        if sizes == batch:
                            name = name.replace("activation_checkpoint", "recomputed")
                        yield self._cell(
                            "speed", name, f"model={model} {words} {sizes} BIG", 1200.0
                        )


def _axes(words: tuple[str, ...] | list[str]) -> dict[str, int]:
    pairs = (word.partition("=") for word in words)
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


# --- running a cell ----------------------------------------------------------------------------

_GRACE = 15.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.2  # seconds
_TAIL = 3000  # characters of a failed command's output that the report has
_VARYING = {"time", "tokens_per_second", "step_seconds", "memory_bytes", "memory_reserved_bytes"}
_VARYING |= {"mfu", "save_stall_seconds", "busy_seconds", "busiest_rank", "busiest_seconds"}
_ALIKE = 1e-3  # relative: fp32 in two layouts, after some steps
_QUIET = ("validation.every=0", "checkpoint.last=false")

Record = dict[str, Any]


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


def run_cell(cell: Cell, folder: Path) -> Outcome:
    """Run a cell; its commands write into `folder`, which is new. Raises nothing of theirs."""
    start = time.monotonic()
    run = _Run(cell, folder.absolute(), start + cell.timeout)
    status, output = "ok", ""
    try:
        text = getattr(run, cell.kind)()
    except CellFailed as failed:
        status, text, output = "FAILED", str(failed), failed.output
    except TimeoutError:
        logs = sorted(run.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        output = logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
        status, text = "TIMEOUT", f"not done in {cell.timeout:.0f} s"
    except Exception as error:  # a file that is missing or odd is a failure of this cell alone
        status, text = "FAILED", f"{type(error).__name__}: {error}"
    words = "titanlike", "verify" if cell.kind == "verify" else "train", *cell.overrides
    seconds = time.monotonic() - start
    return Outcome(status, text, seconds, output[-_TAIL:], " ".join(words), run.figures)


class Command:
    """`titanlike COMMAND ...` in a session of its own, its output in a file."""

    def __init__(self, command: str, overrides: Sequence[str], log: Path, deadline: float) -> None:
        self._log, self._deadline = log, deadline
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "titanlike", command, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment() | {"WANDB_MODE": "disabled"},
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


class _Run:
    """A method for each kind of cell; it returns what was found, and raises what run_cell
    catches."""

    def __init__(self, cell: Cell, folder: Path, deadline: float) -> None:
        self.cell, self.folder, self._deadline = cell, folder, deadline
        self.figures: dict[str, Any] = {}
        self._last_rank = cell.ranks - 1

    def _command(self, name: str, *words: str, job: str = "train") -> Command:
        """A command that writes into a run_dir and a log of this name."""
        words = *words, f"run_dir={self.folder / name}"
        return Command(job, words, self.folder / f"{name}.log", self._deadline)

    def _train(self, name: str, overrides: Sequence[str] = ()) -> list[Record]:
        """A whole run, or what is left of one; its metrics."""
        with self._command(name, *(overrides or self.cell.overrides), *_QUIET) as command:
            if code := command.wait():
                raise CellFailed(f"exit code {code}", command.output)
        return _records(self.folder / name)

    def _process_of(self, command: Command, name: str, steps: int) -> int:
        """The process of the last rank of a run, once that has trained for so many steps."""
        run_dir = self.folder / name
        command.wait_for(lambda: len(_records(run_dir)) >= steps)
        return read_beats(run_dir, range(self.cell.ranks))[self._last_rank].pid

    def _setting(self, key: str) -> float:
        return float(next(w for w in self.cell.overrides if key in w).partition("=")[2])

    def verify(self) -> str:
        with self._command("run", *self.cell.overrides, job="verify") as command:
            code, output = command.wait(), command.output
        lines = [line for line in output.splitlines() if line.startswith(("PASS", "FAIL"))]
        if code or not lines or not lines[-1].startswith("PASS"):
            raise CellFailed(lines[-1] if lines else f"exit code {code}", output)
        worst = json.loads((self.folder / "run/verify/result.json").read_text())["value"]
        return f"{lines[-1].removeprefix('PASS: ')}, largest gradient error {worst:.1e}"

    def determinism(self) -> str:
        first, second = self._train("first"), self._train("second")
        if difference := _same(first, second):
            raise CellFailed(difference)
        return f"{len(first)} steps, twice the same to the last bit"

    def hangs(self) -> str:
        rank, limit = self._last_rank, self._setting("step_timeout")
        with self._command("run", *self.cell.overrides, *_QUIET) as command:
            with _stopped(self._process_of(command, "run", steps=3)):
                start = time.monotonic()
                code = command.wait()
                seconds = time.monotonic() - start
            output = command.output
        error = json.loads((self.folder / "run/result.json").read_text())["error"] or ""
        if code == 0 or f"rank {rank} (" not in error or "has not responded" not in error:
            raise CellFailed(f"rank {rank} is not named: exit code {code}, {error}", output)
        if seconds > limit + 30:
            raise CellFailed(f"named after {seconds:.0f} s, launch.step_timeout={limit:g}", output)
        return f"rank {rank} named and the run ended {seconds:.0f} s after it (limit {limit:g} s)"

    def kills(self) -> str:
        undisturbed = self._train("whole")
        steps = int(self._setting("checkpoint.every")) + 2  # some after the first checkpoint
        with self._command("killed", *self.cell.overrides, *_QUIET) as command:
            os.kill(self._process_of(command, "killed", steps), signal.SIGKILL)
            code, output = command.wait(), command.output
        events = (self.folder / "killed/events.jsonl").read_text().splitlines()
        restarts = [event for event in map(json.loads, events) if event["event"] == "restart"]
        if code or len(restarts) != 1:
            raise CellFailed(f"exit code {code} after {len(restarts)} restarts", output)
        if difference := _same(undisturbed, _records(self.folder / "killed")):
            raise CellFailed(f"other numbers than without the kill: {difference}", output)
        return f"restarted by itself from step {restarts[0]['step']}, no number changed"

    def resumes(self) -> str:
        undisturbed = self._train("whole", self.cell.then)
        self._train("resumed")
        resumed = self._train("resumed", self.cell.then)
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

    def speed(self) -> str:
        records = self._train("run")
        settled = records[len(records) // 2 :]  # the first steps compile, allocate, connect
        figures = {
            key: median(record[key] for record in settled) if key in settled[-1] else None
            for key in ("tokens_per_second", "step_seconds", "mfu")
        }
        memory = max(record["memory_bytes"] for record in records)
        self.figures = figures | {"memory_bytes": memory, "devices": self.cell.ranks}
        speed, mfu = figures["tokens_per_second"] or 0.0, figures["mfu"]
        text = f"{speed:,.0f} tokens/s, {speed / self.cell.ranks:,.0f} a device"
        return f"{text}{'' if mfu is None else f', MFU {mfu:.1%}'}, {memory / 2**30:.1f} GiB"


def _records(run_dir: Path) -> list[Record]:
    return [*jsonl_records(run_dir / "metrics.jsonl")]


def _same(first: list[Record], second: list[Record]) -> str:
    """ "" where two runs have the same numbers to the last bit, else the first difference."""
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
    """Stopped within it; it goes on afterwards, so that it can be ended."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
