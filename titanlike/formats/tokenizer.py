"""Tokenizers: bytes, any tokenizer.json, or a sentencepiece model; and copying a tokenizer's files.

Every tokenizer has a document boundary, a token that text cannot produce, written before each
document so that packed documents can be separated. A folder for which transformers uses more than
its tokenizer.json (a class of its own, or additional special tokens) is loaded by transformers
here, too, so that ids are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlike.core.config.files import parse_json, read_bytes, read_object
from titanlike.core.config.imports import quiet_import
from titanlike.core.data.kinds import DataError, missing_package

# Special tokens that end or begin a document, in order of preference: GPT-2 and Qwen, Llama 3,
# Llama 2 and Mistral, Gemma, BERT; then tokens that begin one.
BOUNDARY_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BOUNDARY_TOKENS += ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")

# transformers' classes that use tokenizer.json unchanged, or the sentencepiece library.
_AS_IT_IS, _SENTENCEPIECE = ("PreTrainedTokenizerFast", "TokenizersBackend"), "SentencePieceBackend"

# Characters per call of a tokenizer library: enough work for its threads, little memory.
GROUP_CHARACTERS = 1 << 20

# Tokenizer files in a folder of transformers.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


TOKENIZER = "tokenizer"  # folder of a run, and of token files
_SETTINGS = "tokenizer_config.json"
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_MOST_BYTES = 1 << 28  # of a tokenizer's file
_MOST_ADDED = 8_000  # added tokens, for which the library takes seconds
_MOST_GROWTH = 64  # characters that normalizers and the like make of one
_PROBE = "a b\n\tÉ1 日本 \U0001f600"
_HIDDEN = "\ufdd0"  # a noncharacter, which texts do not contain

Span = tuple[int, int]  # a token's characters, as start and stop


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    vocab_size: int  # larger than every id, the boundary included
    boundary: int  # id of the document boundary
    controls: dict[str, int]  # special tokens, produced by chat templates, never by plain text
    names: dict[str, str]  # eos_token and others, passed to chat templates
    fingerprint: str  # changes whenever the ids of some text would

    def encode(self, text: str) -> list[int]:
        """Encode a text; spelled-out special tokens are encoded as plain text."""

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Encode texts, in order, without boundaries."""

    def located(self, text: str, *, plain: bool = False) -> tuple[list[int], list[Span]]:
        """Encode a rendered chat template, in which special tokens are spelled out; also return
        each token's span. plain: as `encode`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, skipping boundaries."""


def open_tokenizer(name: str) -> Tokenizer:
    """Open `data.tokenizer`: "bytes", or the path of a tokenizer.json, of a folder with one, or of
    a sentencepiece model (.model).

    Raises DataError (a ValueError) for a missing file or library.
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
    settings = read_beside(path, _SETTINGS)
    names = {key: _content(token) for key in _NAMES if (token := settings.get(key))}
    if path.suffix == ".model" and path.is_file():
        if not settings or settings.get("tokenizer_class") == _SENTENCEPIECE:
            return SentencePieceTokenizer(path, names)
    else:
        tokenizer = JsonTokenizer(path, names if settings else None)
        if path.name not in FILES or not _is_read_otherwise(path, settings, tokenizer.added):
            return tokenizer
    return JsonTokenizer(path, *_by_transformers(path))


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file in a tokenizer's folder; {} if missing. Raises DataError."""
    if not (path.parent / name).is_file():
        return {}
    try:
        return read_object(path.parent / name)
    except (OSError, ValueError) as error:
        fix = "give another folder, or data.tokenizer=bytes"
        raise DataError("data.tokenizer", path.parent, str(error), fix) from None


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token


