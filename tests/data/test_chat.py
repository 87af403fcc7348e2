"""Instruction data: the template's text, loss on the answers alone, conversations packed whole."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.exported import LLAMA, trained
from support.models import tiny
from titanlike.checkpoint.hf_export import export
from titanlike.config.schema import ChatData, Config, Sample
from titanlike.data import registry
from titanlike.data.chat import BUILT_IN, BadConversation, ChatTemplate, find_template
from titanlike.data.registry import DataError, open_data
from titanlike.data.sources import IGNORE
from titanlike.data.tokenizer import ByteTokenizer, byte_tokenizer, write_tokenizer
from titanlike.generation.generate import generate, load_model
from titanlike.models.sampling import Sampling

CHATML = """
{%- for message in messages -%}
    <|{{ message.role }}|>{% if message.role == 'assistant' -%}
        {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ message.content | trim }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def conversation(n: int, turns: int = 1) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be brief"}] if n % 2 else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"né {n} + {turn}?"})
        messages.append({"role": "assistant", "content": f"it is {n + turn}"})
    return {"messages": messages}


def chat(folder: Path, rows: list[Any] | None = None, **changes: Any) -> Config:
    rows = [conversation(n, 1 + n % 3) for n in range(60)] if rows is None else rows
    (folder / "in").mkdir(exist_ok=True)
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / "in" / "a.jsonl").write_text(lines)
    data = ChatData(path=str(folder / "in"), cache=str(folder / "cache"), validation_fraction=0.2)
    return replace(tiny(), data=replace(data, **changes), seq_len=160, batch_size=4)


def answers(sample: dict[str, torch.Tensor]) -> str:
    """What is learned of a sequence; a | where a text ends."""
    learned = sample["targets"][sample["targets"] != IGNORE].tolist()
    return bytes(ord("|") if token == 256 else token for token in learned).decode()


def test_loss_is_on_the_answers_alone_and_conversations_are_packed_whole(tmp_path: Path) -> None:
    data = open_data(chat(tmp_path))
    seen = "".join(
        answers(source[i]) for source in (data.train, data.validation) for i in range(len(source))
    )
    expected = [
        message["content"]
        for n in range(60)
        for message in conversation(n, 1 + n % 3)["messages"]
        if message["role"] == "assistant"
    ]
    found = [text.strip() for text in seen.split("|") if text.strip()]
    assert sorted(found) == sorted(expected)
    together = 0
    for sample in (data.train[i] for i in range(len(data.train))):
        documents = sample["document_ids"]
        assert (documents.diff() >= 0).all()
        for number in documents.unique().tolist():
            here = documents == number
            text = ByteTokenizer().decode(sample["inputs"][here].tolist())
            if number == 160:  # padding
                assert (sample["targets"][here] == IGNORE).all() and not text
                continue
            together += number > 0
            assert text.startswith(("<|user|>", "<|system|>"))
            inputs, targets = sample["inputs"][here], sample["targets"][here]
            learned = targets[:-1] != IGNORE
            assert torch.equal(targets[:-1][learned], inputs[1:][learned])
    assert together > 5, "no two conversations are in one sequence"


