"""tools/checkpoint.py on the checkpoints of a real run: looking, verifying, comparing,
converting."""

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
from safetensors.torch import load_file

from support.paths import ROOT
from support.saved_runs import a_run, checkpoint, edited, reseal
from support.saved_state import load_each, opened, update
from support.world import run_world
from titanlike.checkpoint.commands import main
from titanlike.checkpoint.discovery import Progress
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker

Tool = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of dp2 with checkpoints of steps 2 and 4, and the model alone in bf16."""
    folder = tmp_path_factory.mktemp("tool") / "run"
    config = a_run(folder, dp=2, model_only="bf16")
    run_world(save_twice, config, folder)
    return config


def save_twice(config: Config, worker: Worker) -> None:
    run, checkpointer = opened(config, worker)
    for step in (2, 4):
        update(run)
        checkpointer.save(Progress(step=step), val_loss=1.0 / step)
    checkpointer.finish(Progress(step=4), done=True)


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
    rows = [line.split() for line in text.splitlines()[2:]]
    names = ["step-00000002", "model-00000004", "step-00000004"]
    assert code == 0 and [row[:2] for row in rows] == [[name, "complete"] for name in names]
    assert [row[2] == "-" for row in rows] == [False, True, False]  # val_loss
    assert all(" dp2 " in line for line in text.splitlines()[2:])
    assert tool("list", run / "checkpoints") == (code, text)

    os.truncate(checkpoint(run, 4) / "__1_0.distcp", 100)
    (checkpoint(run, 2) / "COMMITTED").unlink()
    code, text = tool("list", run)
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    states = dict(line.split()[:2] for line in text.splitlines()[2:5])
    assert states == dict(zip(names, ("incomplete", "complete", "damaged"), strict=True))
    assert "step-00000004  __1_0.distcp has 100 bytes" in text
    assert "step-00000002  no COMMITTED: its save was killed" in text

    elsewhere = run.parent / "elsewhere"  # which is not followed, whoever has written it there
    (run / "checkpoints").rename(elsewhere)
    (run / "config.yaml").write_text(f"checkpoint:\n  folder: {elsewhere}\n")
    refused, told = tool("list", run)
    assert refused == 2 and f"if you trust it, write {elsewhere}" in told
    assert tool("list", elsewhere) == (code, text)
    (run / "checkpoints").symlink_to(elsewhere)
    refused, told = tool("list", run)
    assert refused == 2 and f"is a link out of {run}; write {elsewhere}/" in told


def test_show_tells_what_a_checkpoint_holds(whole_run: Path, tool: Tool) -> None:
    code, text = tool("show", whole_run)
    assert code == 0 and max(map(len, text.splitlines())) <= 120
    assert "step        4\n" in text and "2 ranks (dp2), torch" in text
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "state.json"):
        assert name in text
    counts = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.split()}
    # of the optimizer two of each, and one step count
    assert (counts["parameters"], counts["optimizer"]) == ("21", "43")
    assert "model.layers.0" not in text
    code, text = tool("show", checkpoint(whole_run, 2), "--tensors")
    row = next(
        line for line in text.splitlines() if "model.model.layers.1.self_attn.q_proj.weight" in line
    )
    assert row.split()[1:] == ["32", "x", "32", "float32", "4", "KiB"]
    code, text = tool("show", whole_run / "checkpoints" / "model-00000004")
    assert code == 0 and "bfloat16" in text and "optimizer" not in text


def test_list_and_show_import_no_torch(whole_run: Path) -> None:
    """Under a second, on a login node."""
    code = (
        "import sys; from titanlike.checkpoint.commands import main; run = sys.argv[1]; "
        "assert main(['list', run]) == main(['show', run]) == 0; assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(whole_run)]
    done = subprocess.run(command, cwd=ROOT, timeout=30, capture_output=True, text=True)
    assert done.returncode == 0 and "step-00000004" in done.stdout and not done.stderr


# --- verifying -----------------------------------------------------------------------------------


def test_verify_reads_all_and_names_each_bad_file(run: Path, tool: Tool) -> None:
    """A leftover of a save that was killed harms no run; asked for alone, it is incomplete."""
    code, text = tool("verify", run)
    assert code == 0 and text.count("complete (5 files") == 3
    flip(checkpoint(run, 4) / "__0_0.distcp")
    os.truncate(checkpoint(run, 4) / "pieces.json", 7)
    (checkpoint(run, 4) / "__1_0.distcp").unlink()
    code, text = tool("verify", run)
    assert code == 1 and text.count(": complete (") == 2
    bad = text[text.index("step-00000004: damaged") :].splitlines()[1:]
    assert [line.split()[0] for line in bad] == ["__0_0.distcp", "__1_0.distcp", "pieces.json"]
    assert tool("verify", checkpoint(run, 2))[0] == 0
    (checkpoint(run, 4) / "COMMITTED").unlink()
    code, text = tool("verify", run)
    assert code == 0 and "step-00000004: no COMMITTED" in text
    code, text = tool("verify", checkpoint(run, 4))
    assert code == 1 and "step-00000004: incomplete" in text


def test_verify_misses_no_bytes_that_a_checkpoint_should_have(run: Path, tool: Tool) -> None:
    """Checksums that fit, for files that do not hold every tensor."""
    path = checkpoint(run, 4) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(key for key in metadata.storage_data if key.fqn == "model.model.norm.weight")
    del metadata.storage_data[index]
    metadata.state_dict_metadata["model.lm_head.weight"].chunks.pop()
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    object.__setattr__(last, "offset", 10**9)
    path.write_bytes(pickle.dumps(metadata))
    reseal(checkpoint(run, 4))
    code, text = tool("verify", checkpoint(run, 4))
    assert code == 1
    assert ".metadata names no file for model.model.norm.weight at [" in text
    assert "1,024 of the 2,048 elements of model.lm_head.weight" in text
    assert f"{last.relative_path} ends before the bytes of" in text


def test_nothing_damaged_or_planted_is_read_or_run(run: Path, tool: Tool, tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    step, file = checkpoint(run, 4), tmp_path / "out.safetensors"
    flip(checkpoint(run, 2) / "__1_0.distcp")
    (step / ".metadata").write_bytes(pickle.dumps(Planted()))
    reseal(step)
    for folder, says in ((step, "posix.mkdir"), (checkpoint(run, 2), "__1_0.distcp does not")):
        for words in (("verify", folder), ("compare", folder, step), ("consolidate", folder, file)):
            code, text = tool(*words)
            assert code == 1 and says in text, words
    code, text = tool("show", step)
    assert code == 1 and "posix.mkdir" in text
    assert not (tmp_path / "harm").exists() and not file.exists()


# --- comparing -----------------------------------------------------------------------------------


def test_compare_says_what_differs_and_by_how_much(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    step = checkpoint(whole_run, 4)
    assert tool("compare", step, whole_run) == (0, "the same: 66 of 66 tensors are equal\n")

    other = edited(step, tmp_path, lambda tensors: tensors["model.norm.weight"][3].add_(0.25))
    code, text = tool("compare", step, other)
    row = next(line for line in text.splitlines() if "model.model.norm.weight" in line)
    assert code == 1 and row.split()[1:] == ["values", "0.25", "1"]
    assert (
        "only in A: optimizer.state.model.embed_tokens.weight.exp_avg\n" in text
    )  # and not in the file
    assert "only in A: 23 more" in text
    assert "different: 20 of 64 tensors are equal" in text
    assert "random generators: not compared, of 2 and of 0 ranks" in text

    same = edited(step, tmp_path, lambda tensors: None)
    for command in ("list", "show", "verify"):  # a file of another program has weights alone
        code, text = tool(command, same.parent)
        assert code == 0 and "complete" in text, command
    for tolerance, code in ((0, 1), (0.25, 0), (0.24, 1)):
        assert tool("compare", same, other, "--tolerance", tolerance)[0] == code

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] = float("nan")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].clone()
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        tensors["new"] = tensors.pop("model.layers.0.mlp.up_proj.weight")

    spoiled = edited(step, tmp_path, spoil)
    code, text = tool("compare", same, spoiled, "--tolerance", 1e30)
    assert code == 1 and "different: 17 of 22 tensors are equal" in text
    assert (
        "only in A: model.model.layers.0.mlp.up_proj.weight" in text
        and "only in B: model.new" in text
    )
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "model." in line}
    assert rows["model.model.norm.weight"] == ["values", "inf", "1"]
    assert rows["model.lm_head.weight"][:4] == ["shape:", "64x32", "and", "63x32"]
    assert rows["model.model.embed_tokens.weight"][:4] == ["dtype:", "float32", "and", "bfloat16"]
    assert tool("compare", spoiled, spoiled)[0] == 0  # NaN where NaN is


# --- converting ----------------------------------------------------------------------------------


def test_a_run_converted_to_one_file_and_back_is_the_same(
    saved: Config, tool: Tool, tmp_path: Path
) -> None:
    """In a folder, or at a URL; it goes on from there."""
    file, step = tmp_path / "run.safetensors", checkpoint(Path(saved.run_dir), 2)
    code, text = tool("consolidate", step, file, "--optimizer")
    assert code == 0 and "66 tensors" in text
    for there in (tmp_path / "again" / "checkpoints", "memory://bucket/run"):
        code, text = tool("restore", file, there)
        assert code == 0 and "checkpoint.resume=" in text
        assert tool("compare", step, f"{there}/step-00000002")[0] == 0
        for command in ("list", "show", "verify"):
            code, text = tool(command, there)
            assert code == 0 and "step-00000002" in text and "complete" in text
    again = replace(saved, dp=1, run_dir=str(tmp_path / "again"))
    [[loaded]] = run_world(load_each, again, tmp_path / "ranks", [again])
    assert (loaded.step, loaded.error) == (2, "")


def test_a_model_converted_to_one_file_and_back_is_the_same(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        word = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        file = tmp_path / f"{word}.safetensors"
        assert tool("consolidate", whole_run, file, "--dtype", word)[0] == 0
        tensors = load_file(file)
        assert "model.layers.1.mlp.down_proj.weight" in tensors and len(tensors) == 21
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
        code, text = tool("restore", file, tmp_path / word)
        assert code == 0 and "checkpoint.start_from=" in text
        assert tool("verify", tmp_path / word)[0] == 0
    theirs = whole_run / "checkpoints" / "model-00000004"  # what the run itself saved in bf16
    assert tool("compare", tmp_path / "bf16" / "model-00000004", theirs)[0] == 0
    large = edited(whole_run, tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    code, text = tool("consolidate", large, tmp_path / "x.safetensors", "--dtype", "fp16")
    assert code == 2 and "model.model.norm.weight has values too large" in text
    assert not (tmp_path / "x.safetensors").exists()


def test_a_converted_file_is_complete_or_absent(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    """A disk that is full, damage on the way, and files that must not be lost."""
    file, restored = tmp_path / "out" / "model.safetensors", tmp_path / "restored"
    file.parent.mkdir()

    def on_a_full_disk(*words: Any) -> tuple[int, str]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            return tool(*words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    code, text = on_a_full_disk("consolidate", whole_run, file)
    assert code == 2 and "could not be written" in text and not [*file.parent.iterdir()]
    assert tool("consolidate", whole_run, file)[0] == 0
    before = file.read_bytes()
    code, text = tool("consolidate", whole_run, file)
    assert code == 2 and "exists already" in text and file.read_bytes() == before
    code, text = on_a_full_disk("restore", file, restored)
    assert code == 2 and "could not be written" in text and not [*restored.iterdir()]
    flip(file)
    code, text = tool("restore", file, restored)
    assert code == 1 and "is damaged" in text
    file.write_bytes(before[:-10])
    assert tool("restore", file, restored)[0] == 1
    file.write_bytes(before)
    assert tool("restore", file, restored)[0] == 0
    code, text = tool("restore", file, restored)
    assert code == 2 and "exists already" in text


MISTAKES = {
    "": "required: COMMAND",
    "list nowhere": "no checkpoint there",
    "show nowhere": "no checkpoint there",
    "verify nowhere": "no checkpoint there",
    "compare RUN nowhere": "B=nowhere",
    "compare RUN RUN --tolerance -1": "at least 0",
    "consolidate nowhere x.safetensors": "CHECKPOINT=nowhere",
    "consolidate RUN no/folder/x.safetensors": "there is no folder",
    "consolidate RUN x --dtype fp16 --optimizer": "write one of the two",
    "consolidate RUN/checkpoints/model-00000004 x --optimizer": "model alone",
    "consolidate RUN s3://bucket/x": "a local path",
    "restore nowhere.safetensors x": "no such file",
    "restore RUN x": "no such file",
    "list nosuch://bucket": "are kept in a local folder, or by one of file, ",
}


def test_a_mistake_is_one_line(whole_run: Path, tool: Tool) -> None:
    for words, says in MISTAKES.items():
        code, text = tool(*(word.replace("RUN", str(whole_run)) for word in words.split()))
        assert code == 2 and says in text and "Traceback" not in text, words
