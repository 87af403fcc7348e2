"""Evaluate checkpoints of a run while it trains, by lm-evaluation-harness: `titanlike evaluate` in
a subprocess of rank 0, which waits for it only at the end.

Results are in CHECKPOINT.evaluations.json, in events.jsonl, and, as task/NAME/METRIC, in the record
of the step at which they arrived.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from titanlike.checkpoint.discovery import checkpoint_folder, step_name
from titanlike.checkpoint.storage import error_line
from titanlike.config.program import PARENT
from titanlike.config.schema import Config
from titanlike.launch.environment import child_environment, python
from titanlike.metrics.run_files import Events

_KILLED = 10.0  # seconds for a process to end when it is killed


class SideEvaluation:
    """Evaluates checkpoints on rank 0, one at a time; of those that wait, only the newest."""

    def __init__(self, config: Config, run_dir: Path, events: Events) -> None:
        self._config, self._settings, self._events = config, config.evaluate, events
        self._log = run_dir / "logs" / "evaluate.log"
        self._wanted = 0  # step of the checkpoint to evaluate next; 0 = none
        self._running: tuple[int, subprocess.Popen[bytes], float] | None = None

    def want(self, step: int) -> None:
        """Evaluate the checkpoint of a step once it is committed."""
        self._wanted = step

    def steps(self) -> tuple[int, ...]:
        """The steps whose checkpoints are or will be evaluated, and so must not be deleted."""
        running = () if self._running is None else (self._running[0],)
        return (*running, self._wanted)

    def poll(self, committed: Collection[int]) -> dict[str, float]:
        """Return the metrics of an evaluation that has ended, or {}, and start the next one.
        committed: steps of the committed checkpoints."""
        metrics: dict[str, float] = {}
        if self._running is not None:
            step, process, begin = self._running
            timed_out = time.monotonic() - begin > self._settings.timeout
            if timed_out:
                self._end(process)
            if (code := process.poll()) is not None:
                metrics = self._report(step, code, timed_out)
                self._running = None
        if self._running is None and self._wanted in committed:
            step = self._wanted
            self._running = step, self._start(step), time.monotonic()
            self._wanted = 0
        return metrics

    def finish(self, committed: Collection[int], alive: Callable[[str], object]) -> None:
        """Wait for running and requested evaluations, at most `evaluate.timeout` for each. alive:
        called with "" while waiting."""
        self.poll(committed)
        while self._running is not None:
            time.sleep(0.1)
            alive("")
            self.poll(committed)

    def close(self) -> None:
        """Kill the running evaluation."""
        if self._running is not None:
            self._end(self._running[1])
            self._running = None

    def _folder(self) -> Any:
        return checkpoint_folder(self._config)

    def _start(self, step: int) -> subprocess.Popen[bytes]:
        settings = self._settings
        words = [str(self._folder().at(step_name(step))), "--tasks", ",".join(settings.tasks)]
        words += ["--device", settings.device]
        words += [] if settings.limit is None else ["--limit", str(settings.limit)]
        for folder in settings.task_files:
            words += ["--task-files", folder]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # --trust-code: this run was allowed to import and open the same files
        command = [*python(), "-m", "titanlike", "evaluate", *words, "--trust-code"]
        env = child_environment() | {PARENT: str(os.getpid())}
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _report(self, step: int, code: int, timed_out: bool) -> dict[str, float]:
        why = f"took more than {self._settings.timeout:g} s" if timed_out else f"failed ({code})"
        try:
            if code:
                raise ValueError(f"see {self._log}")
            why = "has left no results"
            written = self._folder().read(f"{step_name(step)}.evaluations.json")
            results = json.loads(written)[-1]["results"]
        except (OSError, ValueError) as error:  # training goes on
            text = f"the evaluation of step {step} {why}: {error_line(error)}"
            self._events.log("evaluation_failed", step, text)
            return {}
        numbers = {
            f"task/{task}/{name}": float(value)
            for task, metrics in results.items()
            for name, value in metrics.items()
            if isinstance(value, int | float)
        }
        shown = ", ".join(f"{name[5:]} {value:.4f}" for name, value in numbers.items())
        self._events.log("evaluation", step, f"step {step}: {shown}", results=results)
        return numbers

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait(_KILLED)
