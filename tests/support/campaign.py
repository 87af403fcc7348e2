"""Kills real runs with SIGKILL again and again, starts them again, and checks what they promise.

    python tests/support/campaign.py --kills 100 --seed 0

Each run is `train.py` on a tiny model. It is killed a few times, all its processes at once or one
rank alone, at random moments and at chosen places in the work on checkpoints (faults/sitecustomize.py
holds rank 0 there); each time the same command starts it again, in the end until it is done. Some
runs start themselves again (launch.max_restarts). Checked (killed_runs.py):

- every checkpoint that counts is whole, at every kill; the run goes on from the newest of them;
- it loses at most `every` steps; with a background save at most those of one more interval, the one
  that the save may take (the save before it is whole, for two saves never overlap);
- metrics.jsonl has each step once, with the uninterrupted run's numbers, to the last bit;
- at the end there are `keep` checkpoints and nothing else, and no process is left.

Ends with a table; exit code 1 at the first violation, whose run directory is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.killed_runs import (  # noqa: E402
    LAYOUTS,
    MODES,
    MOMENTS,
    PLACES,
    RESTARTED_AT,
    KilledRun,
    Violation,
)

WEIGHTS = {"one": 10, "pp2": 4, "dp2": 4, "pp2 dp2": 1}


@dataclass
class Tally:
    """What came of the kills so far."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (place, layout)
    victims: Counter[str] = field(default_factory=Counter)
    lost: dict[str, list[int]] = field(default_factory=dict)  # mode -> steps, a kill each
    from_checkpoint: int = 0
    from_scratch: int = 0  # killed before there was a checkpoint
    runs: int = 0
    leftovers: int = 0  # unfinished saves and removals that a start cleared away
    seconds: float = 0.0

    def count(self) -> int:
        return sum(self.kills.values())

    def table(self) -> str:
        layouts = [name for name in LAYOUTS if any(layout == name for _, layout in self.kills)]
        width = max(map(len, [*PLACES, *MOMENTS]))
        lines = [f"{'killed':<{width}}" + "".join(f"{name:>9}" for name in layouts)]
        for place in (*MOMENTS, *PLACES):
            cells = [self.kills[place, layout] for layout in layouts]
            lines.append(f"{place:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
        lines.append("victims: " + ", ".join(f"{n} {who}" for who, n in self.victims.items()))
        for mode, lost in sorted(self.lost.items()):
            mean = sum(lost) / len(lost)
            lines.append(f"{mode}: {mean:.1f} steps lost a kill on average, {max(lost)} at worst")
        lines.append(
            f"{self.count()} kills of {self.runs} runs in {self.seconds:.0f} s; "
            f"{self.from_checkpoint} starts from a checkpoint, {self.from_scratch} from scratch; "
            f"{self.leftovers} leftovers cleared away; 0 mismatches"
        )
        return "\n".join(lines)


def campaign(
    root: Path,
    kills: int,
    seed: int,
    layouts: dict[str, int] | None = None,
    a_run: int = 5,
    places: tuple[str, ...] = (*MOMENTS, *PLACES),
    modes: tuple[str, ...] = MODES,
    restarts: float = 0.2,
    say: Callable[[str], None] = print,
) -> Tally:
    """So many kills, up to `a_run` of each run. Raises Violation, naming seed and run directory.

    restarts: share of the runs that are not started again, but have launch.max_restarts.
    """
    rng, tally, begin = random.Random(seed), Tally(), time.monotonic()
    layouts = layouts or WEIGHTS
    truths: dict[str, tuple[list[dict], float]] = {}
    bag: list[str] = []  # of places: each comes as often as the others
    while tally.count() < kills:
        [layout] = rng.choices(list(layouts), list(layouts.values()))
        run = KilledRun(root / f"run{tally.runs:03d}", layout, rng.choice(modes))
        tally.runs += 1
        place = "nowhere"
        try:
            if layout not in truths:
                since = time.monotonic()
                records = KilledRun(root / f"uninterrupted {layout}", layout, "sync").complete()
                truths[layout] = records, time.monotonic() - since
            truth, span = truths[layout]
            done = kills - tally.count() > 1 and rng.random() < restarts
            if done:
                place = rng.choice(RESTARTED_AT)
                steps = run.restart_itself(place, 2, rng)
                tally.kills[place, layout] += 2
                tally.victims["one rank alone, the run started again by itself"] += 2
                tally.from_checkpoint += 2
                say(
                    f"{tally.count():4}  {layout:8} {run.mode:13} {place:20} goes on by itself from {steps}"
                )
            for _ in range(0 if done else min(a_run, kills - tally.count())):
                bag = bag or rng.sample(places, len(places))
                place, rank = bag.pop(), rng.choice([None, *range(run.ranks)])
                done = not run.kill(place, rank if run.ranks > 1 else None, rng, span)
                if done:  # before it got there
                    break
                lost, alone = run.lost(), rank is not None and run.ranks > 1
                tally.kills[place, layout] += 1
                tally.victims["one rank alone" if alone else "all processes"] += 1
                tally.lost.setdefault(run.mode, []).append(lost)
                tally.from_checkpoint += run.expected > 0
                tally.from_scratch += run.expected == 0
                say(
                    f"{tally.count():4}  {layout:8} {run.mode:13} {place:20} "
                    f"{f'rank {rank}' if alone else 'all':7} at step {run.expected + lost:2}, "
                    f"goes on from {run.expected:2}"
                )
            if not done:
                run.complete()
            run.finished(truth)
            tally.leftovers += sum(event["event"] == "leftover" for event in run.events())
        except Exception as error:
            raise Violation(
                f"{error}\n  in {run.folder} (seed {seed}; {layout}, {run.mode}; last killed: "
                f"{place}); again with: python tests/support/campaign.py --seed {seed} --kills {kills}"
            ) from error
        shutil.rmtree(run.folder)
    tally.seconds = time.monotonic() - begin
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, help="this one alone")
    parser.add_argument("--place", choices=(*MOMENTS, *PLACES), help="this one alone")
    parser.add_argument("--mode", choices=MODES, help="this one alone")
    parser.add_argument("--restarts", type=float, default=0.2, help="share with max_restarts")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        tally = campaign(
            root,
            args.kills,
            args.seed,
            {args.layout: 1} if args.layout else None,
            places=(args.place,) if args.place else (*MOMENTS, *PLACES),
            modes=(args.mode,) if args.mode else MODES,
            restarts=args.restarts,
            say=lambda line: print(line, flush=True),
        )
    except Violation as violation:
        print(f"VIOLATION: {violation}")
        return 1
    shutil.rmtree(root)
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
