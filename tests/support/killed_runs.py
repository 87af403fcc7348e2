"""A run that is killed at chosen places and moments, and what must be true of it after that."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.paths import ROOT
from titanlike.checkpoint.discovery import committed, step_name, step_of
from titanlike.checkpoint.integrity import check_all
from titanlike.checkpoint.storage import Storage
from titanlike.metrics.sinks import read_jsonl

EVERY, KEEP, STEPS = 3, 2, 36
TINY = [
    "model.dim=32",
    "model.ffn_dim=64",
    "model.layers=4",
    "seq_len=16",
    "batch_size=8",
    "data=synthetic",
    "validation.every=0",
    "logger=none",
    f"steps={STEPS}",
    f"checkpoint.every={EVERY}",
    f"checkpoint.keep={KEEP}",
]
LAYOUTS = {"one": (1, 1), "pp2": (2, 1), "dp2": (1, 2), "pp2 dp2": (2, 2)}
MODES = ("sync", "async", "async_pinned", "async_process")
COMPARED = ("loss", "grad_norm", "lr", "tokens")
LIMIT = 120.0  # seconds that anything may take


@dataclass(frozen=True)
class Place:
    """A point of rank 0's work on checkpoints, just before an audit event."""

    event: str
    path: str  # a pattern
    marked: bool | None = None  # whether the folder counts by then; None = either


STEP = r"checkpoints/step-\d+"
PLACES = {
    "in a save": Place("open", rf"{STEP}/.*\.distcp$"),
    "before the manifest": Place("os.rename", rf"{STEP}/files\.json$"),
    "before the commit": Place("os.rename", rf"{STEP}/COMMITTED$"),
    "after the commit": Place("open", rf"{STEP}$", True),
    "before a removal": Place("os.remove", rf"{STEP}/COMMITTED$"),
    "marker removed": Place("shutil.rmtree", rf"{STEP}$", False),
    "half removed": Place("os.remove", r"^(state\.json|.*\.distcp)$"),
    "metrics cut back": Place("os.rename", r"/metrics\.jsonl$"),
}
# those that the second save of a start reaches, or the first that removes
RESTARTED_AT = ("in a save", "before the commit", "after the commit", "marker removed")
MOMENTS = ("start-up", "any time", "in training")  # by the clock


class Violation(AssertionError):
    """A run broke a promise."""


class Attempt:
    """One start of a run's command, with all its processes."""

    def __init__(self, run: KilledRun, fault: dict | None = None) -> None:
        self.run, self.mark = run, uuid.uuid4().hex
        self.events_before = len(run.events())
        self.begin = time.monotonic()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "SLURM", "RANK"))}
        env |= {"OMP_NUM_THREADS": "1", "CAMPAIGN": self.mark, "TMPDIR": str(run.folder)}
        if fault is not None:
            env |= {
                "FAULT": json.dumps(fault),
                "PYTHONPATH": str(ROOT / "tests" / "support" / "faults"),
            }
        with (run.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *run.words],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=run.folder,
                env=env,
                start_new_session=True,
            )

    def running(self) -> bool:
        return self.process.poll() is None

    def alive(self) -> dict[psutil.Process, int | None]:
        """Its processes, the driver included, and the ranks of those that have one."""
        found: dict[psutil.Process, int | None] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                if env.get("CAMPAIGN") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = int(env["RANK"]) if "RANK" in env else None
        return found

    def kill(self, rank: int | None) -> bool:
        """SIGKILL for all processes, the driver first, or for one rank; False if it is not there."""
        victims = [
            process
            for process, of in sorted(self.alive().items(), key=lambda item: item[1] is not None)
            if rank is None or of == rank
        ]
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(victims)

    def end(self, grace: float = 10) -> int:
        """The exit code, once nobody is left."""
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.kill(None)
            raise Violation(f"the run did not end in {LIMIT:g} s") from None
        deadline = time.monotonic() + grace
        while left := self.alive():
            if time.monotonic() > deadline:
                self.kill(None)
                raise Violation(f"processes were left behind: {left}")
            time.sleep(0.02)
        return code

    def until(self, condition: Callable[[], bool], limit: float = LIMIT) -> bool:
        """Wait for a condition; False where the run has ended before, or `limit` is over."""
        deadline = time.monotonic() + limit
        while self.running() and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.003)
        return False


