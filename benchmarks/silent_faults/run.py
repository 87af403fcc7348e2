"""Plant silent faults one after the other, and see which detectors find them, and where.

    python benchmarks/silent_faults/run.py --list
    python benchmarks/silent_faults/run.py [--only TEXT] [--jobs N]

Each fault is planted in a copy of titanlike; a process of its own runs every detector on it, in real
gloo processes. Results are added to results.json, from which the table in README.md and the picture
are made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind a copy with a fault

from benchmarks.silent_faults import report
from benchmarks.silent_faults.faults import HERE, ROOT, Fault, benchmarked

RESULTS = HERE / "results.json"
COPIED = ("titanlike", "conf", "hydra_plugins")
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
STEPS = 20  # of a loss curve
NEAR = 1e-2  # of a golden curve


# --- in a process of its own: the detectors -------------------------------------------------------


def detect(layout: str, folder: Path) -> dict[str, Any]:
    """Run the layout under every detector; what compares with a golden run is left to the parent."""
    import support.world
    from support.world import RankError, run_world
    from titanlike.config.errors import ConfigError
    from titanlike.library import compose
    from titanlike.proof.verify import verify
    from titanlike.training.loop import train

    unused = ("pytest", "transformers.")
    support.world.PRELOADED = [n for n in support.world.PRELOADED if not n.startswith(unused)]
    found: dict[str, Any] = {}

    def timed(name: str, job: Callable[..., Any], config: Any) -> None:
        start = time.monotonic()
        try:
            result: Any = run_world(job, config, folder / name, timeout=TIMEOUT)[0]
        except RankError as error:
            result = {"error": str(error).strip()[-2000:]}
        found[name] = {"seconds": round(time.monotonic() - start, 1)} | result

    model = next((w[6:] for w in layout.split() if w.startswith("model=")), "llama_tiny")
    words = [*BASE, *SIZES[model].split(), *layout.split()]
    run_world(_nothing, compose(*BASE), folder / "start")
    timed("verify", verify, compose(*words))
    try:
        exact = compose(*words, "numerics=exact")
    except ConfigError:
        exact = None  # refused: tp, cp, compile
    if exact is not None:
        timed("exact", verify, exact)
    for name in ("train", "again"):
        timed(name, _curve_of(train), compose(*words, f"steps={STEPS}"))
    return found


def _nothing(config: Any, worker: Any) -> None:
    """So that the imports of the server that forks the ranks are in no detector's time."""


class _curve_of:
    def __init__(self, train: Any) -> None:
        self.train = train

    def __call__(self, config: Any, worker: Any) -> dict[str, Any]:
        self.train(config, worker)
        lines = (
            (worker.run_dir / "metrics.jsonl").read_text().splitlines() if worker.rank == 0 else []
        )
        rows = [json.loads(line) for line in lines]
        return {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}


# --- the parent -----------------------------------------------------------------------------------


def measured(fault: Fault | None, layout: str) -> dict[str, Any]:
    """What a process finds that has this fault; None = none."""
    with tempfile.TemporaryDirectory(prefix="silent-fault-") as scratch:
        copy = Path(scratch) / "copy"
        for name in COPIED:  # with its bytecode
            shutil.copytree(ROOT / name, copy / name)
        if fault is not None:
            path = copy / fault.file
            path.write_text(fault.planted(path.read_text()))
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        env |= {"PYTHONPATH": f"{copy}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        out = Path(scratch) / "found.json"
        words = [sys.executable, __file__, "--detect", str(out), "--layout", layout]
        done = subprocess.run(words, env=env, capture_output=True, text=True, cwd=scratch)
        if done.returncode or not out.exists():
            return {"error": (done.stdout + done.stderr)[-3000:]}
        return json.loads(out.read_text())


def judged(fault: Fault, found: dict[str, Any], golden: dict[str, Any]) -> dict[str, Any]:
    """Which detectors have caught it; None = it does not apply."""
    if "error" in found:
        return found

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
    located = verify.get("first_difference", {})
    first, axis = located.get("first", []), located.get("axis", "")
    text = "\n".join([*first, axis])
    result = {
        "caught": {
            "verify": fails("verify"),
            "exact": fails("exact"),
            "loss": off("loss"),
            "norm": off("grad_norm"),
            "again": found["train"].get("loss") != found["again"].get("loss"),
        },
        "seconds": {name: of["seconds"] for name, of in found.items()},
        "first": first,
        "axis": axis,
        "module": bool(re.search(fault.module, "\n".join(first))),
        "line": bool(re.search(fault.line, text)),
    }
    if "exact" in found:
        result["exact first"] = found["exact"].get("first_difference", {}).get("first", [])
    errors = {name: of["error"][-600:] for name, of in found.items() if "error" in of}
    return result | ({"errors": errors} if errors else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="faults whose name has this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--new", action="store_true", help="those that results.json lacks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--detect", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.detect:
        args.detect.write_text(json.dumps(detect(args.layout, args.detect.parent / "runs")))
        return
    faults = {n: f for n, f in benchmarked().items() if not args.only or args.only in n}
    if args.list:
        for name, fault in faults.items():
            print(f"{name}\n    {fault.layout}; {fault.source}")
        print(f"{len(faults)} faults")
        return
    results = {"right": {}, "faults": {}}
    if args.results.exists():
        results |= json.loads(args.results.read_text())
    layouts = dict.fromkeys(fault.layout for fault in faults.values())
    if args.new:
        faults = {n: f for n, f in faults.items() if n not in results["faults"]}

    def keep() -> None:
        args.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")

    with ThreadPoolExecutor(args.jobs) as pool:
        wanted = [each for each in layouts if each not in results["right"]]
        for layout, found in zip(
            wanted, pool.map(lambda x: measured(None, x), wanted), strict=True
        ):
            wrong = {
                n for n, of in found.items() if n == "error" or of.get("exit_code") or "error" in of
            }
            print(
                f"without a fault, {layout}: {'ALARM: ' + str(found) if wrong else 'right'}",
                flush=True,
            )
            results["right"][layout] = found
            keep()

        def one(pair: tuple[str, Fault]) -> tuple[str, dict[str, Any]]:
            name, fault = pair
            found = measured(fault, fault.layout)
            return name, judged(fault, found, results["right"][fault.layout])

        for name, result in pool.map(one, faults.items()):
            print(json.dumps({name: result}, indent=1), flush=True)
            results["faults"][name] = result
            keep()
    if args.results == RESULTS:
        report.write(results["faults"], benchmarked())


if __name__ == "__main__":
    main()
