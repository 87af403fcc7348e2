"""Text to token ids: bytes, any tokenizer.json, or a sentencepiece model.

All tokenizers have a document boundary, a token that text cannot produce. It is written before
every document, so that packed documents can be separated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

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
    special: frozenset[int]  # ids that no text gives but a chat template's
    fingerprint: str  # changes whenever the same text would give other ids

    def encode(self, text: str) -> list[int]: ...

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]: ...

    def encode_template(self, text: str) -> list[int]:
        """As `encode`, of a chat template's text, in which special tokens are spelled out."""

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8, 256 is the document boundary."""

    vocab_size = 257
    boundary = 256
    special = frozenset({256})
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_template(self, text: str) -> list[int]:
        first, *others = text.split(BOUNDARY_TOKENS[0])
        return [*first.encode(), *(i for part in others for i in (256, *part.encode()))]

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
        self._content = content
        self._of_templates: Any = None
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        if not (vocabulary := self._tokenizer.get_vocab()):
            raise DataError("data.tokenizer", path, "it has no vocabulary", remedy)
        past = max(vocabulary.values()) + 1  # ids may have gaps
        self.special = frozenset(special.values())
        self.boundary = next((special[t] for t in BOUNDARY_TOKENS if t in special), past)
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_template(self, text: str) -> list[int]:
        if self._of_templates is None:
            import tokenizers

            self._of_templates = tokenizers.Tokenizer.from_buffer(self._content)
            self._of_templates.no_truncation()
            self._of_templates.no_padding()
        return self._of_templates.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries; tokenized by several threads."""
        for group in _groups(texts):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries."""
        ids = [int(i) for i in ids if i != self.boundary]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A sentencepiece model (tokenizer.model, spiece.model), read by its own library."""

    def __init__(self, path: str) -> None:
        try:
            import sentencepiece
        except ImportError:
            fix = "Install it with: pip install 'titanlike[sentencepiece]'"
            reason = "the package sentencepiece is not installed"
            raise DataError("data.tokenizer", path, reason, fix) from None
        content = Path(path).expanduser().read_bytes()
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(content)
        except RuntimeError as error:
            reason = f"not a sentencepiece model ({' '.join(str(error).split())[:100]})"
            fix = "Give another file, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", path, reason, fix) from None
        past = self._model.get_piece_size()
        ends = [token for token in (self._model.eos_id(), self._model.bos_id()) if token >= 0]
        self.special = frozenset(filter(self._model.is_control, range(past)))
        self.boundary = ends[0] if ends else past
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_template(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries."""
        for group in _groups(texts):
            for ids in self._model.encode(group):
                yield np.array(ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries."""
        return self._model.decode([int(i) for i in ids if i != self.boundary])


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer for `data.tokenizer`: "bytes", or the path of a tokenizer.json, of a folder with
    one, or of a sentencepiece model (.model).

    Raises DataError (a ValueError) where the file or a library is missing.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        inside = [path / one for one in ("tokenizer.json", "tokenizer.model", "spiece.model")]
        found = next((one for one in inside if one.is_file()), None)
        if found is None:
            reason = "the folder has neither tokenizer.json nor tokenizer.model"
            fix = "Give a folder with one, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", name, reason, fix)
        path = found
    if path.suffix == ".model" and path.is_file():
        return SentencePieceTokenizer(str(path))
    return JsonTokenizer(str(path))


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
