"""Starts command lines of `launch_jobs.py` (or another program) and finds their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.forked import MARK, ForkedProgram

JOBS = Path(__file__).with_name("launch_jobs.py")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]


class Launched:
    """A command line in a session of its own, whose processes are marked."""

    def __init__(
        self,
        *arguments: object,
        torchrun: int = 0,
        options: tuple[str, ...] = (),
        cwd: Path | None = None,
        program: Path = JOBS,
        real: bool = False,
        python: tuple[str, ...] = (),
    ) -> None:
        """torchrun: the number of processes that it starts, 0 = none; options: for torchrun.

        real: a new interpreter, and not a fork (see `forked`); python: its own options.
        """
        self.mark = uuid.uuid4().hex[:15]
        outer = [*TORCHRUN, str(torchrun), *options] if torchrun else []
        env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "SLURM"))}
        env |= {"OMP_NUM_THREADS": "1", MARK: self.mark}
        words = [*outer, str(program), *map(str, arguments)]
        if not real:
            self.process = ForkedProgram(words, cwd, env)
            return
        self.process = subprocess.Popen(
            [sys.executable, *python, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=env,
            start_new_session=True,
            # a shell's background job ignores Ctrl-C, and its children would, too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait(self, timeout: float = 120) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for process in self.alive():
                process.kill()
            raise
        return self.process.returncode, out, err

    def alive(self) -> list[psutil.Process]:
        """Its processes that have not ended, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                if self.mark in (name, process.environ().get(MARK)):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """All its processes stand still meanwhile: they see what is done as one change."""
        processes = self.alive()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def all_exit(self, within: float = 10) -> bool:
        """Whether all its processes end within some seconds; the others are killed."""
        deadline = time.monotonic() + within
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.alive()
        for process in left:
            process.kill()
        return not left
