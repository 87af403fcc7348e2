"""The next batch, read and copied to an accelerator while a step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from titanlike.core.data.sources import Batch
from titanlike.core.launch.heartbeat import DATA_THREAD

_JOIN_TIMEOUT = 5.0  # seconds for the thread to finish its last, unused item

_T = TypeVar("_T")


class DeviceStreams:
    """A side stream of an accelerator, by torch's device-neutral API: its copies overlap with
    compute."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def copying(self) -> Any:
        """A context in which operations run on the side stream."""
        return self._stream  # also makes its device the current one of this thread

    def copied(self) -> Any:
        """Record an event after all copies so far."""
        return self._stream.record_event()

    def hand_over(self, event: Any, values: list[Tensor]) -> None:
        """Let the compute stream wait for the event, and keep the values' memory from being reused
        before the compute stream has run the work that uses them (`record_stream`)."""
        computing = torch.accelerator.current_stream(self._device.index)
        computing.wait_event(event)
        for value in values:
            value.record_stream(computing)


def copied_ahead(
    stream: Iterator[Batch],
    device: torch.device,
    to_device: Callable[[Batch], Batch],
    streams: DeviceStreams,
    in_thread: bool,
) -> Iterator[Batch]:
    """Copy batches to the device through pinned memory on the side stream.

    in_thread: a thread reads and copies the next batch in advance.
    """

    def copied() -> Iterator[tuple[Batch, Any]]:
        for batch in stream:
            with streams.copying():
                moved = to_device(_pinned(batch))
                event = streams.copied()
            yield moved, event

    for batch, event in one_ahead(copied()) if in_thread else copied():
        values = [value for value in batch.values() if value.device == device]
        streams.hand_over(event, values)
        yield batch


def _pinned(batch: Batch) -> Batch:
    """Pin a batch's memory, so that copies to the device are asynchronous."""
    return {
        name: value.pin_memory() if value.device.type == "cpu" else value
        for name, value in batch.items()
    }


def one_ahead(stream: Iterator[_T]) -> Iterator[_T]:
    """Yield the stream's items, reading one item ahead in a thread. An exception is raised where
    its item would be.

    The thread ends when this generator is closed or dropped. If it hangs in the stream, it is
    abandoned and does not keep the process from exiting.
    """
    requests: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def make_items() -> None:
        """Run the thread: for each request put an item, or the exception raised in its place."""
        while requests.get():
            try:
                made.put((next(stream), None))
            except BaseException as error:  # SystemExit of a user's code included
                made.put((None, error))

    thread = threading.Thread(target=make_items, daemon=True, name=DATA_THREAD)
    thread.start()
    requests.put(True)
    try:
        while True:
            # signal handlers can interrupt this wait; core/launch/heartbeat.py recognizes it
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            requests.put(True)
            yield item
    finally:
        requests.put(False)
        thread.join(_JOIN_TIMEOUT)
