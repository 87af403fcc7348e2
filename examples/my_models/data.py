"""Custom data: random ids, each of which must be repeated `delay` tokens later."""

import torch
from torch import Tensor

from titanlike import IGNORE, Data


class Echo:
    """`echo[i]` depends on i alone, so that every rank and every restart reads the same sample."""

    def __init__(self, vocab_size: int, seq_len: int, delay: int, seed: int):
        self.vocab_size, self.seq_len, self.delay, self.seed = vocab_size, seq_len, delay, seed

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2 * i + self.seed)
        ids = torch.randint(self.vocab_size, (self.seq_len,), generator=generator)
        targets = torch.roll(ids, self.delay)
        targets[: self.delay] = IGNORE  # nothing to repeat yet
        return {"inputs": ids, "targets": targets}


def echo(vocab_size: int, seq_len: int, delay: int = 2) -> Data:
    """Called with the keys of `data` and with `seq_len`."""
    train, validation = (Echo(vocab_size, seq_len, delay, seed) for seed in (0, 1))
    return Data(train, validation, vocab_size, f"echo after {delay} of {vocab_size} random ids")
