"""Environment variables: those of an outer launcher (torchrun, SLURM), and those for workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping

_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def workers_environment(workers: int) -> Iterator[None]:
    """Within it, os.environ is what `workers` new processes on this machine inherit.

    Without an outer torchrun's variables, which would make them ranks of its job; with
    OMP_NUM_THREADS = cores / workers unless the user has set it.
    """
    before = dict(os.environ)
    for name in before.keys() - without_rank_variables(before).keys():
        del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // workers)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def without_rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` without the variables that make a process a rank of a launcher's job."""
    return {k: v for k, v in env.items() if k not in _NAMES and not k.startswith(_PREFIXES)}


def use_loopback() -> None:
    """Let gloo and NCCL listen on the loopback interface alone: all ranks are on this machine."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=f"={loopback}")


def is_restart() -> bool:
    """Whether torchrun or SLURM reports that it started this command before.

    torchrun counts per machine, and not where nodes join or leave: see also `RestartState`.
    """
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") not in ("", "0") for name in counts)


def will_restart() -> bool:
    """Whether torchrun will restart this command if it exits with a code other than 0.

    As far as this machine can tell: another one may have used up its restarts.
    """
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return count < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def is_multi_machine() -> bool:
    """Whether torchrun started ranks on several machines."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def interpreter() -> list[str]:
    """The command of Python with the options that this process was started with: -X, -W, -O, ..."""
    # as multiprocessing finds them
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def import_path() -> list[str]:
    """sys.path for workers: the standard library, then the rest of this process' path.

    The current directory is last, so that no file of the user shadows a library.
    """
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    path = [os.path.abspath(entry) for entry in sys.path]
    standard = [p for p in path if p in library or p.endswith((".zip", "/lib-dynload"))]
    return list(dict.fromkeys([*standard, *path, os.getcwd()]))
