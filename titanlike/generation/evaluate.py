"""`titanlike evaluate RUN`: perplexity and bits a byte on any data, or tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

from titanlike.checkpoint.state_dict import DTYPES
from titanlike.config.imports import TRUST_CODE
from titanlike.config.program import program
from titanlike.generation.in_layout import run_in_layout

_DESCRIPTION = """\
Perplexity and bits a byte of a run's newest checkpoint, on its validation data or on others
(KEY=VALUE are keys of the run: data.path=..., pp=2); or tasks of lm-evaluation-harness in one process, of
a run, a checkpoint or a folder of transformers. Results are written beside the checkpoint."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 2 for an error of the user's."""
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN", nargs="?")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*")
    parser.add_argument("--tasks", metavar="A,B", help="of lm-evaluation-harness")
    text = "a folder with task files (YAML) of your own; may be given several times"
    parser.add_argument("--task-files", action="append", default=[], metavar="DIR", help=text)
    text = "only so many documents of each task"
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    text = "documents at a time (default: %(default)s)"
    parser.add_argument("--batch", type=int, default=8, metavar="N", help=text)
    parser.add_argument(
        "--dtype", choices=[*DTYPES], default="fp32", help="of tasks: of the weights"
    )
    parser.add_argument("--device", default="auto", help="of tasks: auto, cpu, cuda")
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.run is None:
        parser.error("which RUN? write the directory of a run, outputs/run")
    try:
        return _tasks(arguments) if arguments.tasks else _perplexity(arguments)
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _perplexity(arguments: argparse.Namespace) -> int:
    """By the job that evaluates in a run's own layout: of other data all, not only a part."""
    run = Path(arguments.run).expanduser()
    if (run / "config.json").is_file() and not (run / "config.yaml").is_file():
        fix = f"train a step from it (model=hf model.path={run}), or give --tasks"
        raise ValueError(f"RUN={run}: is a folder of transformers; {fix}")
    keys = [word.partition("=")[0] for word in arguments.settings]
    others = any(key in ("data", "data.path") for key in keys)
    part = ["evaluate.part=all"] if others and "evaluate.part" not in keys else []
    return run_in_layout("perplexity", run, [*part, *arguments.settings], arguments.trust_code)


def _tasks(arguments: argparse.Namespace) -> int:
    if arguments.settings:
        given = arguments.settings[0]
        raise ValueError(f"{given}: keys of the run are for perplexity; leave out --tasks, or them")
    if importlib.util.find_spec("lm_eval") is None:
        reason = "lm-evaluation-harness is not installed"
        raise ImportError(f"--tasks: {reason}; run pip install 'titanlike[eval]'")
    from titanlike.device.choose import first_device
    from titanlike.generation.harness import evaluate_tasks
    from titanlike.generation.loaded_model import load_model

    loaded = load_model(
        arguments.run,
        first_device(arguments.device),
        DTYPES[arguments.dtype],
        arguments.trust_code,
    )
    tasks = arguments.tasks.split(",")
    found = evaluate_tasks(loaded, tasks, arguments.task_files, arguments.limit, arguments.batch)
    for task, numbers in found.items():
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                print(f"  {task}  {name}  {value:.4f}")
    result = {"kind": "tasks", "limit": arguments.limit, "results": found}
    print(f"{loaded.origin}: written to {loaded.record(result)}")
    return 0
