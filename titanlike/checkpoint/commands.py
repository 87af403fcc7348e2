"""The commands of tools/checkpoint.py. torch is imported by those alone that read tensors."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import Any

from titanlike.checkpoint.describe import list_checkpoints, show
from titanlike.checkpoint.integrity import DamagedCheckpoint, UnsafeCheckpoint
from titanlike.config.program import program
from titanlike.metrics.console import Console

OK, DIFFERENT, INVALID = 0, 1, 2  # exit codes
_DESCRIPTION = """\
Inspect and convert checkpoints. A CHECKPOINT is a step-XXXXXXXX or model-XXXXXXXX folder, or a run
directory, which stands for its newest one; each is a local path or an fsspec URL (s3://...)."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # about reading in a single process, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            ok = arguments.command(Console(steps=1), arguments)
        return OK if ok else DIFFERENT
    except (DamagedCheckpoint, UnsafeCheckpoint) as error:
        return _fail(error, DIFFERENT)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, INVALID)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str,
        command: Callable[[Console, argparse.Namespace], bool],
        text: str,
        *positional: str,
    ) -> Any:
        one = commands.add_parser(name, help=text, description=text)
        for argument in positional:
            one.add_argument(argument.lower(), metavar=argument)
        one.set_defaults(command=command)
        return one

    add("list", _list, "the checkpoints of a run, or in a folder", "FOLDER")
    one = add("show", _show, "what a checkpoint contains", "CHECKPOINT")
    one.add_argument("--tensors", action="store_true", help="name every tensor and every file")
    add(
        "verify",
        _verify,
        "check every file against its checksum; of a run, all checkpoints",
        "CHECKPOINT",
    )
    one = add("compare", _compare, "whether two checkpoints have the same tensors", "A", "B")
    one.add_argument(
        "--tolerance", type=float, default=0.0, help="absolute difference that counts as none"
    )
    one.add_argument("--tensors", action="store_true", help="name every tensor that differs")
    text = "the model (names without `model.`) in one safetensors file"
    one = add("consolidate", _consolidate, text, "CHECKPOINT", "FILE")
    one.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights")
    one.add_argument("--optimizer", action="store_true", help="also all that a run needs to resume")
    text = "a checkpoint (step- or model-XXXXXXXX) in FOLDER from a safetensors file"
    add("restore", _restore, text, "FILE", "FOLDER")
    return parser


def _list(console: Console, arguments: argparse.Namespace) -> bool:
    list_checkpoints(console, arguments.folder)
    return True


def _show(console: Console, arguments: argparse.Namespace) -> bool:
    return show(console, arguments.checkpoint, all_names=arguments.tensors)


def _verify(console: Console, arguments: argparse.Namespace) -> bool:
    from titanlike.checkpoint.verify import verify

    return verify(console, arguments.checkpoint)


def _compare(console: Console, arguments: argparse.Namespace) -> bool:
    from titanlike.checkpoint.compare import compare

    a, b = arguments.a, arguments.b
    return compare(console, a, b, arguments.tolerance, all_names=arguments.tensors)


def _consolidate(console: Console, arguments: argparse.Namespace) -> bool:
    from titanlike.checkpoint.safetensors_file import consolidate

    source, file = arguments.checkpoint, arguments.file
    text = consolidate(source, file, dtype=arguments.dtype, with_optimizer=arguments.optimizer)
    console.line(text)
    return True


def _restore(console: Console, arguments: argparse.Namespace) -> bool:
    from titanlike.checkpoint.safetensors_file import restore

    console.line(restore(arguments.file, arguments.folder))
    return True
