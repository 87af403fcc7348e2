"""From the config to batches.

1. checks.py checks the config before any worker starts.
2. `open_data` opens a source (sources.py) for training and one for validation: text is tokenized
   into a cache first (tokenized_corpus.py), a token file is mapped (token_file.py), random tokens
   are generated, or the user's function is called, whose samples are checked and padded
   (checked_source.py).
3. `batches` reads the training source in the run's global order (shuffle.py): step s is samples
   [s * batch_size, (s + 1) * batch_size) of that order, and dp rank r reads the r-th of dp equal,
   contiguous slices of them. So the order depends on seed and step alone, not on the mesh, and a
   run can be resumed at any step in any layout.
4. `validation_batches` reads the first sequences of the validation source, the same each time.

Shapes: B = batch_size // dp sequences on this dp rank, T = seq_len.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlike.config.schema import (
    ChatData,
    Config,
    HFData,
    MixtureData,
    SyntheticData,
    TextData,
    TokenData,
)
from titanlike.data.checked_source import CheckedSource, stack
from titanlike.data.checks import call_custom, data_of_source, loader_workers, too_short
from titanlike.data.corpus import describe
from titanlike.data.errors import DataError
from titanlike.data.mixture import MixtureBatchSampler, MixtureSource, mixture_of
from titanlike.data.sampler import GlobalBatchSampler
from titanlike.data.shuffle import shuffled_index
from titanlike.data.sources import (
    Batch,
    Data,
    PackedFiles,
    PackedSource,
    Source,
    SyntheticSource,
)
from titanlike.data.token_folder import TokenFile, paths_of, read_tokens
from titanlike.data.tokenized_corpus import tokenize_corpus
from titanlike.data.tokenizer import open_tokenizer
from titanlike.launch.signals import die_with_parent

_WINDOW = 64  # steps within which samples are sorted by length


def open_data(config: Config) -> Data:
    """The training and validation sources of the config.

    Text is tokenized on the first call; several processes may call this concurrently, but then each
    tokenizes. Raises DataError for files that cannot be read, and for a part shorter than one
    sequence of `seq_len`.
    """
    data = config.data
    if isinstance(data, TextData | HFData):
        return _open_text(data, config.seq_len)
    if isinstance(data, TokenData):
        return _open_tokens(data, config.seq_len)
    if isinstance(data, MixtureData):
        return open_mixture(data, config)
    if isinstance(data, ChatData):
        from titanlike.data.chat import open_chat

        return open_chat(data, config.seq_len)
    if isinstance(data, SyntheticData):
        sizes = (data.vocab_size, config.seq_len, config.seed)
        train, validation = (SyntheticSource(*sizes, stream) for stream in (0, 1))
        text = "random tokens, generated on demand"
        return Data(train, validation, data.vocab_size, text)
    return call_custom(data, config.seq_len)


def make_loader(
    source: Source, config: Config, *, dp_rank: int, start_step: int = 0
) -> StatefulDataLoader:
    """An endless loader of the training batches of a dp rank; its state is the step alone.

    So the state can be loaded on another dp rank or with another dp, but only with the same
    `data.workers` (torchdata stores a state for each loader process).
    """
    with warnings.catch_warnings():  # torchdata 0.11 calls a function that torch 2.13 deprecates
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(
            source,
            batch_sampler=_batch_sampler(source, config, dp_rank, start_step),
            collate_fn=collate(source),
            num_workers=loader_workers(config),
            worker_init_fn=_init_worker,
            # The loader draws a number when it starts: not from the generator of dropout.
            generator=torch.Generator(),
        )


def batches(
    source: Source, config: Config, *, dp_rank: int, start_step: int = 0
) -> Iterator[Batch]:
    """The training batches of a dp rank from `start_step`, endless.

    Each is dict(inputs=[B, T], targets=[B, T]), int64, on the CPU, with the other fields
    of the source's samples.
    """
    return iter(make_loader(source, config, dp_rank=dp_rank, start_step=start_step))


def validation_batches(source: Source, config: Config, *, dp_rank: int) -> Iterator[Batch]:
    """The `validation.batches` batches of a dp rank, shaped as in training.

    They are the first sequences of the source, which is repeated where it is too short.
    """
    local = config.batch_size // config.dp
    for step in range(config.validation.batches):
        first = step * config.batch_size + dp_rank * local
        yield collate(source)([source[i % len(source)] for i in range(first, first + local)])


class SimilarLengthBatchSampler(GlobalBatchSampler):
    """The same samples in every `_WINDOW` steps, but those of a step have similar lengths.

    A window's samples are sorted by length and cut into steps, whose order is then shuffled. So the
    order depends on seed, step and the lengths alone.
    """

    def __init__(
        self, size: int, config: Config, dp_rank: int, step: int, lengths: Sequence[int]
    ) -> None:
        super().__init__(size, config, dp_rank, step)
        self._lengths = np.asarray(lengths)
        self._steps = _WINDOW

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        positions = steps[:, None] * self._global + np.arange(self._global)
        samples = shuffled_index(positions.reshape(-1), self._size, self._seed)
        by_length = samples[np.argsort(self._lengths[samples], kind="stable")]
        turns = shuffled_index(steps, len(steps), self._seed)  # another shuffle in each window
        mine = slice(self._offset, self._offset + self._local)
        return by_length.reshape(len(steps), self._global)[turns, mine]


def _batch_sampler(source: Source, config: Config, dp_rank: int, step: int) -> GlobalBatchSampler:
    if isinstance(source, MixtureSource):
        return MixtureBatchSampler(source, config, dp_rank, step)
    lengths = source.lengths if isinstance(source, CheckedSource) else None
    if lengths is None:
        return GlobalBatchSampler(len(source), config, dp_rank, step)
    return SimilarLengthBatchSampler(len(source), config, dp_rank, step, lengths)


def collate(source: Source) -> Callable[[list[Batch]], Batch]:
    """What makes a batch of a source's samples."""
    return source.batch if isinstance(source, CheckedSource) else stack


