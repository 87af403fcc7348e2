"""Simulated machines: a torchrun each, with a rendezvous store in the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch.distributed as dist

from support.launched import Launched
from support.paths import ROOT

# a dead machine is detected after 6 s (sooner, a busy one might be taken for dead, and two runs
# would write to one folder); the machines that have joined 1 s later take part in the next start
TIMES = "keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout=1,join_timeout=60"


class Nodes:
    """Machines with one rank each."""

    def __init__(self, nnodes: str, words: list[str], cwd: Path, restarts: int = 2) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._options = (
            f"--nnodes={nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            f"--rdzv-conf=is_host=0,{TIMES}",
            "--rdzv-id=test",
            "--local-addr=127.0.0.1",
            f"--max-restarts={restarts}",
        )
        self._words, self._cwd = words, cwd
        self._started: list[Launched] = []

    def start(self) -> Launched:
        """Start a machine."""
        how = {"torchrun": 1, "options": self._options, "cwd": self._cwd, "real": True}
        node = Launched(*self._words, program=ROOT / "train.py", **how)
        self._started.append(node)
        return node

    def close(self) -> None:
        for node in self._started:
            for process in node.alive():
                process.kill()
            node.process.communicate()


@contextlib.contextmanager
def nodes(nnodes: str, words: list[str], cwd: Path, **how: int) -> Iterator[Nodes]:
    """All their processes are killed at the end."""
    all_nodes = Nodes(nnodes, words, cwd, **how)
    try:
        yield all_nodes
    finally:
        all_nodes.close()


def worker(node: Launched, rank: int) -> psutil.Process | None:
    """The process of a rank; None if it is on another machine."""
    for process in node.alive():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def power_off(node: Launched) -> None:
    """Kill all processes of a machine."""
    for process in sorted(node.alive(), key=lambda process: process.pid != node.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.process.communicate()
