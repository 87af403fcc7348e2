"""Python programs as forks of a process that has imported torch and titanlike.

A start and its imports take 5 s of CPU, a fork 0.1 s. A program finds argv, environment, working
directory, sys.path, standard streams and signal handlers as after a real start. The Python programs
that it starts (workers of a job, jobs of a sweep) are forks, too, and its own children.

What differs: modules are imported already, of PYTHON* variables only PYTHONPATH has an effect, of
Python's own options only -u, and /proc/PID shows the environment and the command line of the
process that was forked.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from support.world import fork_context

PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 15, 36, 1
MARK = "LAUNCHED"  # environment variable; its value is the name (comm) of the processes, too


class ForkedProgram:
    """`subprocess.Popen([sys.executable, *words])` with captured output, as a fork."""

    def __init__(self, words: Sequence[str], cwd: Path | None, env: dict[str, str]) -> None:
        self.args = [sys.executable, *words]
        self.returncode: int | None = None
        self._folder = tempfile.TemporaryDirectory()
        outputs = [os.path.join(self._folder.name, name) for name in ("stdout", "stderr")]
        self._outputs = [Path(path) for path in outputs]
        place = str(cwd or Path.cwd())
        start = (list(words), place, env, outputs, _base_path(env.get("PYTHONPATH", "")))
        self._process = fork_context().Process(target=_start, args=start, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        out, err = (path.read_text() if path.exists() else "" for path in self._outputs)
        return out, err


def run(
    words: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True)`, as a fork."""
    program = ForkedProgram(words, cwd, dict(os.environ) if env is None else env)
    try:
        out, err = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


@functools.cache
def _base_path(python_path: str) -> list[str]:
    """sys.path of a new interpreter, without the folder of its script."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    env = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _start(
    words: list[str], cwd: str, env: dict[str, str], outputs: list[str], path: list[str]
) -> None:
    """In a child of the fork server: become the program."""
    _forget_the_server()
    os.setsid()
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    files = [os.open(name, flags, 0o600) for name in outputs]
    _become(words, cwd, env, [os.open(os.devnull, os.O_RDONLY), *files], path)


def _forget_the_server() -> None:
    """Leave multiprocessing as in a program that has not used it."""
    process = multiprocessing.current_process()
    process._config = {"authkey": process.authkey, "semprefix": "/mp"}
    process._identity, process._name, process._parent_pid = (), "MainProcess", None
    multiprocessing.process._parent_process = None
    tracker, server = resource_tracker._resource_tracker, forkserver._forkserver
    tracker._fd = tracker._pid = None
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    server._inherited_fds = None


def _become(
    words: list[str], cwd: str, env: dict[str, str], streams: list[int], path: list[str]
) -> None:
    """Run `python *words` in this process, which never returns from here."""
    gc.freeze()  # as in `support.world`
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1024)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # a module that the server has imported may have asked for it
    prctl = ctypes.CDLL(None).prctl
    if MARK in env:
        prctl(PR_SET_NAME, env[MARK][:15].encode())
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = _options(words)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else None
        stream = open(number, "w" if number else "r", closefd=False, errors=errors)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdout.reconfigure(write_through="-u" in options)
    sys.stderr.reconfigure(line_buffering=True)
    # torch's own takes a second of every start with workers: it reads the source of each frame
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what `_Forks` forks twice becomes a child of this process
    subprocess._fork_exec = _Forks(subprocess._fork_exec, path)
    code = _run(words[len(options) :], path)
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 120
    os._exit(code)


def _run(words: list[str], path: list[str]) -> int:
    """The exit code."""
    program, *words = words
    try:
        if program == "-c":
            sys.argv, sys.path[:] = ["-c", *words[1:]], ["", *path]
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(words[0], "<string>", "exec"), module.__dict__)
        elif program == "-m":
            sys.argv, sys.path[:] = words, [os.getcwd(), *path]
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *words]
            sys.path[:] = [os.path.dirname(os.path.realpath(program)), *path]
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


class _Forks:
    """Instead of subprocess's fork and exec: a fork where a Python program is to be started.

    The fork is one of a process that is forked here, before the program has threads and state.
    """

    def __init__(self, fork_exec: Any, path: list[str]) -> None:
        self._fork_exec, self._path = fork_exec, path
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = os.getpid()
        if os.fork() == 0:
            self._socket.close()
            _serve(theirs, program)
        theirs.close()

    def __call__(self, args: Sequence[Any], *settings: Any) -> int:
        words = [os.fsdecode(word) for word in args]
        if words[0] != sys.executable or not _is_program(words[1:]):
            return self._fork_exec(args, *settings)
        cwd, env = settings[3], settings[4]
        streams = [settings[5], settings[8], settings[10]]
        session = bool(settings[14])
        pairs = os.environb.items() if env is None else (pair.split(b"=", 1) for pair in env)
        environ = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
        place = os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd))
        request = pickle.dumps((words[1:], place, environ, self._path, session))
        fds = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        socket.send_fds(self._socket, [request], fds)
        return int(self._socket.recv(32))


def _options(words: list[str]) -> list[str]:
    """Those of Python itself, in front of the program."""
    count = 0
    while words[count].startswith("-") and words[count] not in ("-c", "-m"):
        count += 2 if words[count] in ("-X", "-W") else 1
    return words[:count]


def _is_program(words: list[str]) -> bool:
    """Whether `_run` understands a command line of python's."""
    words = words[len(_options(words)) :]
    return bool(words) and (words[0] in ("-c", "-m") or words[0].endswith(".py"))


def _serve(requests: socket.socket, program: int) -> None:
    """Fork until the program `program` has ended."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.closerange(3, requests.fileno())
    os.closerange(requests.fileno() + 1, 1024)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() not in (program, 1):  # until `between` has ended
                pass
            words, cwd, env, path, session = pickle.loads(data)
            if session:
                os.setsid()
            _become(words, cwd, env, fds, path)
        os.waitpid(between, 0)
        requests.send(os.read(reader, 32))
        for fd in (*fds, reader, writer):
            os.close(fd)
