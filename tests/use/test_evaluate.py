"""How good a trained model is: numbers that plain torch finds, too, written beside the
checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from support.cells import cells, meshes
from support.commands import command
from support.exported import LLAMA, byte_text, trained
from support.world import run_world
from titanlike.core.config.groups.data import StreamData
from titanlike.core.config.groups.jobs import Evaluate, Validation
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.hf.hf_export import export
from titanlike.use import generation_commands as commands
from titanlike.use.checkpoint_jobs import perplexity
from titanlike.use.generate import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("evaluate")
    data = replace(byte_text(folder / "text"), validation_fraction=0.2)
    return trained(folder / "run", LLAMA, data=data)


def by_hand(config: Config) -> tuple[float, int, int]:
    """(nats, tokens, bytes) of all of a run's validation data, a sequence at a time."""
    model = load_model(config.run_dir, CPU, torch.float32).model
    source = open_data(config).validation
    nats = tokens = length = 0.0
    with torch.no_grad():
        for sample in (source[i] for i in range(len(source))):
            logits = model(sample["inputs"][None])[0]
            nats += F.cross_entropy(logits, sample["targets"], reduction="sum").item()
            tokens += len(sample["targets"])
            length += int((sample["targets"] < 256).sum())  # a byte each, but for the boundary
    return nats, int(tokens), int(length)


@pytest.mark.parametrize("layout", cells(meshes("dp=2"), meshes("pp=2 tp=2")))
def test_perplexity_and_bits_a_byte_are_those_of_plain_torch(
    run: Config, layout: Any, tmp_path: Path
) -> None:
    """Of all sequences, also of a last batch that is not full; or of some of them."""
    shutil.copytree(run.run_dir, tmp_path / "run")
    config = replace(run, run_dir=str(tmp_path / "run"), **layout)
    assert len(open_data(config).validation) % config.batch_size
    nats, tokens, length = by_hand(config)
    both = [config, replace(config, evaluate=Evaluate(part="train", batches=2))]
    found, some = run_world(evaluate_each, config, tmp_path / "run" / "perplexity", both)[0]
    assert found["tokens"] == tokens and abs(found["bytes"] - length) < 10
    assert math.isclose(found["loss"], nats / tokens, abs_tol=2e-6)
    assert math.isclose(found["perplexity"], math.exp(nats / tokens), rel_tol=1e-5)
    assert math.isclose(found["bits_per_byte"], nats / math.log(2) / found["bytes"], rel_tol=1e-5)
    assert some["tokens"] == 2 * config.batch_size * config.seq_len
    file = tmp_path / "run" / "checkpoints" / "step-00000001.evaluations.json"
    written = json.loads(file.read_text())
    assert [one["part"] for one in written] == ["validation", "train"]
    assert written[1]["loss"] == some["loss"]


@pytest.mark.parametrize("every", cells({"held out": 1}, {"nothing held out": 0}))
def test_the_held_out_part_of_a_stream_is_evaluated(every: int, tmp_path: Path) -> None:
    """As many samples as the run's own validation had."""
    data = StreamData(path=byte_text(tmp_path).path, readers=2, workers=0)
    validation = Validation(every=every, batches=1)
    run = trained(tmp_path / "run", LLAMA, data=data, validation=validation)
    words = [run.run_dir, "evaluate.part=validation", f"data.path={data.path}"]
    done = command(*words, tool="tools/evaluate.py", cwd=tmp_path)
    if not every:
        assert "validation.every=0: of the stream nothing was held out" in done.stdout + done.stderr
        return
    file = tmp_path / "run" / "checkpoints" / "step-00000001.evaluations.json"
    (result,) = json.loads(file.read_text())
    (last,) = (row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "val_loss" in row)
    assert result["loss"] == pytest.approx(last["val_loss"], abs=2e-6)


def evaluate_each(_: Config, worker: Worker, configs: list[Config]) -> list[dict[str, Any]]:
    found = []
    for number, config in enumerate(configs):
        store = worker.store and dist.PrefixStore(f"{number}", worker.store)
        here = replace(config, run_dir=str(worker.run_dir))
        found.append(perplexity(here, replace(worker, store=store)))
    return found