def _is_read_otherwise(path: Path, settings: dict[str, Any], added: frozenset[str]) -> bool:
    kind = settings.get("tokenizer_class")
    if kind is None and (path.parent / "config.json").is_file():
        return True  # transformers chooses the class by the model's type
    tokens = [*settings.get("added_tokens_decoder", {}).values(), *map(settings.get, _NAMES)]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        tokens += settings.get(key) or []
    named = {_content(token) for token in tokens if token}
    return kind not in (None, *_AS_IT_IS) or not named <= added


def _by_transformers(path: Path) -> tuple[dict[str, str], bytes]:
    """Return the names of special tokens, and the tokenizer.json that transformers makes of a
    folder."""
    try:
        with quiet_import():
            from transformers import AutoTokenizer
    except ImportError:
        raise missing_package("data.tokenizer", path, "transformers", "hf") from None
    settings = {"local_files_only": True, "trust_remote_code": False}  # None would ask on stdin
    try:
        with quiet_import():
            theirs: Any = AutoTokenizer.from_pretrained(path.parent, **settings)
        return theirs.special_tokens_map, theirs.backend_tokenizer.to_str().encode()
    except Exception as error:  # transformers raises any class for a damaged folder
        reason = f"transformers cannot read its folder ({' '.join(str(error).split())[:200]})"
        fix = "correct it; or copy a tokenizer.json into a folder of its own: it is taken as it is"
        raise DataError("data.tokenizer", path, reason, fix) from None


class ByteTokenizer:
    """Ids 0..255 are UTF-8 bytes, 256 is the document boundary."""

    vocab_size = 257
    boundary = 256
    controls: dict[str, int] = {BOUNDARY_TOKENS[0]: 256}
    names: dict[str, str] = {name: BOUNDARY_TOKENS[0] for name in ("bos_token", "eos_token")}
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)

    def located(self, text: str, *, plain: bool = False) -> tuple[list[int], list[Span]]:
        def pieces(text: str) -> tuple[list[int], list[Span]]:
            sizes = [len(character.encode()) for character in text]
            spans = [(offset, offset + 1) for offset, size in enumerate(sizes) for _ in range(size)]
            return [*text.encode()], spans

        return _between(text, {} if plain else self.controls, pieces)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, skipping boundaries; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json (Hugging Face format), read by the tokenizers library.

    names: special tokens' names, None = only the document boundary's; content: replaces the file's.
    """

    def __init__(
        self, path: Path, names: dict[str, str] | None = None, content: bytes | None = None
    ) -> None:
        try:
            import tokenizers
        except ImportError:
            raise missing_package("data.tokenizer", str(path), "tokenizers", "text") from None

        def wrong(reason: str) -> DataError:
            fix = "give the path of a tokenizer.json, or data.tokenizer=bytes"
            return DataError("data.tokenizer", str(path), reason, fix)

        def read(content: bytes) -> Any:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
            # The file may enable truncation, which would drop text, and padding.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer

        if not path.is_file():
            raise wrong("there is no such file")
        try:
            self.content = content or read_bytes(path, _MOST_BYTES)
            if reason := unbounded(self.content):
                raise ValueError(reason)
            self._tokenizer = self._of_text = read(self.content)
            with suppress(Exception):  # of a vocabulary without these characters; not a panic
                self._tokenizer.encode(_PROBE)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a bare Exception, or a panic of Rust's, which is none
            raise wrong(f"not a tokenizer.json ({' '.join(str(error).split())[:300]})") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = frozenset(token.content for token in added.values())
        unknown = getattr(self._tokenizer.model, "unk_token", None)  # any text may produce it
        self.controls: dict[str, int] = {
            token.content: i
            for i, token in added.items()
            if token.special and token.content != unknown
        }
        if not (vocabulary := self._tokenizer.get_vocab()):
            raise wrong("it has no vocabulary")
        past = max(vocabulary.values()) + 1  # ids may have gaps
        ends = [token for token in BOUNDARY_TOKENS if token in self.controls]
        self.boundary = self.controls[ends[0]] if ends else past
        self.vocab_size = max(past, self.boundary + 1)
        default = {name: ends[0] for name in ("bos_token", "eos_token") if ends}
        self.names = default if names is None else names
        self.fingerprint = hashlib.sha256(self.content).hexdigest()
        spelled = [text for token in self.controls for text in (token, f"a{token}a")]
        encodings = self._coder(True).encode_batch(spelled, add_special_tokens=False)
        if any({*self.controls.values()} & {*encoding.ids} for encoding in encodings):
            self._of_text = read(json.dumps(_without_controls(self)).encode())

    def _coder(self, plain: bool) -> Any:
        tokenizer = self._of_text if plain else self._tokenizer
        tokenizer.encode_special_tokens = plain  # spelled-out special tokens are plain text
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._coder(True).encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Encode texts, in order, without boundaries, with several threads."""
        for group in _groups(texts):
            for encoding in self._coder(True).encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def located(self, text: str, *, plain: bool = False) -> tuple[list[int], list[Span]]:
        encoding = self._coder(plain).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        ids = [int(i) for i in ids if i != self.boundary]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def unbounded(content: bytes) -> str:
    """Return why a tokenizer.json could take any time or memory for a short text; "" if it does
    not. Raises ValueError, RecursionError for other content."""
    described = parse_json(content)
    if not isinstance(described, dict):
        return "not an object"
    if isinstance(added := described.get("added_tokens"), list) and len(added) > _MOST_ADDED:
        return f"it has {len(added):,} added tokens, and {_MOST_ADDED:,} are read"
    parts: list[Any] = [described.get(k) for k in ("normalizer", "pre_tokenizer", "decoder")]
    growth = 1.0
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            pattern, new = part.get("pattern"), str(part.get("content", ""))
            old = pattern.get("String", "") if isinstance(pattern, dict) else ""
            growth *= max(1.0, len(new) / max(1, len(str(old))))
            growth *= max(1, len(str(part.get("prepend", ""))))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return f"it makes {growth:.2g} characters of one" if growth > _MOST_GROWTH else ""


