"""Whole commands, as a user types them: the main job, the proof, the bench, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TINY = [
    "model.dim=32",
    "model.ffn_dim=64",
    "model.layers=8",
    "seq_len=16",
    "steps=5",
    "validation.every=0",
    "checkpoint.last=false",
    "logger=none",
]


def command(*words: str, cwd: Path, tool: str = "train.py", timeout: float = 120):
    """Run train.py or a tool with these overrides; the finished process."""
    launcher = [sys.executable]
    if words and words[0] == "torchrun":
        words, launcher = words[1:], TORCHRUN
    return subprocess.run(
        [*launcher, str(ROOT / tool), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").open()]


def test_the_main_job_learns_in_two_minutes_and_says_how_to_go_on(tmp_path: Path) -> None:
    start = time.monotonic()
    done = command("run_dir=run", cwd=tmp_path, timeout=240)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert records[0]["loss"] == pytest.approx(5.6, abs=0.2)  # nats a byte, knowing nothing
    assert records[-1]["val_loss"] < 2.0
    assert seconds < 120
    keys = [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_second",
        "step_seconds",
        "memory_bytes",
    ]
    assert list(records[0])[: len(keys)] == keys
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["value"]) == ("completed", records[-1]["val_loss"])
    assert (tmp_path / "run" / "checkpoints" / "step-00000300" / "COMMITTED").exists()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"train on: python train.py --config-path {tmp_path / 'run'} steps=600"


def test_the_line_that_a_run_ends_with_trains_on(tmp_path: Path) -> None:
    first = command(*TINY, "checkpoint.last=true", "run_dir=a b", cwd=tmp_path)
    line = first.stdout.strip().splitlines()[-1].removeprefix("train on: python train.py ")
    on = subprocess.run(
        f"{sys.executable} {ROOT / 'train.py'} {line}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert on.returncode == 0, on.stderr
    assert "going on from step 5" in on.stdout
    assert len(losses(tmp_path / "a b")) == 10


def test_torchrun_with_its_default_of_one_process_trains_on_eight(tmp_path: Path) -> None:
    words = [*TINY, "batch_size=16"]
    one = command(*words, "run_dir=one", cwd=tmp_path)
    eight = command(
        "torchrun",
        *words,
        "pp=4",
        "dp=2",
        "schedule=interleaved1f1b",
        "run_dir=eight",
        cwd=tmp_path,
    )
    assert one.returncode == eight.returncode == 0, eight.stderr
    assert losses(tmp_path / "eight") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_verify_leaves_a_runs_files_alone_and_ends_with_a_verdict(tmp_path: Path) -> None:
    command(*TINY, "run_dir=run", cwd=tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    words = [*TINY, "run_dir=run", "pp=2", "dp=2"]
    done = command(*words, tool="tools/verify.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASS")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == before


def test_bench_measures_a_command_beside_a_plain_loop(tmp_path: Path) -> None:
    done = command("steps=4", "logger=none", tool="tools/bench.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for label in ("tokens/s", "step", "first step done", "peak memory a rank", "ours / plain"):
        assert label in done.stdout


@pytest.mark.slow
def test_the_framework_costs_at_most_3_percent(tmp_path: Path) -> None:
    done = command("steps=60", "logger=none", tool="tools/bench.py", cwd=tmp_path, timeout=300)
    ratio = float(done.stdout.strip().splitlines()[-1].split()[-1])
    assert ratio < 1.03


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    saving = ["checkpoint.every=2", "checkpoint.last=true", "run_dir=run"]
    command(*TINY, *saving, cwd=tmp_path)
    folder = tmp_path / "run" / "checkpoints" / "step-00000005"
    next(folder.glob("*.distcp")).write_bytes(b"short")
    done = command(*TINY, *saving, "steps=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {folder} is damaged: __0_0.distcp has 5 bytes" in done.stdout
    assert "going on from step 4" in done.stdout


def test_a_run_does_not_start_before_checkpoints_that_are_there(tmp_path: Path) -> None:
    saving = ["checkpoint.every=2", "run_dir=run"]
    command(*TINY, *saving, cwd=tmp_path)
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for resume in ("never", "run/checkpoints/step-00000002"):
        done = command(*TINY, *saving, f"checkpoint.resume={resume}", cwd=tmp_path)
        assert done.returncode == 2
        assert "another run_dir" in done.stderr
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == kept


def test_a_named_checkpoint_is_gone_on_from_in_another_folder(tmp_path: Path) -> None:
    saving = ["checkpoint.every=2", "steps=4"]
    command(*TINY, *saving, "run_dir=one", cwd=tmp_path)
    words = ["checkpoint.resume=one/checkpoints/step-00000002", "run_dir=two"]
    done = command(*TINY, *saving, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == losses(tmp_path / "one")[2:]


def test_a_folder_that_cannot_be_written_is_a_mistake_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command(*TINY, "run_dir=file", cwd=tmp_path)
    assert done.returncode == 2
    assert "run_dir=" in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_ends_a_mesh_at_once_and_is_written_down(tmp_path: Path) -> None:
    words = [*TINY, "pp=2", "steps=100000", "run_dir=run"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