def test_all_of_the_data_that_are_named_count_also_for_a_folder_of_transformers(
    run: Config, tmp_path: Path
) -> None:
    """Nothing is held out of them, though they have room for one sequence alone."""
    export(run.run_dir, str(tmp_path / "hf"))
    (tmp_path / "a.txt").write_text("one sequence, and more")
    words = ["data.path=a.txt", "seq_len=16"]
    done = command("hf", *words, tool="tools/evaluate.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torchao" not in done.stderr
    (result,) = json.loads((tmp_path / "hf/model.evaluations.json").read_text())
    ids = torch.tensor([256, *(tmp_path / "a.txt").read_bytes()][:17])
    with torch.no_grad():
        logits = load_model(str(tmp_path / "hf"), CPU, torch.float32).model(ids[None, :-1]).logits
    expected = F.cross_entropy(logits[0], ids[1:]).item()
    assert result["tokens"] == 16 and result["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_folder_without_a_run_or_a_missing_harness_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commands.evaluate_main([str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None)
    assert commands.evaluate_main(["run", "--tasks", "hellaswag"]) == 2
    assert "pip install 'titanlike[eval]'" in capsys.readouterr().err


# --- lm-evaluation-harness
# ---------------------------------------------------------------------------


class Asked:
    """As the harness asks for something."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def test_texts_are_scored_as_plain_torch_does(run: Config) -> None:
    """Continuations of different lengths together, whole texts in windows, and up to a stop."""
    pytest.importorskip("lm_eval")
    from titanlike.use.harness import HarnessModel

    one = replace(load_model(run.run_dir, CPU, torch.float32), boundary=256, most_tokens=12)

    def score(ids: list[int], first: int) -> tuple[float, bool]:
        with torch.no_grad():
            lines = one.model(torch.tensor([ids[:-1]]))[0, first - 1 :].log_softmax(-1)
        goals = torch.tensor(ids[first:])
        return lines[range(len(goals)), goals].sum().item(), bool((lines.argmax(-1) == goals).all())

    model = HarnessModel(one, batch=2)
    pairs = [("def", " größe"), ("", "d"), ("\treturn ", "x"), ("a", "b"), ("  ", "a")]
    pairs += [("def größe(x):\n", "return")]
    found = model.loglikelihood([Asked(*pair) for pair in pairs])
    for (before, after), (nats, greedy) in zip(pairs, found, strict=True):
        kept = before.rstrip()  # spaces at its end belong to the answer
        answer = (before[len(kept) :] + after).encode()
        ids = [*([*kept.encode()] or [256]), *answer][-13:]
        expected, best = score(ids, len(ids) - len(answer))
        assert math.isclose(nats, expected, rel_tol=1e-5) and greedy == best, (before, after)
    text = "def größe(x):\n\treturn x, y"
    ids = [256, *text.encode()]
    # each but the last window has 12 new tokens, the last as much context as fits
    ends = [0, 12, 24, len(ids) - 1]
    windows = [(ids[max(0, end - 12) : end + 1], end - begin) for begin, end in pairwise(ends)]
    expected = sum(score(window, len(window) - new)[0] for window, new in windows)
    assert math.isclose(model.loglikelihood_rolling([Asked(text)])[0], expected, rel_tol=1e-5)
    [whole] = model.generate_until([Asked("def", {"max_gen_toks": 6})])
    stop = whole[1]
    [until] = model.generate_until([Asked("def", {"max_gen_toks": 6, "until": stop})])
    assert until == whole.partition(stop)[0]


def test_answers_that_cannot_be_scored_are_reported(run: Config) -> None:
    pytest.importorskip("lm_eval")
    from titanlike.use.harness import HarnessModel

    model = HarnessModel(load_model(run.run_dir, CPU, torch.float32), batch=2)
    for pair, told in (
        (("a", ""), "has 0 tokens"),
        (("a", "b" * 17), "has 17 tokens, and the model"),
    ):
        with pytest.raises(ValueError, match=told):
            model.loglikelihood([Asked(*pair)])
    with pytest.raises(
        ValueError, match="asks for 256 tokens, and the model takes 16; max_gen_toks"
    ):
        model.generate_until([Asked("a", {})])
