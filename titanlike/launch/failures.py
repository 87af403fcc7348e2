"""Which of many ranks' errors is the one that matters, and how it is shown.

When one rank fails its peers fail, too, with errors of the transport. Each rank writes what it saw
to run_dir/logs/rankN.error.json before it ends; the reader takes the earliest that is no transport
error, then a death by signal, and a transport error only if there is nothing else.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlike.config.credentials import redact
from titanlike.config.errors import ConfigError
from titanlike.launch.rank_log import log_path

_FRAMES = 5  # of a traceback, innermost
_TRANSPORT = (
    "connection reset by peer",
    "connection closed by peer",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "remote worker",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "recvvalue failed",
    "sendbytes failed",
)


class JobFailed(Exception):
    """A job failed; the text is all that the user needs. A sweep goes on with its next job."""

    def __init__(self, text: str, error: str, users: bool = False) -> None:
        self.error = error  # one line, for result.json
        self.users = users  # a mistake of the user's, which would come again
        self.ends_sweep = False  # whether the processes are lost for further jobs
        super().__init__(text, error)

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank."""

    rank: int
    error: str  # kind and message
    frames: str  # the innermost frames; "" for a user's mistake, whose message says it all
    transport: bool  # probably caused by a peer that failed
    time: float  # seconds since the epoch
    users: bool = False  # a mistake of the user's, or numbers that are bad: to run again is no help

    def to_job_failed(self, run_dir: Path, world_size: int) -> JobFailed:
        who = f"rank {self.rank} failed: " if world_size > 1 else ""
        lines = [who + self.error]
        if self.frames:
            lines.append(self.frames.rstrip())
        lines.append(f"log: {log_path(run_dir, self.rank)}")
        return JobFailed("\n".join(lines), who + self.error, self.users)


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as a Failure, in the words of whoever raised it first."""
    told = _unwrapped(error)
    users = isinstance(told, ConfigError) or (
        isinstance(told, (ValueError, OSError)) and _raised_by_us(told)
    )
    text = redact(str(told) if users else f"{type(told).__name__}: {told}")
    inner = traceback.extract_tb(told.__traceback__)
    if told is error:
        del inner[:1]  # the call of the job
    frames = [redact(frame) for frame in traceback.format_list(inner[-_FRAMES:])]
    words = " ".join(f"{type(link).__name__} {link}" for link in _chain(error)).lower()
    transport = not users and any(word in words for word in _TRANSPORT)
    # a disk or a network may do better the next time
    final = users and getattr(told, "errno", None) is None
    return Failure(rank, text, "" if users else "".join(frames), transport, time.time(), final)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: torch wraps a lost peer into errors of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unwrapped(error: BaseException) -> BaseException:
    """What torch.distributed wrapped: its "failed to run forward" lists tensors, and no cause.

    Whoever else raises one error from another has chosen the words that are to be read.
    """
    while error.__cause__ is not None and _raising_module(error).startswith("torch.distributed."):
        error = error.__cause__
    return error


def _raising_module(error: BaseException) -> str:
    """The module whose code has raised it; "" where nothing has."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return module


def _raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame is the program's own: such a ValueError explains itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Leave it for whoever reports the job; whole or not at all."""
    path = _error_path(run_dir, failure.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    unfinished.replace(path)


def clear_failures(run_dir: Path) -> None:
    """Forget an earlier job in the same run directory."""
    for path in _error_paths(run_dir):
        path.unlink(missing_ok=True)


def peer_failed(run_dir: Path, rank: int) -> bool:
    """Whether another rank than `rank` has left an error."""
    return any(path != _error_path(run_dir, rank) for path in _error_paths(run_dir))


def root_cause(run_dir: Path, deaths: dict[int, int] | None = None) -> Failure | None:
    """The failure that caused the others.

    `deaths` maps ranks that ended without a word to their exit code, negative for a signal.
    """
    texts = [path.read_text(encoding="utf-8") for path in _error_paths(run_dir)]
    failures = [Failure(**json.loads(text)) for text in texts]
    told = {failure.rank for failure in failures}
    for rank, code in (deaths or {}).items():
        if rank not in told:
            failures.append(Failure(rank, describe_exit(code), "", code >= 0, time.time()))
    return min(failures, key=lambda failure: (failure.transport, failure.time), default=None)


def describe_exit(code: int) -> str:
    """How a process ended that left no word: by its exit code, negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code} and no error of its own"
    name = signal.Signals(-code).name
    hint = "; often the kernel when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _error_paths(run_dir: Path) -> list[Path]:
    return list((run_dir / "logs").glob("rank*.error.json"))


def _error_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, rank).with_suffix(".error.json")
