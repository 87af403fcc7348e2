"""Find the root cause among the errors of all ranks, and format it for the user.

When one rank fails, its peers fail with transport errors. Each rank writes its error to
run_dir/logs/rankN.error.json before it exits. The root cause is the earliest error that is not a
transport error, or the end of a process that wrote none; a transport error only if there is nothing
else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlike.core.config import files
from titanlike.core.config.credentials import redact
from titanlike.core.config.errors import ConfigError, Refused, printable

_FAILED = "logs/failed"  # exists once a rank has written its error
_FRAMES = 5  # innermost frames kept of a traceback
_HEAD, _TAIL = 6000, 2000  # characters kept of a long message, at its begin and end
_TRANSPORT = (
    "connection reset by peer",
    "connection closed by peer",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "remote worker",
    "remote process exit",  # this and "remote worker" are texts of ncclRemoteError
    "nccl communicator was aborted",
    "watchdog",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "recvvalue failed",
    "sendbytes failed",
    "distnetworkerror",
)


class TakenOver(ValueError):
    """A later launch of the run has taken over its directory, so this launch ends."""


class PeerFailed(RuntimeError):
    """Raised on a rank that waits for a failed rank, if no other error interrupts it."""

    def __str__(self) -> str:
        return "another rank has failed"


class JobFailed(Exception):
    """A job failed; `text` is the full message for the user. A sweep goes on with its next job."""

    def __init__(
        self, text: str, error: str, permanent: bool = False, invalid: bool = False
    ) -> None:
        self.error = printable(error)  # one line, for result.json
        self.permanent = permanent  # a restart would fail with the same error
        self.invalid = invalid  # an error in the config or the data: nothing was trained
        self.ends_sweep = False  # the processes cannot run further jobs
        self.taken_over = False  # run_dir, including result.json, now belongs to a later launch
        super().__init__(printable(text), error)

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """The error of one rank, as in rankN.error.json."""

    rank: int
    error: str  # type and message
    frames: str  # innermost frames of the traceback; "" for a user error
    transport: bool  # probably caused by a peer that failed
    time: float  # seconds since the epoch
    users: bool = False  # permanent: a user error or a bad loss, which a restart would repeat
    taken_over: bool = False  # see TakenOver
    invalid: bool = False  # an error in the config or the data: nothing was trained
    names_rank: bool = False  # the error text itself names the ranks that are the cause
    by_peer: bool = False  # written by a peer that saw this rank's process end without an error

    def to_job_failed(self, run_dir: Path, world_size: int) -> JobFailed:
        if self.invalid:  # the same on every rank, so no rank is named
            lines = [f"  {line}" for line in self.error.splitlines()]
            text = "\n".join(["error in the config or the data; nothing was trained", *lines])
            return JobFailed(text, self.error, self.users, self.invalid)
        who = f"rank {self.rank} failed: " if world_size > 1 and not self.names_rank else ""
        lines = [who + self.error]
        if self.frames:
            lines.append(self.frames.rstrip())
        if (log := log_path(run_dir, self.rank)).exists():
            lines.append(f"log: {log}")
        text = "\n".join(lines)
        failed = JobFailed(text, who + self.error, self.users, self.invalid)
        failed.taken_over = self.taken_over
        return failed


def log_path(run_dir: Path, rank: int) -> Path:
    """The log file of a rank's output."""
    return run_dir / "logs" / f"rank{rank}.log"


def describe(rank: int, error: BaseException) -> Failure:
    """Convert an exception to a Failure, unwrapping those that torch.distributed put around it."""
    cause = _unwrapped(error)
    inner = traceback.extract_tb(cause.__traceback__)
    # errors raised by this package have a complete message, without frames
    raised_here = bool(inner) and Path(inner[-1].filename).is_relative_to(Path(__file__).parents[2])
    names_rank = bool(getattr(cause, "missing", ()))  # BarrierTimeout
    by_program = raised_here and (names_rank or isinstance(cause, (ValueError, OSError)))
    invalid = isinstance(cause, ConfigError) or type(cause) is Refused  # during launch
    explains_itself = by_program or invalid
    message = str(cause) if explains_itself else f"{type(cause).__name__}: {cause}"
    text = printable(redact(message))
    if cause is error:
        del inner[:1]  # the frame that called the job
    frames = "".join(printable(redact(frame)) for frame in traceback.format_list(inner[-_FRAMES:]))
    # a save that fails because a peer was lost is an OSError of this package
    may_follow = not explains_itself or isinstance(cause, OSError)
    transport = may_follow and _is_transport(error)
    return Failure(
        rank,
        _shortened(text),
        frames="" if explains_itself else _shortened(frames),
        transport=transport,
        time=time.time(),
        # errors of disks and networks, and missing ranks, may not repeat
        users=explains_itself
        and not (transport or names_rank)
        and getattr(cause, "errno", None) is None,
        taken_over=isinstance(cause, TakenOver),
        invalid=invalid,
        names_rank=names_rank,
    )


