"""Instruction data: the template's text, loss on the answers alone, conversations packed whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.exported import LLAMA, trained
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.data import ChatData, TextData
from titanlike.core.config.groups.jobs import Sample, Validation
from titanlike.core.config.received import Consent
from titanlike.core.config.schema import Config
from titanlike.core.data import registry
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.data.sources import IGNORE, REAL
from titanlike.core.launch.worker import Worker
from titanlike.core.training.session import keep_first_day, open_data_on_every_rank
from titanlike.formats.chat_template import BUILT_IN, BadConversation, ChatTemplate, find_template
from titanlike.formats.tokenizer import ByteTokenizer, byte_tokenizer, write_tokenizer
from titanlike.hf.hf_export import export
from titanlike.use.generate import generate, load_model
from titanlike.use.sampling import Sampling


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


DATED = "{{ strftime_now('%d %b %Y') }}" + BUILT_IN


def test_a_template_gets_the_day_of_the_runs_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the day of a resume and the clocks of nodes: the same ids, in a cache of its own."""
    (tmp_path / "dated.jinja").write_text(DATED)
    config = chat(tmp_path, template=str(tmp_path / "dated.jinja"))
    config = replace(config, run_dir=str(tmp_path / "run"), batch_size=2)

    def ids(day: int, config: Config = config, writes: bool = True) -> torch.Tensor:
        clock = type("Clock", (datetime,), {"now": classmethod(lambda _: datetime(2026, 2, day))})
        monkeypatch.setattr("titanlike.formats.chat_template.datetime", clock)
        worker = Worker(0, 1, 0, 1, Path(config.run_dir), None, [])
        data = open_data_on_every_rank(config, worker, writes=writes)
        return data.train[0]["inputs"]

    first = ids(1)
    text = bytes(token for token in first.tolist() if token < 256).decode()
    assert text.startswith("01 Feb 2026")
    assert torch.equal(first, ids(2)), "resumed on another day"
    shutil.rmtree(tmp_path / "cache")
    assert torch.equal(first, ids(3)), "on a machine without the cache"
    assert torch.equal(first, ids(4, replace(config, run_dir=str(tmp_path / "run/perplexity"))))
    (tmp_path / "a.txt").write_text("some text\n" * 200)
    plain = TextData(path=str(tmp_path / "a.txt"), cache=config.data.cache, documents=True)
    beside = Validation(data={"chats": {"name": "chat", **asdict(config.data)}})
    assert len(ids(5, replace(config, data=plain, validation=beside))) == 160
    mine = replace(config, run_dir=str(tmp_path / "a loop of one's own"))
    began = ids(7, mine, writes=False)
    assert bytes(token for token in began.tolist() if token < 256).startswith(b"07 Feb 2026")
    assert not Path(mine.run_dir).exists(), "the library's open_data writes nothing"
    assert torch.equal(began, ids(8, mine, writes=False)), "until the run is saved"
    keep_first_day(mine)
    assert (Path(mine.run_dir) / "first_day").read_text() == "2026-02-07"
    other = replace(config, run_dir=str(tmp_path / "other"))
    assert not torch.equal(first, ids(3, other)), "a run of its own"
    later = run_world(ids_of_rank, replace(other, dp=2), tmp_path / "later")
    assert torch.equal(*later), "a rank whose clock is a day ahead"


def ids_of_rank(config: Config, worker: Worker) -> torch.Tensor:
    """Whose run_dir is on a disk of its own."""
    from titanlike.formats import chat_template as module

    config = replace(config, run_dir=f"{config.run_dir}/{worker.rank}")
    now = datetime(2026, 2, 4 + worker.rank)
    module.datetime = type("Clock", (datetime,), {"now": classmethod(lambda _: now)})  # type: ignore[misc]
    return open_data_on_every_rank(config, worker).train[0]["inputs"]


def test_only_answers_have_loss_and_conversations_are_packed_unsplit(tmp_path: Path) -> None:
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
        assert torch.equal(sample[REAL], documents < 160)
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


def test_an_exported_run_has_the_template_and_talks_with_it(tmp_path: Path) -> None:
    """The run with the day of its first start."""
    (tmp_path / "dated.jinja").write_text(DATED)
    data = chat(tmp_path, template=str(tmp_path / "dated.jinja")).data
    config = trained(tmp_path / "run", LLAMA, data=data, seq_len=160)
    (Path(config.run_dir) / "first_day").write_text("2026-02-01")
    export(config.run_dir, str(tmp_path / "out"))
    messages = conversation(3)["messages"][:-1]
    texts, days = [], []
    for where in (config.run_dir, str(tmp_path / "out")):
        one = load_model(where, torch.device("cpu"), torch.float32)
        assert one.chat is not None
        text = one.chat.render(messages, ask=True)
        days.append(text[:11])
        texts.append((text[11:], one.chat.prompt(messages)[11:]))
    assert days[0] == "01 Feb 2026" != days[1]
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
def test_every_end_of_answer_token_is_known(
    eos: str, ends: Any, known: set, tmp_path: Path
) -> None:
    folder = chatml_folder(tmp_path / "tokenizer", eos, ends)
    assert find_template(None, str(folder)).ends == known
    if ends is None:
        (folder / "generation_config.json").write_text("{")
        with pytest.raises(DataError, match="generation_config.json is not JSON"):
            find_template(None, str(folder))


