"""The Weights & Biases sink, isolated so that W&B cannot fail, delay or hang a run.

1. All calls of wandb are in one daemon thread, fed by a bounded queue. The run waits for it twice,
   each time with a timeout: while the W&B run opens, and while it finishes.
2. Offline, into run_dir/wandb, for `wandb sync` later. Online if asked for by logger.mode=online or
   WANDB_MODE; if the server cannot be reached within the timeout, offline, too.
3. The W&B run's id and name are in run_dir/wandb: a resumed run continues the same W&B run; a copy
   of a run's directory gets a new one while the original still exists.
   W&B drops what is logged for a step before its last one: a record's step is a metric, "step",
   and the horizontal axis of all others; W&B's own also counts steps that were undone.
4. After an exception or a timeout, one line is printed and wandb's service process (wandb-core) is
   killed; metrics.jsonl has everything.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titanlike.core.config import files
from titanlike.core.config.credentials import redact, redact_override
from titanlike.core.config.groups import watching
from titanlike.core.metrics.console import shorten
from titanlike.core.metrics.run_files import earlier_folders
from titanlike.core.metrics.sinks import Sink, read_jsonl, with_prefixes
from titanlike.core.metrics.summary import is_number

BACKLOG = 10_000  # records in the queue; a few MB
GRACE = 30.0  # seconds beyond the user's timeout for importing wandb and starting its service
FINISH_GRACE = 5.0  # seconds beyond the user's timeout, in which wandb gives up by itself
LONGEST_NAME = 128  # characters
# prefixes of overrides that are left out of the run's name
_UNNAMED = "run_dir= logger sweep. hydra launch. log_every= value= checkpoint."
_UNUSED = {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"}  # of the environment
EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 255}  # 255 is W&B's code for Ctrl-C


class WandbSink(Sink):
    """Logs records to W&B. Raises nothing.

    config: uploaded with the run; overrides: name the run; say: prints a line, on the caller's
    thread.
    """

    def __init__(
        self,
        settings: watching.Wandb,
        config: dict[str, Any],
        run_dir: Path,
        say: Callable[[str], None],
        overrides: Sequence[str] = (),
    ) -> None:
        self.location = "W&B: not available"
        self._settings, self._config, self._say = settings, config, say
        self._run_dir = Path(run_dir).resolve()
        stripped = [text.lstrip("+~") for text in overrides]
        named = [text for text in stripped if not text.startswith(tuple(_UNNAMED.split()))]
        name = shorten(",".join(map(redact_override, named)), LONGEST_NAME)
        self._name = name or self._run_dir.name
        events = self._run_dir / "events.jsonl"
        undone = read_jsonl(events) if events.exists() else []
        # steps that a rollback or a resume undid, and the last one logged
        self._undone = sum(e["steps"] for e in undone if is_number(e, "steps"))
        self._last = 0
        # calls on the W&B run; an exit code finishes it
        self._queue: queue.Queue[Callable[[Any], object] | int] = queue.Queue(BACKLOG)
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()  # the thread's lines for `say`
        self._opened = threading.Event()
        self._stopped = threading.Event()
        self._folder: Path | None = None  # the W&B run's, once it is open
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        if not self._opened.wait(settings.timeout + GRACE):
            self._stop(f"it did not start within {settings.timeout + GRACE:.0f} s")
        self._print_notes()

    def log(self, record: dict[str, Any]) -> None:
        self._log(record["step"], lambda: with_prefixes(record))

    def note(self, name: str, text: str) -> None:
        self._put(lambda run: run.summary.update({name: text}))

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        content = {"columns": [*rows[0]] if rows else [], "data": [[*row.values()] for row in rows]}
        self._log(step, lambda: {name: self._wandb.Table(**content)})

    def rewind(self, step: int) -> None:
        self._undone += max(0, self._last - step)

    def _log(self, step: int, entries: Callable[[], dict[str, Any]]) -> None:
        self._last, at = step, step + self._undone
        self._put(lambda run: run.log(entries() | {"step": step}, step=at))

    def close(self, status: str) -> None:
        """Finish the W&B run, or after a timeout leave it to `wandb sync`."""
        limit = self._settings.timeout + FINISH_GRACE
        if not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(EXIT_CODES[status])
            self._thread.join(limit)
            if self._thread.is_alive():
                self._stop(f"it did not finish within {limit:.0f} s")
        self._print_notes()

    def _put(self, action: Callable[[Any], object]) -> None:
        if not self._stopped.is_set():
            try:
                self._queue.put_nowait(action)
            except queue.Full:
                self._stop(f"it took none of the last {BACKLOG} steps")
        self._print_notes()

    def _print_notes(self) -> None:
        while not self._notes.empty():
            self._say(self._notes.get())

    def _stop(self, reason: str) -> None:
        """Accept no more records, kill the service process, note the reason."""
        self._stopped.set()
        note = f"W&B stopped: {reason}; metrics.jsonl has every step"
        if self._folder is not None:
            command = _sync_command(self._folder)
            self.location = f"W&B, a part: {command}"
            note += f"; this uploads what W&B has: {command}"
        self._notes.put(note)
        _end_service()

    # --- wandb's thread ------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            run = self._open()
            if run is None:
                self._stopped.set()
            self._opened.set()
            while not self._stopped.is_set():
                action = self._queue.get()
                if isinstance(action, int):
                    run.finish(exit_code=action)
                    break
                action(run)
        except BaseException as error:  # SystemExit too
            if not self._stopped.is_set():
                self._stop(_one_line(error))
        finally:
            self._opened.set()

    def _open(self) -> Any:
        """Open the W&B run, online or else offline; None if the user has disabled W&B."""
        # wandb-core's telemetry retries without a network, which delays the end of the process
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.pop("WANDB_SERVICE", None)  # a parent's service must not be killed here
        hooks = sys.exit, sys.excepthook
        try:
            import wandb

            self._wandb: Any = wandb
            mode = _mode(self._settings.mode)
            if mode == "disabled":
                self.location = "W&B: disabled by WANDB_MODE"
                return None
            if unused := sorted(_UNUSED & os.environ.keys()):
                reason = "the run's id and files are those of run_dir/wandb"
                self._notes.put(f"W&B: {', '.join(unused)} not used: {reason}")
            if mode == "online":
                try:
                    # without a key wandb.init would ask for one, and wait. login() looks for it in
                    # the environment and netrc, unless the settings say offline
                    wandb.setup(settings=wandb.Settings(silent=True, mode="online"))
                    if wandb.login(prompt=False, verify=False):
                        return self._init("online")
                    no_key = "no API key (`wandb login`, or WANDB_API_KEY)"
                    self._notes.put(f"W&B: {no_key}; continuing offline")
                except Exception as error:
                    self._notes.put(f"W&B: continuing offline, online failed: {_one_line(error)}")
                    # the service keeps the id of a run that failed: start another service
                    _end_service()
            return None if self._stopped.is_set() else self._init("offline")
        finally:
            sys.exit, sys.excepthook = hooks  # wandb's would print a traceback twice

    def _init(self, mode: str) -> Any:
        settings, folder, argv = self._settings, self._run_dir / "wandb", sys.argv
        project = settings.project or os.environ.get("WANDB_PROJECT") or "titanlike"
        name = settings.run_name or os.environ.get("WANDB_NAME")
        own_id, note = run_id(self._run_dir)
        if note:
            self._notes.put(note)
        # wandb.init stores the command line
        sys.argv = [*argv[:1], *map(redact_override, argv[1:])]
        try:
            run = self._wandb.init(
                project=project,
                entity=settings.entity,
                id=own_id,
                name=name or _saved(folder / "run_name", self._name),
                group=settings.group,
                tags=settings.tags or None,
                notes=settings.notes,
                dir=self._run_dir,
                config=self._config,
                mode=mode,
                resume="allow",
                settings=self._wandb.Settings(
                    silent=True,
                    console="off",
                    init_timeout=settings.timeout,
                    finish_timeout=settings.timeout,
                    finish_timeout_raises=True,
                ),
            )
        finally:
            sys.argv = argv
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        self._folder = Path(run.dir).parent
        offline = f"W&B offline; upload with: {_sync_command(self._folder)}"
        self.location = f"W&B: {run.url}" if mode == "online" else offline
        if mode == "online":
            files.atomic_write_text(folder / "run_url", f"{run.url}\n")  # for the report
        return run


def run_id(run_dir: Path) -> tuple[str, str]:
    """The id of a run directory's W&B run, and a note for the user or "".

    A run that was moved keeps its id; a copy gets a new one while the original directory exists.
    """
    file = run_dir / "wandb" / "run_id"
    saved = _saved(file, secrets.token_hex(4))
    for place in earlier_folders(run_dir):
        with contextlib.suppress(OSError, ValueError):
            if files.read_text(Path(place, "wandb", "run_id")).strip() == saved:
                file.unlink()
                file.with_name("run_url").unlink(missing_ok=True)
                new_id = _saved(file, secrets.token_hex(4))
                text = f"W&B: this is a copy of {place}, whose W&B run is {saved}"
                return new_id, f"{text}; it continues as {new_id}"
    return saved, ""


def _sync_command(folder: Path) -> str:
    """The shell command that uploads all launches of a run that are not uploaded yet, in order.

    folder: of the newest launch; its name ends with the run's id.
    """
    run_id = folder.name.rpartition("-")[2]
    folders = sorted({*folder.parent.glob(f"offline-run-*-{run_id}"), folder})
    unsynced = [str(path) for path in folders if not [*path.glob("*.synced")]]
    return shlex.join(["wandb", "sync", *unsynced])


def _mode(mode: str) -> str:
    """Resolve the mode to online, offline or disabled; auto follows WANDB_MODE."""
    if mode != "auto":
        return mode
    words = {"disabled": "disabled", "online": "online", "run": "online", "shared": "online"}
    return words.get(os.environ.get("WANDB_MODE", "").lower(), "offline")


def _saved(path: Path, text: str) -> str:
    """Read the text in `path`; the first time, write `text` to it and return that."""
    with contextlib.suppress(FileNotFoundError):
        if saved := files.read_text(path).strip():
            return saved
    files.atomic_write_text(path, text + "\n")
    return text


def _end_service() -> None:
    """Kill wandb-core, and remove wandb's exit handler, which would wait for it forever."""

    def end() -> None:
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            from wandb.sdk import wandb_setup  # no public API for the process (as of 0.31)

            connection: Any = wandb_setup.singleton()._connection
            connection._proc._process.kill()
        with contextlib.suppress(Exception, SystemExit):  # it exits with wandb-core's code
            wandb.teardown()

    thread = threading.Thread(target=end, name="wandb-end", daemon=True)
    thread.start()
    thread.join(FINISH_GRACE)


def _one_line(error: BaseException) -> str:
    text = redact(" ".join(str(error).split()))  # a proxy's URL may contain credentials
    return f"{type(error).__name__}: {text}"[:160] if text else type(error).__name__
