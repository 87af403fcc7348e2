"""The global order of samples: which ones a dp rank reads in each step."""

from __future__ import annotations

import numpy as np

from titanlike.config.schema import Config
from titanlike.data.shuffle import shuffled_index

_BLOCK = 1024  # samples whose order is computed at once


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
