"""What ranks fail with: the root cause among their errors, and its text for the user.

When one rank fails its peers fail, too, with transport errors. Each rank writes its error to
run_dir/logs/rankN.error.json before it exits; the root cause is the earliest that is not a
transport error, or the end of a process that wrote none, and a transport error only if there is
nothing else.
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

from titanlike.config import files
from titanlike.config.credentials import redact
from titanlike.config.errors import ConfigError, Refused

_FAILED = "logs/failed"  # exists once a rank has written its error
_FRAMES = 5  # of a traceback, innermost
_HEAD, _TAIL = 6000, 2000  # characters that are kept of a longer message: its begin, its end
_TRANSPORT = (
    "connection reset by peer",
    "connection closed by peer",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "remote worker",
    "remote process exit",  # ncclRemoteError in two texts of NCCL's
    "nccl communicator was aborted",
    "watchdog",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "recvvalue failed",
    "sendbytes failed",
)


class TakenOver(ValueError):
    """A later start of the run has taken its directory over: it is no longer this start's."""


class PeerFailed(RuntimeError):
    """Raised on a rank that waits for another one that has failed, where nothing else tells it."""

    def __str__(self) -> str:
        return "another rank has failed"


class JobFailed(Exception):
    """A job failed; `text` is the whole message for the user. A sweep runs its next job."""

    def __init__(
        self, text: str, error: str, permanent: bool = False, invalid: bool = False
    ) -> None:
        self.error = error  # one line, for result.json
        self.permanent = permanent  # whether a restart would fail with the same error
        self.invalid = invalid  # an error in the config or the data: nothing was trained
        self.ends_sweep = False  # whether the processes cannot run further jobs
        self.taken_over = False  # whether run_dir is another start's now, result.json too
        super().__init__(text, error)

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Failure:
    """The error of one rank, as in rankN.error.json."""

    rank: int
    error: str  # type and message
    frames: str  # the innermost frames of the traceback; "" for a user error
    transport: bool  # probably caused by a peer that failed
    time: float  # seconds since the epoch
    users: bool = False  # permanent: a user error or bad numbers, which a restart would repeat
    taken_over: bool = False  # see TakenOver
    invalid: bool = False  # an error in the config or the data: nothing was trained
    names_rank: bool = False  # whether the error itself says which ranks are the cause
    by_peer: bool = False  # of a rank that wrote none: told by another, which saw its process end

    def to_job_failed(self, run_dir: Path, world_size: int) -> JobFailed:
        if self.invalid:  # found by every rank alike, or by one for all
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
    """The file that a rank's output goes to."""
    return run_dir / "logs" / f"rank{rank}.log"


def describe(rank: int, error: BaseException) -> Failure:
    """An exception as a Failure, without the exceptions that torch.distributed wrapped it in."""
    cause = _unwrapped(error)
    inner = traceback.extract_tb(cause.__traceback__)
    # the message of an error that this package raises is complete
    raised_here = bool(inner) and Path(inner[-1].filename).is_relative_to(Path(__file__).parents[1])
    names_rank = bool(getattr(cause, "missing", ()))  # a barrier's
    by_program = raised_here and (names_rank or isinstance(cause, (ValueError, OSError)))
    invalid = isinstance(cause, ConfigError) or type(cause) is Refused  # at a start
    explains_itself = by_program or invalid
    text = redact(str(cause) if explains_itself else f"{type(cause).__name__}: {cause}")
    if cause is error:
        del inner[:1]  # the call of the job
    frames = "".join(redact(frame) for frame in traceback.format_list(inner[-_FRAMES:]))
    # a save that a lost peer has ended is an OSError of this program
    may_follow = not explains_itself or isinstance(cause, OSError)
    transport = may_follow and _is_transport(error)
    return Failure(
        rank,
        _shortened(text),
        frames="" if explains_itself else _shortened(frames),
        transport=transport,
        time=time.time(),
        # an error of a disk or a network, or of a rank that is missing, may not repeat
        users=explains_itself
        and not (transport or names_rank)
        and getattr(cause, "errno", None) is None,
        taken_over=isinstance(cause, TakenOver),
        invalid=invalid,
        names_rank=names_rank,
    )


def _shortened(text: str) -> str:
    """A message that fits result.json and a terminal; the rank's log has all of it."""
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]} [... {left_out:,} characters left out ...] {text[-_TAIL:]}"


def _is_transport(error: BaseException | None) -> bool:
    """Whether a peer that failed probably caused it: torch wraps the error of a lost peer in its
    own."""
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if isinstance(error, PeerFailed) or any(phrase in text for phrase in _TRANSPORT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unwrapped(error: BaseException) -> BaseException:
    """The cause of an error that torch.distributed raised from another one.

    Its "failed to run forward" lists tensors, not the cause. Other code that raises one error from
    another has chosen the message to show.
    """
    while error.__cause__ is not None:
        module = ""  # whose code raised it
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_globals.get("__name__", "")
        if not module.startswith("torch.distributed."):
            break
        error = error.__cause__
    return error


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write rankN.error.json, atomically."""
    path = error_path(run_dir, failure.rank)
    files.atomic_write_text(path, json.dumps(asdict(failure)), sync=False)
    (run_dir / _FAILED).touch()


def clear_failures(run_dir: Path) -> None:
    """Remove the error files of an earlier job in the same run directory."""
    (run_dir / _FAILED).unlink(missing_ok=True)
    for path in _error_paths(run_dir):
        path.unlink(missing_ok=True)


def peer_failed(run_dir: Path, rank: int) -> bool:
    """Whether a rank other than `rank` has written an error.

    Each of a thousand ranks asks twice a second while the run is to stop: the folder, which has a
    few files of each, is only listed once there is an error.
    """
    return (run_dir / _FAILED).exists() and any(
        path != error_path(run_dir, rank) for path in _error_paths(run_dir)
    )


def root_cause(
    run_dir: Path, deaths: Collection[Failure] = (), scratch: Path | None = None
) -> Failure | None:
    """The failure that caused the others.

    scratch: has errors, too, since run_dir may be lost. deaths: of processes that may not have
    written an error.
    """
    failures = []
    for path in [p for folder in (run_dir, scratch) if folder for p in _error_paths(folder)]:
        with contextlib.suppress(OSError, ValueError):  # half a file of a full disk
            failures.append(files.read_object(path, Failure))
    reported = {failure.rank for failure in failures if not failure.by_peer}
    ended = {death.rank for death in deaths}
    failures = [f for f in failures if not (f.by_peer and f.rank in ended | reported)]
    failures += [death for death in deaths if death.rank not in reported]

    def order(failure: Failure) -> tuple[bool, bool, float]:
        # a start that takes over removes unfinished files, which may fail first elsewhere
        return not failure.taken_over, failure.transport, failure.time

    return min(failures, key=order, default=None)


def describe_exit(code: int) -> str:
    """The end of a process that wrote no error, by its exit code; negative: a signal."""
    if code >= 0 and code - 128 not in [*signal.Signals]:
        return f"exited with code {code} and wrote no error"
    if code > 0:  # of a process that has handled it
        return f"ended by {signal.Signals(code - 128).name}"
    name = signal.Signals(-code).name
    hint = "; often by the kernel's out-of-memory killer" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def record_for_torchrun(error: BaseException | str) -> None:
    """Show this error in the report of an outer torchrun."""
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
