"""The next item of a stream, made by a thread while the one before it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from titanlike.launch.heartbeat import DATA_THREAD

_JOIN_TIMEOUT = 5.0  # seconds to complete the item that nobody will use

_T = TypeVar("_T")


def one_ahead(stream: Iterator[_T]) -> Iterator[_T]:
    """The same items, in the same order; what the stream raises is raised where its item would be.

    A thread takes an item from the stream when the one before it is handed out, so it is never more
    than one ahead. It ends with this generator, which is closed or dropped; one that hangs in the
    stream is left behind, and does not keep the process from ending.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    arguments = (stream, wanted, made)
    thread = threading.Thread(target=_make, args=arguments, daemon=True, name=DATA_THREAD)
    thread.start()
    wanted.put(True)
    try:
        while True:
            item, error = made.get()  # a signal's handler interrupts it
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            wanted.put(True)
            yield item
    finally:
        wanted.put(False)
        thread.join(_JOIN_TIMEOUT)


def _make(
    stream: Iterator[Any],
    wanted: SimpleQueue[bool],
    made: SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    """The thread: an item, or what is raised in its place, each time that one is wanted."""
    while wanted.get():
        try:
            made.put((next(stream), None))
        except BaseException as error:  # a SystemExit of the user's code, too
            made.put((None, error))
