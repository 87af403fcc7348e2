"""Ctrl-C at any moment of any command: never lost, one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cells import slow
from support.commands import TINY
from support.forked import run
from support.launched import Launched
from support.paths import ROOT
from support.run_files import result
from support.waiting import until
from titanlike.cli import TOOLS

# a signal whose exception Python swallows: raised in the callback of a weak reference
SWALLOWED = """
import os, signal, sys, weakref
from titanlike.cli import run
from titanlike.core.config import program

class Gone: pass

def parser(*words, **options):
    gone = Gone()
    kept = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del gone
    return real(*words, **options)

real, program.argument_parser = program.argument_parser, parser
{imports}
run(sys.argv.pop(1))
"""
SENDS = """
import os, signal, sys

class Sends:
    def find_spec(self, name, *_):
        if name == os.environ["AT_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Sends())
"""
ENDLESS = """
import time
from titanlike.core.launch.signals import Interrupted, interruptible
with interruptible(grace=1e6):
    try:
        print("ready", flush=True)
        time.sleep(1e6)
    except Interrupted:
        print("cleans up", flush=True)
        time.sleep(1e6)
"""
WORDS = {
    "scripts": ["slurm", "new"],
    "checkpoint": ["list", "none"],
    "tokenize": ["none", "new"],
    "export": ["none", "new"],
    "plan": [],
}
MODULES = [
    "titanlike.core.config.program",
    *slow("titanlike.core.launch.signals", "hydra", "torch"),
]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_signal_is_not_lost_where_python_swallows_its_exception(
    tool: str, tmp_path: Path
) -> None:
    words = WORDS.get(tool, ["none"])
    module = TOOLS[tool].function.rpartition(".")[0]  # some copy the function at their import
    code = SWALLOWED.format(
        imports=f"import titanlike.{module} as its\nits.argument_parser = parser"
    )
    done = run(["-c", code, tool, *words], tmp_path)
    assert done.returncode == 130 and "interrupted" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_a_signal_during_the_imports_has_no_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SENDS)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "AT_IMPORT": module}
    words = [sys.executable, ROOT / "train.py", *TINY, f"run_dir={tmp_path}/run"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert "Traceback" not in done.stderr and "KeyboardInterrupt" not in done.stderr


def test_a_second_signal_ends_a_command_that_is_cleaning_up(tmp_path: Path) -> None:
    words = [sys.executable, "-uc", ENDLESS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in ("ready", "cleans up"):
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGINT)
        until(lambda: process.send_signal(signal.SIGINT) or process.poll() is not None, 30)
        assert process.returncode == 130


@pytest.mark.slow
def test_five_signals_at_once_under_torchrun_are_an_interrupt_and_no_failure(
    tmp_path: Path,
) -> None:
    """The second ends torchrun, and with it the store of the ranks, which are to save."""
    words = [*TINY, "steps=4000", "dp=2", f"run_dir={tmp_path}/run", "log_every=1"]
    launched = Launched(*words, torchrun=2, cwd=tmp_path, program=ROOT / "train.py", real=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 90)
    for _ in range(5):
        os.killpg(launched.process.pid, signal.SIGINT)
        time.sleep(0.05)
    launched.wait()
    until((tmp_path / "run" / "result.json").exists, 60)
    ended = result(tmp_path / "run")
    assert ended["status"] == "interrupted" and ended["error"].startswith("interrupted by SIG")
    assert launched.all_exit(within=30)
