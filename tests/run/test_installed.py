"""The wheel in an environment of its own, away from any checkout: every command works."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.commands import TINY
from support.paths import ROOT
from titanlike.cli import JOBS, TOOLS

SMALL = [
    *TINY,
    "model.num_hidden_layers=2",
    "data=synthetic",
    "batch_size=4",
    "steps=2",
    "device=cpu",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; all other packages are this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run(
        [sys.executable, *install, str(wheel)], check=True, capture_output=True, timeout=60
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    # the .pth files in there are not read, so an editable titanlike stays unknown
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


def run(environment: Path, *words: str, cwd: Path, code: int = 0) -> str:
    """What a command of the environment prints."""
    drop = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    path = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    env |= {"PATH": path, "OMP_NUM_THREADS": "1"}
    line = [environment / "bin" / words[0], *words[1:]]
    settings = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(line, cwd=cwd, env=env, **settings)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_package_comes_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "import titanlike as t; print(t.__file__)"
    text = run(environment, "python", "-c", code, cwd=tmp_path)
    assert Path(text.strip()).is_relative_to(environment)


@pytest.mark.slow
def test_training_names_the_command_that_continues(environment: Path, tmp_path: Path) -> None:
    words = ["checkpoint.last=true", "run_dir=run"]
    text = run(environment, "titanlike", "train", *SMALL, *words, cwd=tmp_path)
    run_dir = tmp_path / "run"
    assert f"continue with: titanlike train --config-path {run_dir} steps=4\n" in text
    line = f"#   titanlike train --config-path {shlex.quote(str(run_dir))}\n"
    assert line in (run_dir / "config.yaml").read_text()
    text = run(environment, "titanlike", "checkpoint", "list", "run", cwd=tmp_path)
    assert "step-00000002" in text


def test_job_scripts_are_copied_and_not_overwritten(environment: Path, tmp_path: Path) -> None:
    for scheduler in ("slurm", "kubernetes"):
        words = ["titanlike", "scripts", scheduler, f"scripts/{scheduler}"]
        run(environment, *words, cwd=tmp_path)
        copied = {path.name: path.read_bytes() for path in (tmp_path / words[-1]).iterdir()}
        source = [path for path in (ROOT / "tools" / scheduler).iterdir() if path.is_file()]
        assert copied == {path.name: path.read_bytes() for path in source}
        assert "--force overwrites" in run(environment, *words, cwd=tmp_path, code=2)
        run(environment, *words, "--force", cwd=tmp_path)


def test_help_lists_the_commands_and_describes_each(environment: Path, tmp_path: Path) -> None:
    text = run(environment, "titanlike", "--help", cwd=tmp_path)
    for command in (*JOBS, *TOOLS):
        assert f"\n    {command} " in text
    for command in ("verify", "report"):
        text = run(environment, "titanlike", command, "--help", cwd=tmp_path)
        assert text.startswith(f"usage: titanlike {command} ")
    assert "did you mean verify?" in run(environment, "titanlike", "verfy", cwd=tmp_path, code=2)


@pytest.mark.slow
def test_the_examples_run_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    for name in ("own_loop.py", "distillation.py", "losses.ipynb"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    torchrun = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [word for word in SMALL if "data=" not in word]
    text = run(environment, *torchrun, "own_loop.py", *words, "pp=2", cwd=tmp_path)
    assert "step 2: loss 5." in text and "validation loss 5." in text
    assert "step 20: divergence" in run(environment, *torchrun, "distillation.py", cwd=tmp_path)
    execute = "from nbclient.cli import main; main()"
    run(environment, "python", "-c", execute, "losses.ipynb", "--inplace", cwd=tmp_path)
    assert "rank 3" in (tmp_path / "losses.ipynb").read_text()
