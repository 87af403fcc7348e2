"""The command line: `titanlike [COMMAND] ...`, also as `python -m titanlike`. In a checkout,
`python train.py ...` and `python tools/*.py ...` do the same without installing.

1. `main` picks the command. `JOBS` train and measure: each is a function `(config, worker)` that
   every rank of the mesh calls. `TOOLS` are functions of a single process, with options of their
   own.
2. `start_job`: one process, the driver, reads the overrides and runs the job. Started alone, it
   launches the workers itself. Among ranks started by torchrun or srun, rank 0 is the driver and
   the others follow it (`launch.torchrun`).
3. The driver checks the command line, composes the config and runs the job, or the jobs of a sweep
   (`driver.drive`).

Exit codes of a job:
    0    completed
    1    failed
    2    an error in the config or the data; nothing was trained
    75   stopped early by a signal or by max_time, with a checkpoint: the same command resumes.
         0 if torchrun would restart the ranks otherwise (--max-restarts)
    130  Ctrl-C ended it immediately; 143 SIGTERM, 138 SIGUSR1, 129 SIGHUP did

A sweep continues after a job that failed, is invalid or reached max_time, and ends with 1 if any
failed. A signal ends it, with 75 if the jobs that ran have stopped with a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from titanlike.run.local import PrestartedWorkers

ExitCode = int | str | None  # as sys.exit takes it


class Command(NamedTuple):
    """A subcommand."""

    function: str  # import path within titanlike
    help: str  # one line for --help
    description: str = ""  # further text for the command's own --help
    folder: str = ""  # a job's folder inside run_dir, so that it never touches a run's files


JOBS = {
    "train": Command("core.training.loop.train", "train a model (default)"),
    "verify": Command(
        "proof.verify.verify",
        "compare a layout with one process of plain torch",
        "Trains verify.steps steps in the layout and in a single process of plain torch, and compares "
        "loss, gradients, updated parameters and optimizer state by name. Exit code 1 if they differ.",
        folder="verify",
    ),
    "sample": Command(
        "use.checkpoint_jobs.sample",
        "write text in a run's own layout",
        "Continues sample.prompts with the newest checkpoint of a run, in any layout: --config-path RUN. "
        "For a model that fits one process `titanlike generate RUN` is faster.",
        folder="samples",
    ),
    "perplexity": Command(
        "use.checkpoint_jobs.perplexity",
        "the loss of a run on any data",
        "Evaluates the newest checkpoint of a run on evaluate.part of the data, in any layout: "
        "--config-path RUN. `titanlike evaluate RUN` calls it.",
        folder="perplexity",
    ),
}
TOOLS = {
    "plan": Command("run.tools.plan", "what a run will cost, before it is paid for"),
    "rehearse": Command("run.tools.rehearse", "prove that the ranks cannot hang"),
    "timeline": Command("run.tools.timeline", "what each rank did, compared with the plan"),
    "checkpoint": Command("use.checkpoint_commands.main", "list, verify, convert checkpoints"),
    "tokenize": Command("formats.tokenize_corpus.main", "a corpus of many files as token ids"),
    "export": Command("hf.hf_export.main", "write a checkpoint for transformers"),
    "generate": Command("use.generation_commands.generate_main", "write text with a trained model"),
    "evaluate": Command(
        "use.generation_commands.evaluate_main",
        "perplexity, bits a byte, and lm-evaluation-harness",
    ),
    "report": Command("run.tools.report", "runs as one page: report.html"),
    "scripts": Command("run.tools.scripts", "copy the job scripts of a cluster"),
}
LISTED = {  # shown in --help
    "plan and train": ("train", "verify", "plan", "rehearse", "tokenize", "scripts"),
    "look at runs": ("report", "timeline", "checkpoint"),
    "use a model": ("generate", "sample", "evaluate", "perplexity", "export"),
}


def run(command: str | None = None) -> NoReturn:
    """Run `main` as the whole life of a process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # until `_until_a_signal`: a Ctrl-C has no traceback of an import, so few are above this
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run_as_process(lambda: main(command))


def run_as_process(call: Callable[[], object]) -> NoReturn:
    """Run `call()`, which may call sys.exit; exit without the interpreter's cleanup of a second."""
    code: ExitCode = 0
    try:
        call()
    except SystemExit as end:
        code = end.code
    from titanlike.core.launch.process_end import leave

    leave(code)


def main(command: str | None = None) -> None:
    """Run `command`; None = the one that the first word names, else train."""
    import pkgutil

    from titanlike.core.config.program import set_program

    _open_closed_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, exit codes of children are lost
    try:
        os.getcwd()
    except OSError:
        sys.exit("error: the working directory has been removed; `cd` to one that exists")
    typed = _take_command() if command is None else None
    set_program(typed)
    if sys.argv[1:] == ["--version"]:
        from titanlike.run.tools import versions

        print(versions())
        return
    list_commands = command is None and typed is None
    command = command or typed or "train"
    if command in TOOLS:
        from titanlike.core.config.program import print_printably

        print_printably()
        tool = f"titanlike.{TOOLS[command].function}"
        sys.exit(_until_a_signal(lambda: pkgutil.resolve_name(tool)(sys.argv[1:])))
    if {"-h", "--help"} & set(sys.argv[1:]):
        _print_help(command, list_commands)
        return
    start_job(f"titanlike.{JOBS[command].function}", JOBS[command].folder)


