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
from pathlib import Path

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlike.config.schema import Config, SyntheticData, TextData, TokenData
from titanlike.data.checked_source import CheckedSource, stack
from titanlike.data.checks import call_custom, loader_workers, too_short
from titanlike.data.corpus import describe
from titanlike.data.shuffle import shuffled_index
from titanlike.data.sources import Batch, Data, PackedSource, Source, SyntheticSource
from titanlike.data.token_file import token_spans
from titanlike.data.tokenized_corpus import tokenize_corpus
from titanlike.data.tokenizer import open_tokenizer
from titanlike.launch.signals import die_with_parent

_BLOCK = 1024  # samples whose order is computed at once
_WINDOW = 64  # steps within which samples are sorted by length


def open_data(config: Config) -> Data:
    """The training and validation sources of the config.

    Text is tokenized on the first call; several processes may call this concurrently, but then each
    tokenizes. Raises DataError for files that cannot be read, and for a part shorter than one
    sequence of `seq_len`.
    """
    data = config.data
    if isinstance(data, TextData):
        return _open_text(data, config.seq_len)
    if isinstance(data, TokenData):
        return _open_tokens(data, config.seq_len)
    if isinstance(data, SyntheticData):
        sizes = (data.vocab_size, config.seq_len, config.seed)
        sources = (SyntheticSource(*sizes, stream) for stream in (0, 1))
        return Data(*sources, data.vocab_size, "random tokens, generated on demand")
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
            collate_fn=_collate(source),
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
        yield _collate(source)([source[i % len(source)] for i in range(first, first + local)])


class GlobalBatchSampler:
    """The sample numbers of a dp rank's slice of each step, endless.

    Computed for `_BLOCK` samples or more at once, which takes hardly longer than for one step.
    """

    def __init__(self, size: int, config: Config, dp_rank: int, step: int) -> None:
        assert config.batch_size % config.dp == 0, "batch_size must divide into dp parts"
        self._size, self._seed = size, config.seed
        self._global, self._local = config.batch_size, config.batch_size // config.dp
        self._offset = dp_rank * self._local
        self._step = step
        self._steps = max(1, _BLOCK // self._local)  # steps in a block
        self._block: tuple[int, list[list[int]]] = (-1, [])  # (its number, samples of each step)

    def __iter__(self) -> GlobalBatchSampler:
        return self

    def __next__(self) -> list[int]:
        number, row = divmod(self._step, self._steps)
        if number != self._block[0]:
            steps = np.arange(number * self._steps, (number + 1) * self._steps)
            self._block = (number, self._samples(steps).tolist())
        self._step += 1
        return self._block[1][row]

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        """This dp rank's samples of a block of steps, [steps, samples of a step]."""
        first = steps[:, None] * self._global + self._offset
        return shuffled_index(first + np.arange(self._local), self._size, self._seed)

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = state["step"]


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
    lengths = source.lengths if isinstance(source, CheckedSource) else None
    if lengths is None:
        return GlobalBatchSampler(len(source), config, dp_rank, step)
    return SimilarLengthBatchSampler(len(source), config, dp_rank, step, lengths)


def _collate(source: Source) -> Callable[[list[Batch]], Batch]:
    return source.batch if isinstance(source, CheckedSource) else stack


def _open_text(data: TextData, seq_len: int) -> Data:
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
        **sources,
        vocab_size=corpus.vocab_size,
        description=f"{describe(data.path)} in {data.tokenizer}: {train} tokens for training, "
        f"{validation} for validation" + _documents_note(data),
        boundary=corpus.boundary,
        decode=tokenizer.decode,
        tokenizer=tokenizer.fingerprint,
    )


def _open_tokens(data: TokenData, seq_len: int) -> Data:
    spans = token_spans(data)
    for error in too_short(spans, seq_len):
        raise error
    path = Path(data.path).expanduser().resolve()
    boundary = data.boundary if data.documents else None
    sources = {
        part: PackedSource(path, data.dtype, *span, seq_len, data.vocab_size, boundary)
        for part, span in spans.items()
    }
    counts = ", ".join(f"{part} {stop - start:,} tokens" for part, (start, stop) in spans.items())
    return Data(
        **sources,
        vocab_size=data.vocab_size,
        description=f"{data.path}: {counts}" + _documents_note(data),
        boundary=data.boundary,
    )


def _documents_note(data: TextData | TokenData) -> str:
    return ", attention within documents" if data.documents else ""


def _init_worker(worker_id: int) -> None:
    """Detach a loader process from signals to the process group; it dies with its parent.

    Ctrl-C and torchrun's signals to the process group are handled by the training process alone,
    which may need its loader for a last step. (torch has set the SIGTERM handler with which the
    training process ends its loader.)
    """
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGKILL)
