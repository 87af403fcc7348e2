"""What is in a batch, before there is one."""

from __future__ import annotations

import torch

from titanlike.config.schema import Config, Custom
from titanlike.data.checks import call_custom
from titanlike.data.sources import Data


def example(config: Config, data: Data | None = None) -> dict[str, torch.Tensor]:
    """A batch of one sequence on the meta device, in the dtypes in which the model gets it.

    data: where it is open already; else a user's own data is opened.
    """
    if isinstance(config.data, Custom):
        sample = (data or call_custom(config.data, config.seq_len)).train[0]
    else:
        ids = torch.empty(config.seq_len, dtype=torch.int64, device="meta")
        sample = {"inputs": ids, "targets": ids}
    dtype = torch.bfloat16 if config.precision.name == "bf16" else torch.float32
    return {
        name: torch.empty(
            1,
            *tensor.shape,
            dtype=dtype if tensor.is_floating_point() else tensor.dtype,
            device="meta",
        )
        for name, tensor in sample.items()
    }
