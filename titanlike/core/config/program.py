"""This program: the command that started it, as messages name it, and its shipped files."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from titanlike.core.config.errors import printable

_VARIABLE = "TITANLIKE_PROGRAM"  # inherited by workers and by the jobs of a sweep
_PACKAGE = Path(__file__).parents[2]


def conf_dir() -> Path:
    """Return the folder of config files: inside the package if installed, else in the checkout."""
    return _shipped("conf", "conf")


def scripts_dir() -> Path:
    """Return the folder of job scripts, one folder per scheduler; found as `conf_dir`."""
    return _shipped("scripts", "tools")


def _shipped(installed: str, checkout: str) -> Path:
    folders = _PACKAGE / installed, _PACKAGE.parent / checkout
    for folder in folders:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"titanlike's files are neither in {folders[0]} nor in {folders[1]}")


def set_program(command: str | None = None) -> None:
    """Record how this process was started. command: the subcommand that the user typed."""
    os.environ[_VARIABLE] = shlex.join([*_executable(), *([command] if command else [])])


def set_caller() -> None:
    """Record that another program calls this one; messages then name the installed command."""
    os.environ.setdefault(_VARIABLE, "titanlike")


def program() -> list[str]:
    """Return the words before the overrides: `titanlike verify`, `python train.py`."""
    recorded = os.environ.get(_VARIABLE)
    return shlex.split(recorded) if recorded else _executable()


def argument_parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return an argument parser for a tool with flags of its own."""
    return argparse.ArgumentParser(prog=shlex.join(program()), description=description, **options)


def train_program() -> list[str]:
    """Return the words that start training, from whichever subcommand: `titanlike train`, `python
    train.py`."""
    words = program()
    last = Path(words[-1])
    if last.suffix == ".py" and last.resolve().parent.name == "tools":
        return [*words[:-1], os.path.normpath(last.parent / ".." / "train.py")]
    is_module = words[-2:-1] == ["-m"]
    has_command = not is_module and last.suffix != ".py" and last.name != "titanlike"
    return [*words[:-1], "train"] if has_command else words


def tool_program(name: str) -> list[str]:
    """Return the words that start a tool or job: `titanlike checkpoint`, `python
    tools/checkpoint.py`."""
    words = train_program()
    last = Path(words[-1])
    if last.name == "train.py" and (script := last.parent / "tools" / f"{name}.py").exists():
        return [*words[:-1], str(script)]
    if last.suffix == ".py":  # a user's own program, or a copy of train.py alone
        words = ["titanlike"] if shutil.which("titanlike") else ["python", "-m", "titanlike"]
        return [*words, name]
    return [*(words[:-1] if words[-1] == "train" else words), name]


def exit_code(
    command: Callable[[], int],
    codes: Mapping[type[Exception], int] | None = None,
    interrupted: str = "interrupted",
) -> int:
    """Run a tool's command and return its exit code; a user's error is one line on stderr.

    codes: exit codes by exception, default 2.
    """
    try:
        return command()
    except (ValueError, OSError, ImportError) as error:
        print("error:", printable(" ".join(str(error).split())), file=sys.stderr)
        return next((c for kind, c in (codes or {}).items() if isinstance(error, kind)), 2)
    except KeyboardInterrupt as signal:
        print(f"\n{interrupted}", file=sys.stderr)
        return getattr(signal, "exit_code", 130)


class PrintableStream:
    """A text stream that escapes control characters, which move the cursor or reorder text.

    A tool's output contains texts of files: names, errors, what a model writes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # a lone "\r" is a progress line's end; the joiners U+200C and U+200D are spelling
        self._stream.write(text if text == "\r" else printable(text, "\n\t\u200c\u200d"))
        return len(text)


def print_printably() -> None:
    """Make this process' standard output and error `PrintableStream`s."""
    sys.stdout = cast(TextIO, PrintableStream(sys.stdout))
    sys.stderr = cast(TextIO, PrintableStream(sys.stderr))


def _executable() -> list[str]:
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name]
    if path.suffix == ".py":
        return ["python", sys.argv[0]]
    if path.name == "-c":
        return ["titanlike"]
    on_path = shutil.which(path.name)  # differs if the environment's folder is not on PATH
    return [path.name if on_path is not None and path.samefile(on_path) else sys.argv[0]]
