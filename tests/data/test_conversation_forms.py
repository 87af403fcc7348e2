"""Instruction data as others write them: recognized by their fields, whatever file they are in."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import orc, parquet
from test_chat import answers, chat

from support.models import tiny
from titanlike.core.config.groups.data import ChatData
from titanlike.core.data import registry
from titanlike.core.data.registry import DataError, open_data
from titanlike.formats.chat_template import BUILT_IN, BadConversation, ChatTemplate
from titanlike.formats.conversation_forms import conversation, with_text_arguments
from titanlike.formats.text import BadRow
from titanlike.formats.tokenizer import ByteTokenizer

PLAIN = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "it is 4"}]
PARTS = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in PLAIN]
SHARED = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "it is 4"}]
ASKED, ANSWERED = PLAIN[0]["content"], PLAIN[1]["content"]

FORMS: dict[str, tuple[dict[str, Any], str]] = {  # a row, and what is said of it
    "messages": ({"messages": PLAIN}, ""),
    "content parts": ({"messages": PARTS}, ""),
    "conversations": ({"conversations": PLAIN}, "messages (conversations)"),
    "ShareGPT": ({"conversations": SHARED}, "ShareGPT (conversations: from, value)"),
    "a struct of columns": (
        {"messages": {"role": ["user", "assistant"], "content": [ASKED, ANSWERED]}},
        "",
    ),
    "Alpaca": ({"instruction": "2 +", "input": "2?", "output": ANSWERED}, "Alpaca"),
    "Dolly": ({"instruction": ASKED, "context": "", "response": ANSWERED}, "Dolly"),
    "completion": ({"prompt": ASKED, "completion": ANSWERED}, "prompt and completion"),
    "of messages": ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, "prompt and completion"),
    "question": ({"question": ASKED, "answer": ANSWERED}, "question and answer"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_conversation(form: str) -> None:
    row, said = FORMS[form]
    found, messages, tools = conversation(json.loads(json.dumps(row)), "messages")
    assert (found, tools) == (said, None)
    text = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
                        ByteTokenizer()).render(messages)  # fmt: skip
    assert text.replace("\n", " ") == "user:2 + 2?;assistant:it is 4;"


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "text", "tool_calls", "function"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=4,
)


@given(st.sampled_from(sorted(FORMS)), st.randoms(use_true_random=False), ODD, st.booleans())
@settings(max_examples=300)
def test_a_row_with_something_else_in_a_field_is_a_bad_row(
    form: str, rng: Random, odd: Any, in_history: bool
) -> None:
    """It is told with its file and line; anything else would be called a damaged file."""
    row: Any = json.loads(json.dumps(FORMS[form][0]))
    at, names = row, list(row)
    while names and rng.random() < 0.7:
        name = rng.choice(names)
        if not isinstance(at[name], list | dict) or not at[name] or rng.random() < 0.3:
            at[name] = odd
            break
        at = at[name]
        names = list(at) if isinstance(at, dict) else list(range(len(at)))
    row |= {"history": odd} if in_history else {}
    template = ChatTemplate(BUILT_IN, ByteTokenizer())
    with suppress(BadRow):
        template.learned(*conversation(row, "messages")[1:])


def test_the_first_row_is_read_before_a_launch(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    row = {"instruction": "a", "input": "", "output": "b", "history": "none"}
    file.write_text(json.dumps(row) + "\n")
    (problem,) = registry.problems(tiny(data=ChatData(path=str(file))))
    assert "a.jsonl: line 1: has no conversation in a known form" in str(problem)


def rows(count: int = 30) -> list[dict[str, Any]]:
    return [{"instruction": f"say {n}", "input": "", "output": f"it is {n}"} for n in range(count)]


def write(kind: str, folder: Path) -> Path:
    table = pyarrow.Table.from_pylist(rows())
    if kind == "jsonl.gz":
        lines = "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows())
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind == "json":
        (folder / "alpaca_data.json").write_text("\ufeff" + json.dumps(rows(), indent=1))
    elif kind == "parquet":
        parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    elif kind == "orc":
        orc.write_table(table, folder / "a.orc")
    elif kind == "arrow file":
        with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as out:
            out.write_table(table)
    else:
        datasets = pytest.importorskip("datasets")
        one = datasets.Dataset.from_list(rows())
        both = datasets.DatasetDict({"train": one, "test": one.select([0])})
        (both if kind == "splits" else one).save_to_disk(str(folder / "saved"))
        return folder / "saved"
    return folder


@pytest.mark.parametrize(
    "kind", ["jsonl.gz", "json", "parquet", "orc", "arrow file", "saved", "splits"]
)
def test_every_row_format_is_read_and_described(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = open_data(chat(tmp_path, path=str(write(kind, tmp_path / "data"))))
    seen = "".join(answers(s[i]) for s in (data.train, data.validation) for i in range(len(s)))
    assert sorted(t.strip() for t in seen.split("|") if t.strip()) == sorted(
        row["output"] for row in rows()
    )
    assert data.description.endswith("read as Alpaca")
    if kind == "splits":
        (tmp_path / "data/saved/dataset_dict.json").write_text('{"splits": ["dev"]}')
        with pytest.raises(DataError, match=r"none is train; write data.path=.*/saved/dev"):
            open_data(chat(tmp_path, path=str(tmp_path / "data/saved")))


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED = [PLAIN[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOOLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} "
TOOLS += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"


def test_a_tool_call_is_written_as_its_template_wants_it(tmp_path: Path) -> None:
    """An object where it is dumped, a text where it is joined to others; never left out."""
    _, messages, _ = conversation({"messages": CALLED}, "messages")
    assert (
        ChatTemplate(TOOLS, ByteTokenizer()).render(messages).endswith('weather {"city": "Paris"}')
    )
    joined = TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
    assert (
        ChatTemplate(joined, ByteTokenizer()).render(messages).endswith('weather {"city": "Paris"}')
    )
    assert [*map(with_text_arguments, messages)][1] == CALLED[1]
    with pytest.raises(BadConversation, match="does not write the call of weather"):
        silent = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", ByteTokenizer())
        silent.render([{"role": "user", "content": "the weather?"}, *messages[1:]])
    tools = conversation({"messages": CALLED, "tools": '[{"type": "function"}]'}, "messages")[2]
    assert tools == [{"type": "function"}]


@pytest.mark.parametrize("marked", [False, True])
def test_answers_of_weight_0_or_within_a_prompt_have_no_loss(marked: bool, tmp_path: Path) -> None:
    end = "{{ m.content }}{{ eos_token }}"
    source = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    source += "{% generation %}" + end + "{% endgeneration %}" if marked else end
    source += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:{% endif %}"
    (tmp_path / "t.jinja").write_text(source)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "not this"}]
    given = [
        {"messages": [turns[0], {**turns[1], "weight": 0}, *PLAIN]},
        {"prompt": [*turns, PLAIN[0]], "completion": PLAIN[1:]},
    ]
    data = open_data(chat(tmp_path, given * 4, template=str(tmp_path / "t.jinja")))
    seen = "".join(answers(s[i]) for s in (data.train, data.validation) for i in range(len(s)))
    assert seen.count("it is 4|") == 8 and "not this" not in seen
