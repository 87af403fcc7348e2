"""A rank's part of a save: a copy of its tensors in memory, and the file that is written of them,
by the trainer or by a process of its own.

The modes async_pinned and async_process copy while training goes on:

1. `Copy`, in training: what may change at any time (buffers, random generators) is copied at once.
   Parameters and optimizer state change in an optimizer's step alone: they are copied meanwhile, by
   the GPU on a stream of its own, or by the saving thread.
2. `before_update`, in training: the next optimizer step waits for the copy; on a GPU the stream
   does, and the CPU goes on.
3. `finish`, in the saving thread: the copy is complete.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor

from titanlike.checkpoint.storage import Storage, error_line
from titanlike.device.accelerator import pin, unpin

_ALIGNMENT = 64  # bytes
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PATIENCE = 5.0  # seconds for the process to end

# --- the copy -------------------------------------------------------------------------------------


class Copy:
    """A copy of some tensors, in progress or complete. `tensors` are valid after `finish`."""

    def __init__(
        self, sources: Mapping[Any, Tensor], memory: HostMemory, is_late: Callable[[Any], bool]
    ) -> None:
        """is_late: whether a tensor is changed by nothing but an optimizer's step."""
        self.tensors = memory.tensors_like(sources)
        self._late: list[tuple[Tensor, Tensor]] = []  # to be copied by the saving thread
        self._copied = threading.Event()
        self._gpu_copied: torch.Event | None = None
        sources = {key: tensor.detach() for key, tensor in sources.items()}
        on_gpu = {
            key: tensor if is_late(key) else tensor.clone()
            for key, tensor in sources.items()
            if not tensor.is_cpu
        }
        if on_gpu:
            stream = torch.Stream(next(iter(on_gpu.values())).device)
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                for key, source in on_gpu.items():
                    self.tensors[key].copy_(source, non_blocking=True)
                    if source is not sources[key]:
                        source.record_stream(stream)
            self._gpu_copied = stream.record_event()
        for key, source in sources.items():
            if source.is_cpu and is_late(key):
                self._late.append((self.tensors[key], source))
            elif source.is_cpu:
                self.tensors[key].copy_(source)

    def before_update(self) -> None:
        """Wait for the copy; to be called in training before any parameter changes."""
        if self._late:
            self._copied.wait()
        if self._gpu_copied is not None:
            torch.accelerator.current_stream().wait_event(self._gpu_copied)

    def finish(self) -> None:
        """Copy what is left, and wait for the GPU."""
        try:
            for target, source in self._late:
                target.copy_(source)
        finally:
            self._copied.set()  # a failure is the save's, and training goes on
        if self._gpu_copied is not None:
            self._gpu_copied.synchronize()


