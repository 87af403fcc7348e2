"""Conversations become the ids that transformers gives, and what is learned of them is its mask: a
table of tokenizers, templates and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from support.tokenizers import write_tokenizer
from titanlike.formats.chat_template import BUILT_IN, ChatTemplate
from titanlike.formats.tokenizer import open_tokenizer
from titanlike.formats.tokenizer import write_tokenizer as export_tokenizer

KINDS = [
    *(
        "byte-level",
        "metaspace-first",
        "metaspace-always",
        "metaspace-never",
        "unigram",
        "word-piece",
        "bytes",
        "byte-alone",
    ),
    *("byte-added", "byte-padding", "byte-begin", "byte-qwen"),
    *("sentencepiece-bpe-fallback", "sentencepiece-bpe-fallback-legacy"),
    *("sentencepiece-unigram-nfkc", "sentencepiece-bpe-alone-nfkc"),
    *("sentencepiece-unigram-alone-fallback", "sentencepiece-bpe-alone"),
]
TEMPLATES = {
    "built-in": BUILT_IN,
    "tags": """
{%- for message in messages -%}
    <|{{ message.role }}|>
    {% if message.role == 'assistant' -%}
    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

    {%- else %}{{ message.content }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} "
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "inst-tags": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %} {{ m.content }} {{ eos_token }}{% endgeneration %}"
    "{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}",
    "tools": "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "last": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% else %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}""",
}
SPELLED = "what are </s>, <s> and <|endoftext|>?</s>"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "né < 1"}}}


def said(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """Question and answer in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "plain": (said("the question", "the answer"), None),
    "turns": (said("return the value", "the value of x", "why?", "since it is"), None),
    "system": (said("def f(x):", "return x", system="be brief, the user is new"), None),
    "tools": (said("add the numbers", "it is 3"), [TOOL]),
    "empty": (said("nothing", "", "and now", "more"), None),
    "two": ([*said("a question", "one answer"), *said("", "another answer")[1:]], None),
    "spelled": (said(SPELLED, "the end", SPELLED, "</s> is the end"), None),
    "emoji": (said("a 🙂 née", "🙂 größe 日本 🙂"), None),
    "spaces": (said("  two\n\n spaces ", "\n  the  answer \n", " x", " y "), None),
    "long": (said("the module " * 40, "the text is wrapped " * 40), None),
}


def texts(source: str, theirs: Any, messages: list[Any], tools: Any) -> tuple[str, list[Any]]:
    """What transformers renders, and where its answers are: from the end of what asks for an
    answer, or of {% generation %}, by transformers' own."""

    def text(messages: list[Any], ask: bool = False) -> str:
        how = {"tools": tools, "chat_template": source, "tokenize": False}
        return theirs.apply_chat_template(messages, add_generation_prompt=ask, **how)

    if "generation %}" in source:
        how = {"tools": tools, "chat_template": source, "return_assistant_tokens_mask": True}
        [whole], [spans] = render_jinja_template([messages], **how, **theirs.special_tokens_map)
        return whole, spans
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [(len(text(messages[:n], True)), len(text(messages[: n + 1]))) for n in answers]
    return text(messages), spans


def learned(text: str, spans: list[Any], theirs: Any) -> list[bool] | None:
    """Whether a token has a character of an answer, by transformers' offsets; without offsets, by
    the ids of what is before, None where these are no beginning of the whole or are trimmed."""
    if theirs.is_fast:
        kept = {"add_special_tokens": False, "return_offsets_mapping": True}
        places = theirs(text, **kept)["offset_mapping"]
        return [any(max(a, c) < min(b, d) for c, d in spans) for a, b in places]
    whole, cuts = theirs.encode(text, add_special_tokens=False), list[int]()
    for place in (place for span in spans for place in span):
        before = theirs.encode(text[:place], add_special_tokens=False)
        trimmed = not theirs.sp_model.normalize("a ").endswith("▁") and text[place - 1].isspace()
        merged = theirs.sp_model.unk_id() in whole  # one for several characters
        if whole[: len(before)] != before or trimmed or merged:
            return None
        cuts.append(len(before))
    inside = np.zeros(len(whole), bool)
    for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
        inside[begin:end] = True
    return inside.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_masks_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    name = write_tokenizer(kind, tmp_path / "given")
    ours = open_tokenizer(name)
    export_tokenizer(name, (out := tmp_path / "out").mkdir() or out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    alone = not (tmp_path / "given/tokenizer_config.json").is_file()
    given = theirs if alone else transformers.AutoTokenizer.from_pretrained(tmp_path / "given")
    masks = compared = 0
    for form, source in TEMPLATES.items():
        safe, parsed = ChatTemplate(source, ours), ChatTemplate(source, ours, parse_special=True)
        assert theirs.eos_token_id == given.eos_token_id and theirs.eos_token_id in safe.ends
        for about, (messages, tools) in CONVERSATIONS.items():
            for one in (theirs, given):
                where = f"{kind} {form} {about}"
                how: dict[str, Any] = {"tools": tools, "chat_template": source}
                tags = "generation %}" in source and one.is_fast
                found = one.apply_chat_template(messages, return_assistant_tokens_mask=tags, **how)
                ids, mask = parsed.learned(messages, tools)
                assert ids == found["input_ids"], where
                text, spans = texts(source, one, messages, tools)
                if (expected := learned(text, spans, one)) is not None:
                    masks += 1
                    assert mask.tolist() == expected, where
                    # but where the tokenizer drops an answer's first character, or its last
                    edges = [c for a, b in spans for c in (a, b - 1)]
                    if tags and None not in map(found.char_to_token, edges):
                        assert mask.tolist() == found["assistant_masks"], where
                        compared += 1
                how |= {"add_generation_prompt": True, "sanitize_control_tokens": True}
                try:
                    asked = one.apply_chat_template(messages[:-1], return_dict=False, **how)
                except ValueError:  # "the tokenizer produces it from plain text"
                    asked = safe.prompt(messages[:-1], tools)
                    assert "unigram" in kind and about == "spelled"
                    unspelled = safe.prompt(said("a", "b", "c"))
                    for token in ours.controls.values():
                        assert asked.count(token) == unspelled.count(token), where
                assert safe.prompt(messages[:-1], tools) == asked, where
    assert compared >= (36 if theirs.is_fast else 0) and masks >= (120 if theirs.is_fast else 20), (
        masks
    )
