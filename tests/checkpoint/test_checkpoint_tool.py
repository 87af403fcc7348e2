"""tools/checkpoint.py on the checkpoints of a real run: looking, verifying, comparing, converting."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.paths import ROOT
from support.saved_runs import a_run, checkpoint, numbers, reseal, train_all
from titanlike.checkpoint.commands import main
from titanlike.config.schema import Config, Validation

Tool = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of pp2 x dp2 with checkpoints of steps 2 and 4, and the model alone in bf16."""
    folder = tmp_path_factory.mktemp("tool") / "run"
    config = a_run(folder, 2, 2, steps=4, every=2, model_only="bf16")
    config = replace(config, validation=Validation(every=2, batches=1))
    assert train_all(config) == [""]
    return config


@pytest.fixture(scope="module")
def whole_run(saved: Config) -> Path:
    return Path(saved.run_dir)


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """A copy, to be harmed."""
    return shutil.copytree(whole_run, tmp_path / "run")


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run a command; its exit code, and what it printed."""

    def call(*words: Any) -> tuple[int, str]:
        try:
            code = main(list(map(str, words)))
        except SystemExit as ended:  # argparse
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        assert printed.err.count("\n") <= 1 or printed.err.startswith("usage"), printed.err
        return code, printed.out + printed.err

    return call


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(data)


# --- looking -------------------------------------------------------------------------------------


def test_list_shows_every_checkpoint_and_what_is_wrong_with_it(run: Path, tool: Tool) -> None:
    code, text = tool("list", run)
    assert code == 0
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        ["step-00000002", "complete"],
        ["model-00000004", "complete"],
        ["step-00000004", "complete"],
    ]
    assert [row[2] == "-" for row in rows] == [False, True, False]  # val_loss
    assert all("pp2 x dp2 1f1b" in line for line in text.splitlines()[2:])
    assert max(map(len, text.splitlines())) <= 80
    assert tool("list", run / "checkpoints") == (code, text)

    file = checkpoint(run, 4) / "__1_0.distcp"
    os.truncate(file, 100)
    (checkpoint(run, 2) / "COMMITTED").unlink()
    code, text = tool("list", run)
    states = {line.split()[0]: line.split()[1] for line in text.splitlines()[2:5]}
    assert states == {
        "step-00000002": "incomplete",
        "model-00000004": "complete",
        "step-00000004": "damaged",
    }
    assert "step-00000004  __1_0.distcp has 100 bytes" in text
    assert "step-00000002  no COMMITTED: its save was killed" in text
    assert max(map(len, text.splitlines())) <= 80


def test_list_finds_the_checkpoints_that_a_run_keeps_elsewhere(run: Path, tool: Tool) -> None:
    expected = tool("list", run)
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "config.yaml").write_text(f"checkpoint:\n  folder: {run.parent / 'elsewhere'}\n")
    assert tool("list", run) == expected


def test_show_tells_what_a_checkpoint_holds(whole_run: Path, tool: Tool) -> None:
    code, text = tool("show", whole_run)
    assert code == 0
    assert "step        4\n" in text and "4 ranks (pp2 x dp2 1f1b, split even), torch" in text
    for name in ("__0_0.distcp", "__3_0.distcp", ".metadata", "state.json"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 120
    parameters, optimizer = (
        next(line for line in text.splitlines() if what in line).split()
        for what in ("parameters", "optimizer")
    )
    assert parameters[1] == "21" and optimizer[1] == "43"  # two of each, and one step count
    assert "layers.0" not in text
    code, text = tool("show", checkpoint(whole_run, 2), "--tensors")
    row = next(line for line in text.splitlines() if "model.layers.1.attention.wq.weight" in line)
    assert row.split()[1:] == ["32", "x", "32", "float32", "4", "KiB"]
    code, text = tool("show", whole_run / "checkpoints" / "model-00000004")
    assert code == 0 and "bfloat16" in text and "optimizer" not in text


def test_looking_takes_no_torch(whole_run: Path) -> None:
    """Under a second, on a login node."""
    code = (
        "import sys; from titanlike.checkpoint.commands import main; run = sys.argv[1]; "
        "assert main(['list', run]) == main(['show', run]) == 0; assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(whole_run)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=30, capture_output=True)
    tool = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), "list", str(whole_run)]
    done = subprocess.run(tool, check=True, timeout=30, capture_output=True, text=True)
    assert "step-00000004" in done.stdout and not done.stderr


# --- verifying -----------------------------------------------------------------------------------


def test_verify_reads_all_and_names_each_bad_file(run: Path, tool: Tool) -> None:
    code, text = tool("verify", run)
    assert code == 0 and text.count("complete (7 files") == 3
    flip(checkpoint(run, 4) / "__0_0.distcp")
    os.truncate(checkpoint(run, 4) / "__2_0.distcp", 7)
    (checkpoint(run, 4) / "__3_0.distcp").unlink()
    code, text = tool("verify", run)
    assert code == 1
    assert text.count(": complete (") == 2
    bad = text[text.index("step-00000004: damaged") :].splitlines()[1:]
    assert [line.split()[0] for line in bad] == ["__0_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    assert tool("verify", checkpoint(run, 2))[0] == 0
    flip(checkpoint(run, 2) / ".metadata")
    code, text = tool("verify", checkpoint(run, 2))
    assert code == 1 and text.splitlines()[1].startswith("  .metadata does not match the checksum")


def test_verify_tells_a_save_that_was_killed_from_damage(run: Path, tool: Tool) -> None:
    """A leftover harms no run; asked for alone, it is incomplete."""
    (checkpoint(run, 4) / "COMMITTED").unlink()
    code, text = tool("verify", run)
    assert code == 0 and "step-00000004: no COMMITTED" in text
    code, text = tool("verify", checkpoint(run, 4))
    assert code == 1 and "step-00000004: incomplete" in text


def test_verify_misses_no_bytes_that_a_checkpoint_should_have(run: Path, tool: Tool) -> None:
    """Checksums that fit, for files that do not hold every tensor."""
    path = checkpoint(run, 4) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(key for key in metadata.storage_data if key.fqn == "model.norm.weight")
    del metadata.storage_data[index]
    metadata.state_dict_metadata["model.head.weight"].chunks.pop()
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    object.__setattr__(last, "offset", 10**9)
    path.write_bytes(pickle.dumps(metadata))
    reseal(checkpoint(run, 4))
    code, text = tool("verify", checkpoint(run, 4))
    assert code == 1
    assert ".metadata names no file for model.norm.weight at [" in text
    assert "1,024 of the 2,048 elements of model.head.weight" in text
    assert f"{last.relative_path} ends before the bytes of" in text


def test_nothing_in_a_checkpoint_is_run(run: Path, tool: Tool, tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    (checkpoint(run, 4) / ".metadata").write_bytes(pickle.dumps(Planted()))
    reseal(checkpoint(run, 4))
    step, file = checkpoint(run, 4), tmp_path / "out.safetensors"
    for words in (
        ("show", step),
        ("verify", step),
        ("compare", step, step),
        ("consolidate", step, file),
    ):
        code, text = tool(*words)
        assert code == 1 and "posix.mkdir" in text, words
    assert not (tmp_path / "harm").exists() and not file.exists()


# --- comparing -----------------------------------------------------------------------------------


def test_compare_says_what_differs_and_by_how_much(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    step = checkpoint(whole_run, 4)
    assert tool("compare", step, whole_run) == (0, "the same: 68 of 68 tensors are equal\n")

    other = edited(tool, step, tmp_path, lambda tensors: tensors["norm.weight"][3].add_(0.25))
    code, text = tool("compare", step, other)
    assert code == 1
    row = next(line for line in text.splitlines() if "model.norm.weight" in line)
    assert row.split()[1:] == ["values", "0.25", "1"]
    assert "only in A: optimizer.state.embedding.weight.exp_avg\n" in text  # and not in the file
    assert "only in A: 23 more" in text
    assert "different: 20 of 64 tensors are equal" in text
    assert "random generators: not compared, of 4 and of 0 ranks" in text

    same = edited(tool, step, tmp_path, lambda tensors: None)
    for command in ("list", "show", "verify"):  # a file of another program has weights alone
        code, text = tool(command, same.parent)
        assert code == 0 and "complete" in text, command
    assert tool("compare", same, other)[0] == 1
    assert tool("compare", same, other, "--tolerance", 0.25)[0] == 0
    assert tool("compare", same, other, "--tolerance", 0.24)[0] == 1

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"][0] = float("nan")
        tensors["head.weight"] = tensors["head.weight"][1:].clone()
        tensors["embedding.weight"] = tensors["embedding.weight"].bfloat16()
        tensors["new"] = tensors.pop("layers.0.ffn.up.weight")

    spoiled = edited(tool, step, tmp_path, spoil)
    code, text = tool("compare", same, spoiled, "--tolerance", 1e30)
    assert code == 1
    assert "only in A: model.layers.0.ffn.up.weight" in text and "only in B: model.new" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "model." in line}
    assert rows["model.norm.weight"] == ["values", "inf", "1"]
    assert rows["model.head.weight"][:4] == ["shape:", "64x32", "and", "63x32"]
    assert rows["model.embedding.weight"][:4] == ["dtype:", "float32", "and", "bfloat16"]
    assert "different: 17 of 22 tensors are equal" in text
    assert tool("compare", spoiled, spoiled)[0] == 0  # NaN where NaN is


def edited(tool: Tool, source: Path, tmp_path: Path, change: Callable[[Any], Any]) -> Path:
    """A checkpoint with the model of `source` after a change."""
    number = len(list(tmp_path.iterdir()))
    file = tmp_path / f"{number}.safetensors"
    assert tool("consolidate", source, file)[0] == 0
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    assert tool("restore", file, tmp_path / f"{number}-out")[0] == 0
    return tmp_path / f"{number}-out" / "model-00000000"


# --- converting ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_from_a_restored_file_to_the_last_bit(
    saved: Config, tool: Tool, tmp_path: Path
) -> None:
    file, step = tmp_path / "run.safetensors", checkpoint(Path(saved.run_dir), 2)
    code, text = tool("consolidate", step, file, "--optimizer")
    assert code == 0 and "68 tensors" in text
    run = tmp_path / "again"
    code, text = tool("restore", file, run / "checkpoints")
    assert code == 0 and "checkpoint.resume=" in text
    assert tool("compare", step, run)[0] == 0
    assert tool("verify", run)[0] == 0
    assert train_all(replace(saved, run_dir=str(run))) == [""]
    before, after = numbers(Path(saved.run_dir)), numbers(run)
    assert after == {step: before[step] for step in (3, 4)}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_model_alone_in_one_file_and_back(
    dtype: str, whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    assert tool("consolidate", whole_run, file, "--dtype", dtype)[0] == 0
    tensors = load_file(file)
    assert "layers.1.ffn.down.weight" in tensors and len(tensors) == 21
    assert {tensor.dtype for tensor in tensors.values()} == {
        {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    }
    code, text = tool("restore", file, tmp_path)
    assert code == 0 and "checkpoint.start_from=" in text
    assert tool("verify", tmp_path / "model-00000004")[0] == 0
    if dtype == "bf16":  # what the run itself saved in it
        assert tool("compare", tmp_path, whole_run / "checkpoints")[0] == 2  # no step- in there
        theirs = whole_run / "checkpoints" / "model-00000004"
        assert tool("compare", tmp_path / "model-00000004", theirs)[0] == 0


def test_a_number_too_large_for_a_dtype_is_not_made_infinite(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    large = edited(tool, whole_run, tmp_path, lambda tensors: tensors["norm.weight"].fill_(1e6))
    code, text = tool("consolidate", large, tmp_path / "x.safetensors", "--dtype", "fp16")
    assert code == 2 and "model.norm.weight has values too large" in text
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_is_whole_or_not_there(whole_run: Path, tool: Tool, tmp_path: Path) -> None:
    """A disk that is full, damage on the way, and files that must not be lost."""
    file = tmp_path / "out" / "model.safetensors"
    file.parent.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, text = tool("consolidate", whole_run, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "could not be written" in text
    assert list(file.parent.iterdir()) == []

    assert tool("consolidate", whole_run, file)[0] == 0
    before = file.read_bytes()
    code, text = tool("consolidate", whole_run, file)
    assert code == 2 and "exists already" in text and file.read_bytes() == before

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, text = tool("restore", file, tmp_path / "restored")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "could not be written" in text
    assert list((tmp_path / "restored").iterdir()) == []

    data = bytearray(before)
    data[-10] ^= 1
    file.write_bytes(data)
    code, text = tool("restore", file, tmp_path / "restored")
    assert code == 1 and "is damaged" in text
    file.write_bytes(before[:-10])
    assert tool("restore", file, tmp_path / "restored")[0] == 1
    file.write_bytes(before)
    assert tool("restore", file, tmp_path / "restored")[0] == 0
    code, text = tool("restore", file, tmp_path / "restored")
    assert code == 2 and "exists already" in text


def test_a_damaged_checkpoint_is_not_converted(run: Path, tool: Tool, tmp_path: Path) -> None:
    flip(checkpoint(run, 4) / "__1_0.distcp")
    code, text = tool("consolidate", run, tmp_path / "x.safetensors")
    assert code == 1 and "__1_0.distcp does not match the checksum" in text
    assert not (tmp_path / "x.safetensors").exists()
    assert tool("compare", run, checkpoint(run, 2))[0] == 1


def test_checkpoints_elsewhere_are_named_by_url(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    file, there = tmp_path / "run.safetensors", "memory://bucket/run"
    assert tool("consolidate", whole_run, file, "--optimizer")[0] == 0
    assert tool("restore", file, there)[0] == 0
    for command in ("list", "show", "verify"):
        code, text = tool(command, there)
        assert code == 0 and "step-00000004" in text and "complete" in text
    assert tool("compare", whole_run, f"{there}/step-00000004")[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "required: COMMAND"),
        (("list", "nowhere"), "no checkpoint there"),
        (("show", "nowhere"), "no checkpoint there"),
        (("verify", "nowhere"), "no checkpoint there"),
        (("compare", "RUN", "nowhere"), "B=nowhere"),
        (("compare", "RUN", "RUN", "--tolerance", "-1"), "at least 0"),
        (("consolidate", "nowhere", "x.safetensors"), "CHECKPOINT=nowhere"),
        (("consolidate", "RUN", "no/folder/x.safetensors"), "there is no folder"),
        (("consolidate", "RUN", "x", "--dtype", "fp16", "--optimizer"), "write one of the two"),
        (("consolidate", "RUN/checkpoints/model-00000004", "x", "--optimizer"), "model alone"),
        (("consolidate", "RUN", "s3://bucket/x"), "a local path"),
        (("restore", "nowhere.safetensors", "x"), "no such file"),
        (("restore", "RUN", "x"), "no such file"),
        (("list", "nosuch://bucket"), "Protocol not known"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], says: str, whole_run: Path, tool: Tool
) -> None:
    code, text = tool(*(word.replace("RUN", str(whole_run)) for word in words))
    assert code == 2 and says in text
    assert "Traceback" not in text
