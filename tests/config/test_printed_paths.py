"""Command lines that are printed can be pasted into a shell, whatever the folders are called."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

from hydra.core.override_parser.overrides_parser import OverridesParser

from titanlike.config.schema import Checkpoint, Config
from titanlike.config.validate import problems
from titanlike.config.write import write_config
from titanlike.sweeps.sweep_run import SweepRun

NAMES = ["plain-1.x", "a b", "it's", 'say "x"', "$HOME", "`date`", "back\\slash", "x\\'s\\"]
NAMES += ["{a},b=c#;(*%", "é"]


def pasted(line: str) -> list[str]:
    """The words that bash makes of a line."""
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, timeout=20
    )
    return shown.stdout.decode().split("\0")[:-1]


def test_a_printed_command_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    """Of a run, in its config.yaml, and of a sweep, whose folder is also a value of an override."""
    for name in NAMES:
        folder = tmp_path / name
        write_config(Config(run_dir=str(folder)), folder)
        line = (folder / "config.yaml").read_text().splitlines()[1].removeprefix("#").strip()
        assert pasted(line)[-2:] == ["--config-path", str(folder)]
        sweep = SimpleNamespace(command=["seed=1,2"], program=["python", "train.py"], folder=folder)
        words = pasted(SweepRun._resume_line(sweep))
        assert words[:3] == ["python", "train.py", "seed=1,2"]
        override = OverridesParser.create().parse_override(words[3])
        assert override.key_or_group == "run_dir" and str(override.value()) == str(folder)


def test_a_path_that_no_line_could_show_is_refused() -> None:
    for name in ("a\nb", "a\rb", "\x1b[31m"):
        found = problems(Config(run_dir=name, checkpoint=Checkpoint(folder=name)))
        assert [problem.key for problem in found] == ["run_dir", "checkpoint.folder"]
        assert all(str(problem).isprintable() for problem in found)
        assert not problems(Config(run_dir=found[0].fix.partition("=")[2]))
