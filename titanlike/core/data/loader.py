"""From the config to batches.

1. registry.py checks the config before any worker starts.
2. `registry.open_data` opens sources (sources.py) for training and validation, by the module of the
   kind of data: text is tokenized into a cache first (text.py), a token file is memory-mapped
   (tokens.py), random tokens are generated (synthetic.py), or the user's function is called, whose
   samples are checked and padded (custom.py).
3. `batches` reads the training source in the run's global order (order.py): step s is samples [s *
   batch_size, (s + 1) * batch_size) of that order, and dp rank r reads the r-th of dp equal,
   contiguous slices. So the order depends on seed and step alone, not on the mesh, and a run can be
   resumed at any step in any layout.
4. `validation_batches` reads the first samples of a validation source, each once, the same ones
   each time.

Shapes: B = batch_size // dp sequences on this dp rank, T = seq_len.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import queues
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.draws import number_of
from titanlike.core.data.kinds import loader_workers
from titanlike.core.data.order import GlobalBatchSampler, RampBatchSampler
from titanlike.core.data.registry import SHARED_MEMORY, free_shared_memory, open_data
from titanlike.core.data.sources import REAL, Batch, Data, Source, Stream, stack, with_real_tokens
from titanlike.core.launch.signals import die_with_parent
from titanlike.core.metrics.units import size


def batches(
    source: Source | Stream,
    config: Config,
    *,
    dp_rank: int,
    start_step: int = 0,
    used: set[str] | None = None,
) -> Iterator[Batch]:
    """Return an endless iterator over a dp rank's training batches from `start_step`.

    Each batch is dict(inputs=[B, T], targets=[B, T]), int64, on the CPU, with the other fields of
    the source's samples; B and T by `Config.batch_shape`. used: the fields that this rank needs,
    None = all; a rank that needs none does not read a stream.
    """
    making = partial(
        DataLoader[Any],
        worker_init_fn=_init_worker,
        # of its processes' seeds; drawn from dropout's generator otherwise
        generator=torch.Generator().manual_seed(number_of(config.seed, dp_rank, start_step)),
    )
    if loader_workers(config.data):
        get_temp_dir()  # else each process makes one, which stays when it is killed
    padded = collate(source) is not stack  # perhaps: samples of a user's own
    mark = with_real_tokens if padded and (used is None or REAL in used) else None
    if isinstance(source, Stream):
        if used is not None and not (used if padded else used - {REAL}):
            return _received(source.unread(config, start_step), config, start_step)
        read = source.stream(config, dp_rank, start_step, making)
        received = _received(read, config, start_step)
        return map(mark, received) if mark else received
    if hasattr(source, "batch_sampler"):
        sampler = source.batch_sampler(config, dp_rank, start_step)
    else:
        kind = RampBatchSampler if config.ramp else GlobalBatchSampler
        sampler = kind(len(source), config, dp_rank, start_step)
    workers = loader_workers(config.data)
    loader = making(
        cast(Any, source), batch_sampler=sampler, collate_fn=collate(source), num_workers=workers
    )
    try:
        stream = iter(loader)
    except OSError as error:  # from creating its semaphores
        raise _not_sent(config, str(error)) from None
    if loader.num_workers or config.ramp:
        stream = _received(stream, config, start_step)
    return map(mark, stream) if mark else stream


def _received(stream: Iterable[Any], config: Config, step: int) -> Iterator[Batch]:
    """Yield batches, or raise the error of a loader process that could not send one. With `ramp`,
    batches [samples, seq_len] are cut into the sequence length of their stage."""
    for number, batch in enumerate(stream, step + 1):
        if isinstance(batch, NotSent):
            raise _not_sent(config, f"one of {size(batch.bytes)}: {batch.reason}")
        if config.ramp:
            length = config.batch_shape(number)[1]
            batch = {name: value.reshape(-1, length) for name, value in batch.items()}
        yield batch


def _not_sent(config: Config, reason: str) -> ValueError:
    text = f"its processes cannot send their batches ({reason})"
    if "space" in reason:
        text += f", and {SHARED_MEMORY} has {size(free_shared_memory())} left"
    fix = "data.workers=0, or more shared memory (docker run --shm-size=1g)"
    return ValueError(str(Problem("data.workers", loader_workers(config.data), text, fix)))


def validation_weights(source: Source, config: Config, batches: int) -> list[float]:
    """Return a weight for each of `validation_batches`, so that each sample counts once.

    A partial last batch is filled with copies of the last sample; one more batch of copies alone
    has a negative weight, which cancels them, for any loss or metric.
    """
    total = min(len(source), batches * config.batch_size) if batches else len(source)
    copies = -total % config.batch_size
    whole = [1.0] * -(-total // config.batch_size)
    return [*whole, -copies / config.batch_size] if copies else whole


def validation_batches(
    source: Source, config: Config, *, dp_rank: int, batches: int
) -> Iterator[Batch]:
    """Yield a dp rank's slice, shaped as in training, of the first `batches` global batches of a
    source (0 = all), to be weighted by `validation_weights`."""
    local, last = config.batch_size // config.dp, len(source) - 1
    for number, weight in enumerate(validation_weights(source, config, batches)):
        start = number * config.batch_size + dp_rank * local if weight > 0 else last
        yield collate(source)([source[min(i, last)] for i in range(start, start + local)])


def collate(source: Source | Stream) -> Callable[[list[Batch]], Batch]:
    """Return the function that stacks a source's samples to a batch."""
    return getattr(source, "collate", stack)


