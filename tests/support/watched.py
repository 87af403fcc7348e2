"""`python -P watched.py < JOBS` runs titanlike's commands in this process, and prints what each of
them opened, wrote, connected to and started, but should not.

JOBS: {"outside": FOLDER, "inside": FOLDER, "commands": [[COMMAND, WORD ...] ...]}. A command has 10
s of the processor and 1 GiB, though not the first, which imports. An audit hook sees each file,
socket and process before it is used. What is in `outside`, and what is written anywhere but in
`inside`, in HOME and in temporary folders of titanlike's own, is a breach; so is a connection. A
process of titanlike's is not started, but kept with the config that it would have.

`watch_children` makes an environment in which every Python is watched, to its end.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

LIMIT, WAIT = 10, 90  # seconds of the processor, and in all: a command is not to hang
MEMORY = 1 << 30  # bytes that a command may take
_PATHS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
_PATHS += ("os.symlink", "os.link", "os.chmod", "os.truncate", "ctypes.dlopen", "os.utime")
_IN_FOLDER = ("os.mkdir", "os.remove", "os.rmdir")  # their last argument is a descriptor, or -1
_TEMPORARY = ("titanlike", "torchinductor")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty")
_SOCKETS = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class NotStarted(Exception):
    """A process that is not started here."""


class Watch:
    def __init__(self, outside: str, inside: str, log: str = "") -> None:
        """log: a file for breaches, in a process that may start others of Python."""
        self.outside, self.log = os.path.realpath(outside), log
        temporary = (os.path.join(tempfile.gettempdir(), f"{name}-") for name in _TEMPORARY)
        own = (inside, os.environ["HOME"], *temporary)
        self.own = tuple(map(os.path.realpath, own))
        self.breaches: list[str] = []
        self.children: list[dict[str, Any]] = []
        self._busy = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            if event in _PATHS:
                self._path(event, args)
            elif event in _SOCKETS:
                self._breach(f"{event} {args[1:]}")
                raise ConnectionError("watched")
            elif event in _STARTS:
                self._child(event, args)
        finally:
            self._busy = False

    def _path(self, event: str, args: tuple[Any, ...]) -> None:
        flags = args[2] if event == "open" and isinstance(args[2], int) else 0
        reads = event in ("os.listdir", "os.scandir", "ctypes.dlopen")
        writes = bool(flags & _WRITES) if event == "open" else not reads
        for path in args[: 2 if event in ("os.rename", "os.symlink", "os.link") else 1]:
            if not isinstance(path, str | bytes) or (event == "ctypes.dlopen" and "/" not in path):
                continue  # a descriptor; a library of the system
            descriptor = args[-1] if event in _IN_FOLDER and isinstance(args[-1], int) else -1
            base = os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""
            real = os.path.realpath(os.path.join(base, os.fsdecode(path)))
            written = writes and not real.startswith((*self.own, "/dev/", "/proc/"))
            if written or real == self.outside or real.startswith(f"{self.outside}/"):
                self._breach(f"{event} {os.fsdecode(path)}")

    def _child(self, event: str, args: tuple[Any, ...]) -> None:
        words = [str(word) for word in args[1]] if event == "subprocess.Popen" else []
        if event == "os.fork" or (self.log and words[:1] == [sys.executable]):
            return  # it is watched, too
        if words[:4] != [sys.executable, "-P", "-m", "titanlike"]:
            self._breach(f"{event} {args}")
            raise NotStarted
        folder = Path(words[words.index("--config-path") + 1])
        self.children.append({"words": words, "config": (folder / "config.yaml").read_text()})
        raise NotStarted

    def _breach(self, text: str) -> None:
        self.breaches.append(text)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{text}\n")


def watch_children(outside: Path, inside: Path, home: Path) -> tuple[dict[str, str], Path]:
    """The environment, and the file in which breaches are written."""
    site, log = home / "site", home / "breaches"
    site.mkdir()
    call = f"Watch({str(outside)!r}, {str(inside)!r}, {str(log)!r})"
    text = f"import sys\nfrom support.watched import Watch\nsys.addaudithook({call})\n"
    (site / "sitecustomize.py").write_text(text)
    paths = [site, Path(__file__).parents[2], Path(__file__).parents[1]]
    return {"PYTHONPATH": os.pathsep.join(map(str, paths))}, log


def main() -> None:
    from titanlike.cli import TOOLS

    job = json.load(sys.stdin)
    watch = Watch(job["outside"], job["inside"])
    commands = {name: pkgutil.resolve_name(f"titanlike.{c.function}") for name, c in TOOLS.items()}
    # the first of a user's programs that draws looks for the fonts of the system by `fc-list`
    importlib.import_module("matplotlib.font_manager")
    sys.addaudithook(watch)
    ends: list[dict[str, Any]] = []
    limits = resource.getrlimit(resource.RLIMIT_AS)
    for command, *words in job["commands"]:
        watch.breaches, watch.children = [], []
        text, code = io.StringIO(), None
        if ends:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, limits[1]))
        signal.setitimer(signal.ITIMER_PROF, LIMIT if ends else WAIT)
        signal.alarm(WAIT)
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                code = commands[command](words)
        except SystemExit as end:
            code = end.code
        except NotStarted:
            code = 0
        except BaseException:
            text.write(traceback.format_exc())
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        end = {"command": [command, *words], "code": code, "text": text.getvalue()}
        ends.append(end | {"breaches": watch.breaches, "children": watch.children})
    print(json.dumps(ends))


def _late(*_: object) -> None:
    raise TimeoutError(f"no end in {LIMIT} s of the processor, or {WAIT} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _late)
    signal.signal(signal.SIGPROF, _late)
    main()