def test_text_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer("bytes", folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [conversation(n, 2) for n in range(8)]
    template = find_template(None, str(folder))
    for messages in (row["messages"] for row in rows):
        for ask in (False, True):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
            assert template.render(messages, ask=ask) == text
    found = theirs.apply_chat_template(
        [row["messages"] for row in rows], return_assistant_tokens_mask=True, return_dict=True
    )
    expected = "".join(
        bytes(min(token, 255) for token, answer in zip(ids, mask, strict=True) if answer)
        .replace(b"\xff", b"|")
        .decode()
        for ids, mask in zip(found["input_ids"], found["assistant_masks"], strict=True)
    )
    data = open_data(replace(chat(tmp_path, rows, tokenizer=str(folder)), seq_len=100))
    seen = "".join(
        answers(one[i]) for one in (data.train, data.validation) for i in range(len(one))
    )
    assert sorted(seen.split("|")) == sorted(expected.split("|"))


def test_an_exported_run_has_the_template_and_talks_with_it(tmp_path: Path) -> None:
    config = trained(tmp_path / "run", LLAMA, data=chat(tmp_path).data, seq_len=160)
    export(config.run_dir, str(tmp_path / "out"))
    messages = conversation(3)["messages"][:-1]
    texts = []
    for where in (config.run_dir, str(tmp_path / "out")):
        one = load_model(where, torch.device("cpu"), torch.float32)
        assert one.chat is not None
        texts.append((one.chat.render(messages, ask=True), one.chat.prompt(messages)))
    assert texts[0] == texts[1] and texts[0][0].endswith("<|assistant|>\n")


def chatml_folder(folder: Path, eos: str, ends: Any) -> Path:
    """A tokenizer as Qwen's: the end of a document is one token, that of an answer another."""
    folder.mkdir()
    described = byte_tokenizer("<|endoftext|>")
    [first] = described["added_tokens"]
    marks = ["<|im_start|>", "<|im_end|>"]
    described["added_tokens"] += [
        first | {"content": m, "id": 257 + i} for i, m in enumerate(marks)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(IM)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
IM += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "eos, ends, known",
    [
        ("<|endoftext|>", None, {258, 256}),  # what the template writes after an answer
        ("<|im_start|>", 256, {258, 257, 256}),
        ("", [256, 71], {258, 256, 71}),
    ],
)
def test_all_that_ends_an_answer_is_known(eos: str, ends: Any, known: set, tmp_path: Path) -> None:
    folder = chatml_folder(tmp_path / "tokenizer", eos, ends)
    assert find_template(None, str(folder)).ends == known
    if ends is None:
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(DataError, match="generation_config.json is not JSON"):
            find_template(None, str(folder))


def test_a_model_that_has_learned_an_answer_stops_after_it(tmp_path: Path) -> None:
    """In `generate`, in samples of the run, and in transformers with what is exported."""
    folder = chatml_folder(tmp_path / "tokenizer", "<|endoftext|>", None)
    own = str((folder / "chat_template.jinja").rename(tmp_path / "own.jinja"))
    (folder / "chat_template.jinja").write_text("the folder's")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    data = chat(tmp_path, [{"messages": turns}] * 40, tokenizer=str(folder), template=own).data
    asks = replace(Sample(), every=40, prompts=[IM_ASKED], tokens=12, temperature=0)
    config = trained(tmp_path / "run", LLAMA, data=data, seq_len=32, steps=40, sample=asks)
    [said] = map(json.loads, (tmp_path / "run/samples.jsonl").read_text().splitlines())
    assert said["text"] == "so"
    for where in (config.run_dir, str(tmp_path / "out")):
        one = load_model(where, torch.device("cpu"), torch.float32)
        assert one.coder is not None and one.chat is not None
        ids = one.chat.prompt(turns[:1])
        [found] = generate(one, [ids], 12, Sampling(temperature=0))
        assert one.coder.decode(found) == "so"
        if where == config.run_dir:
            export(config.run_dir, str(tmp_path / "out"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False
    )
    assert found[0, len(ids) :].tolist() == [*b"so", 258]


IM_ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{broken", "line 2: is not JSON"),
        ({"conversations": []}, "data.messages_key=conversations"),
        ({"messages": [{"content": "no role"}]}, "no list of messages"),
    ],
)
def test_a_bad_line_is_named(row: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        open_data(chat(tmp_path, [conversation(0), row]))
    assert told in str(error.value)


def test_a_file_that_cannot_be_read_is_named_and_not_the_cache(tmp_path: Path) -> None:
    config = chat(tmp_path)
    whole = gzip.compress((tmp_path / "in" / "a.jsonl").read_bytes())
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"data.path=.*b.jsonl.gz: cannot be read to its end"):
        open_data(config)
    (tmp_path / "in" / "b.jsonl.gz").unlink()
    os.mkfifo(tmp_path / "in" / "b.jsonl.gz")
    with pytest.raises(DataError, match=r"data.path=.*b.jsonl.gz: .*not a regular file"):
        open_data(config)


def test_a_template_that_cannot_tell_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(DataError, match="changes the text before answer"):
        open_data(chat(tmp_path, template=str(tmp_path / "t.jinja")))
    (tmp_path / "t.jinja").write_text("{% if %}")
    [problem] = registry.problems(chat(tmp_path, template=str(tmp_path / "t.jinja")))
    assert "is no Jinja template: line 1" in str(problem)
    with pytest.raises(BadConversation, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", ByteTokenizer()).render([])
    with pytest.raises(BadConversation):  # the sandbox
        escape = "{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}"
        ChatTemplate(escape, ByteTokenizer()).render([])


def test_another_text_in_the_same_template_file_is_noticed(tmp_path: Path) -> None:
    config = chat(tmp_path, template=str(tmp_path / "t.jinja"))
    for template in (BUILT_IN, BUILT_IN.replace("<|", "<||")):
        (tmp_path / "t.jinja").write_text(template)
        text = ByteTokenizer().decode(open_data(config).train[0]["inputs"].tolist())
        assert text.startswith(template.partition("{{ message.role")[0].rpartition("}")[2])
