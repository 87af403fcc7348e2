"""The commands of tools/checkpoint.py. torch is imported by those alone that read tensors."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

from titanlike.checkpoint.listing import list_all, show
from titanlike.checkpoint.whole import Damaged, Refused
from titanlike.metrics.console import Console

FINE, DIFFERENT, WRONG = 0, 1, 2  # exit codes
_DESCRIPTION = """\
Look after checkpoints. A CHECKPOINT is a step-XXXXXXXX or model-XXXXXXXX folder, or a run, whose
newest one is then meant; each may be a local path or a URL that fsspec knows (s3://...)."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # that one process reads alone, which is the intent
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            fine = arguments.command(Console(steps=1), arguments)
        return FINE if fine else DIFFERENT
    except (Damaged, Refused) as error:
        return _fail(error, DIFFERENT)
    except (ValueError, OSError, ImportError) as error:
        return _fail(error, WRONG)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkpoint.py", description=_DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[Console, argparse.Namespace], bool], text: str, *places: str
    ) -> Any:
        one = commands.add_parser(name, help=text, description=text)
        for place in places:
            one.add_argument(place.lower(), metavar=place)
        one.set_defaults(command=command)
        return one

    add("list", _list, "the checkpoints of a run, or in a folder", "FOLDER")
    one = add("show", _show, "what is in a checkpoint", "CHECKPOINT")
    one.add_argument("--tensors", action="store_true", help="name every tensor and every file")
    add("verify", _verify, "read every file against its checksum; of a run, all", "CHECKPOINT")
    one = add("compare", _compare, "whether two checkpoints hold the same tensors", "A", "B")
    one.add_argument(
        "--tolerance", type=float, default=0.0, help="absolute difference that counts as none"
    )
    one.add_argument("--tensors", action="store_true", help="name every tensor that differs")
    text = "the model (names without `model.`) in one safetensors file"
    one = add("consolidate", _consolidate, text, "CHECKPOINT", "FILE")
    one.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights")
    one.add_argument("--optimizer", action="store_true", help="all that a run needs to go on, too")
    text = "a checkpoint (step- or model-XXXXXXXX) in FOLDER from a safetensors file"
    add("restore", _restore, text, "FILE", "FOLDER")
    return parser


def _list(console: Console, arguments: argparse.Namespace) -> bool:
    list_all(console, arguments.folder)
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
