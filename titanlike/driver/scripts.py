"""`titanlike scripts SCHEDULER DIR`: copy the job scripts of a cluster's scheduler."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from titanlike.config.program import program, scripts_dir


def main(argv: list[str] | None = None) -> int:
    """Copy the scripts. The exit code is 2 if nothing was copied."""
    parser = argparse.ArgumentParser(
        prog=shlex.join(program()),
        description="Copy the job scripts of a scheduler into a folder. They need no checkout.",
    )
    parser.add_argument("scheduler", choices=("slurm", "kubernetes"))
    parser.add_argument("folder", metavar="DIR", type=Path, help="made if it does not exist")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    arguments = parser.parse_args(argv)
    source, folder = scripts_dir() / arguments.scheduler, arguments.folder
    files = sorted(path for path in source.iterdir() if path.is_file())
    try:
        existing = [path.name for path in files if (folder / path.name).exists()]
        if existing and not arguments.force:
            raise FileExistsError(
                f"{folder} already has {', '.join(existing)}; --force overwrites them"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, folder)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"copied to {folder}: {', '.join(path.name for path in files)}")
    return 0
