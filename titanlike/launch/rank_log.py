"""The output of a rank: run_dir/logs/rankN.log, and for rank 0 the console, too."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from titanlike.config.credentials import redact


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank{rank}.log"


@contextlib.contextmanager
def logged(run_dir: Path, rank: int, *, console: bool) -> Iterator[TextIO]:
    """Within it, this process' output goes to the rank's log file, which is yielded.

    With `console`, Python's output goes to both, and the terminal stays a terminal. Without, the
    file replaces the process' stdout and stderr, so that it also gets the output of C libraries.
    """
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with open(path, "a", encoding="utf-8", buffering=1) as file, contextlib.ExitStack() as stack:
        if console:
            stack.enter_context(contextlib.redirect_stdout(_Tee(sys.stdout, file)))
            stack.enter_context(contextlib.redirect_stderr(_Tee(sys.stderr, file)))
        else:
            stack.enter_context(_redirected(file))
            stack.enter_context(contextlib.redirect_stdout(_Tee(sys.stdout, None)))
            stack.enter_context(contextlib.redirect_stderr(_Tee(sys.stderr, None)))
        faulthandler.enable(file)  # writes the stack of a segmentation fault
        try:
            yield file
        finally:
            faulthandler.disable()
            root.handlers[:], root.level = handlers, level


class _Tee:
    """A stream that also writes to `file` if there is one, and removes credentials."""

    def __init__(self, console: TextIO, file: TextIO | None) -> None:
        self._console, self._file = console, file

    def write(self, text: str) -> int:
        text = redact(text)
        # progress bars redraw a line with \r
        if self._file is not None and "\r" not in text and not self._file.closed:
            self._file.write(text)
        return self._console.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


@contextlib.contextmanager
def _redirected(file: TextIO) -> Iterator[None]:
    """Within it, file descriptors 1 and 2 point to `file`."""
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    try:
        for fd, _ in saved:
            os.dup2(file.fileno(), fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
