"""A failure of verify is shown by a short script, in the smallest model that still fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.families import gpt2, llama
from support.models import tiny
from support.paths import ROOT
from titanlike.core.config import files
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.parse import parse
from titanlike.core.config.schema import Config
from titanlike.proof.repro import scripts, shrunk

SMALL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2"]
SMALL += ["data=synthetic", "data.vocab_size=64", "batch_size=8", "seq_len=16", "logger=none"]
# of tests/faults/*.yaml -> a layout in which it shows
FAULTS = {
    "gradient accumulation forgets a microbatch": "pp=2 dp=2 schedule.microbatches=2",
    "gradients of norms on parts of the sequence are not summed": "tp=2 dp=2",
    "gathered keys get the gradient of the rank's own queries alone": "cp=2 context_parallel=gather",
    "gradients are averaged over data-parallel ranks, not summed": "dp=2 pp=2",
    "a norm counts twice what both tensor-parallel ranks hold": "tp=2 optimizer=sgd "
    "optimizer.clip=0.01",
}
ROWS = {
    row["fault"]: row
    for path in sorted((ROOT / "tests/faults").glob("*.yaml"))
    for row in yaml.safe_load(path.read_text())
}


def python(path: Path, *words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """In a fresh process, with the checkout at `path`."""
    places = os.pathsep.join([str(path), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *words], cwd=at, env=environment, **options)


def repro_of(path: Path, at: Path, *overrides: str) -> str:
    """The script that verify writes."""
    words = ["verify", *overrides, f"run_dir={at / 'run'}", "verify.repro=repro.py"]
    done = python(path, "-m", "titanlike", *words, at=at)
    verdict = files.read_object(at / "run/verify/verdict.json")
    assert "shows it" in verdict["first_difference"]["repro"], done.stdout[-2000:] + done.stderr
    text = (at / "repro.py").read_text()
    assert len(text.splitlines()) <= 40
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.grid if n else ()) for n, f in enumerate(FAULTS)]
)
def test_a_script_shows_a_fault_and_passes_without_it(fault: str, tmp_path: Path) -> None:
    copy, row = tmp_path / "checkout", ROWS[fault]
    for name in ("titanlike", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / row["file"]
    source.write_text(source.read_text().replace(row["replace"], row["by"]))
    text = repro_of(copy, tmp_path, *SMALL, *FAULTS[fault].split())
    assert "'num_hidden_layers': 1" in text and "\n2 processes" in text
    planted = python(copy, "repro.py", at=tmp_path)
    assert planted.returncode == 1 and "FAIL: " in planted.stdout, planted.stderr
    right = python(ROOT, "repro.py", at=tmp_path)
    assert right.returncode == 0 and "PASS: " in right.stdout, right.stdout[-2000:] + right.stderr


@pytest.mark.slow
def test_a_fault_of_the_users_module_is_shown_in_plain_torch(tmp_path: Path) -> None:
    own = ["model=own", "model.name=support.ranked_models.Ranked", *SMALL[3:]]
    text = repro_of(ROOT, tmp_path, "dp=2", *own)
    assert "titanlike." not in text and "from support.ranked_models import Ranked" in text
    assert "'layers': 1" in text
    done = python(ROOT, "repro.py", at=tmp_path)
    assert done.returncode == 1 and "FAIL: gradients differ" in done.stderr


CONFIGS = {
    "llama": tiny(dp=2, pp=2, layers=2, schedule=Schedule("1f1b", 2)),
    "gpt2, clipped": tiny(tp=2, model=gpt2(), optimizer=Sgd(clip=0.01)),
    "own": tiny(dp=2, model=Model("support.ranked_models.Ranked", {"vocab_size": 64})),
}
LOCATED = {
    "first": ["first difference: a gradient", "  rank 1: 2 times"],
    "axis": "fails with dp=2",
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_script_has_the_config_in_forty_lines(config: Config) -> None:
    *plain, text = scripts(config, LOCATED, Path("repro.py"))
    for source in (*plain, text):
        compile(source, "repro.py", "exec")
        assert len(source.splitlines()) <= 40
        assert LOCATED["first"][0] in source
    assert len(plain) == (config is CONFIGS["own"])
    space: dict[str, Any] = {"__name__": "imported"}
    exec(text, space)
    parsed, problems = parse(space["CONFIG"])
    assert not problems
    parsed.model.args = config.model.args | parsed.model.args
    assert parsed == replace(config, run_dir=parsed.run_dir)


def test_a_failing_config_is_reduced() -> None:
    """Layers, sizes and tokens, but not what the fault needs."""
    config = tiny(dp=2, layers=8, model=llama(num_hidden_layers=8, hidden_size=64))

    def fails(config: Config) -> bool:
        args = config.model.args
        return args["num_hidden_layers"] > 1 and args["num_attention_heads"] > 1

    small = shrunk(config, fails)
    sizes = {name: value for name, value in small.model.args.items() if value is not None}
    assert sizes["num_hidden_layers"] == sizes["num_attention_heads"] == 2
    assert (sizes["hidden_size"], small.batch_size, small.seq_len) == (8, 1, 8)
