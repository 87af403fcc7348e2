"""The command line as a whole: showing, completing, launching again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.launched import Launched
from support.paths import ROOT


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments]
    settings = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, **settings)


@pytest.mark.parametrize(
    "line, offered",
    [
        ("train.py schedule=inter", "schedule=interleaved1f1b"),
        ("titanlike bench-checkpoint -m pp=2 fsdp.z", "fsdp.zero="),
    ],
)
def test_tab_completes_groups_choices_and_keys_without_torch(
    tmp_path: Path, line: str, offered: str
) -> None:
    done = run("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert offered in done.stdout.split()
    assert " torch\n" not in done.stderr


def test_the_config_can_be_shown_from_any_folder_without_its_secrets(tmp_path: Path) -> None:
    words = ["data.path=https://me:sesame@host/x", "sweep.submit='x --token sesame'"]
    shown = yaml.safe_load(run("pp=4", *words, "--cfg", "job", cwd=tmp_path).stdout)
    assert shown["pp"] == 4 and "hydra" not in shown
    assert shown["data"]["path"] == "https://***@host/x" and "sesame" not in str(shown)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_launched_again_from_its_config(tmp_path: Path) -> None:
    """The command is the one that the file itself names; every value survives the way."""
    first = Launched("hello", "seed=3", "optimizer.eps=1e-12", "data.text_key='1e5'", cwd=tmp_path)
    assert first.wait()[0] == 0
    (config,) = tmp_path.rglob("config.yaml")
    before = config.read_text()
    assert f"--config-path {shlex.quote(str(config.parent))}" in before.splitlines()[1]
    again = Launched("hello", "--config-path", config.parent, cwd=tmp_path / "outputs")
    assert again.wait()[0] == 0
    assert config.read_text() == before
    assert len(list(tmp_path.rglob("result.json"))) == 1, "it goes on in its own run directory"


def test_an_installed_package_adds_choices_by_an_entry_point(tmp_path: Path) -> None:
    """The package `mine` is installed as far as Python can tell: code and metadata on its path."""
    (tmp_path / "mine" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("CONF = __path__[0] + '/conf'\n")
    (tmp_path / "mine" / "conf" / "model" / "mine.yaml").write_text("name: mine.Model\nwidth: 3\n")
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[titanlike.plugins]\nmine = mine\n")
    done = run("model=mine", "--cfg", "job", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert yaml.safe_load(done.stdout)["model"] == {"name": "mine.Model", "width": 3}
