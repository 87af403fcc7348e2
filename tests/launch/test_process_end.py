"""A process that is done leaves at once and loses nothing; garbage waits until a job is built."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from support.paths import ROOT
from titanlike.core.launch.process_end import built, collected_once_built, leave

PROGRAM = """
import atexit, gc, sys, threading, time
sys.path.insert(0, {root!r})
from titanlike.core.launch.process_end import leave
class Torn:
    def __del__(self): print("torn down", flush=True)
kept = Torn()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
text, data = open("left.txt", "w"), open("left.bin", "wb")
text.write("a text")
data.write(b"bytes")
gc.freeze()
print("x" * 200_000)
print("an error", file=sys.stderr)
try:
    leave({code})
finally:
    gc.unfreeze()
"""


def ended(folder: Path, *options: str, code: object = 3) -> subprocess.CompletedProcess:
    program = folder / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT), code=repr(code)))
    command = [sys.executable, *options, str(program)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


@pytest.mark.parametrize("code, exit_code, more", [(3, 3, ""), ("why not", 1, "why not\n")])
def test_a_process_exits_at_once_and_loses_no_output(
    tmp_path: Path, code: object, exit_code: int, more: str
) -> None:
    done = ended(tmp_path, code=code)
    assert done.returncode == exit_code
    assert done.stdout == "x" * 200_000 + "\nthread\nexit function\n"
    assert done.stderr == "an error\n" + more
    assert (tmp_path / "left.txt").read_text() == "a text"
    assert (tmp_path / "left.bin").read_text() == "bytes"


def test_a_tool_gets_the_exit_code_of_the_program_it_runs(tmp_path: Path) -> None:
    """A profiler, like coverage, writes what it has found after the program."""
    report = tmp_path / "profile"
    done = ended(tmp_path, "-m", "cProfile", "-o", str(report))
    assert report.stat().st_size > 0 and "torn down" in done.stdout
    with pytest.raises(SystemExit) as end:
        leave(3)
    assert end.value.code == 3


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_after_a_build_and_before_the_next_job() -> None:
    with collected_once_built():
        assert not gc.isenabled()
        of_the_build = weakref.ref(Cycle())
        built()
        assert gc.isenabled() and of_the_build() is None
        of_the_job = weakref.ref(Cycle())
    assert gc.isenabled()
    with collected_once_built():
        assert of_the_job() is None
    gc.unfreeze()
