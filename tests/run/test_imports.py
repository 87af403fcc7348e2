"""Code that a config names is executed; what is imported from elsewhere is shown before it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import command
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.user_code import Custom, Model
from titanlike.core.config.imports import import_object, outside
from titanlike.core.models.registry import build_model
from titanlike.core.optim.custom import import_callable

MODEL = """
import sys
print("EXECUTED", __name__, flush=True)
from torch import nn
from os import system
from subprocess import call

class Model(nn.Module):
    def __init__(self, vocab_size: int = 256, command: str = ""):
        super().__init__()
        self.layer = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        return self.layer(tokens)

class Thing:
    def __init__(self, **words):
        print("EXECUTED Thing", flush=True)

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
"""
RUN = """
defaults: [_self_, override hydra/job_logging: none, override hydra/hydra_logging: none]
hydra:
  run: {dir: '${run_dir}'}
  output_subdir: null
  callbacks: {mine: {_target_: elsewhere.callbacks.Mine}}
data: {name: synthetic}
logger: {name: none}
steps: 1
run_dir: out
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on PYTHONPATH, one in the working directory, and somebody's run folder."""
    elsewhere, here = tmp_path / "site" / "elsewhere", tmp_path / "work" / "local"
    for folder in (elsewhere / "deep", here, tmp_path / "site" / "spread" / "inner"):
        folder.mkdir(parents=True)
    for path in (elsewhere, elsewhere / "deep", here):
        (path / "__init__.py").write_text("print('EXECUTED', __name__, flush=True)\n")
    for path in (elsewhere / "deep", here, tmp_path / "site" / "spread" / "inner"):
        (path / "models.py").write_text(MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "work"


def run_folder(work: Path, name: str, more: str = "") -> list[str]:
    folder = work / "received"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"{RUN}model: {{name: {name}{more}}}\n")
    return ["--config-path", "received"]


def test_a_received_config_cannot_call_the_standard_library(packages: Path) -> None:
    name = "elsewhere.deep.models.system"  # which that package imports
    words = run_folder(packages, name, ", command: touch called, args: touch called")
    done = command(*words, cwd=packages)
    assert done.returncode == 2, done.stderr
    assert f"imports {name} (model.name), from " in done.stdout
    assert "a part of Python's standard library" in done.stderr
    assert not (packages / "called").exists() and not (packages / "out").exists()
    for name in ("os.system", "subprocess.run", "builtins.exec"):
        with pytest.raises(ValueError, match="a part of Python's standard library"):
            import_object(name)


def test_a_package_called_as_a_module_of_the_standard_library_is_to_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has imported, or finds, its own `wave`, not the folder of a user's models."""
    (tmp_path / "wave").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hides it: rename wave"):
        import_object("wave.net.Model")


def test_a_configs_external_imports_are_shown_before_execution(packages: Path) -> None:
    """With the file, also in a package without __init__.py; and what Hydra's section names."""
    named = {"model": "elsewhere.deep.models.Model", "loss": "spread.inner.models.loss"}
    words = run_folder(packages, f"{named['model']}}}\nloss: {{name: {named['loss']}")
    done = command(*words, "--check", cwd=packages)
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.partition("EXECUTED")
    for group, path in named.items():
        file = packages.parent / "site" / (path.rpartition(".")[0].replace(".", "/") + ".py")
        assert f"imports {path} ({group}.name), from {file}\n" in before
    assert "imports elsewhere.callbacks.Mine (hydra.callbacks.mine._target_), from " in before
    assert "imports" not in after


def test_imports_by_hydras_own_modules_are_shown() -> None:
    """Logging's formatters may be any function, also one of a module that logging imports."""
    calls = {"logging.os.system", "hydra.utils.os.system", "hydra._internal.nothing.run"}
    own = {
        "logging.handlers.RotatingFileHandler",
        "hydra._internal.hydra.Hydra",
        "logging.Formatter",
    }
    formatters = {str(at): {"()": path} for at, path in enumerate(sorted(calls | own))}
    shown = {line.split()[1] for line in outside({}, {"job_logging": {"formatters": formatters}})}
    assert shown == calls


def test_a_target_outside_of_any_module_is_refused(packages: Path) -> None:
    name = "elsewhere.deep.models.Thing"
    done = command("data=synthetic", "model=own", f"model.name={name}", "--check", cwd=packages)
    assert done.returncode == 2 and "EXECUTED Thing" not in done.stdout
    assert f"model.name={name}: is a " in done.stderr


def test_titanlike_and_the_working_directory_are_not_shown_as_external(packages: Path) -> None:
    own = ["data=synthetic", "model=own", "model.name=local.models.Model"]
    done = command(*own, "--check", cwd=packages)
    assert "imports" not in done.stdout
    assert done.stdout.endswith("config OK; nothing was started (--check)\n")


@pytest.mark.parametrize(
    "path, near",
    [
        ("local.models.Modell", "local.models.Model"),
        ("local.model.Model", "local.models.Model"),
        ("local.models.los", "local.models.loss"),
        ("local.models.Attention", ""),
    ],
)
def test_a_misspelt_import_path_has_one_answer(
    path: str, near: str, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name beside it that may be meant, else the form; never a built-in choice."""
    monkeypatch.chdir(packages)
    group = "loss" if "los" in path else "model"
    with pytest.raises(ConfigError) as caught:
        build_model(Model(path)) if group == "model" else import_callable("loss", Custom(path))
    (problem,) = caught.value.problems
    assert problem.fix == (f"{group}.name={near}" if near else "name it as package.module.Class")
    assert "did you mean" not in str(problem)
