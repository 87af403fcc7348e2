"""Small jobs by which the tests see what the launcher does; run as a program, a command line.

`python launch_jobs.py JOB [overrides]` is what `train.py` is, with a job of this file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))


def hello(config, worker):
    """Every rank says where it is."""
    print(f"hello from {worker.rank} of {worker.world_size}", flush=True)
    return {"value": float(config.seed)}


def odd_seeds_fail(config, worker):
    """For sweeps: some jobs fail, on all ranks."""
    if config.seed % 2:
        raise RuntimeError(f"seed {config.seed} is odd")
    return {"value": float(config.seed)}


def odd_seeds_fail_on_rank_1(config, worker):
    """For sweeps: the other ranks wait for it in a collective."""
    import torch.distributed as dist

    _join(worker)
    if worker.rank == 1 and config.seed % 2:
        raise RuntimeError(f"seed {config.seed} is odd")
    _collective()
    dist.destroy_process_group()
    return {"value": float(config.seed)}


def one_comes_out_late(config, worker):
    """All ranks fail, rank 0 when the others wait for it no longer; it does not hear SIGTERM."""
    (worker.run_dir / f"begun{worker.rank}").touch()
    if worker.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(8)
    raise RuntimeError(f"rank {worker.rank} has enough")


def leaks(config, worker):
    """Changes what belongs to the process; says what it found."""
    import logging

    found = os.environ.get("LEAK"), len(logging.getLogger().handlers)
    print(f"found {found}", flush=True)
    os.environ["LEAK"] = "yes"
    logging.basicConfig(level=logging.DEBUG)
    return {"value": 0.0 if found == (None, 0) else 1.0}


def one_crashes(config, worker):
    """Rank 2 fails; the others wait for it in a collective."""
    _join(worker)
    if worker.rank == 2:
        raise RuntimeError("the real error")
    _collective()


def one_dies(config, worker):
    """Rank 1 is killed; the other waits for it in a collective."""
    _join(worker)
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    _collective()


def one_sleeps(config, worker):
    """All ranks hang, rank 0 in a collective, until somebody ends them."""
    _join(worker)
    (worker.run_dir / f"ready{worker.rank}").touch()
    if worker.rank == worker.world_size - 1:
        time.sleep(300)
    _collective()


def deaf(config, worker):
    """Waits in C for a lock that it holds: no signal handler of Python's ever runs."""
    import ctypes

    mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    (worker.run_dir / "ready0").touch()
    lock(mutex)


def nine(config, worker):
    """Ends with an exit code of its own."""
    return {"value": None, "exit_code": 9}


def never_at_a_step(config, worker):
    """Would stop at the next step, which does not come."""
    with worker.stop_request.deferred():
        (worker.run_dir / f"ready{worker.rank}").touch()
        time.sleep(300)


def one_dies_once(config, worker):
    """The last rank is killed at the first start; the others, which would stop at the next step,
    never look. Then: how often rank 0 was started."""
    first = not (worker.run_dir / "starts").exists()
    worker.store.set(f"looked{worker.rank}", "")
    worker.store.wait([f"looked{rank}" for rank in range(worker.world_size)])
    if worker.rank == 0:
        with (worker.run_dir / "starts").open("a") as file:
            file.write(f"{time.time()} ")
    if first:
        with worker.stop_request.deferred():
            if worker.rank == worker.world_size - 1:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(300)
    return {"value": float(len((worker.run_dir / "starts").read_text().split()))}


def mistaken(config, worker):
    """Fails by a mistake of the user's, which another start would meet again."""
    from titanlike.config.imports import import_object

    with (worker.run_dir / "starts0").open("a") as file:
        file.write("x")
    import_object("no.such.module")


def stops(config, worker):
    """Stops early, by the clock where the seed is 0, else by a signal."""
    print("stops", flush=True)
    stopped = "SIGTERM" if config.seed else "max_time"
    return {"value": float(config.seed), "stopped": stopped, "exit_code": 75}


def _join(worker):
    import torch.distributed as dist

    place = {"rank": worker.rank, "world_size": worker.world_size}
    dist.init_process_group("gloo", store=worker.store, **place)


def _collective():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    from titanlike.cli import start_job

    start_job(f"launch_jobs:{sys.argv.pop(1)}")
