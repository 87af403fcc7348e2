"""The environment: what it tells of a launcher further out, and what workers find in theirs."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def workers_environment(workers: int) -> Iterator[None]:
    """os.environ as `workers` new processes of this machine shall inherit it.

    An outer torchrun's variables would make them ranks of its job. The cores are shared among
    them unless the user has set OMP_NUM_THREADS.
    """
    before = dict(os.environ)
    for name in before.keys() - without_rank_variables(before).keys():
        del os.environ[name]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // workers)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def without_rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what makes a process a rank of an outer launcher's job."""
    ours = {name for name in env if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: value for name, value in env.items() if name not in ours}


def is_restart() -> bool:
    """Whether torchrun or SLURM is known to have started this command before.

    torchrun's count is each machine's own, and stays where nodes come or go: see also `RestartState`.
    """
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") not in ("", "0") for name in counts)


def will_restart() -> bool:
    """Whether torchrun will start this command again if it ends with an exit code that is not 0.

    As far as this machine knows: another one may have used up its restarts.
    """
    count, most = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return int(count) < int(most)


def is_multi_machine() -> bool:
    """Whether torchrun has started ranks on other machines, too."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


def import_path() -> list[str]:
    """sys.path for workers: the standard library first, then this process' path in its order.

    The current directory comes last, so that a file of the user's shadows no library.
    """
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    path = [os.path.abspath(entry) for entry in sys.path]
    standard = [p for p in path if _is_standard(Path(p), library)]
    return list(dict.fromkeys([*standard, *path, os.getcwd()]))


def _is_standard(path: Path, library: set[str]) -> bool:
    return path.suffix == ".zip" or str(path) in library or path.name == "lib-dynload"
