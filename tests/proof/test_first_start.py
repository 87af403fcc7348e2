"""Code from outside of titanlike is compared with one process before a layout of it is trained."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.cells import slow
from support.commands import TINY, command
from support.models import tiny
from titanlike.core.config.groups.jobs import Verify
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.imports import outside_code
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.proof import first_start
from titanlike.proof.first_start import LIMIT
from titanlike.run.job import JobRunner

MODELS = """
import torch
from torch import nn
from titanlike.core.models.llama import Llama

class Right(Llama):
    pass

class Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.01 * gradient.mean(0, keepdim=True)

class Mixed(Llama):
    def forward(self, ids, **fields):
        return Balanced.apply(super().forward(ids, **fields))

class Gated(Llama):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, ids, **fields):
        x = super().forward(ids, **fields)
        return x + self.gate * x.mean(0, keepdim=True)
"""
SIZES = [f"+{word}" for word in TINY if word.startswith("model.")] + ["+model.vocab_size=null"]
OTHERS = [word for word in TINY if not word.startswith("model.")]


def trained(name: str, *words: str, cwd: Path) -> tuple[int, str]:
    """(exit code, all that is said) of a short run of one of MODELS."""
    (cwd / "mine.py").write_text(MODELS)
    own = ["model=own", f"model.name=mine.{name}", *SIZES]
    done = command(*OTHERS, *own, "data=synthetic", "steps=1", "run_dir=run", *words, cwd=cwd)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_custom_code_is_verified_once_for_each_layout_and_source(tmp_path: Path) -> None:
    code, text = trained("Right", "dp=2", cwd=tmp_path)
    assert code == 0 and "verified: 3 steps are those of one process in fp32 (" in text, text
    assert json.loads((tmp_path / "run" / "result.json").read_text())["verification"] in text
    shutil.rmtree(tmp_path / "run")
    code, text = trained("Right", "dp=2", "seed=3", "precision=bf16", cwd=tmp_path)
    assert code == 0 and "verified before" in text
    config = tiny(dp=2, model=Custom("support.planned_models.Own", {"vocab_size": None}))
    code = outside_code(config)
    key = first_start._verdict_key(config, code)
    assert key == first_start._verdict_key(tiny(dp=2, model=config.model, steps=9), code)
    assert key != first_start._verdict_key(tiny(pp=2, model=config.model), code)


@pytest.mark.parametrize(
    "name, layout", [("Mixed", "dp=2"), *slow(("Mixed", "pp=2"), ("Gated", "dp=2"))]
)
def test_a_layout_that_trains_another_model_is_not_started(
    name: str, layout: str, tmp_path: Path
) -> None:
    """What is mixed in the gradient alone, or behind a gate that begins at 0, no check sees."""
    code, text = trained(name, layout, cwd=tmp_path)
    assert code == 2, text
    assert "in this layout it does not train as in one process: " in text or "mixes the" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    if layout == "pp=2":
        assert "DIFFERS" in text and "verify=off" in text
        code, text = trained(name, layout, "verify=off", cwd=tmp_path)
        assert code == 0 and "training complete" in text


@pytest.mark.parametrize(
    "config, code",
    [
        (tiny(dp=2), {}),
        (tiny(dp=2, optimizer=Sgd(), verify=Verify("required")), {}),
        (tiny(dp=2, lr=Custom("mine.rate")), {}),
        (tiny(dp=2, loss=Custom("mine.loss")), {"loss.name": "mine.loss"}),
        (tiny(dp=2, data=Custom("mine.rows")), {"data.name": "mine.rows"}),
    ],
)
def test_built_in_models_need_no_first_verification(config: Config, code: dict[str, str]) -> None:
    assert outside_code(config) == code
    asked = code or config.verify.name == "required"
    job = JobRunner("titanlike.core.training.loop.train", "").job_of(config)
    assert job == (
        "titanlike.proof.first_start.train" if asked else "titanlike.core.training.loop.train"
    )
    assert JobRunner(job, "").job_of(replace(config, dp=1)) == job  # nothing is divided


def test_a_layout_too_large_for_one_process_is_skipped_with_a_reason(tmp_path: Path) -> None:
    worker = Worker(0, 2, 0, 2, tmp_path, None, [])
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 8000,
    }
    model = Custom("titanlike.core.models.llama.Llama", {**sizes, "num_hidden_layers": 8})
    long = first_start._too_much(tiny(dp=2, model=model, seq_len=512), worker)
    assert long.startswith("one process would take ") and int(long.split()[4]) > LIMIT
    large = Custom(
        "titanlike.core.models.llama.Llama",
        {**sizes, "num_hidden_layers": 250, "hidden_size": 16384, "intermediate_size": 65536},
    )
    assert "too large" in first_start._too_much(tiny(dp=2, model=large), worker)
    assert first_start._too_much(tiny(dp=2), worker) == ""
    note = first_start._not_verified(tiny(dp=2), long)
    assert note.startswith(
        "this layout is not verified against one process (one process"
    ) and re.search(r"(tools/verify\.py|titanlike verify)` with the same overrides", note)
