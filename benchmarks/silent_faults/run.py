"""Plant silent faults one after the other, and see which detectors find them, and where.

    python benchmarks/silent_faults/run.py --list
    python benchmarks/silent_faults/run.py [--only TEXT] [--jobs N]

Each fault is planted in a copy of titanlike; a process of its own runs every detector on it, in real
gloo processes. Results are added to results.json, from which the table in README.md and the picture
are made.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind a copy with a fault

from benchmarks.silent_faults import report
from benchmarks.silent_faults.faults import HERE, ROOT, Fault, benchmarked

RESULTS = HERE / "results.json"
COPIED = ("titanlike", "conf", "hydra_plugins")
PRELOADED = (  # before forks; nothing of titanlike, which each fork has a copy of
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.optim",
    "hydra",
    "omegaconf",
)
TIMEOUT = 150.0  # seconds of a detector; a layout that is right takes 3 on an idle machine
BASE = [
    "device=cpu",
    "seq_len=32",
    "batch_size=8",
    "logger=none",
    "validation.batches=1",
    "checkpoint.every=0",
    "checkpoint.last=false",
]
SIZES = {  # of the layout's model
    "llama_tiny": "model.hidden_size=32 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.intermediate_size=64 model.num_hidden_layers=2",
    "gpt2_tiny": "model.n_embd=32 model.n_head=4 model.n_layer=2",
    "moe_tiny": "model.hidden_size=32 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.moe_intermediate_size=32 model.num_hidden_layers=2",
}
STEPS = 12  # of a loss curve
NEAR = 1e-2  # of a golden curve


# --- in a fork with a copy of titanlike: the detectors --------------------------------------------


def detect(layout: str, folder: Path, golden: bool, alone: bool) -> dict[str, Any]:
    """Run the layout under every detector; golden: without a fault, once each; alone: under verify.
    What compares with a golden run is left to `judged`."""
    import support.world
    from support.world import RankError, run_world
    from titanlike.core.config.errors import ConfigError
    from titanlike.core.training.loop import train  # noqa: F401
    from titanlike.library import compose
    from titanlike.proof.verify import verify

    # the ranks are forks of this process, which has imported what they need
    support.world.fork_context = lambda: multiprocessing.get_context("fork")
    found: dict[str, Any] = {}

    def timed(name: str, job: Callable[..., Any], config: Any) -> None:
        start = time.monotonic()
        try:
            result: Any = run_world(job, config, folder / name, timeout=TIMEOUT)[0]
        except RankError as error:
            result = {"error": str(error).strip()[-2000:]}
        found[name] = {"seconds": round(time.monotonic() - start, 1)} | result

    words = words_of(layout)
    timed("verify", verify, compose(*words))
    if alone:
        return found
    try:  # which has microbatches of its own
        less = [word for word in words if not word.startswith("schedule.microbatches=")]
        exact = compose(*less, "numerics=exact")
    except ConfigError:
        exact = None  # refused: tp, cp
    if exact is not None and exact != compose(*words):
        timed("exact", verify, exact)
    for name in ("train", "again")[: 1 if golden else 2]:
        timed(name, curve, compose(*words, f"steps={STEPS}"))
    return found


def words_of(layout: str) -> list[str]:
    """The overrides of a run."""
    model = next((w[6:] for w in layout.split() if w.startswith("model=")), "llama_tiny")
    return [*BASE, *SIZES[model].split(), *layout.split()]


def curve(config: Any, worker: Any) -> dict[str, Any]:
    """Train; losses and gradient norms of the steps."""
    from titanlike.core.training.loop import train

    train(config, worker)
    lines = (worker.run_dir / "metrics.jsonl").read_text().splitlines() if worker.rank == 0 else []
    rows = [json.loads(line) for line in lines]
    return {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}


# --- the parent -----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """A fork of this process that imports titanlike with a fault, and runs its detectors."""

    name: str  # "" = without a fault
    layout: str
    alone: bool  # verify is

    def start(self, fault: Fault | None) -> None:
        detect = _detect_hang if fault is not None and fault.hangs else _detect
        self._scratch = tempfile.TemporaryDirectory(prefix="silent-fault-")
        folder = Path(self._scratch.name)
        for name in COPIED:  # with its bytecode
            shutil.copytree(ROOT / name, folder / "copy" / name)
        if fault is not None:
            path = folder / "copy" / fault.file
            path.write_text(fault.planted(path.read_text()))
        context = multiprocessing.get_context("fork")
        args = (self.layout, folder, fault is None, self.alone)
        self.process = context.Process(target=detect, args=args)
        self.process.start()

    def found(self) -> dict[str, Any]:
        self.process.join()
        folder = Path(self._scratch.name)
        out, log = folder / "found.json", folder / "log"
        result = {"error": log.read_text()[-3000:]} if not out.exists() else {}
        result = result or json.loads(out.read_text())
        self._scratch.cleanup()
        return result


def _detect_hang(layout: str, folder: Path, golden: bool, alone: bool) -> None:
    """Train as the command does, whose watchdog ends it; then ask torch's analyzer."""
    run, start = folder / "run", time.monotonic()
    ends = ["launch.step_timeout=20", "launch.timeout=30", f"run_dir={run}", f"steps={STEPS}"]
    words = [sys.executable, "-m", "titanlike", "train", *words_of(layout), *ends]
    env = os.environ | {"PYTHONPATH": f"{folder / 'copy'}", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    trained = subprocess.run(words, timeout=300, **options)
    hang = [line for line in trained.stderr.splitlines() if line.startswith("no progress")]
    words = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    words += [str(run / "logs" / "flight_recorder"), "--prefix", "gloo_rank"]
    analyzed = subprocess.run(words, timeout=120, **options)
    said = (analyzed.stdout + analyzed.stderr).strip().splitlines()
    found = {"hang": hang, "recorder": analyzed.returncode == 0, "analysis": said[-1:]}
    found["seconds"] = round(time.monotonic() - start, 1)
    (folder / "found.json").write_text(json.dumps(found))


def _detect(layout: str, folder: Path, golden: bool, alone: bool) -> None:
    stream = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.chdir(folder)
    sys.path[:0] = [str(folder / "copy"), str(ROOT / "tests")]
    found = detect(layout, folder / "runs", golden, alone)
    import titanlike

    assert Path(titanlike.__file__).is_relative_to(folder), titanlike.__file__
    (folder / "found.json").write_text(json.dumps(found))


def measured(
    work: Sequence[tuple[str, str]], faults: Mapping[str, Fault], jobs: int, alone: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name of a fault or "", layout, what was found) of each, `jobs` at a time."""
    for name in PRELOADED:
        importlib.import_module(name)
    left, running = [*work], list[Measurement]()
    while left or running:
        while left and len(running) < jobs:
            running.append(Measurement(*left.pop(0), alone))
            running[-1].start(faults.get(running[-1].name))
        connection.wait([each.process.sentinel for each in running])
        for each in [each for each in running if not each.process.is_alive()]:
            running.remove(each)
            yield each.name, each.layout, each.found()


def judged(fault: Fault, found: dict[str, Any], golden: dict[str, Any]) -> dict[str, Any]:
    """Which detectors, of those that ran, have caught it; None = it does not apply."""
    if "error" in found:
        return found
    if fault.hangs:
        first = [*found["hang"], *found["analysis"]]
        caught = {"recorder": found["recorder"]}
        return {"caught": caught, "seconds": {"hang": found["seconds"]}, "first": first}

    def fails(name: str) -> bool | None:
        if name not in found:
            return None
        return "error" in found[name] or bool(found[name]["exit_code"])

    def off(key: str) -> bool:
        curves = (found["train"].get(key), golden["train"][key])
        if curves[0] is None or len(curves[0]) < len(curves[1]):
            return True
        return any(not abs(a - b) <= NEAR * abs(b) for a, b in zip(*curves, strict=True))

    verify = found["verify"]
    located = verify.get("first_difference") or {}
    first, axis = located.get("first", []), located.get("axis", "")
    caught = {"verify": fails("verify")}
    if "train" in found:
        again = found["train"].get("loss") != found["again"].get("loss")
        caught |= {"exact": fails("exact"), "loss": off("loss")}
        caught |= {"norm": off("grad_norm"), "again": again}
    result: dict[str, Any] = {
        "caught": caught,
        "seconds": {name: of["seconds"] for name, of in found.items()},
        "first": first,
        "axis": axis,
        "operation": located.get("operation", ""),
    }
    result |= placed(fault, result)
    if "exact" in found:
        result["exact first"] = (found["exact"].get("first_difference") or {}).get("first", [])
    errors = {name: of["error"][-600:] for name, of in found.items() if "error" in of}
    return result | ({"errors": errors} if errors else {})


def merged(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is new, and of the other detectors what was there before."""
    both = {key: before.get(key, {}) | new[key] for key in ("caught", "seconds") if key in new}
    return before | new | both


def placed(fault: Fault, result: dict[str, Any]) -> dict[str, bool]:
    """Whether what verify has said names the module, the operation, and a line of the fault's file."""
    first = "\n".join(result["first"])
    operation = result.get("operation", "")
    text = f"{first}\n{result.get('axis', '')}\n{operation}"
    return {
        "module": bool(re.search(fault.module, first)),
        "line": bool(re.search(fault.line, text)),
        "source": "/".join(Path(fault.file).parts[-3:]) in operation,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="faults whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--new", action="store_true", help="those that results.json lacks")
    parser.add_argument("--verify", action="store_true", help="run this detector alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    faults = {n: f for n, f in benchmarked().items() if not args.only or args.only in n}
    if args.list:
        for name, fault in faults.items():
            print(f"{name}\n    {fault.layout}; {fault.source}")
        print(f"{len(faults)} faults")
        return
    results = {"right": {}, "faults": {}}
    if args.results.exists():
        results |= json.loads(args.results.read_text())
    if args.new:
        faults = {n: f for n, f in faults.items() if n not in results["faults"]}
    work: list[tuple[str, str]] = []
    for layout in dict.fromkeys(fault.layout for fault in faults.values()):
        work += [("", layout)] if args.verify or layout not in results["right"] else []
        work += [(name, layout) for name, fault in faults.items() if fault.layout == layout]
    waiting: dict[str, dict[str, Any]] = {}  # for the golden run of its layout
    for name, layout, found in measured(work, faults, args.jobs, args.verify):
        if name:
            waiting[name] = found
        else:
            results["right"][layout] = merged(results["right"].get(layout, {}), found)
            alarms = [of for of in found.values() if "error" in of or of.get("exit_code")]
            alarms = [found] if "error" in found else alarms
            print(f"without a fault, {layout}: {f'ALARM {alarms}' if alarms else 'right'}")
        for other in [n for n in waiting if faults[n].layout in results["right"]]:
            golden, before = (
                results["right"][faults[other].layout],
                results["faults"].get(other, {}),
            )
            new = judged(faults[other], waiting.pop(other), golden)
            results["faults"][other] = merged(before, new) if args.verify else new
            print(json.dumps({other: results["faults"][other]}, indent=1), flush=True)
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if args.results == RESULTS:
        every = benchmarked()
        for name, result in results["faults"].items():
            if name in every and "first" in result:  # by the expressions of today
                result |= placed(every[name], result)
        report.write(results["faults"], every)


if __name__ == "__main__":
    main()
