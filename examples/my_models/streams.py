"""A stream of one's own, a graph of `torchdata.nodes`: lines of text files as bytes, a line a sample.

Run it with: PYTHONPATH=examples python train.py data=own data.name=my_models.streams.lines
data.path=titanlike/ seq_len=64
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchdata.nodes import IterableWrapper, Mapper

from titanlike import IGNORE, Data


class Lines:
    """Every `readers`-th line of the files, from the `reader`-th one. Its state is a line's number:
    without `state_dict` and `load_state_dict` a resume would read forward from the beginning."""

    def __init__(self, files: list[Path], reader: int, readers: int):
        self.files, self.reader, self.readers = files, reader, readers
        self.done = 0

    def __iter__(self) -> Iterator[str]:
        lines = (line for file in self.files for line in file.open(errors="replace"))
        for number, line in enumerate(lines):
            if number >= self.done and number % self.readers == self.reader and line.strip():
                self.done = number + 1
                yield line
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def lines(path: str, seq_len: int, reader: int, readers: int) -> Data:
    """Called for each reader, with the keys of `data` and with `seq_len`."""

    def sample(line: str) -> dict[str, Tensor]:
        ids = torch.full((seq_len + 1,), 256)  # 256 = padding
        text = torch.tensor([*line.encode()[: seq_len + 1]])
        ids[: len(text)] = text
        return {"inputs": ids[:-1], "targets": ids[1:].masked_fill(ids[1:] == 256, IGNORE)}

    files = sorted(Path(path).rglob("*.py"))
    read = IterableWrapper(Lines(files, reader, readers))
    return Data(
        Mapper(read, sample), None, vocab_size=257, description=f"lines of {len(files)} files"
    )
