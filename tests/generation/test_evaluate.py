"""How good a trained model is: numbers that plain torch finds, too, written beside the checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml

from support.cells import cells
from support.exported import LLAMA, byte_text, trained
from support.world import run_world
from titanlike.checkpoint.hf_export import export
from titanlike.config.schema import Config, Evaluate
from titanlike.data.loader import open_data
from titanlike.generation import evaluate
from titanlike.generation.loaded_model import load_model
from titanlike.training.evaluate_job import perplexity

CPU = torch.device("cpu")


def by_hand(config: Config) -> tuple[float, int, int]:
    """(nats, tokens, bytes) of all of a run's validation data, a sequence at a time."""
    model, source = (
        load_model(config.run_dir, CPU, torch.float32).model,
        open_data(config).validation,
    )
    nats = tokens = length = 0.0
    with torch.no_grad():
        for sample in (source[i] for i in range(len(source))):
            logits = model(sample["inputs"][None])[0]
            nats += F.cross_entropy(logits, sample["targets"], reduction="sum").item()
            tokens += len(sample["targets"])
            length += int((sample["targets"] < 256).sum())  # a byte each, but for the boundary
    return nats, int(tokens), int(length)


LAYOUTS = cells({"pp2-dp2": {"pp": 2, "dp": 2}}, {"tp2": {"tp": 2}, "one": {}})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_perplexity_and_bits_a_byte_are_those_of_plain_torch(layout: Any, tmp_path: Path) -> None:
    """Of all sequences, also of a last batch that is not full."""
    data = replace(byte_text(tmp_path / "text"), validation_fraction=0.2)
    config = trained(tmp_path / "run", LLAMA, data=data, **layout)
    assert len(open_data(config).validation) % config.batch_size
    nats, tokens, length = by_hand(config)
    found = run_world(perplexity, config, tmp_path / "run" / "perplexity")[0]
    assert found["tokens"] == tokens and abs(found["bytes"] - length) < 10
    assert math.isclose(found["loss"], nats / tokens, abs_tol=2e-6)
    assert math.isclose(found["perplexity"], math.exp(nats / tokens), rel_tol=1e-5)
    assert math.isclose(found["bits_per_byte"], nats / math.log(2) / found["bytes"], rel_tol=1e-5)
    some = replace(config, evaluate=Evaluate(part="train", batches=2))
    found = run_world(perplexity, some, tmp_path / "run" / "perplexity")[0]
    assert found["tokens"] == 2 * config.batch_size * config.seq_len
    file = tmp_path / "run" / "checkpoints" / "step-00000001.evaluations.json"
    written = json.loads(file.read_text())
    assert [one["part"] for one in written] == ["validation", "train"]
    assert written[1]["loss"] == found["loss"]


# --- lm-evaluation-harness ---------------------------------------------------------------------------


def test_without_the_harness_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    assert evaluate.main(["run", "--tasks", "hellaswag"]) == 2
    assert "pip install 'titanlike[eval]'" in capsys.readouterr().err


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
    (tmp_path / "config.json").touch()
    assert evaluate.main([str(tmp_path)]) == 2
    assert f"model.path={tmp_path}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_of_ones_own_gives_what_the_harness_finds_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices, whole texts and generated ones; nothing is downloaded."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    config = trained(tmp_path / "run", LLAMA, data=byte_text(tmp_path / "text"), steps=30)
    export(config.run_dir, str(tmp_path / "out"))
    rows = [
        {"q": "def größ", "c": ["e():", "zz"], "a": 0},
        {"q": "\treturn ", "c": ["b", "'é'"], "a": 1},
        {"q": "def", "c": [" größe", "größe"], "a": 0},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
    }
    kinds: dict[str, dict[str, Any]] = {
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{c}}",
            "target_delimiter": "",
            "doc_to_target": "{{a}}",
            "metric_list": [{"metric": "acc"}],
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}{{c[0]}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
        "written": {
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "e():",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    (tmp_path / "tasks").mkdir()
    for name, kind in kinds.items():
        text = yaml.safe_dump({"task": name, **common, **kind})
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text)
    words = ["--tasks", ",".join(kinds), "--task-files", str(tmp_path / "tasks"), "--batch", "2"]
    found = []
    for where, file in (
        ("run", tmp_path / "run" / "checkpoints" / "step-00000001.evaluations.json"),
        ("out", tmp_path / "out" / "model.evaluations.json"),
    ):
        assert evaluate.main([str(tmp_path / where), *words]) == 0, capsys.readouterr().err
        file = next(file.parent.glob("*.evaluations.json"))
        found.append(json.loads(file.read_text())[0]["results"])
    assert found[0]["choices"]["acc"] == found[1]["choices"]["acc"] > 0.5
    bits = [one["texts"]["bits_per_byte"] for one in found]
    assert math.isclose(*bits, rel_tol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()

    def score(before: str, after: str) -> float:
        """Log-probability of bytes after others, or after the token between documents."""
        first = list(before.encode()) or [256]
        ids = torch.tensor(first + list(after.encode()))
        with torch.no_grad():
            scores = theirs(ids[None, :-1]).logits[0, len(first) - 1 :].log_softmax(-1)
        return scores.gather(-1, ids[len(first) :, None]).sum().item()

    right = [score(r["q"], r["c"][r["a"]]) > score(r["q"], r["c"][1 - r["a"]]) for r in rows]
    assert found[0]["choices"]["acc"] == sum(right) / len(rows)
    texts = [row["q"] + row["c"][0] for row in rows]
    nats, length = sum(score("", text) for text in texts), sum(len(t.encode()) for t in texts)
    assert math.isclose(bits[0], -nats / math.log(2) / length, rel_tol=1e-4)
    assert found[0]["written"] == found[1]["written"]
    assert evaluate.main([str(tmp_path / "run"), "--tasks", "no_such", *words[2:]]) == 2
    assert "no such task" in capsys.readouterr().err
