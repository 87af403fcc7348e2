"""A process that writes a rank's file of tensors, so that training keeps Python's interpreter lock.

The trainer copies its tensors into shared memory and asks for a file; planning and the commit, which
take little, stay in the trainer. So this process can never complete a checkpoint: whatever becomes of
it, the save is complete or does not count, as without it.

It ends with its trainer, however that ends: by the kernel (Linux: PR_SET_PDEATHSIG), and at the end of
the trainer's socket. It ignores the signals that ask a run to stop, because the trainer saves then.
A write that fails raises in the trainer what it raised here; a process that has died or does not
answer in time fails the save in progress, and the next one starts another.

A message is a pickle; before a request comes a byte with the descriptor of the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from titanlike.checkpoint.staging import HostMemory
    from titanlike.checkpoint.storage import Storage
    from titanlike.checkpoint.tensor_file import WrittenFile

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_PATIENCE = 5.0  # seconds for the process to end


class WriterProcess:
    """The trainer's side."""

    def __init__(self, memory: HostMemory, timeout: float) -> None:
        """timeout: seconds until a write fails."""
        self._memory, self._timeout = memory, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it unless it runs. On the main thread: the kernel ends it with the thread."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        code = "from titanlike.checkpoint.writer_process import main; main()"
        words = [f"import sys; sys.path.insert(0, {root!r}); {code}", str(os.getpid())]
        # the GPU is the trainer's alone
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it ignores them
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", *words, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        ours.settimeout(self._timeout)
        self._socket = ours

    def write(self, folder: Storage, name: str, tensors: Iterable[Tensor]) -> WrittenFile:
        """Write a file of tensors that are in the shared memory. Raises OSError."""
        assert self._socket is not None
        places = [
            (str(t.dtype).removeprefix("torch."), tuple(t.shape), self._memory.offset(t))
            for t in tensors
        ]
        try:
            socket.send_fds(self._socket, [b"m"], [self._memory.fd])
            self._socket.sendall(pickle.dumps((str(folder), name, places)))
            with self._socket.makefile("rb") as answers:
                error, written = pickle.load(answers)
        except TimeoutError:
            self.kill()
            raise OSError(f"{folder}/{name} was not written in {self._timeout:g} s") from None
        except (OSError, EOFError, pickle.UnpicklingError):  # also in the middle of its answer
            self.kill()
            code = self._process and self._process.returncode
            raise OSError(f"the process that writes {folder}/{name} has died ({code})") from None
        if error is not None:
            raise error
        return written

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.close()

    def close(self) -> None:
        """End it; not while it writes."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


# --- in the process --------------------------------------------------------------------------------


def main() -> None:
    """Serve requests until the trainer is gone."""
    trainer, fd = int(sys.argv[1]), int(sys.argv[2])
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:  # it has ended meanwhile
        os._exit(0)
    import torch

    torch.set_num_threads(1)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    with contextlib.suppress(EOFError, ConnectionError, pickle.UnpicklingError):
        while descriptors := socket.recv_fds(connection, 1, 1)[1]:  # none at the socket's end
            request = pickle.load(requests)
            try:
                answer = None, _write(descriptors[0], *request)
            except Exception as error:
                answer = _portable(error), None
            finally:
                os.close(descriptors[0])
            connection.sendall(pickle.dumps(answer))
    os._exit(0)


def _write(memory: int, location: str, name: str, places: list[Any]) -> WrittenFile:
    import torch

    from titanlike.checkpoint.storage import Storage
    from titanlike.checkpoint.tensor_file import write_tensors

    mapping = mmap.mmap(memory, 0)

    def tensor(dtype: str, shape: tuple[int, ...], begin: int) -> Tensor:
        kind = getattr(torch, dtype)
        if 0 in shape:
            return torch.empty(shape, dtype=kind)
        count = torch.Size(shape).numel()
        return torch.frombuffer(mapping, dtype=kind, count=count, offset=begin).view(shape)

    return write_tensors(Storage(location), name, (tensor(*place) for place in places))


def _portable(error: Exception) -> Exception:
    """The error as the trainer can load it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return OSError(f"{type(error).__name__}: {error}")
    return error