class KilledRun:
    """A run directory, the command that writes it, and what is known of it."""

    def __init__(self, folder: Path, layout: str, mode: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.layout, self.mode = folder, layout, mode
        self.run_dir = folder / "run"
        self.checkpoints = Storage(self.run_dir / "checkpoints")
        self.pp, self.dp = LAYOUTS[layout]
        own = [f"pp={self.pp}", f"dp={self.dp}", f"checkpoint.mode={mode}", "run_dir=run"]
        self.words = [*TINY, *own]
        self.expected = 0  # step that the next start goes on from

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    def records(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def newest(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def events(self) -> list[dict]:
        path = self.run_dir / "events.jsonl"
        return read_jsonl(path) if path.exists() else []

    def complete(self) -> list[dict]:
        """Run to the end, once; the records."""
        attempt = Attempt(self)
        if (code := attempt.end()) != 0:
            raise Violation(f"exit code {code}: {self.output()}")
        self.went_on(attempt)
        return self.records()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-2000:]

    def kill(self, place: str, rank: int | None, rng: random.Random, span: float) -> bool:
        """Start the run and kill it there; False where it came to its end before.

        span: seconds that an uninterrupted run takes.
        """
        flag = self.folder / "flag"
        flag.unlink(missing_ok=True)
        fault = {"event": "", "flag": str(flag), "count": rng.choice([1, 1, 2, 3])}
        fault["fsync"] = rng.choice([0, 0.01, 0.03])
        if place in PLACES:
            fault |= vars(PLACES[place])
            if place == "metrics cut back":
                fault["count"] = 1
        attempt = Attempt(self, fault)
        if place in PLACES:
            reached = attempt.until(flag.exists)
            if self.mode != "sync":
                time.sleep(rng.choice([0, 0.02, 0.2]))  # training goes on beside the save
        elif place == "in training":
            goal = self.expected + rng.randrange(1, STEPS - self.expected)
            reached = attempt.until(lambda: self.newest() >= goal and self.moved_on(attempt))
            time.sleep(rng.uniform(0, 0.05))
        else:
            seconds = rng.uniform(0, span * (0.6 if place == "start-up" else 1.0))
            attempt.until(lambda: False, seconds)
            reached = attempt.running()
        killed = reached and attempt.kill(rank)
        flag.unlink(missing_ok=True)
        code = attempt.end()
        if not killed and code != 0:
            raise Violation(f"nobody was killed, and the exit code is {code}: {self.output()}")
        if killed and rank is not None and code == 0 and self.newest() < STEPS:
            raise Violation(f"rank {rank} was killed, and the exit code is 0: {self.output()}")
        self.went_on(attempt)
        return killed and code != 0

    def restart_itself(self, place: str, times: int, rng: random.Random) -> list[int]:
        """Run a fresh run to its end with launch.max_restarts, one rank killed a few times there.

        Returns the steps that it went on from.
        """
        flag = self.folder / "flag"
        fault = {"flag": str(flag), "count": 2, "fsync": 0} | vars(PLACES[place])
        before = len(self.words)
        self.words.append(f"launch.max_restarts={times}")
        attempt, killed = Attempt(self, fault), 0
        while attempt.until(flag.exists):
            if killed < times:
                attempt.kill(rng.randrange(self.ranks))
                killed += 1
            flag.unlink()
        code = attempt.end()
        if code != 0 or killed < times:
            raise Violation(f"{killed} kills of a rank, exit code {code}: {self.output()}")
        del self.words[before:]
        new = self.events()[attempt.events_before :]
        resumes = [event["step"] for event in new if event["event"] == "resume"]
        if len(resumes) != times or resumes != sorted(resumes):
            raise Violation(f"restarted {times} times, it went on from {resumes}")
        return resumes

    def moved_on(self, attempt: Attempt) -> bool:
        """Whether a start has done something that counts: the old records are not cut back yet."""
        return self.expected == 0 or any(
            event["event"] == "resume" for event in self.events()[attempt.events_before :]
        )

    def went_on(self, attempt: Attempt) -> None:
        """Check where the last start began."""
        new = self.events()[attempt.events_before :]
        resumes = [event["step"] for event in new if event["event"] == "resume"]
        if resumes not in ([], [self.expected]):
            raise Violation(f"it went on from {resumes}, and step {self.expected} was the newest")
        if self.expected and not resumes and any(event["event"] == "saved" for event in new):
            raise Violation(f"it began afresh, though there was step {self.expected}")
        if damaged := [event for event in new if event["event"] == "damaged"]:
            raise Violation(f"a checkpoint was found damaged: {damaged}")

    def lost(self) -> int:
        """Check what a kill has left; the steps that will have to be done again."""
        whole = committed(self.checkpoints)
        for path in whole:
            check_all(path)
        if whole and step_of(whole[0]) < self.expected:
            raise Violation(f"the checkpoint of step {self.expected} is gone")
        if self.expected and not whole:
            raise Violation("no checkpoint is left")
        self.expected = step_of(whole[0]) if whole else 0
        lost = self.newest() - self.expected
        limit = EVERY if self.mode == "sync" else 2 * EVERY
        if not 0 <= lost <= limit:
            raise Violation(f"{lost} steps are lost, and {limit} may be")
        return lost

    def finished(self, truth: list[dict]) -> None:
        """Check a completed run against the uninterrupted one."""
        records = self.records()
        steps = [record["step"] for record in records]
        if steps != list(range(1, STEPS + 1)):
            raise Violation(f"metrics.jsonl has the steps {steps}")
        for one, other in zip(records, truth, strict=True):
            for key in COMPARED:
                if one[key] != other[key]:
                    step = one["step"]
                    raise Violation(f"{key} of step {step} is {one[key]!r}, not {other[key]!r}")
        kept = [step_name(step) for step in range(EVERY, STEPS + 1, EVERY)[-KEEP:]]
        if (names := self.checkpoints.names()) != kept:
            raise Violation(f"{names} are in the folder of checkpoints, not {kept}")
        for name in kept:
            check_all(self.checkpoints.at(name))
        strays = [path.name for path in self.run_dir.rglob(".*") if path.name != ".metadata"]
        if strays:
            raise Violation(f"unfinished files are left: {strays}")
