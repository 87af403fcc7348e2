"""The files of a run's tokenizer as transformers reads them, beside an exported model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from titanlike.data.tokenizer import BOUNDARY_TOKENS, ByteTokenizer, Tokenizer, open_tokenizer

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


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
    if isinstance(tokenizer, ByteTokenizer):
        token = BOUNDARY_TOKENS[0]
        _write(folder / "tokenizer.json", byte_tokenizer(token))
    else:
        path = Path(name).expanduser()
        copied = copy_tokenizer(path if path.is_dir() else path.parent, folder)
        if not path.is_dir() and path.name not in FILES:
            model = path.suffix == ".model"
            shutil.copyfile(path, folder / ("tokenizer.model" if model else "tokenizer.json"))
        if "tokenizer_config.json" in copied or not (folder / "tokenizer.json").is_file():
            return tokenizer
        token = _token_of(folder / "tokenizer.json", tokenizer.boundary)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["clean_up_tokenization_spaces"] = False
    if token is not None:
        settings["eos_token"] = settings["bos_token"] = token
    _write(folder / "tokenizer_config.json", settings)
    return tokenizer


def byte_tokenizer(boundary: str) -> dict[str, Any]:
    """tokenizer.json for `data.tokenizer=bytes`: ids are bytes, and one more separates documents."""
    added = {"content": boundary, "single_word": False, "lstrip": False, "rstrip": False}
    added |= {"id": ByteTokenizer.boundary, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
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
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _token_of(file: Path, boundary: int) -> str | None:
    """The text of a token that is added to a vocabulary."""
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    return next((one["content"] for one in added if one["id"] == boundary), None)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
