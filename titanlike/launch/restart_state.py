"""What is kept of a job where torchrun starts its ranks again: by each machine, for its agent.

An agent is a torchrun process; it outlives its workers. One that is killed is missed by the others,
and starts with nothing when it comes back: so every start collects what the machines know
(`follow.StartedRanks`), and the machine that has seen the most starts is right. A job whose agents
have all ended is forgotten: the next one with the same --rdzv-id is another job.

The default run directory has the time in its name: a restart writes to that of the first start.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

_STARTS = "starts"


class Kept:
    """Values by key. `memory`: the file of this machine's agent; None = nothing is kept."""

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory
        self._values: dict[str, str] = {}
        if memory is not None:
            with contextlib.suppress(OSError, ValueError):
                self._values = json.loads(memory.read_text(encoding="utf-8"))

    @classmethod
    def of_this_machine(cls) -> Kept:
        """What the agent that started this process has kept; nothing without torchrun."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        folder = Path(tempfile.gettempdir()) / f"titanlike-agents-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid():  # somebody else's: it would say where we write
                return cls()
        except OSError:
            return cls()
        _remove_abandoned(folder)
        return cls(folder / _name(os.getppid()))

    @classmethod
    def of_one_process(cls) -> Kept:
        """The same, for a start of one process; it counts."""
        kept = cls.of_this_machine()
        kept.begin()
        return kept

    def get(self, key: str) -> str | None:
        """What an earlier start has kept, or this one."""
        return self._values.get(key)

    def keep(self, key: str, value: str) -> None:
        """Keep `value`, unless an earlier start has kept one."""
        if key not in self._values:
            self.put(key, value)

    def put(self, key: str, value: str) -> None:
        """Keep `value` instead of what was kept."""
        self._values[key] = value
        self._write()

    def begin(self) -> None:
        """Count a start."""
        self.put(_STARTS, str(self._starts + 1))

    def adopt(self, others: Iterable[str]) -> None:
        """Take over what the machine knows (`to_json`) that has seen more starts than this one."""
        known = [Kept.from_json(text) for text in others]
        newest = max([self, *known], key=lambda kept: kept._starts)
        if newest is not self:
            self._values = newest._values
            self._write()

    @property
    def _starts(self) -> int:
        return int(self._values.get(_STARTS, "0"))

    def to_json(self) -> str:
        return json.dumps(self._values)

    @classmethod
    def from_json(cls, text: str) -> Kept:
        kept = cls()
        kept._values = json.loads(text)
        return kept

    def _write(self) -> None:
        if self._memory is None:
            return
        with contextlib.suppress(OSError):  # a full disk: a restart will know less
            unfinished = self._memory.with_suffix(f".{os.getpid()}")
            unfinished.write_text(self.to_json(), encoding="utf-8")
            unfinished.replace(self._memory)


def _name(pid: int) -> str:
    """A name for a process that no other one on this machine has, had, or will have."""
    space, born = "0", "0"
    with contextlib.suppress(OSError, ValueError, IndexError):  # no Linux: the process id alone
        space = str(os.stat("/proc/self/ns/pid").st_ino)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        born = stat.rpartition(")")[2].split()[19]  # in clock ticks since the machine started
    return f"{space}-{pid}-{born}.json"


def _remove_abandoned(folder: Path) -> None:
    """Remove the memory of agents that have ended, as far as it can be told."""
    for path in folder.glob("*-*-*.json"):
        space, pid, _ = path.name.split("-")
        own_space = _name(os.getpid()).split("-")[0]
        if space == own_space and pid.isdigit() and _name(int(pid)) != path.name:
            path.unlink(missing_ok=True)
