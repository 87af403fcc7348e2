"""Training steps of one rank on an accelerator that is not there: tensors without memory on a device
of their own, on which an operation with a tensor of the CPU raises. `python -m
support.fake_accelerator NAME...` runs layouts of LAYOUTS; prints a line for each that fails.

Left out are experts of other ranks, whose sizes are values, and rings, which ask for a backend."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from support.counted_memory import build_fake, fake_process_group
from support.families import llama, moe
from support.models import tiny
from titanlike.core.config.groups.computation import (
    ActivationCheckpoint,
    Float8Precision,
    Fsdp,
    Numerics,
    Precision,
    SelectiveActivationCheckpoint,
)
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy, CrossEntropy
from titanlike.core.config.groups.watching import Metrics
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.fake_ranks import fake_tensors
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.step import forward_backward, update

small = partial(tiny, layers=2)
EXACT = Numerics("exact", 1)
LAYOUTS = {
    "one process": small(),
    "bf16": small(precision=Precision("bf16")),
    "losses of microbatches": small(metrics=Metrics(microbatch_losses=True)),
    "chunked loss": small(loss=ChunkedCrossEntropy()),
    "recomputed": small(activation_checkpoint=ActivationCheckpoint("full")),
    "recomputed in part": small(activation_checkpoint=SelectiveActivationCheckpoint()),
    "dp": small(1, 2, precision=Precision("bf16")),
    "hsdp": small(1, 4, replicate=2, fsdp=Fsdp(zero=3)),
    "pp": small(2),
    "pp dp": tiny(pp=2, dp=2, schedule="interleaved1f1b"),
    "split backward": tiny(pp=2, schedule="zbvzerobubble"),
    "tied over stages": small(2, tied=True),
    "tp": small(tp=2),
    "cp": small(cp=2),
    "cp gather": small(2, cp=2, context_parallel="gather"),
    "muon": small(1, 2, optimizer=Muon()),
    "mixture": small(model=moe(n_shared_experts=1, balance_loss=0.01, z_loss=0.001)),
    "float8": small(precision=Float8Precision(min_features=32)),
    "multi-token": small(
        model=llama(num_nextn_predict_layers=1), loss=CrossEntropy(mtp_weight=0.3)
    ),
    "exact": small(numerics=EXACT),
    "exact dp": small(1, 2, numerics=EXACT, fsdp=Fsdp(zero=3)),
    "exact pp": tiny(pp=2, schedule="zbvzerobubble", numerics=EXACT),
}


class Module:
    """What torch asks a device's module, as torch.cuda: one device, queues that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)


def two_steps(config: Config, fake: FakeTensorMode) -> None:
    """Of rank 0, and an evaluation."""
    config, device = replace(config, device="auto"), torch.device("pretended", 0)

    with fake_process_group(0, config.world_size):
        run = build_fake(config, device, fake)
        shape = config.batch_size // config.dp, config.seq_len
        worker = Worker(0, config.world_size, 0, 1, Path(), None, [])
        detector = AnomalyDetector(config, {})
        with fake:
            batch = {
                name: torch.zeros(shape, dtype=torch.int64, device=device)
                for name in ("inputs", "targets")
            }
            for step in (1, 2):
                gradients = forward_backward(run, config, step, iter([batch]))
                assert gradients.loss.device == gradients.norm.device == device
                update(run, config, gradients, detector, worker)
            run.train_mode(False)
            run.pipeline.evaluate(batch)


@contextmanager
def without_memory(fake: FakeTensorMode) -> Iterator[None]:
    """Within it the device's tensors are fake ones, also where no mode is entered."""

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **_: object) -> torch.Tensor:
        return FakeTensor(fake, torch.empty(size, dtype=dtype, device="meta"), torch.device(device))

    def strided(
        size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: object
    ) -> torch.Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(fake, made, torch.device(device))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("empty.memory_format", empty, "PrivateUse1")
        library.impl("empty_strided", strided, "PrivateUse1")
        yield


def main(names: list[str]) -> None:
    _setup_privateuseone_for_python_backend("pretended", Module())
    for kind in ("Stream", "Event"):
        mock.patch.object(torch, kind, mock.MagicMock()).start()
    mock.patch.object(torch.accelerator, "current_stream", mock.MagicMock()).start()
    for function in ("memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        mock.patch.object(torch.accelerator, function, mock.MagicMock(return_value=0)).start()
    mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor).start()
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    fake = fake_tensors()
    with without_memory(fake):
        for name in names or LAYOUTS:
            if LAYOUTS[name].pp > 1 and torch.__version__ < "2.12":
                continue  # whose pipelines ask for a backend, too
            try:
                two_steps(LAYOUTS[name], fake)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
