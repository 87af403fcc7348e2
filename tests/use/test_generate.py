"""Text from trained models: token for token what transformers writes, in one process and in
layouts."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.cells import cells, meshes
from support.exported import GPT2, LLAMA, MOE, byte_text, trained, with_args
from support.families import deepseek, gpt_oss
from support.hf_tiny import SIZES, model_of
from support.records import numbers
from support.saved_runs import a_run, train_all
from support.tokenizers import write_tokenizer
from support.world import run_world
from titanlike.core.config.groups.jobs import Sample
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.schema import Config
from titanlike.hf.hf_export import export
from titanlike.use.checkpoint_jobs import sample
from titanlike.use.generate import LoadedModel, generate, load_model
from titanlike.use.generation_commands import generate_main as main
from titanlike.use.sampling import Sampling, next_tokens

CPU, GREEDY = torch.device("cpu"), Sampling(temperature=0)
PROMPTS = [list(text.encode()) for text in ("def", "g", "\treturn 'é", "ö", "x = def größe")]
TOKENS = 50


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
    {"gpt2": with_args(GPT2, n_positions=128)},
    {
        "hf-qwen3": with_args(model_of("qwen3"), max_seq_len=128, vocab_size=257),
        "moe": MOE,
        "latent attention": deepseek(),
        "sinks": gpt_oss(),
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
        assert not any(module.training for module in one.model.modules())
        assert generate(one, PROMPTS, TOKENS, GREEDY) == expected
    if model.name != "hf":
        assert loaded(config.run_dir).takes_cache
        one = replace(loaded(config.run_dir), boundary=None)
        assert generate(one, PROMPTS, TOKENS, GREEDY, cached=False) == expected
        alone = generate(one, PROMPTS[1:2], TOKENS, GREEDY)
        assert alone == expected[1:2]


def test_what_is_drawn_depends_on_the_seed_and_the_place_among_prompts() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    sampling = Sampling(temperature=1.0, top_p=1.0, seed=3)

    def draw(rows: slice, how: Sampling, of: torch.Tensor = logits) -> list[list[int]]:
        random = how.generators(3)[rows]
        return [next_tokens(of[rows], how, random).tolist() for _ in range(200)]

    every = slice(0, 3)
    together, alone = draw(every, sampling), draw(slice(1, 2), sampling)
    assert [row[1:2] for row in together] == alone
    assert together == draw(every, sampling) != draw(every, replace(sampling, seed=4))
    same = draw(every, sampling, logits[:1].expand(3, -1))  # one prompt, three texts
    assert [row[0] for row in same] != [row[1] for row in same] != [row[2] for row in same]
    shares = torch.bincount(torch.tensor([row[0] for row in together]), minlength=50) / 200
    assert (shares - logits[0].softmax(-1)).abs().max() < 0.1
    few = {row[0] for row in draw(every, replace(sampling, top_k=2))}
    assert few == set(logits[0].topk(2).indices.tolist())
    likely = logits[0].softmax(-1).sort(descending=True)
    kept = likely.indices[: int((likely.values.cumsum(0) < 0.7).sum()) + 1]
    nucleus = {row[0] for row in draw(every, replace(sampling, top_p=0.7))}
    assert nucleus == set(kept.tolist())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("generate")
    return trained(folder / "run", LLAMA, data=byte_text(folder / "text"), seq_len=32)


TEXTS = ["def", "größe", "\treturn x, y, ", "a", "12", "''"]
CHUNKED = {"loss": ChunkedCrossEntropy(chunk=8)}
LAYOUTS = meshes("tp=2")
MORE_LAYOUTS = {"pp=2 tp=2, chunked": {"pp": 2, "tp": 2, **CHUNKED}}
LAST_LAYOUTS = {"pp=2 dp=2, chunked": {"pp": 2, "dp": 2, **CHUNKED}}


@pytest.mark.parametrize("layout", cells(LAYOUTS, MORE_LAYOUTS, LAST_LAYOUTS))
def test_sampling_in_a_runs_layout_matches_one_process(
    run: Config, layout: Any, tmp_path: Path
) -> None:
    shutil.copytree(run.run_dir, tmp_path / "run")
    settings = Sample(prompts=TEXTS, tokens=8, temperature=0)
    config = replace(run, **layout, sample=settings)
    found = run_world(sample, config, tmp_path / "run" / "samples")
    one = loaded(tmp_path / "run")
    assert one.coder is not None
    expected = generate(one, [one.coder.encode(text) for text in TEXTS], 8, GREEDY)
    texts = [one.coder.decode(ids) for ids in expected]
    assert len(set(texts)) > 1 and [ranks["texts"] for ranks in found] == [texts] * len(found)


def test_sampling_during_training_does_not_change_losses(tmp_path: Path) -> None:
    """They are in samples.jsonl and on the console, and the losses are those without them."""
    model = with_args(model_of("gpt2", resid_pdrop=0.3), vocab_size=257)
    plain = a_run(tmp_path / "plain", steps=4)
    plain = replace(plain, model=model, data=byte_text(tmp_path / "text"))
    settings = Sample(every=2, prompts=["def", "return"], tokens=4)
    sampled = replace(plain, sample=settings, run_dir=str(tmp_path / "sampled"))
    assert train_all(plain, sampled, folder=tmp_path / "out") == ["", ""]
    assert numbers(tmp_path / "sampled") == numbers(tmp_path / "plain")
    lines = (tmp_path / "sampled" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row["prompt"]) for row in rows] == [
        *((2, "def"), (2, "return"), (4, "def"), (4, "return")),
    ]
    assert "sample at step 4:\n    | def" in (tmp_path / "out" / "rank0.out").read_text()


# --- the command ----------------------------------------------------------------------------------


def test_a_text_ends_where_a_document_does(run: Config) -> None:
    one = replace(loaded(run.run_dir), boundary=None)
    whole = generate(one, PROMPTS, 20, GREEDY)
    end = whole[0][7]
    found = generate(replace(one, boundary=end), PROMPTS, 20, GREEDY)
    assert found == [ids[: ids.index(end)] if end in ids else ids for ids in whole]
    assert len({len(ids) for ids in found}) > 1


def test_the_command_prints_prompts_and_texts(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [run.run_dir, "--prompt", "def", "--tokens", "5", "--prompt", "x ="]
    assert main([*words, "temperature=0.5", "top_k=3", "seed=4"]) == 0
    first = capsys.readouterr()
    assert "--- 2 of 2\nx =" in first.out and "tok/s; step 1 of" in first.err
    assert main([*words, "temperature=0.5", "top_k=3", "seed=4", "--no-cache"]) == 0
    assert capsys.readouterr().out == first.out


def test_a_conversation_continues_with_its_history(
    run: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model's answers; an empty line begins another one."""
    said = iter(["def", " y", "", "def"])

    def ask(_: str) -> str:
        if (text := next(said, None)) is None:
            raise EOFError
        return text

    asked: list[str] = []
    one = loaded(run.run_dir)
    coder = one.coder
    assert coder is not None

    def answered(model: LoadedModel, prompts: list[list[int]], *how: Any, **more: Any) -> Any:
        asked.append(coder.decode(prompts[0]))
        return generate(model, prompts, *how, **more)

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("titanlike.use.generation_commands.generate", answered)
    assert main([run.run_dir, "--chat", "--tokens", "6", "temperature=0"]) == 0
    answer = coder.decode(generate(one, [coder.encode("def")], 6, GREEDY)[0])
    assert asked == ["def", f"def{answer} y", "def"] and answer
    assert capsys.readouterr().out.count(answer) >= 2
    asked.clear()
    words = ["--prompt", "def", "--prompt", " y", "--tokens", "6", "temperature=0"]
    assert main([run.run_dir, "--chat", *words]) == 0
    assert asked == ["def", f"def{answer} y"] and "> def\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["byte-begin", "metaspace-first"])
