"""Streams (`data=stream`): text is read, tokenized, packed and shuffled while training runs.

A corpus is files (text and JSONL divided among the readers by bytes, tables whole), a streamed
Hugging Face dataset (a folder, or a name on the hub), or a weighted mixture of these. Readers are
defined in stream_source.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import HFData, StreamData, TextData, TokenData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError, missing_package
from titanlike.core.data.readers import held_out_problems, reader_problems
from titanlike.core.metrics import units
from titanlike.formats import hf_dataset, text, token_folder, tokens
from titanlike.formats.mixture import Points, check_weights, points_of, seed_of
from titanlike.formats.text import vocabulary
from titanlike.formats.token_files import TokenSet
from titanlike.formats.tokenizer import Tokenizer, open_tokenizer

__all__ = ["CHECKS", "open_data", "vocabulary"]

if TYPE_CHECKING:
    from titanlike.core.data.sources import Batch, Data


def open_data(data: StreamData, config: Config) -> Data:
    import torch

    from titanlike.core.data.sources import Data
    from titanlike.formats.stream_source import HeldOutSource, StreamSource

    reads = _ReadsText(data, config.seq_len, config.seed)
    example = reads.finish(torch.zeros(config.seq_len + 1, dtype=torch.int32))
    train = StreamSource(config, data.readers, reads, example, reads.finish)
    tokenizer = open_tokenizer(data.tokenizer)
    buffer = data.shuffle_buffer * (config.seq_len + 1) * 4
    places = data.sources or [data.path or "Python's own sources"]
    what = f"{', '.join(places)} in {data.tokenizer}, streamed by {train.readers} readers with "
    what += f"{data.workers} loader process{'es' * (data.workers != 1)} a rank; shuffled in "
    what += f"{data.shuffle_buffer:,} sequences ({units.size(buffer)})"
    return Data(
        train,
        HeldOutSource(train),
        vocab_size=tokenizer.vocab_size,
        description=what,
        boundary=tokenizer.boundary,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        tokenizer=tokenizer.fingerprint,
        fingerprint=json.dumps([tokenizer.fingerprint, reads.identity(), data.documents]),
    )


def _check_sources(data: StreamData, config: Config) -> Iterator[Problem]:
    if importlib.util.find_spec("torchdata") is None:
        raise missing_package("data", "stream", "torchdata", "stream")
    yield from reader_problems(config, data.readers)
    yield from held_out_problems(config)
    if data.sources:
        yield from check_weights(data.sources)
        if data.path is not None:
            reason = "the sources have paths of their own"
            yield Problem("data.path", data.path, reason, "data.path=null")
    for name, section in _sections(data).items():
        for problem in _check_section(section, config):
            yield replace(problem, key=f"data.sources.{name}.path") if name else problem


def _check_section(data: StreamData, config: Config) -> Iterator[Problem]:
    try:
        if (files := _token_files(data)) is not None:
            try:
                tokens.check_first_ids(files)
            except DataError as error:  # the vocabulary is that of the tokenizer
                fix = "data.tokenizer=PATH of what wrote it"
                reason = f"{error.problem.reason}, and {data.tokenizer} has {files.vocab_size}"
                yield Problem("data.path", data.path, reason, fix)
            return
        if (rows := _dataset(data)) is None:
            text.check_first_records(data.path, data.text_key)
        else:
            yield from hf_dataset.check(rows, config)
    except DataError as error:
        yield error.problem


CHECKS = (text.check_tokenizer, text.check_stand_in, _check_sources)


def _sections(data: StreamData) -> dict[str, StreamData]:
    """Return each source's section of the config by name; "" for a stream without sources."""
    if not data.sources:
        return {"": data}
    sections = data.sources.items() if isinstance(data.sources, dict) else ()
    named = {n: s["path"] for n, s in sections if isinstance(s, dict) and "path" in s}
    return {name: replace(data, path=path, sources={}) for name, path in named.items()}


def _token_files(data: StreamData) -> TokenSet | None:
    """Return a source's token files, which are read by index, or None. Raises DataError if they
    were written with a different tokenizer."""
    place = Path(data.path or "").expanduser()
    is_index = data.path is not None and (place / token_folder.INDEX).exists()
    if not is_index and place.suffix not in (".bin", ".npy"):
        return None
    ours, files = open_tokenizer(data.tokenizer), tokens.read_tokens(_token_section(data))
    if files.tokenizer and open_tokenizer(files.tokenizer).fingerprint != ours.fingerprint:
        fix = f"data.tokenizer={files.tokenizer}"
        raise DataError("data.path", data.path, "was written with another tokenizer", fix)
    return files


