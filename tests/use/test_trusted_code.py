"""What a file names is not run: a checkpoint is weights, and who wrote it need not be known."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support import saved_runs
from support.command_lines import examined
from support.commands import SCRIPTS, TINY, command
from support.models import LLAMA, tiny
from support.saved_runs import checkpoint, reseal
from titanlike.core.checkpoint.storage import STATE
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.pipeline import CustomSchedule
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.parse import to_plain
from titanlike.core.config.received import Consent
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.models.registry import build_model
from titanlike.core.optim import custom
from titanlike.core.pipeline.from_config import choose_order
from titanlike.use.generate import load_model
from titanlike.use.generation_commands import evaluate_main as evaluate
from titanlike.use.generation_commands import generate_main as generate

saved = saved_runs.saved
CPU = torch.device("cpu"), torch.float32


class Touches:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def forged(saved: Config, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint whose state.json names another model, sealed like a true one."""

    def forge(model: dict[str, Any], **config: Any) -> Path:
        folder = tmp_path / "checkpoints" / "step-00000006"
        shutil.copytree(checkpoint(Path(saved.run_dir), 6), folder)
        state = json.loads((folder / STATE).read_text())
        own = model["name"].startswith("theirs")
        state["model"] = state["model"] | model if own else model
        state["config"]["model"] |= config
        (folder / STATE).write_text(json.dumps(state))
        reseal(folder)
        return folder

    return forge


