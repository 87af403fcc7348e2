"""From the config to batches.

1. `problems` and `vocab_size` (checks.py) look at the config before any worker starts.
2. `open_data` makes a source (sources.py) for training and one for validation: text is tokenized
   into a cache first (prepare.py), a token file is mapped, random tokens are made on demand, and a
   function of the user's own is called, whose samples are checked and padded (samples.py).
3. `batches` reads the training source in the run's global order (order.py): step s is samples
   [s * batch_size, (s + 1) * batch_size) of that order, and dp rank r reads the r-th of dp equal,
   contiguous slices of them. So the order depends on seed and step alone, not on the mesh, and a
   run goes on at any step in any layout.
4. `validation_batches` reads the first sequences of the validation source, the same each time.

Shapes: B sequences of this dp rank = batch_size // dp, T = seq_len.
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
from titanlike.data.checks import (
    call_custom,
    loader_workers,
    problems,
    too_short,
    vocab_size,
)
from titanlike.data.corpus import describe
from titanlike.data.shuffle import shuffled_index
from titanlike.data.sources import Data, PackedSource, Source, SyntheticSource
from titanlike.data.token_file import token_spans
from titanlike.data.tokenized_corpus import tokenize_corpus
from titanlike.data.tokenizer import open_tokenizer
from titanlike.launch.signals import die_with_parent

__all__ = ["batches", "loader", "open_data", "problems", "validation_batches", "vocab_size"]

BLOCK = 1024  # samples
WINDOW = 64  # steps among which samples are sorted by length
Batch = dict[str, torch.Tensor]


def open_data(config: Config) -> Data:
    """The training and validation sources of the config.

    Text is tokenized on the first call; several processes may call this at once, and it saves work
    when one of them does so first. Raises ValueError (DataError) for what cannot be read, and where
    a part has less than one sequence of `seq_len`.
    """
    data = config.data
    if isinstance(data, TextData):
        return _open_text(data, config.seq_len)
    if isinstance(data, TokenData):
        return _open_tokens(data, config.seq_len)
    if isinstance(data, SyntheticData):
        train, validation = (
            SyntheticSource(data.vocab_size, config.seq_len, config.seed, stream)
            for stream in (0, 1)
        )
        return Data(train, validation, data.vocab_size, "random tokens, made on demand")
    return call_custom(data, config.seq_len)


def loader(
    source: Source, config: Config, *, dp_rank: int, start_step: int = 0
) -> StatefulDataLoader:
    """Endless loader of the training batches of a dp rank; its state is the step alone.

    So the state may be loaded into a loader of another dp rank or dp, as long as
    `data.workers` stays (torchdata keeps a state for each loader process).
    """
    pinned = config.device != "cpu" and torch.cuda.is_available()
    with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(
            source,
            batch_sampler=_order(source, config, dp_rank, start_step),
            collate_fn=_collate(source),
            num_workers=loader_workers(config),
            pin_memory=pinned,
            worker_init_fn=_enter_worker,
            # The loader draws a number when it starts: not from the generator that dropout uses.
            generator=torch.Generator(),
        )


def batches(
    source: Source, config: Config, *, dp_rank: int, start_step: int = 0
) -> Iterator[Batch]:
    """The training batches of a dp rank from `start_step` on, without end.

    Each is dict(inputs=[B, T], targets=[B, T]), int64, on the CPU (pinned where a GPU is used), with
    what else the source's samples have.
    """
    return iter(loader(source, config, dp_rank=dp_rank, start_step=start_step))


def validation_batches(source: Source, config: Config, *, dp_rank: int) -> Iterator[Batch]:
    """The `validation.batches` batches of a dp rank, shaped as in training.

    They are the first sequences of the source, which begins again where it is too short.
    """
    local = config.batch_size // config.dp
    for step in range(config.validation.batches):
        first = step * config.batch_size + dp_rank * local
        yield _collate(source)([source[i % len(source)] for i in range(first, first + local)])


class GlobalOrder:
    """Batch sampler: the sample numbers of a dp rank's slice of each step, without end.

    They are computed for `BLOCK` samples or more at once, which costs hardly more than one step's.
    """

    def __init__(self, size: int, config: Config, dp_rank: int, step: int) -> None:
        assert config.batch_size % config.dp == 0, "batch_size must divide into dp parts"
        self._size, self._seed = size, config.seed
        self._global, self._local = config.batch_size, config.batch_size // config.dp
        self._offset = dp_rank * self._local
        self._step = step
        self._steps = max(1, BLOCK // self._local)  # steps in a block
        self._block: tuple[int, list[list[int]]] = (-1, [])  # its number, samples of each step

    def __iter__(self) -> GlobalOrder:
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


class SimilarLengths(GlobalOrder):
    """The same samples in every `WINDOW` steps, dealt so that those of a step are of similar length.

    A window's samples are sorted by length and cut into its steps, which then come in a random
    order. So the order is one of seed and step, as without, and of the lengths.
    """

    def __init__(
        self, size: int, config: Config, dp_rank: int, step: int, lengths: Sequence[int]
    ) -> None:
        super().__init__(size, config, dp_rank, step)
        self._lengths = np.asarray(lengths)
        self._steps = WINDOW

    def _samples(self, steps: np.ndarray) -> np.ndarray:
        positions = steps[:, None] * self._global + np.arange(self._global)
        samples = shuffled_index(positions.reshape(-1), self._size, self._seed)
        by_length = samples[np.argsort(self._lengths[samples], kind="stable")]
        turns = shuffled_index(steps, len(steps), self._seed)  # a shuffle of each window's own
        mine = slice(self._offset, self._offset + self._local)
        return by_length.reshape(len(steps), self._global)[turns, mine]


def _order(source: Source, config: Config, dp_rank: int, step: int) -> GlobalOrder:
    lengths = source.lengths if isinstance(source, CheckedSource) else None
    if lengths is None:
        return GlobalOrder(len(source), config, dp_rank, step)
    return SimilarLengths(len(source), config, dp_rank, step, lengths)


def _collate(source: Source) -> Callable[[list[Batch]], Batch]:
    return source.batch if isinstance(source, CheckedSource) else stack


def _open_text(data: TextData, seq_len: int) -> Data:
    tokenizer = open_tokenizer(data.tokenizer)
    prepared = tokenize_corpus(data, tokenizer)
    spans = {part: (0, count) for part, count in prepared.tokens.items()}
    for error in too_short(spans, seq_len):
        raise error
    boundary = prepared.boundary if data.documents else None
    sources = {
        part: PackedSource(
            prepared.path(part), prepared.dtype, *span, seq_len, prepared.vocab_size, boundary
        )
        for part, span in spans.items()
    }
    train, held_out = (f"{prepared.tokens[part]:,}" for part in ("train", "validation"))
    return Data(
        **sources,
        vocab_size=prepared.vocab_size,
        description=f"{describe(data.path)} in {data.tokenizer}: {train} tokens to train on, "
        f"{held_out} for validation" + _kept_apart(data),
        boundary=prepared.boundary,
        decode=tokenizer.decode,
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
        description=f"{data.path}: {counts}" + _kept_apart(data),
        boundary=data.boundary,
    )


def _kept_apart(data: TextData | TokenData) -> str:
    return ", each document by itself" if data.documents else ""


def _enter_worker(worker_id: int) -> None:
    """A loader process leaves signals to the training process, and dies with it.

    Ctrl-C, and the signals that torchrun sends to a process group, are for the training process
    alone, which may need its loader for a last step. (torch has set the handler of SIGTERM, by
    which the training process ends its loader.)
    """
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGKILL)
