"""Files of token ids cut into sequences; tokenized text is read by it, too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import xxhash

from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.data.sources import IGNORE, Data, documents_note, numbers_hash
from titanlike.formats.token_files import TokenFile, TokenSet, open_tokens, too_short
from titanlike.formats.token_formats import borders
from titanlike.formats.tokenizer import Tokenizer

_COMPARED = 1 << 22  # tokens of each file whose document borders are in the fingerprint


def packed_data(config: Config, tokens: TokenSet, tokenizer: Tokenizer | None, what: str) -> Data:
    """Open token files as data. what: the description. Raises DataError for a part shorter than one
    sequence. If nothing is held out, both parts are all of the data."""
    data: Any = config.data
    parts, boundary = tokens.parts(data.validation_fraction), tokens.boundary
    if not data.validation_fraction:  # nothing is held out
        parts = {part: files for part, files in parts.items() if sum(f.count for f in files)}
    for problem in too_short(parts, config.seq_len):
        raise DataError(*astuple(problem))
    sources, separated = {}, boundary if data.documents else None
    by_index = data.documents and boundary is None
    for part, files in parts.items():
        sources[part] = PackedSource(files, config.seq_len, tokens.vocab_size, separated, by_index)
        if not len(sources[part]):
            reason = f"no file of the {part} part has as many as seq_len + 1 tokens"
            raise DataError("data.path", data.path, reason, "give larger files")
    train, validation = sources["train"], sources.get("validation", sources["train"])
    what += f": {train.count:,} tokens"
    if validation is not train:
        what += f" for training, {validation.count:,} for validation"
    return Data(
        train,
        validation,
        vocab_size=tokens.vocab_size,
        description=what + documents_note(config.data),
        boundary=boundary,
        decode=None if tokenizer is None else tokenizer.decode,
        encode=None if tokenizer is None else tokenizer.encode,
        tokenizer=None if tokenizer is None else tokenizer.fingerprint,
    )


class PackedSource:
    """Token files cut into sequences without gap or overlap; no sequence spans two files.

    Sequence i of a file reads its tokens [i * seq_len, i * seq_len + seq_len]: the last is a target
    only, and the first input of the next sequence. A remainder shorter than a sequence is dropped.

    boundary: the token that begins a document; if given, samples have document_ids, the number of
    boundaries up to each token. Targets do not change: the target of a document's last token is the
    next document's boundary, from which the model learns to end a document.

    by_index: documents begin where the files' indices say, at any token, which is then not the
    target of the token before it.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        vocab_size: int,
        boundary: int | None = None,
        by_index: bool = False,
    ) -> None:
        self._arguments = files, seq_len, vocab_size, boundary, by_index
        self._files, self._seq_len = files, seq_len
        self._vocab_size, self._boundary = vocab_size, boundary
        self._tokens = [open_tokens(file) for file in files]
        self._borders = [borders(file) for file in files] if by_index else None
        # cumulative ends of the files, in sequences and in tokens
        self._ends = [*accumulate(max(0, (file.count - 1) // seq_len) for file in files)]
        self._token_ends = [*accumulate(file.count for file in files)]

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned loader process maps the files itself: pickled maps would contain all tokens.
        return type(self), self._arguments

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self._token_ends[-1]

    def read(self, start: int, number: int) -> np.ndarray:
        """Read up to `number` tokens from `start` with file reads: a page fault of a memory map may
        read megabytes."""
        pieces, stop = [np.empty(0, np.int64)], min(start + number, self.count)
        while start < stop:
            index = bisect_right(self._token_ends, start)
            file, mapped = self._files[index], self._tokens[index].base
            assert isinstance(mapped, np.memmap) and mapped.filename is not None
            place = file.start + start - (self._token_ends[index] - file.count)
            count = min(stop, self._token_ends[index]) - start
            offset = mapped.offset + place * mapped.itemsize
            piece = np.fromfile(mapped.filename, mapped.dtype, count, offset=offset)
            pieces.append(piece.astype(np.int64))
            start += count
        return np.concatenate(pieces)

    def fingerprint(self) -> str:
        text = f"{self.count:,} tokens, {numbers_hash(self.count, self.read)}"
        for file, one in zip(self._files, self._borders or (), strict=False):
            places = one.within(file.start, min(file.stop, file.start + _COMPARED))
            text += f", documents {xxhash.xxh3_64_hexdigest(places.tobytes())}"
        return text

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        index = bisect_right(self._ends, i)
        file = self._files[index]
        start = file.start + (i - (self._ends[index - 1] if index else 0)) * self._seq_len
        tokens = self._tokens[index][start : start + self._seq_len + 1].astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise ValueError(
                f"{file.path}: token id {bad} near position {start} is outside of the "
                f"vocabulary of {self._vocab_size}. Set data.vocab_size to more than the largest "
                "id in the file, and check data.dtype"
            )
        ids = torch.from_numpy(tokens)
        sample = {"inputs": ids[:-1], "targets": ids[1:]}
        if self._boundary is not None:
            sample["document_ids"] = (sample["inputs"] == self._boundary).cumsum(0)
        if self._borders is not None:
            begins = self._borders[index].within(start, start + self._seq_len) - start
            first = np.zeros(self._seq_len + 1, np.int64)
            first[begins] = 1
            sample["document_ids"] = torch.from_numpy(first[:-1].cumsum())
            sample["targets"] = ids[1:].masked_fill(torch.from_numpy(first[1:] == 1), IGNORE)
        return sample