@pytest.mark.parametrize("alone", [False, True])
def test_a_model_that_has_learned_an_answer_stops_after_it(alone: bool, tmp_path: Path) -> None:
    """In `generate`, in samples of the run, and in transformers with what is exported; with a
    tokenizer.json alone, too. The run can be moved without its tokenizer and template."""
    changes, asked, end = {}, "<|user|>\na\n<|assistant|>\n", 256
    if alone:
        (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer("</s>")))
        changes["tokenizer"] = str(tmp_path / "tokenizer.json")
    else:
        folder = chatml_folder(tmp_path / "tokenizer", "<|endoftext|>", None)
        own = str((folder / "chat_template.jinja").rename(tmp_path / "own.jinja"))
        (folder / "chat_template.jinja").write_text("the folder's")
        changes, asked, end = {"tokenizer": str(folder), "template": own}, IM_ASKED, 258
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]
    data = chat(tmp_path, [{"messages": turns}] * 40, **changes).data
    asks = replace(Sample(), every=40, prompts=[asked], tokens=12, temperature=0)
    config = trained(tmp_path / "run", LLAMA, data=data, seq_len=32, steps=40, sample=asks)
    [said] = map(json.loads, (tmp_path / "run/samples.jsonl").read_text().splitlines())
    assert said["text"] == "so"
    (tmp_path / "elsewhere").mkdir()
    for path in (Path(changes["tokenizer"]), Path(changes.get("template", config.data.path))):
        path.rename(tmp_path / "elsewhere" / path.name)
    run = str(Path(config.run_dir).rename(tmp_path / "elsewhere" / "run"))
    for where in (run, str(tmp_path / "out")):
        one = load_model(where, torch.device("cpu"), torch.float32, consent=Consent())
        assert one.coder is not None and one.chat is not None
        ids = one.chat.prompt(turns[:1])
        [found] = generate(one, [ids], 12, Sampling(temperature=0))
        assert one.coder.decode(found) == "so"
        if where == run:
            export(run, str(tmp_path / "out"))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False
    )
    assert found[0, len(ids) :].tolist() == [*b"so", end]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    whole = theirs.apply_chat_template(turns, return_dict=False)
    assert whole[: len(ids) + 3] == [*ids, *b"so", end]


IM_ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{broken", "line 2: is not JSON"),
        ({"chosen": [{"role": "user", "content": "?"}]}, "write data.messages_key=chosen"),
        ({"conversations": [{"from": "narrator", "value": "?"}]}, "message from 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type image"),
        ({"messages": [{"content": "no role"}]}, "no list of messages"),
    ],
)
def test_a_bad_line_is_named(row: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        open_data(chat(tmp_path, [conversation(0), row]))
    assert told in str(error.value)


def test_truncated_and_dropped_conversations_are_counted(tmp_path: Path) -> None:
    """An answer behind seq_len is no answer; the ids of the others are those of transformers that
    truncates."""
    long = {"messages": [{"role": "user", "content": "x" * 50}, *conversation(0)["messages"][1:]]}
    rows = [conversation(n, 2) for n in range(0, 16, 2)] + [long]
    data = open_data(replace(chat(tmp_path, rows), seq_len=40))
    assert "8 conversations in" in data.description
    assert "8 conversations are longer than seq_len and were cut" in data.description
    assert "1 have no answer within seq_len and were left out" in data.description
    write_tokenizer("bytes", tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    how = {"truncation": True, "max_length": 41, "chat_template": BUILT_IN, "return_dict": False}
    texts = [one["messages"] for one in rows[:-1]]
    expected = [ids[:-1] for ids in theirs.apply_chat_template(texts, **how)]
    seen = [
        one[i]["inputs"].tolist() for one in (data.train, data.validation) for i in range(len(one))
    ]
    assert sorted(seen) == sorted(expected)
    with pytest.raises(DataError, match="seq_len=36: no answer has its end within so many tokens"):
        open_data(replace(chat(tmp_path, rows), seq_len=36))


@pytest.mark.parametrize(
    "special, template",
    [
        ([], None),  # no token ends a text
        (["</s>"], "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
        (["</s>"], "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
         "{{ eos_token }}{% endfor %}"),
    ],
)  # fmt: skip
def test_answers_that_would_be_learned_without_an_end_are_refused(
    special: list[str], template: str | None, tmp_path: Path
) -> None:
    described = byte_tokenizer("</s>") | ({} if special else {"added_tokens": []})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    changes = {"tokenizer": str(tmp_path / "tokenizer.json")}
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        changes["template"] = str(tmp_path / "t.jinja")
    config = chat(tmp_path, **changes)
    [problem] = registry.problems(config)
    assert "would be learned without a token that ends them" in str(problem)
    assert "eos_token" in problem.fix
    with pytest.raises(DataError, match="line 1: its answers would be learned without"):
        open_data(config)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{% set x = namespace(y='a') %}{% for i in range(60) %}{% set x.y = x.y ~ x.y %}{% endfor %}",
        "{{ messages[0].content | center(10**11) }}",
    ],
)
def test_a_template_without_bounds_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(source)
    [problem] = registry.problems(chat(tmp_path, template=str(tmp_path / "t.jinja")))
    assert "takes more than 5 s or 1 GiB for a short conversation" in str(problem)


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
