"""Environment variables of outer launchers (torchrun, SLURM's srun) and of workers, and the state
that a job keeps across torchrun's restarts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from titanlike.core.config import files
from titanlike.core.config.errors import ConfigError, Problem

_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 32000)  # below 32768, where Linux's ephemeral ports begin
_STEPS = 101  # ports between the same step of two consecutive jobs


def is_restart() -> bool:
    """Whether torchrun or SLURM reports that it launched this command before.

    torchrun counts per machine, and not when nodes join or leave: see also `RestartState`.
    """
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(os.environ.get(name, "0") not in ("", "0") for name in counts)


def will_restart() -> bool:
    """Whether torchrun will restart this command if it exits with a code other than 0, as far as
    this machine knows: a different machine may have used up its restarts."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return count < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers_environment(workers: int) -> dict[str, str]:
    """Environment of `workers` ranks on this machine, without an outer torchrun's rank variables.
    OMP_NUM_THREADS = cores / workers unless the user has set it."""
    threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // workers))}
    threads |= compiler_environment(workers)
    size = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    return threads | without_rank_variables(os.environ) | size


def compiler_environment(ranks: int) -> dict[str, str]:
    """Limit inductor's compile processes for `ranks` ranks on this machine. By default each rank
    starts as many as there are cores, up to 32, of 0.3 GB each."""
    threads = min(32, max(1, available_cores() // ranks))  # inductor's own limit
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}


def without_rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` without the variables that make a process a rank of a launcher's job."""
    return {k: v for k, v in env.items() if k not in _NAMES and not k.startswith(_PREFIXES)}


def child_environment() -> dict[str, str]:
    """Environment of a subprocess that runs `python -m titanlike`: not a rank, and importing this
    checkout even if a different version is installed."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    env = without_rank_variables(os.environ)
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def python() -> list[str]:
    """The Python command to run titanlike in a subprocess: -P keeps files in the working directory
    from shadowing libraries."""
    return [sys.executable, "-P"]


def interpreter() -> list[str]:
    """The Python command with this process' options: -X, -W, -O, ..."""
    # multiprocessing uses the same function
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def import_path() -> list[str]:
    """sys.path for workers: the standard library first, then the rest of this process' path.

    The current directory is last, so that the user's files shadow no library; under `python -P` it
    is omitted.
    """
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    path = [os.path.abspath(entry) for entry in sys.path]
    standard = [p for p in path if p in library or p.endswith((".zip", "/lib-dynload"))]
    here = [] if sys.flags.safe_path else [os.getcwd()]
    return list(dict.fromkeys([*standard, *path, *here]))


def check_launcher(before_ranks: bool) -> None:
    """Raise ConfigError if a launcher's variables are set but do not make this process a valid
    rank.

    before_ranks: only the number of ranks is checked, as they are not launched yet.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    variables = {name: os.environ.get(name, "1" if name == "WORLD_SIZE" else "0") for name in names}
    if all(re.fullmatch("[0-9]{1,7}", text) for text in variables.values()):
        rank, local_rank, size = map(int, variables.values())
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and not before_ranks else ()
        if max(rank, local_rank) < size and all(map(os.environ.get, needed)):
            return
        variables |= {name: os.environ.get(name, "") for name in needed}
    text = " ".join(f"{name}={value}" for name, value in variables.items())
    reason = "the environment describes no rank of a launcher"
    fix = f"start with torchrun or srun, or `unset {' '.join(names)}` for one process"
    raise ConfigError([Problem(text, "", reason, fix)])


def adopt_slurm() -> None:
    """Set RANK, WORLD_SIZE and so on if `srun` launched one process per rank.

    MASTER_ADDR and MASTER_PORT default to the step's first node and a port derived from the ids of
    job and step, equal on all ranks. (Each task of a job array has its own job id.) Raises
    ConfigError where variables of srun are missing, as in a container that does not get them.
    """
    env = os.environ
    if "RANK" in env or env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return
    try:
        tasks = tasks_of_nodes(env["SLURM_STEP_TASKS_PER_NODE"])
        if "MASTER_ADDR" not in env:
            nodes = env["SLURM_STEP_NODELIST"]
            env["MASTER_ADDR"] = "localhost" if len(tasks) == 1 else _address(nodes)
        if "MASTER_PORT" not in env:
            number = int(env["SLURM_JOB_ID"]) * _STEPS + int(env["SLURM_STEP_ID"])
            env["MASTER_PORT"] = str(_PORTS[number % len(_PORTS)])
        env.update(
            RANK=env["SLURM_PROCID"],
            LOCAL_RANK=env["SLURM_LOCALID"],
            WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
            LOCAL_WORLD_SIZE=str(tasks[int(env["SLURM_NODEID"])]),
        )
    except KeyError as missing:
        reason = "is not set, while SLURM_STEP_NUM_TASKS is"
        fix = "pass all SLURM_* variables to the container, or unset SLURM_STEP_NUM_TASKS"
        raise ConfigError([Problem(str(missing.args[0]), "", reason, fix)]) from None
    except ValueError as error:
        raise ConfigError([Problem("SLURM_*", "", str(error), "start by srun anew")]) from None


def tasks_of_nodes(text: str) -> list[int]:
    """Parse the number of tasks per node from SLURM's short form: "2(x3),1" is [2, 2, 2, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}: not of the form 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _address(nodes: str) -> str:
    """The name of the first of SLURM's nodes ("n[07-09],m3" begins with n07), or its address if the
    name does not resolve."""
    host = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).split(",")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # unknown to DNS
        command = ["scontrol", "--oneliner", "show", "node", host]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # not in this container
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
            if address := re.search(r" NodeAddr=(\S+)", done.stdout):
                return address[1]
        reason = f"the first node, {host}, does not resolve, and scontrol gives no address of it"
        fix = f"export MASTER_ADDR=ADDRESS of {host}"
        raise ConfigError([Problem("SLURM_STEP_NODELIST", nodes, reason, fix)]) from None
    return host


class RestartState:
    """State that survives torchrun's restarts of the ranks: strings by key, in one JSON file per
    agent.

    An agent is a torchrun process; it outlives its workers. A killed agent comes back with an empty
    state, so each launch gathers the states of all machines and adopts the one that has seen the
    most launches. The state ends with its agent: the next job with the same --rdzv-id is a new job.
    It holds e.g. the default run directory, whose name has the time of the first launch.
    """

    def __init__(self, path: Path | None = None) -> None:
        """path: this machine's file; None = only in memory."""
        self._path = path
        self._values: dict[str, str] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError):  # unreadable: start empty
                self._values = _texts(files.read_object(path))

    @classmethod
    def load(cls) -> RestartState:
        """Load the state of the agent that launched this process; empty without torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        folder = Path(tempfile.gettempdir()) / f"titanlike-agents-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # who could then choose our run_dir
                return cls()
        except OSError:
            return cls()
        here = _file_name(os.getpid()).split("-")[0]
        for path in folder.glob("*-*-*.json"):  # remove files of ended agents in this pid namespace
            namespace, pid, _ = path.name.split("-")
            if namespace == here and pid.isdigit() and _file_name(int(pid)) != path.name:
                path.unlink(missing_ok=True)
        return cls(folder / _file_name(os.getppid()))

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def set_default(self, key: str, value: str) -> None:
        """Set `key` unless this launch or an earlier one has set it."""
        if key not in self._values:
            self.set(key, value)

    def set(self, key: str, value: str) -> None:
        self._write({**self._values, key: value})

    def count_start(self) -> None:
        self.set("starts", str(_starts(self._values) + 1))

    def adopt_newest(self, others: Iterable[str]) -> None:
        """Adopt the state of `others` (`to_json`) that has seen the most launches, if more than
        this."""
        states = [self._values, *(_texts(files.parse_object(text)) for text in others)]
        newest = max(states, key=_starts)
        if newest is not self._values:
            self._write(newest)

    def to_json(self) -> str:
        return json.dumps(self._values)

    def _write(self, values: dict[str, str]) -> None:
        self._values = values
        if self._path is not None:
            with contextlib.suppress(OSError):  # full disk: a restart will not have this
                files.atomic_write_text(self._path, self.to_json(), sync=False)


def _texts(record: dict[str, object]) -> dict[str, str]:
    return {key: value for key, value in record.items() if isinstance(value, str)}


def _starts(values: dict[str, str]) -> int:
    starts = values.get("starts", "")
    return int(starts) if starts.isdecimal() and len(starts) < 10 else 0


def _file_name(pid: int) -> str:
    """PID_NAMESPACE-PID-START_TIME.json, never reused by a different process on this machine."""
    namespace, start_time = "0", "0"
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux: only the process id
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        start_time = stat.rpartition(")")[2].split()[19]  # in clock ticks since boot
    return f"{namespace}-{pid}-{start_time}.json"
