"""Kills real runs with SIGKILL again and again, starts them again, and checks what they promise.

    python tests/support/campaign.py --kills 100 --seed 0

Each run is `train.py` on a tiny model. It is killed a few times, all its processes at once or one
rank alone, at chosen places in the work on checkpoints (faults/sitecustomize.py holds rank 0 there)
or in training; each time the same command starts it again, in the end until it is done. Checked:

- every checkpoint that counts is whole, at every kill; the run goes on from the newest of them;
- it loses at most `every` steps; with a background save at most those of one more interval, the one
  that the save may take (the save before it is whole, for two saves never overlap);
- metrics.jsonl has each step once, with the uninterrupted run's numbers, to the last bit;
- at the end there are `keep` checkpoints and nothing else, and no process is left.

Raises AssertionError at the first violation; the run directory is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parents[place]) for place in (1, 2)]

from support.paths import ROOT  # noqa: E402
from titanlike.core.checkpoint.discovery import committed, step_name, step_of  # noqa: E402
from titanlike.core.checkpoint.integrity import check_all  # noqa: E402
from titanlike.core.checkpoint.storage import Storage  # noqa: E402
from titanlike.core.metrics.goodput import goodput  # noqa: E402
from titanlike.core.metrics.sinks import read_jsonl  # noqa: E402
from titanlike.planning.whole_run import RunTimes, simulate_runs  # noqa: E402

EVERY, KEEP, STEPS = 3, 2, 36
WORDS = (
    "model.hidden_size=32 model.intermediate_size=64 model.num_hidden_layers=4 seq_len=16 batch_size=8 data=synthetic "
    f"validation.every=0 logger=none steps={STEPS} checkpoint.every={EVERY} "
    f"checkpoint.keep={KEEP} run_dir=run"
).split()
LAYOUTS = {"one": (1, 1), "pp2": (2, 1), "dp2": (1, 2), "pp2 dp2": (2, 2)}
MODES = ("sync", "async", "async_pinned")
COMPARED = ("loss", "grad_norm", "lr", "tokens")
LIMIT = 120.0  # seconds that anything may take
STEP = r"checkpoints/step-\d+"
PLACES = {  # just before which audit event of rank 0; whether the folder counts by then
    "in a save": ("open", rf"{STEP}/.*\.safetensors$", None),
    "before the index": ("os.rename", rf"{STEP}/index\.json$", None),
    "before the commit": ("os.rename", rf"{STEP}/COMMITTED$", None),
    "after the commit": ("open", rf"{STEP}$", True),
    "before a removal": ("os.remove", rf"{STEP}/COMMITTED$", None),
    "marker removed": ("shutil.rmtree", rf"{STEP}$", False),
    "half removed": ("os.remove", r"^(state\.json|.*\.safetensors)$", None),
    "metrics cut back": ("os.rename", r"/metrics\.jsonl$", None),
    "at start-up": ("open", r"/metrics\.jsonl$", None),
    "in training": ("", "", None),
}


class KilledRun:
    """A run directory, the command that writes it, and what is known of it."""

    def __init__(self, folder: Path, layout: str, mode: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run_dir, self.mode = folder, folder / "run", mode
        self.pp, self.dp = LAYOUTS[layout]
        self.words = [*WORDS, f"pp={self.pp}", f"dp={self.dp}", f"checkpoint.mode={mode}"]
        self.checkpoints = Storage(self.run_dir / "checkpoints")
        self.every = EVERY
        self.expected = 0  # step that the next start goes on from

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return read_jsonl(path) if path.exists() else []

    def last(self) -> int:
        return max((row["step"] for row in self.rows("metrics.jsonl")), default=0)

    def start(
        self,
        fault: dict[str, Any] | None = None,
        victim: int | None = None,
        goal: int = STEPS,
        life: float = LIMIT,
    ) -> bool:
        """Start it, and kill it where the fault stops it, once it has written the step `goal`, or
        after `life` seconds; whether it came to its end before."""
        mark, before = uuid.uuid4().hex, len(self.rows("events.jsonl"))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "SLURM", "RANK"))}
        env |= {"OMP_NUM_THREADS": "1", "CAMPAIGN": mark, "TMPDIR": str(self.folder)}
        env |= {"PYTHONPATH": str(Path(__file__).with_name("faults")), "FAULT": json.dumps(fault)}
        env |= {"FAULT_RANK": "0" if self.pp * self.dp > 1 else ""}
        flag = Path(fault["flag"]) if fault else self.folder / "none"
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *self.words],
                **{"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL},
                **{"cwd": self.folder, "env": env, "start_new_session": True},
            )
        began = time.monotonic()
        deadline = began + LIMIT
        # the last step may have been written by an earlier start, which was killed before its save
        going_on = (lambda: True) if goal >= STEPS else (lambda: self.last() < goal)
        while process.poll() is None and not flag.exists() and going_on():
            if time.monotonic() > began + life < deadline:
                break
            assert time.monotonic() < deadline, f"it did not end in {LIMIT:g} s"
            time.sleep(0.003)
        reached = process.poll() is None and (fault is not None or life < LIMIT)
        if reached:  # the driver first
            alive = sorted(processes(mark).items(), key=lambda item: item[1] is not None)
            for one in (one for one, rank in alive if victim in (None, rank)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        flag.unlink(missing_ok=True)
        code = process.wait(LIMIT)
        while processes(mark):
            assert time.monotonic() < deadline, f"left behind: {processes(mark)}"
            time.sleep(0.02)
        assert reached or code == 0, (self.folder / "output").read_text()[-2000:]
        new = self.rows("events.jsonl")[before:]
        resumes = [event["step"] for event in new if event["event"] == "resume"]
        assert resumes in ([], [self.expected]), f"from {resumes}, not {self.expected}"
        assert not [event for event in new if event["event"] == "damaged"], new
        saved = any(event["event"] == "saved" for event in new)
        assert resumes or not (self.expected and saved), "it began afresh"
        return code == 0

    def lost(self) -> int:
        """Check what a kill has left; the steps that will have to be done again."""
        whole = committed(self.checkpoints)
        for path in whole:
            check_all(path)
        newest = step_of(whole[0]) if whole else 0
        assert newest >= self.expected, f"the checkpoint of step {self.expected} is gone"
        self.expected = newest
        lost, limit = self.last() - newest, self.every * (1 if self.mode == "sync" else 2)
        assert 0 <= lost <= limit, f"{lost} steps are lost"
        return lost

    def finished(self, truth: list[dict[str, Any]]) -> None:
        """Check a completed run against the uninterrupted one."""
        rows = self.rows("metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        for one, other in zip(rows, truth, strict=True):
            assert all(one[key] == other[key] for key in COMPARED), (one, other)
        kept = [step_name(step) for step in range(EVERY, STEPS + 1, EVERY)[-KEEP:]]
        assert self.checkpoints.names() == kept
        for name in kept:
            check_all(self.checkpoints.at(name))
        strays = [*self.run_dir.rglob(".*")]
        assert not strays, strays


def processes(mark: str) -> dict[psutil.Process, int | None]:
    """Those of one start, the driver included, and the ranks of those that have one."""
    found: dict[psutil.Process, int | None] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if env.get("CAMPAIGN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = int(env["RANK"]) if "RANK" in env else None
    return found


def campaign(
    root: Path,
    kills: int,
    seed: int,
    layouts: tuple[str, ...] = ("one", "one", "one", *LAYOUTS),
    modes: tuple[str, ...] = MODES,
    places: tuple[str, ...] = tuple(PLACES),
    say: Callable[[str], object] = print,
) -> list[tuple[str, int]]:
    """So many kills, up to five of each run: (place, steps lost) of each."""
    rng, truths = random.Random(seed), dict[str, list[dict[str, Any]]]()
    found: list[tuple[str, int]] = []
    bag: list[str] = []  # of places: each comes as often as the others
    while len(found) < kills:
        layout, mode = rng.choice(layouts), rng.choice(modes)
        if layout not in truths:
            whole = KilledRun(root / f"uninterrupted {layout}", layout, "sync")
            assert whole.start()
            truths[layout] = whole.rows("metrics.jsonl")
        run, done = KilledRun(root / f"run{len(found):03d}", layout, mode), False
        for _ in range(min(5, kills - len(found))):
            bag = bag or rng.sample(places, len(places))
            place = bag.pop()
            fault = dict(zip(("event", "path", "marked"), PLACES[place], strict=True))
            count = 1 if place == "metrics cut back" else rng.choice([1, 1, 2, 3])
            fault |= {"flag": str(run.folder / "flag"), "count": count}
            fault["fsync"] = rng.choice([0, 0.01, 0.03])
            victim = rng.choice([None, *range(run.pp * run.dp)]) if layout != "one" else None
            goal = run.last() + rng.randrange(1, 6) if place == "in training" else STEPS
            done = run.start(fault, victim, goal)
            if done:  # before it got there
                break
            found.append((place, run.lost()))
            say(f"{len(found):4} {layout:4} {mode:13} {place:20} goes on from {run.expected}")
        assert done or run.start()
        run.finished(truths[layout])
        shutil.rmtree(run.folder)
    return found


def goodputs(
    root: Path, mtbf: float, lives: int, say: Callable[[str], object] = print
) -> tuple[RunTimes, float, dict[str, float]]:
    """Kill a run after exponential times until it is done. Returns its times (of its own steps; of
    starts and saves of another run, which is not killed), the goodput that they predict, and what
    was measured.

    lives: so many times before a kill, at the middles of equal parts of their distribution, in any
    order; the run is about as long as most of them.
    """
    more = ["model.hidden_size=128", "model.intermediate_size=512", "seq_len=64", "gc_every=0"]

    def run(name: str) -> KilledRun:
        made = KilledRun(root / name, "one", "sync")
        made.every = 50
        made.words += [*more, f"checkpoint.every={made.every}"]
        return made

    def step_seconds(run: KilledRun) -> float:
        return statistics.mean(row["step_seconds"] for row in run.rows("metrics.jsonl"))

    calm, starts = run("calm"), []
    for steps in (200, 400):  # the second launch reads a checkpoint
        launched = time.time()
        calm.words.append(f"steps={steps}")
        assert calm.start()
        starts.append(calm.rows("metrics.jsonl")[steps - 200]["time"] - launched)
        calm.expected = steps
    saves = [event for event in calm.rows("events.jsonl") if event["event"] == "saved"]
    fields = {"stall": "stall_seconds", "save": "seconds"}
    measured = {name: statistics.median(s[key] for s in saves) for name, key in fields.items()}
    start = statistics.mean(starts) - step_seconds(calm)
    steps = round(0.7 * lives * (mtbf - start) / step_seconds(calm))
    killed, pauses, ended = run("killed"), [], 0.0
    killed.words.append(f"steps={steps}")
    quantiles = [(place + 0.5) / lives for place in range(lives)]
    random.Random(0).shuffle(quantiles)
    for number, quantile in enumerate([*quantiles, 1.0]):
        life, launched = LIMIT if quantile == 1 else -mtbf * math.log(1 - quantile), time.time()
        pauses += [launched - ended] if ended else []
        if killed.start(life=life):
            break
        ended = launched + life
        say(f"{number:4} killed after {life:.1f} s; goes on after {killed.lost()} lost steps")
    found = goodput(killed.run_dir)
    assert found is not None
    times = RunTimes(
        **{"steps": steps, "step": step_seconds(killed), "start": start},
        **{"down": statistics.mean(pauses), "mtbf": mtbf, **measured},
    )
    return times, float(simulate_runs(times, killed.every).goodput.mean()), found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    text = "instead, compare the goodput of a run killed so often with the planned one"
    parser.add_argument("--goodput", type=int, default=0, metavar="KILLS", help=text)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    print(f"seed {arguments.seed}; what goes wrong is kept in {root}", flush=True)
    if arguments.goodput:
        times, planned, measured = goodputs(root, 20.0, arguments.goodput)
        print(f"{times}\n{measured}\nplanned {planned:.1%}, measured {measured['share']:.1%}")
        shutil.rmtree(root)
        return 0
    found = campaign(
        root, arguments.kills, arguments.seed, say=lambda line: print(line, flush=True)
    )
    for place in PLACES:
        lost = [steps for where, steps in found if where == place]
        print(f"{place:20} {len(lost):4} kills, {max(lost, default=0)} steps lost at most")
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