def _init_worker(worker_id: int) -> None:
    """Detach a loader process from signals to the process group; it dies with its parent.

    Only the training process handles Ctrl-C and torchrun's signals; it may need its loader for one
    more step. (torch installs the SIGTERM handler by which the training process stops its loader.)
    """
    os.setsid()
    # a fork has none of the threads of tokenizers' pool, which would be waited for for ever
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    die_with_parent(os.getppid(), signal.SIGKILL)
    # W&B hooks imports to record packages in the run; the hook raises in a forked process
    if (hooks := sys.modules.get("wandb.sdk.lib.import_hooks")) is not None:
        hooks.unregister_all_post_import_hooks()
    # torch has no public hook for errors of the sending thread: by default the error is printed
    # and the training process waits for the batch forever
    queues.Queue._on_queue_feeder_error = _send_instead  # type: ignore[attr-defined]


class NotSent(NamedTuple):
    """Sent in place of a batch that a loader process could not send."""

    reason: str
    bytes: int


def _send_instead(queue: queues.Queue[Any], error: Exception, item: Any) -> None:
    number, batch = item
    batch = getattr(batch, "batch", batch)  # a stream sends blocks
    tensors = batch.values() if isinstance(batch, dict) else ()
    queue.put((number, NotSent(str(error), sum(tensor.nbytes for tensor in tensors))))


# --- the fields of a batch, known before any is loaded --------------------------------------------


def opened(config: Config, data: Data | None) -> Data | None:
    """Return `data`, or a user's own, opened now; None for other kinds, whose shapes are known."""
    return open_data(config) if data is None and isinstance(config.data, Custom) else data


def example_batch(config: Config, data: Data | None = None) -> dict[str, torch.Tensor]:
    """Return a batch of one sequence on the meta device, with the dtypes that the model receives.

    Variable lengths have the maximal length. data: if already open; otherwise a user's function is
    called. Raises DataError for an invalid sample.
    """
    data = opened(config, data)
    if data is not None and data.example is not None:
        batch = {name: value.to("meta") for name, value in data.example.items()}
    elif isinstance(config.data, Custom):
        from titanlike.core.data.checked import CheckedSource
        from titanlike.core.data.custom import checked

        assert data is not None
        train = data.train
        if not isinstance(train, CheckedSource):  # not opened by `open_data`
            train = checked(data, config.data.name, config).train
        batch = cast(CheckedSource, train).example()
    else:
        ids = torch.empty(config.seq_len, dtype=torch.int64, device="meta")
        sample = {"inputs": ids, "targets": ids}
        if getattr(config.data, "documents", False):
            sample["document_ids"] = ids
        batch = stack([sample])
    dtype = torch.bfloat16 if config.precision.low else torch.float32
    dtypes = {name: dtype if t.is_floating_point() else t.dtype for name, t in batch.items()}
    shapes = {name: tensor.shape for name, tensor in batch.items() if name != REAL}
    return {n: torch.empty(shape, dtype=dtypes[n], device="meta") for n, shape in shapes.items()}


def field_problems(config: Config, model: nn.Module, fields: Iterable[str]) -> list[Problem]:
    """Return a problem for each batch field that is not an argument of the model's forward."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # `cache` is the KV cache of generation, not a field
    by_name = [p.name for p in parameters[1:] if p.kind in kinds and p.name != "cache"]
    takes = f"besides its inputs it takes {', '.join(by_name)}"
    takes = takes if by_name else "it takes inputs only"
    problems = []
    for name in (name for name in fields if name not in ("inputs", *by_name)):
        reason = (
            f"gives the batch a field {name}, which the forward of model.name={config.model.name} "
            f"does not take ({takes})"
        )
        if isinstance(config.data, Custom):
            fix = f"samples without it, or a forward with an argument {name}"
            problems.append(Problem("data.name", config.data.name, reason, fix))
        else:
            problems.append(Problem("data.documents", True, reason, "data.documents=false"))
    return problems
