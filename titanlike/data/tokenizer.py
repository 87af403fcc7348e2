"""Text to token ids: bytes, any tokenizer.json, or a sentencepiece model; and a tokenizer's files.

All tokenizers have a document boundary, a token that text cannot produce. It is written before
every document, so that packed documents can be separated.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from titanlike.data.registry import DataError, missing_package

# Special tokens that end or begin a document, in order of preference: GPT-2 and Qwen, Llama 3,
# Llama 2 and Mistral, Gemma, BERT; then tokens that begin one.
BOUNDARY_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BOUNDARY_TOKENS += ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")

# Characters per call of a library: enough work for its threads, little memory.
GROUP_CHARACTERS = 1 << 20

# Of a folder of transformers.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int  # every id is smaller, the boundary included
    boundary: int  # id of the document boundary
    special: frozenset[int]  # ids that no text gives but a chat template's
    fingerprint: str  # changes whenever the same text would give other ids

    def encode(self, text: str) -> list[int]: ...

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries."""

    def encode_template(self, text: str) -> list[int]:
        """As `encode`, of a chat template's text, in which special tokens are spelled out."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries."""


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer for `data.tokenizer`: "bytes", or the path of a tokenizer.json, of a folder
    with one, or of a sentencepiece model (.model).

    Raises DataError (a ValueError) where the file or a library is missing.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        inside = (path / file for file in ("tokenizer.json", "tokenizer.model", "spiece.model"))
        file = next((file for file in inside if file.is_file()), None)
        if file is None:
            reason = "the folder has neither tokenizer.json nor tokenizer.model"
            fix = "give a folder with one, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", name, reason, fix)
        path = file
    if path.suffix == ".model" and path.is_file():
        return SentencePieceTokenizer(path)
    return JsonTokenizer(path)


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
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """The text without boundaries; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json (Hugging Face format), read by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise missing_package("data.tokenizer", str(path), "tokenizers", "text") from None

        def wrong(reason: str) -> DataError:
            fix = "give the path of a tokenizer.json, or data.tokenizer=bytes"
            return DataError("data.tokenizer", str(path), reason, fix)

        def read() -> Any:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # The file may ask for truncation, which would drop text, and for padding.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer

        if not path.is_file():
            raise wrong("there is no such file")
        content = path.read_bytes()
        try:
            self._tokenizer = read()
        except Exception as error:  # the library raises bare Exception
            raise wrong(f"not a tokenizer.json ({error})") from None
        # Text that spells a special token is encoded as text.
        self._tokenizer.encode_special_tokens = True
        self._read, self._of_templates = read, cast(Any, None)
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        if not (vocabulary := self._tokenizer.get_vocab()):
            raise wrong("it has no vocabulary")
        past = max(vocabulary.values()) + 1  # ids may have gaps
        self.special = frozenset(special.values())
        self.boundary = next((special[t] for t in BOUNDARY_TOKENS if t in special), past)
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_template(self, text: str) -> list[int]:
        self._of_templates = self._of_templates or self._read()
        return self._of_templates.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each text, in order, without boundaries; tokenized by several threads."""
        for group in _groups(texts):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids if i != self.boundary]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer:
    """A sentencepiece model (tokenizer.model, spiece.model), read by its own library."""

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise missing_package(
                "data.tokenizer", path, "sentencepiece", "sentencepiece"
            ) from None
        content = path.read_bytes()
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(content)
        except RuntimeError as error:
            reason = f"not a sentencepiece model ({' '.join(str(error).split())[:100]})"
            fix = "give another file, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", path, reason, fix) from None
        past = self._model.get_piece_size()
        ends = [token for token in (self._model.eos_id(), self._model.bos_id()) if token >= 0]
        self.special = frozenset(filter(self._model.is_control, range(past)))
        self.boundary = ends[0] if ends else past
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.encode: Callable[[str], list[int]] = self._model.encode
        self.encode_template = self.encode

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for group in _groups(texts):
            for ids in self._model.encode(group):
                yield np.array(ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i != self.boundary])


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


# --- the files that transformers reads, beside an exported model ----------------------------------


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy a folder's tokenizer files; their names."""
    names = [name for name in FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names


def write_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Write the files of `data.tokenizer`, which is given back.

    Raises DataError (a ValueError) where it is missing.
    """
    tokenizer = open_tokenizer(name)
    file, token = folder / "tokenizer.json", BOUNDARY_TOKENS[0]
    if isinstance(tokenizer, ByteTokenizer):
        _write(file, byte_tokenizer(token))
    else:
        path = Path(name).expanduser()
        copied = copy_tokenizer(path if path.is_dir() else path.parent, folder)
        if not path.is_dir() and path.name not in FILES:
            is_model = path.suffix == ".model"
            shutil.copyfile(path, folder / ("tokenizer.model" if is_model else file.name))
        if "tokenizer_config.json" in copied or not file.is_file():
            return tokenizer
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        token = next((t["content"] for t in added if t["id"] == tokenizer.boundary), "")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    if token:
        settings["eos_token"] = settings["bos_token"] = token
    _write(folder / "tokenizer_config.json", settings)
    return tokenizer


def byte_tokenizer(boundary: str) -> dict[str, Any]:
    """tokenizer.json for `data.tokenizer=bytes`: ids are bytes, and one more separates
    documents."""
    added = {"content": boundary, "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"id": ByteTokenizer.boundary, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # the printable character that stands for each byte in byte-level tokenizers (GPT-2's table)
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(characters)},
            "merges": [],
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
