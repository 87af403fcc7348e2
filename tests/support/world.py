"""Ranks for tests: gloo processes, forked from one server that has imported torch.

The server starts once a session (5 s of CPU); 8 ranks then take a fraction of a second. Each call
has new processes, so that nothing leaks from one test into another.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "titanlike.cli",
    "titanlike.run.overrides",
    "titanlike.run.drive",
    "titanlike.core.checkpoint.discovery",
    "titanlike.run.checks",
    "titanlike.run.job",
    "titanlike.core.models.gpt2",
    "titanlike.core.models.llama",
    "titanlike.core.training.loop",
    "torch.distributed.pipelining",
    "torch.distributed.launcher.api",
    "titanlike.proof.verify",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
SECONDARY = ("Connection", "closed", "gloo", "Broken pipe", "reset by peer")  # of a dead peer


@cache
def fork_context() -> Any:
    """Its processes are forks of a server that has imported `PRELOADED`."""
    for name in PRELOADED:  # which the server would leave out without an error
        assert find_spec(name), f"{name}, to be preloaded, does not exist"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


def run_world(
    function: Callable[..., Any], config: Any, run_dir: Path, *args: Any, timeout: float = 60
) -> list[Any]:
    """function(config, worker, *args) on all ranks of config's mesh; their results by rank.

    Raises RankError with the first real error of a rank. After `timeout` seconds all are killed.
    """
    context = fork_context()
    run_dir.mkdir(parents=True, exist_ok=True)
    config = replace(config, run_dir=str(run_dir))
    size = config.world_size
    store = run_dir / f"store-{time.monotonic_ns()}"
    ends, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        target = (function, config, args, rank, size, str(run_dir), str(store), theirs)
        process = context.Process(target=_rank, args=target, daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    try:
        return _collect(ends, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
        store.unlink(missing_ok=True)


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[tuple[bool, float, str]] = []
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        left = deadline - time.monotonic()
        pending = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(pending, timeout=max(0, left))
        if not ready:
            break
        for end in ready:
            rank = ends.index(end)
            try:
                ok, value = pickle.loads(end.recv_bytes())
            except EOFError:
                ok, value = False, f"rank {rank} died without a result"
            results[rank] = value
            if not ok:
                errors.append((any(word in value for word in SECONDARY), time.monotonic(), value))
                deadline = min(deadline, time.monotonic() + 2)  # for its peers' errors
    if errors:
        raise RankError(min(errors)[2])
    missing = sorted(set(range(len(ends))) - set(results))
    if missing:
        raise RankError(f"no result from ranks {missing} in {timeout:g} s")
    return [results[rank] for rank in range(len(ends))]


def _rank(
    function: Callable[..., Any],
    config: Any,
    args: tuple[Any, ...],
    rank: int,
    size: int,
    run_dir: str,
    store: str,
    end: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    from titanlike.core.launch.worker import Worker

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # loader processes
    gc.freeze()  # else a collection copies each page of what the server has imported: 0.2 s
    torch.set_num_threads(1)  # the ranks share the cores
    if rank or "TITANLIKE_TEST_OUTPUT" not in os.environ:
        log = os.open(Path(run_dir) / f"rank{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    worker = Worker(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        run_dir=Path(run_dir),
        store=dist.FileStore(store, size) if size > 1 else None,
        overrides=[],
    )
    try:
        answer = True, function(config, worker, *args)
    except BaseException as error:
        answer = False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    end.send_bytes(pickle.dumps(answer))
    end.close()
    os._exit(0)  # without destructors: a process group must not outlive its peers' errors
