"""A conversation in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from titanlike.generation.generate import generate
from titanlike.generation.loaded_model import LoadedModel
from titanlike.generation.sampling import Sampling


def chat(loaded: LoadedModel, tokens: int, sampling: Sampling, first: Sequence[str] = ()) -> int:
    """Answer the prompts `first`, then ask for more until the end of the input; the exit code.

    With a chat template the model answers what was said so far; without one it continues the text.
    An answer is printed as it comes.
    """
    assert loaded.coder is not None
    print(f"{loaded.origin}; an empty line begins anew, Ctrl-D ends")
    messages: list[dict[str, str]] = []
    text, given = "", list(first)
    while True:
        try:
            if given:
                print(f"> {(said := given.pop(0))}")
            else:
                said = input("> ")
        except EOFError:
            print()
            return 0
        if not said:
            messages, text = [], ""
            continue
        messages.append({"role": "user", "content": said})
        text = loaded.chat_template(messages) if loaded.chat_template else text + said
        shown = _Shown(loaded)
        ids = loaded.coder.encode(text)
        if loaded.most_tokens is not None and len(ids) + tokens > loaded.most_tokens:
            ids = ids[tokens - loaded.most_tokens :]  # the end of a long conversation
        [found] = generate(loaded, [ids], tokens, sampling, on_token=shown.add)
        answer = loaded.coder.decode(found)
        shown.finish(answer)
        messages.append({"role": "assistant", "content": answer})
        text += answer


class _Shown:
    """Prints a text as its tokens come: a character may be several tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.coder is not None
        self._decode, self._ids, self._printed = loaded.coder.decode, list[int](), 0

    def add(self, _: int, token: int) -> None:
        self._ids.append(token)
        self._print(self._decode(self._ids).rstrip("\ufffd"))

    def finish(self, text: str) -> None:
        self._print(text)
        print()

    def _print(self, text: str) -> None:
        print(text[self._printed :], end="", flush=True)
        self._printed = max(self._printed, len(text))
