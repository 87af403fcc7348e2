"""Text to token ids: bytes, or any tokenizer.json.

Both tokenizers have a document boundary, a token that text cannot produce. It is written before
every document, so that packed documents can be separated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlike.data.errors import DataError, missing_extra

# Special tokens that end or begin a document, in order of preference: GPT-2 and Qwen, Llama 3,
# Llama 2 and Mistral, Gemma, BERT; then tokens that begin one.
BOUNDARY_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BOUNDARY_TOKENS += ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")

# Characters per call of the tokenizers library: enough work for its threads, little memory.
GROUP_CHARACTERS = 1 << 20


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int  # every id is smaller, the boundary included
    boundary: int  # id of the document boundary
    fingerprint: str  # changes whenever the same text would give other ids

    def encode(self, text: str) -> list[int]: ...

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8, 256 is the document boundary."""

    vocab_size = 257
    boundary = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries."""
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json (Hugging Face format), read by the tokenizers library."""

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ImportError:
            raise missing_extra("data.tokenizer", path, "tokenizers") from None
        file = Path(path).expanduser()
        remedy = "Give the path of a tokenizer.json, or data.tokenizer=bytes"
        if not file.is_file():
            raise DataError("data.tokenizer", path, "there is no such file", remedy)
        content = file.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            reason = f"not a tokenizer.json ({error})"
            raise DataError("data.tokenizer", path, reason, remedy) from None
        # The file may ask for truncation, which would drop text, and for padding.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that spells a special token is encoded as text.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        if not (vocabulary := self._tokenizer.get_vocab()):
            raise DataError("data.tokenizer", path, "it has no vocabulary", remedy)
        past = max(vocabulary.values()) + 1  # ids may have gaps
        self.boundary = next((special[t] for t in BOUNDARY_TOKENS if t in special), past)
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries; tokenized by several threads."""
        for group in _groups(texts):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries."""
        ids = [int(i) for i in ids if i != self.boundary]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer for `data.tokenizer`: "bytes", or the path of a tokenizer.json.

    Raises DataError (a ValueError) where the file or the tokenizers library is missing.
    """
    return ByteTokenizer() if name == "bytes" else JsonTokenizer(name)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
