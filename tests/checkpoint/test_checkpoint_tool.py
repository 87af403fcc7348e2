"""tools/checkpoint.py on the checkpoints of a real run: looking, verifying, consolidating."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from support.paths import ROOT
from support.saved_runs import a_run, checkpoint, edited, flip
from support.saved_state import opened, update
from support.world import run_world
from titanlike.core.checkpoint.discovery import Progress
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.use.checkpoint_commands import main

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


# --- looking -------------------------------------------------------------------------------------


def test_list_shows_every_checkpoint_and_what_is_wrong_with_it(run: Path, tool: Tool) -> None:
    code, text = tool("list", run)
    rows = [line.split() for line in text.splitlines()[2:]]
    names = ["step-00000002", "model-00000004", "step-00000004"]
    assert code == 0 and [row[:2] for row in rows] == [[name, "complete"] for name in names]
    assert [row[2] == "-" for row in rows] == [False, True, False]  # val_loss
    assert all(" dp2 " in line for line in text.splitlines()[2:])
    assert tool("list", run / "checkpoints") == (code, text)

    os.truncate(checkpoint(run, 4) / "rank-00001.safetensors", 100)
    (checkpoint(run, 2) / "COMMITTED").unlink()
    code, text = tool("list", run)
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    states = dict(line.split()[:2] for line in text.splitlines()[2:5])
    assert states == dict(zip(names, ("incomplete", "complete", "damaged"), strict=True))
    assert "step-00000004  rank-00001.safetensors has 100 bytes" in text
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
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "index.json", "state.json"):
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
        "import sys; from titanlike.use.checkpoint_commands import main; run = sys.argv[1]; "
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
    files = [f"rank-0000{rank}.safetensors" for rank in range(2)]
    flip(checkpoint(run, 4) / files[0])
    assert "step-00000004: damaged\n  rank-00000" in tool("verify", run)[1]
    os.truncate(checkpoint(run, 4) / "state.json", 7)
    (checkpoint(run, 4) / files[1]).unlink()
    code, text = tool("verify", run)
    assert code == 1 and text.count(": complete (") == 2
    bad = text[text.index("step-00000004: damaged") :].splitlines()[1:]
    assert {line.split()[0] for line in bad} == {*files, "state.json"}
    assert tool("verify", checkpoint(run, 2))[0] == 0
    (checkpoint(run, 4) / "COMMITTED").unlink()
    code, text = tool("verify", run)
    assert code == 0 and "step-00000004: no COMMITTED" in text
    code, text = tool("verify", checkpoint(run, 4))
    assert code == 1 and "step-00000004: incomplete" in text


# --- converting ----------------------------------------------------------------------------------


def test_a_model_is_consolidated_to_one_file(whole_run: Path, tool: Tool, tmp_path: Path) -> None:
    """In each dtype; as the run itself has saved it in bf16."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        word = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        file = tmp_path / f"{word}.safetensors"
        assert tool("consolidate", whole_run, file, "--dtype", word)[0] == 0
        tensors = load_file(file)
        assert "model.layers.1.mlp.down_proj.weight" in tensors and len(tensors) == 21
        assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    theirs = tmp_path / "theirs.safetensors"
    assert tool("consolidate", whole_run / "checkpoints" / "model-00000004", theirs)[0] == 0
    own, other = load_file(tmp_path / "bf16.safetensors"), load_file(theirs)
    assert all(torch.equal(own[name], other[name]) for name in own | other)
    large = edited(whole_run, tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    code, text = tool("consolidate", large, tmp_path / "x.safetensors", "--dtype", "fp16")
    assert code == 2 and "model.model.norm.weight has values too large" in text
    assert not (tmp_path / "x.safetensors").exists()


def test_a_checkpoint_is_read_by_safetensors_and_by_torch_alone(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    """By the lines of the docs; what torch consolidates has the bits of `consolidate`."""
    step, file = checkpoint(whole_run, 4), tmp_path / "one.safetensors"
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    lines = page.partition("```py\n")[2].partition("```")[0]
    scope: dict[str, Any] = {"folder": step}
    assert lines.count("\n") < 15
    exec(lines, scope)
    assert tool("consolidate", step, file)[0] == 0
    truth = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    found = scope["tensors"]
    names = {name for name in found if name.startswith("model.")}
    assert names == truth.keys() and "optimizer.state.lm_head.weight.exp_avg" in found
    assert all(torch.equal(found[name], truth[name]) for name in truth)

    out = tmp_path / "consolidated"
    out.mkdir()
    consolidate_safetensors_files(str(step), str(out), dict.fromkeys(truth, 1))
    torchs = load_file(out / "model-00001-of-00001.safetensors")
    assert torchs.keys() == truth.keys()
    assert all(torch.equal(torchs[name], truth[name]) for name in truth)

    loaded = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(step)), no_dist=True)
    assert all(torch.equal(loaded[name], truth[name]) for name in truth)


def test_a_consolidated_file_is_complete_or_absent(
    whole_run: Path, tool: Tool, tmp_path: Path
) -> None:
    """A disk that is full, and files that must not be lost."""
    file = tmp_path / "out" / "model.safetensors"
    file.parent.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, text = tool("consolidate", whole_run, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "could not be written" in text and not [*file.parent.iterdir()]
    assert tool("consolidate", whole_run, file)[0] == 0
    before = file.read_bytes()
    code, text = tool("consolidate", whole_run, file)
    assert code == 2 and "exists already" in text and file.read_bytes() == before


MISTAKES = {
    "": "required: COMMAND",
    "list nowhere": "no checkpoint there",
    "list compare": "no checkpoint there",
    "show nowhere": "no checkpoint there",
    "verify nowhere": "no checkpoint there",
    "digest RUN nowhere": "B=nowhere",
    "consolidate nowhere x.safetensors": "CHECKPOINT=nowhere",
    "consolidate RUN no/folder/x.safetensors": "there is no folder",
    "consolidate RUN s3://bucket/x": "a local path",
    "list nosuch://bucket": "are kept in a local folder, or by one of file, ",
}


def test_a_mistake_is_one_line(whole_run: Path, tool: Tool) -> None:
    for words, says in MISTAKES.items():
        code, text = tool(*(word.replace("RUN", str(whole_run)) for word in words.split()))
        assert code == 2 and says in text and "Traceback" not in text, words
