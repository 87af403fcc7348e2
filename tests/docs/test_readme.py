"""The README is true: its commands run, its table is the schema's, the files it names are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import readme_table
from support.paths import ROOT

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
BENCH = "python tools/bench.py model.layers=2 steps=10"  # test_runs runs it
INSTALLING = [line for line in COMMANDS if line.startswith("pip install")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout and takes what the commands write."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("train.py", "tools", "conf", "titanlike", "hydra_plugins", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_the_first_two_commands_install_and_run_and_install_and_test() -> None:
    """`.ci/run` runs the second in a fresh environment; the first is test_runs' main job."""
    assert COMMANDS[:2] == INSTALLING
    assert COMMANDS[0].endswith("&& python train.py")
    assert COMMANDS[1].endswith("&& pytest")
    assert all("-c constraints.txt" in line for line in INSTALLING)


def test_every_other_command_runs(checkout: Path) -> None:
    """Those that go on from ones before in their order, the others two at a time."""
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environment["OMP_NUM_THREADS"] = "1"  # two commands at a time
    environment["WANDB_MODE"] = "disabled"  # a second each; the main job's test has it on
    others = [line for line in COMMANDS if line not in INSTALLING and line != BENCH]
    assert len(others) >= 12 and BENCH in COMMANDS

    def run(line: str) -> None:
        done = subprocess.run(
            line,
            shell=True,
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    chains = [
        [line for line in others if name in line]
        for name in ("outputs/mesh", "outputs/saved", "outputs/sweep")
    ]
    chains += [[line] for line in others if not any(line in chain for chain in chains)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda chain: [run(line) for line in chain], chains))


def test_the_table_of_keys_is_the_schemas() -> None:
    """If not: python tests/readme_table.py"""
    between = TEXT.split(readme_table.BEGIN)[1].split(readme_table.END)[0]
    assert between.strip() == readme_table.table()


def test_every_file_it_names_is_there() -> None:
    rows = re.findall(r"^\| (`.*?) \|", TEXT.split("| look here | for |")[1], flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert len(named) > 8
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "titanlike" / name).exists(), name


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "@@" not in TEXT
