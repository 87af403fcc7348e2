"""The ranks of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.core.distributed.collectives import GroupInfo


@dataclass(eq=False)
class TensorRanks(GroupInfo):
    """The tensor-parallel group of this rank."""

    # whether activations between sharded layers are sharded along the sequence: in batches whose
    # length `size` divides
    sequence: bool = False
    # whether gathered activations are gathered again for the backward: see `gathered.py`
    gathers_again: bool = True
    # blocks are compiled: nothing overlaps with gathering again, so what is gathered is kept
    compiled: bool = False

    def part(self, length: int) -> tuple[int, int]:
        """(start, stop) of this rank's rows, split as by torch.chunk: the last ranks may have
        fewer."""
        rows = -(-length // self.size)
        start = min(self.rank * rows, length)
        return start, min(start + rows, length)