class HostMemory:
    """Memory that tensors are copied to: kept between saves, pinned with a GPU, shared on request.

    One mapping for all tensors of a save, which grows when it is too small; the tensors of the save
    before are then invalid. Shared memory has no name (memfd), so that nothing is left when the
    process is killed.
    """

    def __init__(self, *, shared: bool) -> None:
        """shared: another process can map it, by its file descriptor `fd`. Linux only."""
        self._shared = shared
        self.fd = -1
        self._mapping: mmap.mmap | None = None
        self._size = self._address = 0
        self._pinned = False

    def tensors_like(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Contiguous CPU tensors of the same shapes and dtypes, with any content."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._size:
            self.close()
            if self._shared:
                self.fd = os.memfd_create("checkpoint")
                os.ftruncate(self.fd, end)
            self._mapping, self._size = mmap.mmap(self.fd, end), end
            self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
            self._pinned = pin(self._address, end)  # else copies are right, and take longer
        return {
            key: _tensor_at(self._mapping, tensor.dtype, tensor.shape, begin)
            for (key, tensor), begin in zip(tensors.items(), begins, strict=True)
        }

    def offset(self, tensor: Tensor) -> int:
        """The place where one of these tensors begins."""
        return tensor.data_ptr() - self._address if tensor.numel() else 0

    def close(self) -> None:
        """Release it; what remains of it goes with the tensors that are still there."""
        if self._pinned:
            unpin(self._address)
        self._mapping, self._size, self._pinned = None, 0, False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _tensor_at(
    mapping: mmap.mmap | None, dtype: torch.dtype, shape: tuple[int, ...], begin: int
) -> Tensor:
    """A tensor in a mapping, with a storage of its own."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    place: dict[str, Any] = {"count": prod(shape), "offset": begin}
    return torch.frombuffer(mapping, dtype=dtype, **place).view(shape)


# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenFile:
    """A file of tensors that has been written."""

    name: str
    size: int
    checksum: str  # of the whole file
    ends: list[int]  # where each chunk ends
    sums: bytes  # the checksum of each chunk, one after the other


def write_tensors(folder: Storage, name: str, tensors: Iterable[Tensor]) -> WrittenFile:
    """Write a file of torch.save's records, one after the other, as DCP reads them; durably.

    Raises OSError.
    """
    with folder.create(name) as raw, _without_crc32():
        stream, ends, sums = _ChecksumStream(raw), [], []
        for tensor in tensors:
            tensor = tensor.detach().cpu()
            # without the rest of its storage, which torch.save would write, too
            if tensor.untyped_storage().size() != tensor.nbytes:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            stream.chunk = xxhash.xxh3_128()
            try:
                torch.save(tensor, cast(IO[bytes], stream))
            except RuntimeError:
                if stream.error is not None:  # torch.save raises an error of its own instead
                    raise stream.error from None
                raise
            ends.append(stream.size)
            sums.append(stream.chunk.digest())
        raw.flush()
        if folder.local:
            os.fsync(raw.fileno())
    return WrittenFile(name, stream.size, stream.whole.hexdigest(), ends, b"".join(sums))


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """A context in which torch.save leaves out the CRC of its records, which takes a third of a
    save's CPU time and is read by nobody: `pieces.json` has a checksum of each."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ChecksumStream:
    """A stream for torch.save, which writes sequentially."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.size, self.whole, self.chunk = 0, xxhash.xxh3_128(), xxhash.xxh3_128()
        self.error: OSError | None = None  # the first

    def write(self, data: Any) -> int:
        try:
            self._raw.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.whole.update(data)
        self.chunk.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()


# --- the process ----------------------------------------------------------------------------------


class WriterProcess:
    """A process that writes a rank's file, so that training keeps Python's interpreter lock.

    The trainer copies its tensors into shared memory and asks for a file; planning and the commit,
    which take little, stay in the trainer. So this process can never complete a checkpoint:
    whatever becomes of it, the save is complete or does not count, as without it.

    It ends with its trainer, however that ends: by the kernel (Linux: PR_SET_PDEATHSIG), and at the
    end of the trainer's socket. It ignores the signals that ask a run to stop, because the trainer
    saves then. A process that has died or does not answer in time fails the save in progress, and
    the next one starts another.

    A message is a pickle; before a request comes a byte with the descriptor of the memory.
    """

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
        # before it imports torch, which takes seconds: it ends with this thread
        code = f"import sys; sys.path.insert(0, {root!r}); "
        code += "from titanlike.launch.signals import die_with_parent; "
        code += f"die_with_parent({os.getpid()}, {signal.SIGKILL:d}); "
        code += f"from titanlike.checkpoint.staging import serve; serve({theirs.fileno()})"
        # the GPU is the trainer's alone
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until it ignores them
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
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
        places = [(t.dtype, tuple(t.shape), self._memory.offset(t)) for t in tensors]
        try:
            socket.send_fds(self._socket, [b"m"], [self._memory.fd])
            self._socket.sendall(pickle.dumps((str(folder), name, places)))
            with self._socket.makefile("rb") as answers:
                error, written = pickle.load(answers)
        except TimeoutError:
            self.close(patience=0)
            raise OSError(f"{folder}/{name} was not written in {self._timeout:g} s") from None
        except (OSError, EOFError, pickle.UnpicklingError):  # also in the middle of its answer
            self.close(patience=0)
            code = self._process and self._process.returncode
            raise OSError(f"the process that writes {folder}/{name} has died ({code})") from None
        if error:
            raise OSError(error)
        return written

    def close(self, patience: float = _PATIENCE) -> None:
        """End it; not while it writes, or at once, without patience."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def serve(fd: int) -> None:
    """Serve requests that come by a socket until the trainer is gone, in a process of its own."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    torch.set_num_threads(1)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    with contextlib.suppress(EOFError, ConnectionError, pickle.UnpicklingError):
        while descriptors := socket.recv_fds(connection, 1, 1)[1]:  # none at the socket's end
            location, name, places = pickle.load(requests)
            error, written = "", None
            try:
                mapping = mmap.mmap(descriptors[0], 0)
                tensors = (_tensor_at(mapping, *place) for place in places)
                written = write_tensors(Storage(location), name, tensors)
            except Exception as failure:
                error = error_line(failure)
            finally:
                os.close(descriptors[0])
            connection.sendall(pickle.dumps((error, written)))
    os._exit(0)
