"""Converts rows of instruction data in other projects' formats to messages of role and content.

A format is recognized by its fields: messages or conversations (OpenAI's, ShareGPT's from/value, or
columns of a struct), or a question and an answer (Alpaca, prompt/completion).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from titanlike.formats.text import BadRow

Message = dict[str, Any]  # role, content, weight (0 = no loss)
Conversation = tuple[str, list[Message], Any]  # format's name ("" = messages), messages, tools

_LISTS = ("messages", "conversations", "conversation")
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response"), "tool"),
}
_PAIRS = (  # fields of the question, fields of the answer, the format's name
    (("instruction", "input"), "output", "Alpaca"),
    (("instruction", "context"), "response", "Dolly"),
    (("prompt",), "completion", "prompt and completion"),
    (("prompt",), "response", "prompt and response"),
    (("query",), "response", "query and response"),
    (("question",), "answer", "question and answer"),
    (("problem",), "solution", "problem and solution"),
)


def conversation(row: Any, key: str) -> Conversation:
    """Convert a row to a conversation. key: `data.messages_key`. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("is not an object")
    try:
        return _converted(row, key)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, BadRow):
            raise
        reason = "has no conversation in a known form: what its fields hold is of other types ("
        raise BadRow(f"{reason}{type(error).__name__}: {error})") from None


def _converted(row: dict[str, Any], key: str) -> Conversation:
    """Raises BadRow, or what Python raises where a field holds something else than its form does."""
    lists = dict.fromkeys((key, *(_LISTS if key == _LISTS[0] else ())))
    for name in lists:
        if (found := _listed(row.get(name))) or row.get(name) == []:
            form = f"ShareGPT ({name}: from, value)" if "from" in [*found, {}][0] else ""
            form = form or (f"messages ({name})" if name != key else "")
            return form, _messages(found, row), _json(row.get("tools"))
    for asked, answer, form in _PAIRS if key == _LISTS[0] else ():
        if asked[0] in row and answer in row:
            before, after = row[asked[0]], row[answer]
            if isinstance(before, str):
                text = "\n".join(row[name] for name in asked if row.get(name))
                turns = [(one[0], one[1]) for one in row.get("history") or ()]
                before = [
                    {"role": role, "content": content}
                    for turn in (*turns, (text,))
                    for role, content in zip(("user", "assistant"), turn, strict=False)
                ]
            before = [{**message, "weight": 0} for message in before]
            after = [{"role": "assistant", "content": after}] if isinstance(after, str) else after
            return form, _messages([*before, *after], row), _json(row.get("tools"))
    names = [name for name, value in row.items() if _listed(value)]
    fix = f"data.messages_key={names[0]}" if names else ""
    reason = f"has no conversation: no list of messages in {', '.join(lists)}, and no question "
    raise BadRow(f"{reason}with an answer that is known (its fields are {', '.join(row)})", fix)


def is_learned(message: Message) -> bool:
    """Return whether an answer has a loss, by OpenAI's `weight` or axolotl's `train`."""
    return (
        message.get("role") == "assistant"
        and message.get("weight") != 0
        and message.get("train") is not False
    )


def _listed(value: Any) -> list[Message]:
    """Convert to a list of messages; a struct has one column of roles and one of contents."""
    if isinstance(value, dict) and value and all(isinstance(one, list) for one in value.values()):
        value = [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return []
    return value if all("role" in one or "from" in one for one in value) else []


def _messages(given: list[Message], row: dict[str, Any]) -> list[Message]:
    messages = [_message(message) for message in given]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _message(given: Message) -> Message:
    """Convert a message to OpenAI's format. Raises BadRow."""
    message = {name: value for name, value in given.items() if name not in ("from", "value")}
    if "from" in given:
        if given["from"] not in _ROLES:
            raise BadRow(f"has a message from {given['from']!r}, which is no role that is known")
        message |= {"role": _ROLES[given["from"]], "content": given.get("value")}
    content = message.get("content")
    if isinstance(content, list):  # content parts
        if strange := [part for part in content if "text" not in part]:
            raise BadRow(f"has a part of type {strange[0].get('type')}, and text alone is read")
        content = message["content"] = "".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call, _json) for call in calls]
    has_text = isinstance(content, str | None) and ("content" in message or calls)
    if not has_text or not isinstance(message.get("role"), str):
        raise BadRow("has no list of messages with a role and a content: a message has none")
    return message


def with_text_arguments(message: Message) -> Message:
    """Return the message with calls' arguments as JSON text, as some templates need them."""
    if not (calls := message.get("tool_calls")):
        return message
    dumped = partial(json.dumps, ensure_ascii=False)
    return {**message, "tool_calls": [_with_arguments(call, dumped) for call in calls]}


def _with_arguments(call: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


def _json(value: Any) -> Any:
    """Parse a text that is JSON; return any other value unchanged."""
    with suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def without_nulls(value: Any) -> Any:
    """Drop null fields, with which a table fills columns that only other rows have."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return value