def _shortened(text: str) -> str:
    """Shorten a message to fit result.json and a terminal; the rank's log has all of it."""
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]} [... {left_out:,} characters left out ...] {text[-_TAIL:]}"


def _is_transport(error: BaseException | None) -> bool:
    """Whether the error was probably caused by a failed peer. torch wraps such errors in its own,
    so causes and contexts are searched."""
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, PeerFailed) or any(phrase in text for phrase in _TRANSPORT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unwrapped(error: BaseException) -> BaseException:
    """Find the cause of an error that torch.distributed raised from a different one.

    torch's "failed to run forward" lists tensors instead of the cause. Other code that raises one
    error from a different one has chosen the message to show.
    """
    while error.__cause__ is not None:
        module = ""  # that raised the error
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_globals.get("__name__", "")
        if not module.startswith("torch.distributed."):
            break
        error = error.__cause__
    return error


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write rankN.error.json atomically."""
    path = error_path(run_dir, failure.rank)
    files.atomic_write_text(path, json.dumps(asdict(failure)), sync=False)
    (run_dir / _FAILED).touch()


def clear_failures(run_dir: Path) -> None:
    """Remove error files of an earlier job in the same run directory."""
    (run_dir / _FAILED).unlink(missing_ok=True)
    for path in _error_paths(run_dir):
        path.unlink(missing_ok=True)


def peer_failed(run_dir: Path, rank: int) -> bool:
    """Whether a rank other than `rank` has written an error.

    Polled by every rank while stopping, so the directory is listed only after an error exists.
    """
    own, some = error_path(run_dir, rank), (run_dir / _FAILED).exists()
    return some and any(path != own for path in _error_paths(run_dir))


def root_cause(
    run_dir: Path, deaths: Collection[Failure] = (), scratch: Path | None = None
) -> Failure | None:
    """Find the failure that caused the others.

    scratch: a second folder with error files, since run_dir may be lost. deaths: of processes that
    may not have written an error.
    """
    failures = []
    for path in [p for folder in (run_dir, scratch) if folder for p in _error_paths(folder)]:
        with contextlib.suppress(OSError, ValueError):  # truncated by a full disk
            failures.append(files.read_object(path, Failure))
    reported = {failure.rank for failure in failures if not failure.by_peer}
    ended = {death.rank for death in deaths}
    failures = [f for f in failures if not (f.by_peer and f.rank in ended | reported)]
    failures += [death for death in deaths if death.rank not in reported]

    def order(failure: Failure) -> tuple[bool, bool, float]:
        # a launch that takes over deletes unfinished files, which may first fail other ranks
        return not failure.taken_over, failure.transport, failure.time

    return min(failures, key=order, default=None)


def describe_exit(code: int) -> str:
    """Describe the end of a process that wrote no error, by its exit code; -N = by signal N."""
    if code >= 0 and code - 128 not in [*signal.Signals]:
        return f"exited with code {code} and wrote no error"
    if code > 0:  # the process handled the signal
        return f"ended by {signal.Signals(code - 128).name}"
    name = signal.Signals(-code).name
    hint = "; often by the kernel's out-of-memory killer" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def record_for_torchrun(error: BaseException | str) -> None:
    """Show this error in an outer torchrun's report."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            # the handler formats the exception being handled
            text = error if isinstance(error, str) else describe(0, error).error
            raise RuntimeError(text) from None
        except RuntimeError as shown:
            get_error_handler().record_exception(shown)


def _error_paths(run_dir: Path) -> list[Path]:
    return list((run_dir / "logs").glob("rank*.error.json"))


def error_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, rank).with_suffix(".error.json")