def library_calls(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Of callables of libraries that run what their arguments say."""
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    (tmp_path / "x.npy").write_bytes(pickle.dumps(Touches(tmp_path / "ran")))
    (tmp_path / "hubconf.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nm = None\n")
    hub = {"repo_or_dir": str(tmp_path), "model": "m", "source": "local"}
    return {
        "torch.load": {"f": str(tmp_path / "x.pt"), "weights_only": False},
        "torch.hub.load": hub,
        "numpy.load": {"file": str(tmp_path / "x.npy"), "allow_pickle": True},
        "torch.serialization.load": {"f": str(tmp_path / "x.pt"), "weights_only": False},
    }


CALLS = ["torch.load", "torch.hub.load", "numpy.load", "torch.serialization.load"]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_checkpoint_cannot_make_a_library_run_its_code(
    forged: Callable[..., Path], name: str, trusted: bool, tmp_path: Path
) -> None:
    """Not even where its code is trusted: these make no model."""
    folder = forged({"name": name, **library_calls(tmp_path)[name]})
    said = "of a library" if trusted else f"imports {name} .model.name.*--trust-code"
    with pytest.raises(ValueError, match=said):
        load_model(str(folder), *CPU, consent=Consent(trusted=trusted, files=True))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", CALLS)
def test_a_config_cannot_make_a_library_run_its_code(name: str, tmp_path: Path) -> None:
    """Nor as its data, loss, optimizer, learning rate or schedule."""
    args = library_calls(tmp_path)[name]
    with pytest.raises(ConfigError, match="of a library"):
        build_model(Custom(name, args))
    for group in ("optimizer", "lr", "loss"):
        with pytest.raises(ConfigError, match="of a library"):
            custom.import_callable(group, Custom(name, args))
    with pytest.raises(DataError, match="of a library"):
        open_data(tiny(data=Custom(name, args)))
    [problem] = choose_order(tiny(schedule=CustomSchedule(name, args)))[2]
    assert "of a library" in problem.reason
    assert not (tmp_path / "ran").exists()


def test_objects_that_a_library_builds_for_a_key_are_accepted() -> None:
    assert custom.import_callable("loss", Custom("torch.nn.functional.cross_entropy"))
    assert custom.import_callable("loss", Custom("torch.nn.CrossEntropyLoss"))
    assert custom.import_callable("optimizer", Custom("torch.optim.Adagrad"))


def test_a_custom_model_is_imported_only_with_consent(
    forged: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "theirs.py").write_text(
        f"import torch\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
        "from titanlike.core.models.llama import Llama\n"
        "class Model(Llama):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    folder = forged({"name": "theirs.Model"}, name="theirs.Model")
    with pytest.raises(ValueError, match="imports theirs.Model .model.name"):
        load_model(str(folder), *CPU)
    assert evaluate([str(folder), "--tasks", "none"]) == 2
    assert not (tmp_path / "ran").exists()
    capsys.readouterr()
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = load_model(str(folder), *CPU, consent=Consent(trusted=True)).model
    assert type(model).__name__ == "Model" and (tmp_path / "ran").exists()
    assert "imports theirs.Model (model.name), from " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_a_run_with_a_custom_model_is_evaluated_with_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Who has launched it need not repeat it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state") if known else "/dev/null")
    (tmp_path / "theirs.py").write_text("from titanlike.core.models.llama import Llama as Model\n")
    words = [*TINY, "steps=1", "data=synthetic", "checkpoint.last=true", "run_dir=run"]
    own = ["model=own", "model.name=theirs.Model", "+model.vocab_size=null"]
    own += [f"+{word}" for word in TINY if word.startswith("model.")]
    words = [word for word in words if not word.startswith("model.")] + own
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tool = str(SCRIPTS / "titanlike")
    done = command("evaluate", "run", cwd=tmp_path, tool=tool)
    assert done.returncode == 2 and "imports theirs.Model (model.name), " in done.stderr
    assert ("--trust-code" in done.stderr) != known
    words = ["evaluate", "run", *([] if known else ["--trust-code"])]
    done = command(*words, cwd=tmp_path, tool=tool)
    assert done.returncode == 2 and "write evaluate.batches=100" in done.stderr  # random tokens
    done = command(*words, "evaluate.batches=1", cwd=tmp_path, tool=tool)
    assert done.returncode == 0, done.stderr
    assert "imports theirs.Model (model.name), from " in done.stderr and "perplexity" in done.stdout


def forged_sizes(changes: dict[str, Any]) -> dict[str, Any]:
    return {"name": "llama", **LLAMA, "vocab_size": 64, "num_hidden_layers": 2, **changes}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_hidden_layers": 10**7}, "and its model num_hidden_layers=10000000; it is damaged"),
        (
            {"hidden_size": 4 * 10**8},
            r"would be of shape \(64, 400000000\), and the checkpoint has \(64, 32\)",
        ),
        (
            {"num_hidden_layers": 9},
            "is of another model: its model.layers.2.* the checkpoint has none",
        ),
    ],
)
def test_forged_sizes_take_neither_time_nor_memory(
    forged: Callable[..., Path], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        load_model(str(forged(forged_sizes(changes))), *CPU)


def no_json(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)


def an_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an index without a map": lambda folder: an_index(folder, "[]"),
    "an index of null": lambda folder: an_index(folder, '{"weight_map": {"a": null}}'),
    "weights cut off": lambda folder: os.truncate(folder / "model.safetensors", 999),
    "weights without a header": lambda f: (f / "model.safetensors").write_bytes(b"x" * 999),
    "a config that is nested too deep": lambda folder: no_json(folder, "config.json"),
    "other sizes": lambda f: (f / "config.json").write_text(
        (f / "config.json").read_text().replace('"n_embd": 8', '"n_embd": 16')
    ),
    "a pickle": lambda folder: (
        (folder / "model.safetensors").unlink(),
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touches(folder / "ran"))),
    ),
    "a tokenizer of null": lambda folder: (folder / "tokenizer.json").write_text("null"),
    "code of its own": lambda f: (f / "config.json").write_text(
        json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "theirs.C"}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_of_transformers_that_is_damaged_is_named_in_a_line(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything asked, or run: the standard input is at its end."""
    folder = tmp_path / "folder"
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    config = transformers.GPT2Config(**sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    DAMAGES[damage](folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert generate([str(folder), "--prompt", "a"]) == 2
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith(f"error: RUN={folder}: ") and "Traceback" not in "".join(told)
    assert not (folder / "ran").exists() and sys.stdin.read() == "y\n"


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_folder_of_transformers_chooses_no_kernel_of_the_hub(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "someone/kernel"}))
    asked: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.is_kernel", asked.append)
    assert load_model(str(tmp_path), *CPU).model.config._attn_implementation == "sdpa"
    assert {*asked} <= {"sdpa", None}


def test_aliases_of_aliases_in_a_config_are_refused_before_they_are_written_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ten lines that would be 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    config = to_plain(Config()) | {"defaults": ["_self_"]}
    text = "\n".join([*lines, *(f"{key}: {json.dumps(value)}" for key, value in config.items())])
    (tmp_path / "config.yaml").write_text(text)
    assert evaluate([str(tmp_path), "--trust-code"]) == 2
    assert "values, by aliases of aliases" in capfd.readouterr().err
    for words in ([], ["schedule=gpipe"]):
        (problem,) = examined("--config-path", str(tmp_path), *words).problems
        assert "it has 1.2e+09 values, by aliases of aliases" in problem.reason
