"""The ranks of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.distributed.collectives import GroupInfo


@dataclass(eq=False)
class TensorRanks(GroupInfo):
    """The tensor-parallel ranks that this one computes with."""

    # Whether activations between sharded layers are divided along the sequence. It may differ from
    # batch to batch: a length that `size` does not divide is not.
    sequence: bool = False
    # whether what is gathered along it is not kept for the backward: see `gathered.py`
    gathers_again: bool = True

    def part(self, length: int) -> tuple[int, int]:
        """(start, stop) of this rank's part of so many rows, dealt as torch.chunk does: the last
        may have fewer."""
        rows = -(-length // self.size)
        start = min(self.rank * rows, length)
        return start, min(start + rows, length)