def start_job(
    function: str, folder: str = "", result_dir: str | None = None, checked: bool = False
) -> None:
    """Run a job as the command line says, and exit.

    function: import path of `(config, worker) -> dict | None`. In rank 0's result, "value" is what
    a sweep compares and "exit_code" this process' exit code (default 0). folder: as in `Command`.
    result_dir: where a sweep's job writes result.json if it is refused before it has a run_dir.
    checked: whether the sweep has checked this job's config.
    """
    from titanlike.core.launch.process_end import no_garbage_collection

    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.append(os.getcwd())  # for user code that Hydra imports
    with no_garbage_collection():
        sys.exit(_until_a_signal(lambda: _drive_or_follow(function, folder, result_dir, checked)))


def _until_a_signal(call: Callable[[], ExitCode]) -> ExitCode:
    """Return `call()`. A signal that it does not handle ends the process, with one line."""
    from titanlike.core.launch.signals import Interrupted, exit_now, interruptible

    try:
        with interruptible() as received:
            code = call()
            # a library that a signal has left in a broken state may have raised another error
            if code and received() and code != 128 + received():
                raise Interrupted(received())
            return code
    except Interrupted as interrupted:
        print(f"\n{interrupted}", file=sys.stderr)
        exit_now(interrupted.exit_code)


def _drive_or_follow(function: str, folder: str, result_dir: str | None, checked: bool) -> ExitCode:
    """Run this process' part of a job: the driver's, or a following rank's."""
    from titanlike.core.config.errors import ConfigError
    from titanlike.core.launch import environment
    from titanlike.core.launch.signals import die_with_parent
    from titanlike.run.job import JobRunner, print_problems

    try:
        environment.adopt_slurm()
        # job scripts check before the ranks start: WORLD_SIZE without RANK
        before_ranks = "--check" in sys.argv[1:] and "RANK" not in os.environ
        environment.check_launcher(before_ranks)
    except ConfigError as error:
        return print_problems(error.problems)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)
    alone = before_ranks or int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not alone:
        from titanlike.core.launch.torchrun import TorchrunRanks

        ranks = TorchrunRanks()
        if ranks.rank > 0:
            return ranks.run_follower()
    from titanlike.run.drive import drive  # imports Hydra, which the followers do not need

    if alone:
        restart_state = environment.RestartState.load()
        restart_state.count_start()
        with contextlib.ExitStack() as resources:

            @functools.cache
            def workers() -> PrestartedWorkers:
                from titanlike.run.local import PrestartedWorkers

                return resources.enter_context(PrestartedWorkers())

            restarted = environment.is_restart()
            runner = JobRunner(function, folder, None, restart_state, restarted, checked, workers)
            return drive(runner, result_dir)
    code: ExitCode = 1
    try:
        runner = JobRunner(function, folder, ranks, ranks.restart_state, environment.is_restart())
        code = drive(runner, result_dir)
        return code
    finally:
        ranks.shutdown(code if isinstance(code, int) else int(code is not None))


def _open_closed_streams() -> None:
    """Open the null device for stdin, stdout and stderr that the caller has closed (`>&-`).

    Otherwise the next file or socket gets their descriptors, and whatever is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115


def _take_command() -> str | None:
    """Remove and return the command that the first word names. Exits with 2 for an unknown command."""
    commands, word = [*JOBS, *TOOLS], "".join(sys.argv[1:2])
    if word in commands:
        return sys.argv.pop(1)
    if re.fullmatch(r"[a-z][a-z_-]*", word):
        from titanlike.core.config.errors import nearest

        near = nearest(word, commands)
        hint = f"did you mean {near}?" if near else f"commands: {', '.join(commands)}"
        print(f"error: no such command: {word}; {hint}", file=sys.stderr)
        sys.exit(2)
    return None


def _print_help(command: str, list_commands: bool) -> None:
    from titanlike.core.config.program import program, train_program
    from titanlike.run.help import command_help, help_on, help_text

    if os.environ.get("RANK", "0") != "0":
        return
    if words := [word for word in sys.argv[1:] if not word.startswith("-") and "=" not in word]:
        text = help_on(words, train_program())
    elif command == "train":
        helps = {name: command.help for name, command in (JOBS | TOOLS).items()}
        groups = {title: {n: helps[n] for n in names} for title, names in LISTED.items()}
        text = help_text(program(), groups if list_commands else {})
    else:
        text = command_help(program(), JOBS[command].description)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