def test_a_chat_with_a_folder_is_that_of_transformers(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a template that writes the beginning of a text, which the tokenizer adds, too."""
    write_tokenizer(kind, tmp_path / "out")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    template += "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (tmp_path / "out" / "chat_template.jinja").write_text(template)
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model("llama", **SIZES, vocab_size=700)
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    model.save_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    questions, messages = ["the text of </s> and <s>", "why?"], list[dict[str, str]]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        asked: Any = {"add_generation_prompt": True, "sanitize_control_tokens": True}
        asked = tokenizer.apply_chat_template(messages, return_tensors="pt", **asked)
        ids = model.generate(**asked, max_new_tokens=8, do_sample=False)[0]
        answer = tokenizer.decode(ids[asked["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    assert asked["input_ids"][0].tolist().count(tokenizer.bos_token_id) == 1
    words = [word for question in questions for word in ("--prompt", question)]
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main([str(tmp_path / "out"), "--chat", *words, "--tokens", "8", "temperature=0"]) == 0
    said = capsys.readouterr().out
    assert all(f"> {m['content']}\n" in said for m in messages[::2])
    assert all(f"\n{m['content']}\n" in said for m in messages[1::2]), (said, messages)


def test_an_unknown_argument_is_reported(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["temprature=0"], "write temperature=0"),
        (["top_p=2"], "write top_p=0.95"),
        (["--tokens", "0"], "write --tokens 200"),
        (["--prompt", ""], "no tokens"),
    ):
        assert main([run.run_dir, "--prompt", "x", *words]) == 2
        assert told in capsys.readouterr().err