def _open_text(data: TextData | HFData, seq_len: int) -> Data:
    tokenizer = open_tokenizer(data.tokenizer)
    corpus = tokenize_corpus(data, tokenizer)
    spans = {part: (0, count) for part, count in corpus.tokens.items()}
    for error in too_short(spans, seq_len):
        raise error
    boundary = corpus.boundary if data.documents else None
    sources = {
        part: PackedSource(
            corpus.path(part), corpus.dtype, *span, seq_len, corpus.vocab_size, boundary
        )
        for part, span in spans.items()
    }
    train, validation = (f"{corpus.tokens[part]:,}" for part in ("train", "validation"))
    return Data(
        sources["train"],
        sources["validation"],
        vocab_size=corpus.vocab_size,
        description=f"{describe(data.path)} in {data.tokenizer}: {train} tokens for training, "
        f"{validation} for validation" + _documents_note(data),
        boundary=corpus.boundary,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        tokenizer=tokenizer.fingerprint,
    )


def _open_tokens(data: TokenData, seq_len: int) -> Data:
    found = read_tokens(data)
    spans = found.spans(data.validation_fraction)
    for error in too_short(spans, seq_len):
        raise error
    boundary = found.boundary if data.documents else None
    sources = {}
    for part, span in spans.items():
        sources[part] = packed(found.part(*span), seq_len, found.vocab_size, boundary)
        if not len(sources[part]):
            reason = f"no file of the {part} part has as many as seq_len + 1 tokens"
            raise DataError("data.path", data.path, reason, "Give larger files")
    counts = ", ".join(f"{part} {stop - start:,} tokens" for part, (start, stop) in spans.items())
    places = ", ".join(map(str, paths_of(data)))
    many = f" in {len(found.files):,} files" if len(found.files) > 1 else ""
    tokenizer = None if found.tokenizer is None else open_tokenizer(found.tokenizer)
    return Data(
        sources["train"],
        sources["validation"],
        vocab_size=found.vocab_size,
        description=f"{places}: {counts}{many}" + _documents_note(data),
        boundary=found.boundary,
        decode=None if tokenizer is None else tokenizer.decode,
        encode=None if tokenizer is None else tokenizer.encode,
        tokenizer=None if tokenizer is None else tokenizer.fingerprint,
    )


def packed(
    files: list[TokenFile], seq_len: int, vocab_size: int, boundary: int | None
) -> PackedSource | PackedFiles:
    """Sequences of `seq_len` tokens of files: none goes over the end of one."""
    sources = [
        PackedSource(file.path, file.dtype, file.start, file.stop, seq_len, vocab_size, boundary)
        for file in files
    ]
    return sources[0] if len(sources) == 1 else PackedFiles(sources)


def open_mixture(data: MixtureData, config: Config) -> Data:
    """Each source as data=tokens or data=text would open it, mixed. Raises DataError."""
    opened: dict[str, Data] = {}
    for name, source in data.sources.items():
        one = data_of_source(data, source)
        try:
            if isinstance(one, TokenData):
                opened[name] = _open_tokens(one, config.seq_len)
            else:
                opened[name] = _open_text(one, config.seq_len)
        except DataError as error:
            key = error.key.replace("data.path", f"data.sources.{name}.path")
            raise DataError(key, error.value, error.reason, error.remedy) from None
    return mixture_of(opened, data, config, _documents_note(data))


def _documents_note(data: TextData | HFData | TokenData | MixtureData) -> str:
    return ", attention within documents" if data.documents else ""


def _init_worker(worker_id: int) -> None:
    """Detach a loader process from signals to the process group; it dies with its parent.

    Ctrl-C and torchrun's signals to the process group are handled by the training process alone,
    which may need its loader for a last step. (torch has set the SIGTERM handler with which the
    training process ends its loader.)
    """
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGKILL)
