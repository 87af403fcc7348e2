"""Training in which one rank hangs or dies at a place: `python planted_ends.py [overrides]`, as
`train.py`. PLANTED="PLACE RANK HOW" says which."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[2]))

SLOW = 20.0
STEP = 3  # in which the place "step" is


def train(config, worker):
    """`training.loop.train` with what PLANTED says."""
    from titanlike.core.training import loop
    from titanlike.proof.verify import verify

    place, rank, how = os.environ["PLANTED"].split()
    if worker.rank == int(rank):
        _plant(place, lambda: _end(how, worker.run_dir))
    job = verify if os.environ.get("JOB") == "verify" else loop.train
    result = job(config, worker)
    if worker.rank == int(rank) and place == "end":
        _end(how, worker.run_dir)
    return result


def _end(how: str, run_dir: Path) -> None:
    (run_dir / "reached").touch()
    if how == "stop":
        time.sleep(1.5)  # for a heartbeat
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleep":
        time.sleep(600)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise RuntimeError("planted")
    elif how == "scheduler":  # the test sends SIGTERM to all
        time.sleep(1)
    elif how == "slow":  # longer than any other rank may be waited for
        time.sleep(SLOW)
    else:
        os._exit(int(how.removeprefix("exit")))


def _plant(place: str, end: Callable[[], None]) -> None:
    import torch.distributed as dist

    from titanlike.core.checkpoint import writer
    from titanlike.core.launch.watchdog import Watchdog
    from titanlike.core.training import session
    from titanlike.hf import hf_export

    called = {
        "start": (session, "open_data"),
        "connect": (dist, "init_process_group"),
        "build": (session, "build"),
        "load": (session.Checkpointer, "resume"),
        "writing": (writer, "write_checkpoint"),
        "background": (writer, "write_checkpoint"),
        "export": (hf_export, "export"),
    }
    if place in called:
        owner, name = called[place]
        inner = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            end()
            return inner(*args, **more)

        setattr(owner, name, call)
        return
    enter = Watchdog.enter_phase

    def enter_phase(self: Any, step: int, phase: str, timeout: float | None = None) -> None:
        enter(self, step, phase, timeout)
        if (phase == place and place != "end") or (place, phase, step) == ("step", "data", STEP):
            end()

    Watchdog.enter_phase = enter_phase


if __name__ == "__main__":
    from titanlike.cli import start_job

    start_job("planted_ends:train")