def _token_section(data: StreamData) -> TokenData:
    ours = open_tokenizer(data.tokenizer)
    of_tokenizer: dict[str, Any] = {"vocab_size": ours.vocab_size, "boundary": ours.boundary}
    return TokenData(path=data.path or "", documents=data.documents, **of_tokenizer)


def read_by_index(data: StreamData) -> TextData | HFData | TokenData:
    """Return the section that reads all of one source's text, once and to its end."""
    if _token_files(data) is not None:
        return _token_section(data)
    common: dict[str, Any] = {k: getattr(data, k) for k in ("text_key", "tokenizer", "documents")}
    rows = _dataset(data)
    if rows is None:
        return TextData(path=data.path, **common)
    return replace(rows, documents=data.documents)


def _dataset(data: StreamData) -> HFData | None:
    """Return the section of a source that is read with `datasets`; None = files read by this
    package."""
    if data.path is None:
        return None
    place = Path(data.path).expanduser()
    saved = any((place / name).exists() for name in hf_dataset.SAVED)
    if place.exists() and not saved:
        tars = place.suffix == ".tar" or (place.is_dir() and any(place.glob("*.tar")))
        if not tars:
            return None
    elif not place.exists() and (os.sep in data.path[:1] or data.path[:1] in ".~"):
        return None
    keys = ("path", "subset", "split", "revision", "text_key", "tokenizer")
    return HFData(**{key: getattr(data, key) for key in keys})


@dataclass(frozen=True)
class _ReadsText:
    """Opens readers of text: the `open_reader` of a StreamSource."""

    data: StreamData
    seq_len: int
    seed: int
    by_place = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.data, self.seq_len, self.seed)  # each process opens a tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.data.tokenizer)

    def identity(self) -> list[Any]:
        """Return, as JSON, what the samples depend on."""
        parts = list[list[Any]]()
        for name, section in _sections(self.data).items():
            rows, chosen = _dataset(section), list[Any]()
            if (tokens := _token_files(section)) is not None:
                parts.append([name, "tokens", [file.count for file in tokens.files]])
                continue
            if rows is None:
                files = text.find_files(section.path)
            else:
                chosen = [rows.subset, rows.split]
                if not (place := Path(rows.path).expanduser()).exists():
                    parts.append([name, rows.path, rows.revision, *chosen])
                    continue
                files = text.files_under(place, {".tar", ".arrow"})
            sizes = [size for _, size, _ in text.file_states(files)]
            digest = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
            parts.append([name, len(sizes), digest, self.data.text_key, *chosen])
        weights = [[n, s["weight"]] for n, s in self.data.sources.items()]
        return [*parts, weights]

    def __call__(self, reader: int, readers: int, wrap: Callable[[Any], Any], whole: bool) -> Any:
        from titanlike.formats import stream_nodes as nodes
        from titanlike.formats.packed import PackedSource

        def opened(data: StreamData, seed: int) -> Any:
            if (files := _token_files(data)) is not None:
                boundary = files.boundary if data.documents else None
                source = PackedSource(files.files, self.seq_len, files.vocab_size, boundary)
                indexed = nodes.Indexed(source, reader, readers, seed)
                return nodes.Repeated(wrap(indexed), data.repeat and whole, indexed)
            section = _dataset(data)
            if section is None:
                parts = nodes.parts_of(text.find_files(data.path), readers)
                rows: Any = nodes.Rows(parts, data.text_key, reader, readers, seed)
                dataset = rows
            else:
                dataset = hf_dataset.streamed(section, reader, readers)
                rows = nodes.DatasetRows(dataset, data.text_key)
            # the stream also ends if an epoch has no sample but held-out ones
            repeated = nodes.Repeated(wrap(rows), data.repeat and whole, dataset)
            packed = nodes.Packed(repeated, self.tokenizer, self.seq_len)
            size = -(-data.shuffle_buffer // readers)
            if not whole or size <= 1:
                return packed
            return nodes.Shuffled(packed, size, (seed * 1000003 + reader) % (1 << 62))

        if not self.data.sources:
            return opened(self.data, self.seed)
        sections = _sections(self.data).items()
        sources = {n: opened(section, seed_of(self.seed, n)) for n, section in sections}
        weights: list[Points] = [points_of(s["weight"]) for s in self.data.sources.values()]
        return nodes.Mixed(sources, weights, self.seed)

    def finish(self, item: Any) -> Batch:
        if isinstance(item, dict):  # a sample of a token file
            return item
        ids = item.long()
        sample = {"inputs": ids[:-1], "targets": ids[1:]}
        if self.data.documents:
            sample["document_ids"] = (sample["inputs"] == self.tokenizer.boundary).cumsum(0)
        return sample
