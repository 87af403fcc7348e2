"""The commands of tools/checkpoint.py. torch is imported by those alone that read tensors."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from typing import Any

from titanlike.checkpoint.describe import list_checkpoints, show, verify
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
            ok = _run(Console(steps=1), arguments)
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

    def add(name: str, text: str, *positional: str) -> Any:
        one = commands.add_parser(name, help=text, description=text)
        for argument in positional:
            one.add_argument(argument.lower(), metavar=argument)
        one.set_defaults(command=name)
        return one

    add("list", "the checkpoints of a run, or in a folder", "FOLDER")
    one = add("show", "what a checkpoint contains", "CHECKPOINT")
    one.add_argument("--tensors", action="store_true", help="name every tensor and every file")
    text = "check every file against its checksum; of a run, all checkpoints"
    one = add("verify", text, "CHECKPOINT")
    text = "also lift the mark DAMAGED where all bytes are right"
    one.add_argument("--repair", action="store_true", help=text)
    one = add("compare", "whether two checkpoints have the same tensors", "A", "B")
    text = "absolute difference that counts as none"
    one.add_argument("--tolerance", type=float, default=0.0, help=text)
    one.add_argument("--tensors", action="store_true", help="name every tensor that differs")
    text = "the model (names without `model.`) in one safetensors file"
    one = add("consolidate", text, "CHECKPOINT", "FILE")
    one.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights")
    one.add_argument("--optimizer", action="store_true", help="also all that a run needs to resume")
    text = "a checkpoint (step- or model-XXXXXXXX) in FOLDER from a safetensors file"
    add("restore", text, "FILE", "FOLDER")
    return parser


def _run(console: Console, args: argparse.Namespace) -> bool:
    """Whether nothing is damaged or different."""
    if args.command == "list":
        list_checkpoints(console, args.folder)
        return True
    if args.command == "show":
        return show(console, args.checkpoint, all_names=args.tensors)
    if args.command == "verify":
        return verify(console, args.checkpoint, repair=args.repair)
    if args.command == "compare":
        from titanlike.checkpoint.compare import compare

        return compare(console, args.a, args.b, args.tolerance, all_names=args.tensors)
    from titanlike.checkpoint.safetensors_file import consolidate, restore

    if args.command == "restore":
        console.line(restore(args.file, args.folder))
    else:
        options = {"dtype": args.dtype, "with_optimizer": args.optimizer}
        console.line(consolidate(args.checkpoint, args.file, **options))
    return True