def _without_controls(tokenizer: JsonTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json whose vocabulary hides special tokens from text: unigram and
    word-level models have them among their pieces."""
    described = json.loads(tokenizer.content)
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["special"]]
    model, hidden = described["model"], {t: _HIDDEN + t for t in tokenizer.controls}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(piece, piece): i for piece, i in model["vocab"].items()}
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [(a, b) for a, b in pairs if not hidden.keys() & {a, b, a + b}]
    return described


class SentencePieceTokenizer:
    """A sentencepiece model (tokenizer.model, spiece.model), read by its library. In a rendered
    chat template, each part between special tokens is encoded separately."""

    def __init__(self, path: Path, names: dict[str, str]) -> None:
        try:
            import sentencepiece
        except ImportError:
            package = "sentencepiece"
            raise missing_package("data.tokenizer", path, package, package) from None
        self.content = read_bytes(path, _MOST_BYTES)
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.load_from_serialized_proto(self.content)
        except RuntimeError as error:
            reason = f"not a sentencepiece model ({' '.join(str(error).split())[:100]})"
            fix = "give another file, or data.tokenizer=bytes"
            raise DataError("data.tokenizer", path, reason, fix) from None
        past, piece = self._model.get_piece_size(), self._model.id_to_piece
        ids = {"eos_token": self._model.eos_id(), "bos_token": self._model.bos_id()}
        ids = {name: token for name, token in ids.items() if token >= 0}
        self.controls: dict[str, int] = {
            piece(i): i for i in range(past) if self._model.is_control(i)
        }
        self.names = names or {name: piece(token) for name, token in ids.items()}
        self.boundary = next(iter(ids.values()), past)
        self.vocab_size = max(past, self.boundary + 1)
        self.fingerprint = hashlib.sha256(self.content).hexdigest()
        self.encode: Callable[[str], list[int]] = self._model.encode

    def encode_many(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        for group in _groups(texts):
            for ids in self._model.encode(group):
                yield np.array(ids, dtype=np.uint32)

    def located(self, text: str, *, plain: bool = False) -> tuple[list[int], list[Span]]:
        return _between(text, {} if plain else self.controls, self._pieces)

    def _pieces(self, text: str) -> tuple[list[int], list[Span]]:
        pieces = [*self._model.encode(text, out_type="proto").pieces]
        sizes = [len(character.encode()) for character in text]
        places = {offset: number for number, offset in enumerate(accumulate(sizes, initial=0))}
        spans, end = list[Span](), len(text)
        for piece in reversed(pieces):  # the last of a character's bytes has its position
            end = places[piece.end] if piece.end > piece.begin else end
            spans.append((places[piece.begin], end))
        return [piece.id for piece in pieces], spans[::-1]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids if i != self.boundary])


def _between(
    text: str, controls: dict[str, int], encode: Callable[[str], tuple[list[int], list[Span]]]
) -> tuple[list[int], list[Span]]:
    """Encode as `located` does, with a tokenizer that knows no special tokens."""
    longest_first = sorted(controls, key=len, reverse=True)
    ids, spans, offset = list[int](), list[Span](), 0
    for part in re.split(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})", text):
        token = controls.get(part)
        part_ids, places = encode(part) if token is None else ([token], [(0, len(part))])
        ids += part_ids
        spans += [(offset + begin, offset + end) for begin, end in places]
        offset += len(part)
    return ids, spans


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
    """Copy a folder's tokenizer files; return their names."""
    names = [name for name in FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names


def write_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Write the files of `data.tokenizer` and return the tokenizer.

    Raises DataError (a ValueError) if it is missing.
    """
    tokenizer = open_tokenizer(name)
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False, **tokenizer.names}
    kind, file = _AS_IT_IS[0], folder / "tokenizer.json"
    if isinstance(tokenizer, ByteTokenizer):
        _write(file, byte_tokenizer(BOUNDARY_TOKENS[0]))
    else:
        path = Path(name).expanduser()
        path = path if path.is_dir() else path.parent
        copy_tokenizer(path, folder)
        settings |= read_beside(file, _SETTINGS)
        if isinstance(tokenizer, JsonTokenizer):
            file.write_bytes(tokenizer.content)
        elif isinstance(tokenizer, SentencePieceTokenizer):
            (folder / "tokenizer.model").write_bytes(tokenizer.content)
            file.unlink(missing_ok=True)
            kind = _SENTENCEPIECE
            settings.setdefault("extra_special_tokens", [*tokenizer.controls])
    settings.pop("auto_map", None)
    _write(folder / _SETTINGS, settings | {"tokenizer_class": kind})
    return tokenizer


def keep_tokenizer(data: Any, run_dir: Path) -> None:
    """Copy the tokenizer and chat template that a section of data names to run_dir/tokenizer, once,
    so that the run can be moved without them. Raises OSError."""
    folder, path = run_dir / TOKENIZER, Path(data.tokenizer).expanduser()
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=run_dir, prefix=TOKENIZER) as parent:
        unfinished = Path(parent, TOKENIZER)
        unfinished.mkdir()
        write_tokenizer(data.tokenizer, unfinished)
        ends = (path if path.is_dir() else path.parent) / "generation_config.json"
        if ends.is_file():
            shutil.copyfile(ends, unfinished / ends.name)
        if template := getattr(data, "template", None):
            shutil.copyfile(Path(template).expanduser(), unfinished / "chat_template.jinja")
        unfinished.rename(folder)


def byte_tokenizer(boundary: str) -> dict[str, Any]:
    """Return the tokenizer.json of `data.tokenizer=bytes`: ids are bytes, and one more id separates
    documents."""
    added = {"content": boundary, "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"id": ByteTokenizer.boundary, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    # the printable character for each byte in byte-level tokenizers (GPT-2's table)
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
