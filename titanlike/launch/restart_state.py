"""What a job remembers when torchrun restarts its ranks: a JSON file per torchrun agent.

An agent is a torchrun process; it outlives its workers. An agent that was killed comes back with an
empty state, so every start collects the states of all machines (`external.ExternalRanks`) and takes
the one that has seen the most starts. The state ends with its agent: the next job with the same
--rdzv-id is another job.

The default run directory has the time in its name; a restart writes to that of the first start.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from titanlike.config import files

_STARTS = "starts"


class RestartState:
    """String values by key. `path`: the file of this machine's agent; None = in memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._values: dict[str, str] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError):  # a restart begins with less
                self._values = _texts(files.read_object(path))

    @classmethod
    def load(cls) -> RestartState:
        """The state of the agent that started this process; empty without torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        folder = Path(tempfile.gettempdir()) / f"titanlike-agents-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid():  # another user's: it would choose our run_dir
                return cls()
        except OSError:
            return cls()
        _remove_abandoned(folder)
        return cls(folder / _file_name(os.getppid()))

    def get(self, key: str) -> str | None:
        return self._values.get(key)

    def set_default(self, key: str, value: str) -> None:
        """Set `key` unless this start or an earlier one has."""
        if key not in self._values:
            self.set(key, value)

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        self._write()

    def count_start(self) -> None:
        self.set(_STARTS, str(self._starts + 1))

    def adopt_newest(self, others: Iterable[str]) -> None:
        """Replace this state by the one of `others` (`to_json`) with the most starts, if newer."""
        states = [RestartState.from_json(text) for text in others]
        newest = max([self, *states], key=lambda state: state._starts)
        if newest is not self:
            self._values = newest._values
            self._write()

    @property
    def _starts(self) -> int:
        starts = self._values.get(_STARTS, "")
        return int(starts) if starts.isdecimal() and len(starts) < 10 else 0

    def to_json(self) -> str:
        return json.dumps(self._values)

    @classmethod
    def from_json(cls, text: str) -> RestartState:
        state = cls()
        state._values = _texts(files.parse_object(text))
        return state

    def _write(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # full disk: a restart begins with less
            unfinished = self._path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(self.to_json(), encoding="utf-8")
            unfinished.replace(self._path)


def _texts(record: dict[str, object]) -> dict[str, str]:
    return {key: value for key, value in record.items() if isinstance(value, str)}


def _file_name(pid: int) -> str:
    """PID_NAMESPACE-PID-START_TIME.json: unique to a process on this machine, for all time."""
    namespace, start_time = "0", "0"
    with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux: the process id alone
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        start_time = stat.rpartition(")")[2].split()[19]  # in clock ticks since boot
    return f"{namespace}-{pid}-{start_time}.json"


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of agents in this pid namespace that have ended."""
    own_namespace = _file_name(os.getpid()).split("-")[0]
    for path in folder.glob("*-*-*.json"):
        namespace, pid, _ = path.name.split("-")
        if namespace == own_namespace and pid.isdigit() and _file_name(int(pid)) != path.name:
            path.unlink(missing_ok=True)
