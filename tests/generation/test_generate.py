"""Text from trained models: token for token what transformers writes, in one process and in layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.cells import cells
from support.exported import GPT2, LLAMA, MOE, byte_text, trained, with_args
from support.hf_tiny import model_of
from support.saved_runs import numbers, train_all
from support.world import run_world
from titanlike.checkpoint.hf_export import export
from titanlike.config.schema import ChunkedCrossEntropy, Config, Sample
from titanlike.generation.command import main
from titanlike.generation.generate import generate
from titanlike.generation.loaded_model import LoadedModel, load_model
from titanlike.generation.sampling import Sampling, next_tokens
from titanlike.training.sample_job import sample

CPU, GREEDY = torch.device("cpu"), Sampling(temperature=0)
PROMPTS = [list(text.encode()) for text in ("def", "g", "\treturn 'é", "ö", "x = def größe")]
TOKENS = 100


def loaded(location: Path | str) -> LoadedModel:
    return load_model(str(location), CPU, torch.float32)


def by_transformers(folder: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of one prompt alone, which end at no id."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(max_new_tokens=TOKENS)
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
    return found[0, len(prompt) :].tolist()


FAMILIES = cells(
    {
        "gpt2": with_args(GPT2, max_seq_len=128),
    },
    {
        "hf-qwen3": with_args(model_of("qwen3"), max_seq_len=128, vocab_size=257),
        "moe": MOE,
    },
)


@pytest.mark.parametrize("model", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    """Of prompts of different lengths together, with the cache and without."""
    config = trained(tmp_path / "run", model, data=byte_text(tmp_path / "text"), steps=60)
    export(config.run_dir, str(tmp_path / "out"))
    expected = [by_transformers(tmp_path / "out", prompt) for prompt in PROMPTS]
    assert any(len(set(ids)) > 8 for ids in expected), "a model that says one thing proves little"
    for where in (config.run_dir, tmp_path / "out"):
        one = replace(loaded(where), boundary=None)
        assert generate(one, PROMPTS, TOKENS, GREEDY) == expected
    if model.name != "hf":
        assert loaded(config.run_dir).takes_cache
        one = replace(loaded(config.run_dir), boundary=None)
        assert generate(one, PROMPTS, TOKENS, GREEDY, cached=False) == expected
        alone = generate(one, PROMPTS[1:2], TOKENS, GREEDY)
        assert alone == expected[1:2]


def test_a_text_ends_where_a_document_does(tmp_path: Path) -> None:
    config = trained(tmp_path / "run", LLAMA, data=byte_text(tmp_path / "text"))
    one = replace(loaded(config.run_dir), boundary=None)
    whole = generate(one, PROMPTS, 20, GREEDY)
    end = whole[0][7]
    found = generate(replace(one, boundary=end), PROMPTS, 20, GREEDY)
    assert found[0] == whole[0][: whole[0].index(end)]
    for ids, all_of_it in zip(found, whole, strict=True):
        assert ids == (all_of_it[: all_of_it.index(end)] if end in all_of_it else all_of_it)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=3)

    def draw(rows: slice, how: Sampling) -> list[list[int]]:
        random = how.generators(3)[rows]
        return [next_tokens(logits[rows], how, random).tolist() for _ in range(200)]

    together, alone = draw(slice(0, 3), sampling), draw(slice(1, 2), sampling)
    assert [row[1:2] for row in together] == alone
    assert together == draw(slice(0, 3), sampling) != draw(slice(0, 3), replace(sampling, seed=4))
    shares = torch.bincount(torch.tensor([row[0] for row in together]), minlength=50) / 200
    assert (shares - logits[0].softmax(-1)).abs().max() < 0.1
    few = {row[0] for row in draw(slice(0, 3), replace(sampling, top_k=2))}
    assert few == set(logits[0].topk(2).indices.tolist())
    likely = logits[0].softmax(-1).sort(descending=True)
    kept = likely.indices[: int((likely.values.cumsum(0) < 0.7).sum()) + 1]
    nucleus = {row[0] for row in draw(slice(0, 3), replace(sampling, top_p=0.7))}
    assert nucleus == set(kept.tolist())


LAYOUTS = cells(
    {},
    {
        "pp2-tp2": {"pp": 2, "tp": 2},
        "pp2-dp2-chunked": {"pp": 2, "dp": 2, "loss": ChunkedCrossEntropy(chunk=8)},
        "tp2-chunked": {"tp": 2, "loss": ChunkedCrossEntropy(chunk=8)},
    },
    {"dp2-tp2": {"dp": 2, "tp": 2}},
)
TEXTS = ["def", "größe", "\treturn x, y, ", "a", "12", "''"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_runs_own_layout_writes_what_one_process_does(layout: Any, tmp_path: Path) -> None:
    data = byte_text(tmp_path / "text")
    config = trained(tmp_path / "run", LLAMA, data=data, seq_len=96, **layout)
    settings = Sample(prompts=TEXTS, tokens=60, temperature=0)
    config = replace(config, sample=settings)
    found = run_world(sample, config, tmp_path / "run" / "samples")
    one = loaded(tmp_path / "run")
    assert one.coder is not None
    expected = generate(one, [one.coder.encode(text) for text in TEXTS], 60, GREEDY)
    expected_texts = [one.coder.decode(ids) for ids in expected]
    assert found[0]["texts"] == expected_texts
    assert all(one["texts"] == expected_texts for one in found)
    drawn = replace(config, sample=replace(settings, temperature=1.0, tokens=5))
    first, second = (run_world(sample, drawn, tmp_path / "run" / "samples") for _ in range(2))
    assert first[0]["texts"] == second[0]["texts"] != [text[:5] for text in expected_texts]


def test_samples_during_training_change_nothing_of_it(tmp_path: Path) -> None:
    """They are in samples.jsonl and on the console, and the losses are those without them."""
    data = byte_text(tmp_path / "text")
    plain = trained(tmp_path / "plain", LLAMA, data=data, pp=2, seq_len=32)
    plain = replace(plain, steps=4, run_dir=str(tmp_path / "again"))
    settings = Sample(every=2, prompts=["def", "return"], tokens=4)
    sampled = replace(plain, sample=settings, run_dir=str(tmp_path / "sampled"))
    assert train_all(plain) == train_all(sampled) == [""]
    assert numbers(tmp_path / "sampled") == numbers(tmp_path / "again")
    lines = (tmp_path / "sampled" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        *((2, "def"), (2, "return"), (4, "def"), (4, "return")),
    ]
    shown = (tmp_path / "sampled" / "rank0.out").read_text()
    assert "sample at step 4:\n    | def" in shown


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("generate")
    return trained(folder / "run", LLAMA, data=byte_text(folder / "text"))


def test_the_command_prints_prompts_and_texts(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [run.run_dir, "--prompt", "def", "--tokens", "5", "--prompt", "x ="]
    assert main([*words, "temperature=0.5", "top_k=3", "seed=4"]) == 0
    first = capsys.readouterr()
    assert "--- 2 of 2\nx =" in first.out and "tok/s; step 1 of" in first.err
    assert main([*words, "temperature=0.5", "top_k=3", "seed=4", "--no-cache"]) == 0
    assert capsys.readouterr().out == first.out


def test_a_conversation_goes_on_with_what_was_said(
    run: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(["def", " y", "", "def"])
    monkeypatch.setattr("builtins.input", lambda _: _next(said))
    assert main([run.run_dir, "--chat", "--tokens", "6", "temperature=0"]) == 0
    answers = capsys.readouterr().out.splitlines()[1:]
    one = loaded(run.run_dir)
    assert one.coder is not None
    [first] = generate(one, [one.coder.encode("def")], 6, GREEDY)
    assert "\n".join(answers).count(one.coder.decode(first)) >= 2  # before and after the empty line


def _next(said: Any) -> str:
    try:
        return next(said)
    except StopIteration:
        raise EOFError from None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["temprature=0"], "write temperature=0"),
        (["top_p=2"], "write top_p=0.95"),
        (["--tokens", "0"], "write --tokens 200"),
        (["--prompt", ""], "no tokens"),
    ],
)
def test_a_wrong_word_is_told(
    run: Config, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main([run.run_dir, "--prompt", "x", *words]) == 2
    assert told in capsys.readouterr().err
