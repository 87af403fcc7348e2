"""Small tokenizers of every kind, trained on Python's own sources, in files as their users have
them."""

from __future__ import annotations

import inspect
import io
import json
import textwrap
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = inspect.getsource(textwrap).splitlines() + inspect.getsource(inspect).splitlines()[:1500]
BEGIN, END, PAD = "<s>", "</s>", "<pad>"


def _trained(model: Any, before: Any, after: Any, trainer: Any, **given: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = before, after
    special = given.pop("special", [PAD, BEGIN, END])
    kwargs = {"vocab_size": 600, "special_tokens": special, "show_progress": False, **given}
    tokenizer.train_from_iterator(TEXTS, trainer(**kwargs))
    return tokenizer


def _byte_level(**given: Any) -> Tokenizer:
    before, alphabet = pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel.alphabet()
    given |= {"initial_alphabet": alphabet}
    return _trained(models.BPE(), before, decoders.ByteLevel(), trainers.BpeTrainer, **given)


def _metaspace(scheme: str) -> Tokenizer:
    before = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first")
    after = decoders.Metaspace(prepend_scheme=scheme)
    model = models.BPE(unk_token=PAD, fuse_unk=True)
    return _trained(model, before, after, trainers.BpeTrainer)


def _unigram() -> Tokenizer:
    before, after = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = _trained(models.Unigram(), before, after, trainers.UnigramTrainer, unk_token=PAD)
    model.normalizer = normalizers.NFKC()
    return model


def _word_piece() -> Tokenizer:
    before = pre_tokenizers.BertPreTokenizer()
    model, after = models.WordPiece(unk_token=PAD), decoders.WordPiece()
    tokenizer = _trained(model, before, after, trainers.WordPieceTrainer)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    return tokenizer


def _sentencepiece(path: Path, kind: str, byte_fallback: bool, **given: Any) -> None:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in TEXTS if line.strip()),
        model_writer=out,
        model_type=kind,
        vocab_size=600,
        byte_fallback=byte_fallback,
        minloglevel=2,
        **given,
    )
    path.write_bytes(out.getvalue())


def write_tokenizer(kind: str, folder: Path) -> str:
    """What `data.tokenizer` is to be."""
    folder.mkdir(parents=True)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"bos_token": BEGIN, "eos_token": END}
    if kind == "bytes":
        return kind
    if kind.startswith("sentencepiece"):
        _, model, *rest = kind.split("-")
        form: dict[str, Any] = {"normalization_rule_name": "identity"}
        form |= {"remove_extra_whitespaces": False}
        form = {} if "nfkc" in rest else form
        name = "own.model" if "alone" in rest else "tokenizer.model"
        _sentencepiece(folder / name, model, "fallback" in rest, **form)
        if "alone" in rest:
            return str(folder / name)
        settings["tokenizer_class"] = {"bpe": "LlamaTokenizer", "unigram": "T5Tokenizer"}[model]
        settings |= {"legacy": True} if "legacy" in rest else {}
        settings |= {"unk_token": "<unk>", "extra_ids": 0}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return str(folder)
    name, _, form = kind.partition("-")
    made = {
        "byte": _byte_level,
        "metaspace": lambda: _metaspace(form),
        "unigram": _unigram,
        "word": _word_piece,
    }
    tokenizer = made[name]()
    if form == "begin":
        ids = [(BEGIN, tokenizer.token_to_id(BEGIN))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=ids
        )
    if form == "padding":
        settings["pad_token"] = END
    if form == "added":  # tokens that the folder has and tokenizer.json has not
        settings |= {"eos_token": "<end>", "extra_special_tokens": ["<|user|>", "<|assistant|>"]}
        tokenizer.add_tokens([AddedToken("<think>", special=False)])
    if form == "qwen":
        settings["tokenizer_class"] = "Qwen2Tokenizer"
    tokenizer.save(str(folder / "tokenizer.json"))
    if form == "alone":
        return str(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
