"""A rank's part of a save: a copy of its tensors in host memory, and the file written from it, by
the trainer or by a separate process.

The modes async_pinned and async_process copy while training continues:
1. `Copy`, in training: tensors that may change at any time (buffers, random generators) are copied
   at once. Parameters and optimizer state change only in an optimizer step, so they are copied
   concurrently, by the GPU on a side stream, or by the saving thread.
2. `before_update`, in training: the next optimizer step waits for the copy; on a GPU only the
   stream waits.
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
from titanlike.config.files import sync_to_disk
from titanlike.device.accelerator import pin, unpin

_ALIGNMENT = 64  # bytes to which each tensor is aligned
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PATIENCE = 5.0  # seconds to wait for the process to exit

# --- the copy -------------------------------------------------------------------------------------


class Copy:
    """A copy of some tensors, in progress or complete. `tensors` are valid after `finish`."""

    def __init__(
        self, sources: Mapping[Any, Tensor], memory: HostMemory, is_late: Callable[[Any], bool]
    ) -> None:
        """is_late: whether a tensor changes only in an optimizer step, so that it may be copied
        later."""
        self.tensors = memory.tensors_like(sources)
        self._late: list[tuple[Tensor, Tensor]] = []  # (target, source) for the saving thread
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
        """Wait for the copy; called in training before any parameter changes."""
        if self._late:
            self._copied.wait()
        if self._gpu_copied is not None:
            torch.accelerator.current_stream().wait_event(self._gpu_copied)

    def finish(self) -> None:
        """Copy the remaining tensors, and wait for the GPU."""
        try:
            for target, source in self._late:
                target.copy_(source)
        finally:
            self._copied.set()  # also after an error, which fails the save but not training
        if self._gpu_copied is not None:
            self._gpu_copied.synchronize()


class HostMemory:
    """Host memory that tensors are copied to: reused by later saves, pinned if there is a GPU,
    shared on request.

    One mapping holds all tensors of a save and grows when it is too small, which invalidates the
    previous save's tensors. Shared memory is anonymous (memfd), so that nothing is left when the
    process is killed.
    """

    def __init__(self, *, shared: bool) -> None:
        """shared: other processes can map it by its file descriptor `fd`. Linux only."""
        self._shared = shared
        self.fd = -1
        self._mapping: mmap.mmap | None = None
        self._size = self._address = 0
        self._pinned = False

    def tensors_like(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return uninitialized contiguous CPU tensors of the same shapes and dtypes."""
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
            self._pinned = pin(self._address, end)  # if this fails, copies are slower
        return {
            key: _tensor_at(self._mapping, tensor.dtype, tensor.shape, begin)
            for (key, tensor), begin in zip(tensors.items(), begins, strict=True)
        }

    def offset(self, tensor: Tensor) -> int:
        """Return the offset of one of these tensors."""
        return tensor.data_ptr() - self._address if tensor.numel() else 0

    def close(self) -> None:
        """Release the memory; parts that tensors still use are freed with them."""
        if self._pinned:
            unpin(self._address)
        self._mapping, self._size, self._pinned = None, 0, False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _tensor_at(
    mapping: mmap.mmap | None, dtype: torch.dtype, shape: tuple[int, ...], begin: int
) -> Tensor:
    """Return a tensor in a mapping, with its own storage object."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    place: dict[str, Any] = {"count": prod(shape), "offset": begin}
    return torch.frombuffer(mapping, dtype=dtype, **place).view(shape)


# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenFile:
    """The checksums of a written file of tensors."""

    name: str
    size: int
    checksum: str  # of the file
    ends: list[int]  # end offset of each chunk
    sums: bytes  # concatenated checksums of the chunks


def write_tensors(folder: Storage, name: str, tensors: Iterable[Tensor]) -> WrittenFile:
    """Write tensors as consecutive records of torch.save, the format that DCP reads; durable on
    return.

    Raises OSError.
    """
    with folder.create(name) as raw, _without_crc32():
        stream, ends, sums = _ChecksumStream(raw), [], []
        for tensor in tensors:
            tensor = tensor.detach().cpu()
            # torch.save would write the whole storage of a view
            if tensor.untyped_storage().size() != tensor.nbytes:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            stream.chunk = xxhash.xxh3_128()
            try:
                torch.save(tensor, cast(IO[bytes], stream))
            except RuntimeError:
                if stream.error is not None:  # torch.save hides it behind its own error
                    raise stream.error from None
                raise
            ends.append(stream.size)
            sums.append(stream.chunk.digest())
        raw.flush()
        if folder.local:
            sync_to_disk(raw.fileno())
    return WrittenFile(name, stream.size, stream.whole.hexdigest(), ends, b"".join(sums))


@contextlib.contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch.save omit the CRC of its records, which takes a third of a save's CPU time and is
    never read: `pieces.json` has their checksums."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _ChecksumStream:
    """A sequential output stream for torch.save that computes checksums."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.size, self.whole, self.chunk = 0, xxhash.xxh3_128(), xxhash.xxh3_128()
        self.error: OSError | None = None  # the first error

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
    """A process that writes a rank's file, so that saving does not hold the trainer's GIL.

    The trainer copies its tensors into shared memory and requests a file; planning and the commit,
    which are cheap, stay in the trainer. So this process can never complete a checkpoint: if it
    fails, the save is incomplete and does not count.

    It exits with its trainer, however that ends: by the kernel (Linux: PR_SET_PDEATHSIG), and when
    the trainer's socket closes. It ignores the signals that stop a run, because the trainer saves
    then. If it dies or does not answer in time, the save in progress fails, and the next one starts
    a new process.

    A message is a pickle; a request is preceded by a byte that carries the memory's file
    descriptor.
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
        """Start the process unless it runs. Call on the main thread: the kernel kills it with the
        thread that started it."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        # set before importing torch, which takes seconds: the process dies with this thread
        code = f"import sys; sys.path.insert(0, {root!r}); "
        code += "from titanlike.launch.signals import die_with_parent; "
        code += f"die_with_parent({os.getpid()}, {signal.SIGKILL:d}); "
        code += f"from titanlike.checkpoint.staging import serve; serve({theirs.fileno()})"
        # the process must not use the trainer's GPU
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # until the process ignores them
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
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
        """Write a file of tensors in the shared memory. Raises OSError."""
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
        except (OSError, EOFError, pickle.UnpicklingError):  # it may die in the middle of an answer
            self.close(patience=0)
            code = self._process and self._process.returncode
            raise OSError(f"the process that writes {folder}/{name} has died ({code})") from None
        if error:
            raise OSError(error)
        return written

    def close(self, patience: float = _PATIENCE) -> None:
        """End the process once it does not write, or immediately without patience."""
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
    """Serve requests from a socket until the trainer is gone, as the process's main function."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    torch.set_num_threads(1)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    with contextlib.suppress(EOFError, ConnectionError, pickle.UnpicklingError):
        while descriptors := socket.recv_fds(connection, 1, 1)[
            1
        ]:  # empty when the socket is closed
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
