"""Small jobs for tests of the launcher: `python launch_jobs.py JOB [overrides]`, as `train.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2]))


def hello(config, worker):
    """Each rank prints its rank, and a variable that the config may have set."""
    mine = f", MINE={os.environ['MINE']}" if "MINE" in os.environ else ""
    print(f"hello from {worker.rank} of {worker.world_size}{mine}", flush=True)
    return {"value": float(config.seed)}


def is_forked(config, worker):
    """Whether this process has what a test has imported."""
    return {"value": float("_pytest" in sys.modules)}


def rank_0_fails_late(config, worker):
    """All ranks fail, rank 0 after the others have stopped waiting; it ignores SIGTERM."""
    (worker.run_dir / f"begun{worker.rank}").touch()
    if worker.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(8)
    raise RuntimeError(f"rank {worker.rank} has enough")


def rank_0_fails_while_rank_1_tells_its_error(config, worker):
    """Rank 0's failure ends rank 1, which has logged its error and is reporting it."""

    class LongError(RuntimeError):
        def __str__(self) -> str:
            if "run_job" not in (frame.name for frame in traceback.extract_stack()):
                # the main thread sees the signal before the thread that would end the process
                sys.setswitchinterval(30)
                (worker.run_dir / "reporting").touch()
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    pass
            return "a long story"

    if worker.rank == 1:
        raise LongError
    while not (worker.run_dir / "reporting").exists():
        time.sleep(0.05)
    raise RuntimeError("rank 0 has enough")


def rank_1_refuses(config, worker):
    """Rank 1 finds a mistake of the user's; the other waits for it in a collective."""
    from titanlike.core.config.errors import ConfigError, Problem, Refused

    wrong = "seed", config.seed, "is not wanted", "seed=7"
    _join(worker)
    if worker.rank == 1:
        raise Refused(*wrong) if config.seed == 2 else ConfigError([Problem(*wrong)] * 2)
    _collective()


def rank_1_dies(config, worker):
    """Rank 1 is killed; the other waits for it in a collective."""
    _join(worker)
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    _collective()


def hangs(config, worker):
    """All ranks hang, rank 0 in a collective, until they are killed."""
    _join(worker)
    (worker.run_dir / f"ready{worker.rank}").touch()
    if worker.rank == worker.world_size - 1:
        time.sleep(300)
    _collective()


def deadlocks_in_c(config, worker):
    """Deadlocks in C: no Python signal handler ever runs."""
    import ctypes

    mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    (worker.run_dir / "ready0").touch()
    lock(mutex)


def exits_with_9(config, worker):
    """Ends with an exit code of its own."""
    return {"value": None, "exit_code": 9}


def fails_beside_one_that_does_not_end(config, worker):
    """Both ranks write the process ids of their parent and of themselves or a child, and whether
    they run their parent's program, of which they are a fork."""
    pid = os.getpid()
    if worker.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pid = subprocess.Popen(["sleep", "300"]).pid
    parent, own = (Path(f"/proc/{p}/cmdline").read_bytes() for p in (os.getppid(), os.getpid()))
    text = f"{os.getppid()} {pid} {int(parent == own)}"
    (worker.run_dir / f"process{worker.rank}").write_text(text)
    if worker.rank == 1:
        time.sleep(300)
    while not (worker.run_dir / "process1").exists():
        time.sleep(0.01)
    raise ValueError("rank 0 fails")


def never_reaches_a_step(config, worker):
    """Defers signals to a step boundary that is never reached."""
    with worker.stop_request.deferred():
        (worker.run_dir / f"ready{worker.rank}").touch()
        time.sleep(300)


def stops(config, worker):
    """Stops early, by max_time if the seed is 0, else by a signal. Changes the state of the
    process, and prints the state that it found."""
    import logging

    print(f"found {(os.environ.get('LEAK'), len(logging.getLogger().handlers))}", flush=True)
    os.environ["LEAK"] = "yes"
    logging.basicConfig(level=logging.DEBUG)
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
