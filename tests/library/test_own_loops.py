"""The programs in examples/ run, also where titanlike is installed and there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from support.commands import TINY, TORCHRUN
from support.forked import run
from support.paths import ROOT

SMALL = [word for word in TINY if not re.match("steps|validation|checkpoint", word)]


def example(name: str, ranks: int, folder: Path, *words: str) -> str:
    """What an example prints under torchrun."""
    shutil.copy(ROOT / "examples" / name, folder)
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks), name]
    done = run([*launcher, *words], folder, {**os.environ, "PYTHONPATH": str(ROOT)}, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_custom_script_trains_and_resumes_in_another_layout(tmp_path: Path) -> None:
    words = [*SMALL, "batch_size=8", "device=cpu", "run_dir=run"]
    text = example("own_loop.py", 2, tmp_path, *words, "pp=2", "steps=2")
    assert re.findall(r"step (\d+): loss 5\.", text) == ["1", "2"]
    assert "run/checkpoints/step-00000002" in text and "validation loss 5." in text
    text = example("own_loop.py", 1, tmp_path, *words, "steps=3")
    assert re.findall(r"step (\d+): loss 5\.", text) == ["3"]


@pytest.mark.slow
def test_a_smaller_model_learns_the_logits_of_a_pipelined_one(tmp_path: Path) -> None:
    text = example("distillation.py", 2, tmp_path)
    losses = [float(loss) for loss in re.findall(r"divergence (.*)", text)]
    assert len(losses) == 20 and losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_a_notebook_shows_losses_and_the_schedule(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "losses.ipynb", as_version=4)
    settings = {"resources": {"metadata": {"path": str(tmp_path)}}, "timeout": 120}
    NotebookClient(notebook, kernel_name="python3", **settings).execute()
    shown = [
        output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    assert any("image/png" in data for data in shown)  # the losses
    assert any("rank 3" in data.get("image/svg+xml", "") for data in shown)  # the order
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert len(pages) == 2 and all("<svg" in page for page in pages)  # the run, the plan
