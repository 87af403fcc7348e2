"""From the config to batches.

1. registry.py checks the config before any worker starts.
2. `registry.open_data` opens a source (sources.py) for training and one for validation, by the
   module of the kind of data: text is tokenized into a cache first (text.py), a token file is
   mapped (tokens.py), random tokens are generated (synthetic.py), or the user's function is called,
   whose samples are checked and padded (custom.py).
3. `batches` reads the training source in the run's global order (order.py): step s is samples
   [s * batch_size, (s + 1) * batch_size) of that order, and dp rank r reads the r-th of dp equal,
   contiguous slices of them. So the order depends on seed and step alone, not on the mesh, and a
   run can be resumed at any step in any layout.
4. `validation_batches` reads the first samples of a validation source, each once, the same each
   time.

Shapes: B = batch_size // dp sequences on this dp rank, T = seq_len.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import queues
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from titanlike.config.errors import Problem
from titanlike.config.schema import Config, Custom
from titanlike.data.kinds import loader_workers
from titanlike.data.order import GlobalBatchSampler, RampBatchSampler
from titanlike.data.registry import SHARED_MEMORY, free_shared_memory, open_data
from titanlike.data.sources import Batch, Data, Source, Stream, stack
from titanlike.launch.heartbeat import DATA_THREAD
from titanlike.launch.signals import die_with_parent
from titanlike.metrics.units import size

_JOIN_TIMEOUT = 5.0  # seconds to complete the item that nobody will use

_T = TypeVar("_T")


def batches(
    source: Source | Stream,
    config: Config,
    *,
    dp_rank: int,
    start_step: int = 0,
    used: set[str] | None = None,
) -> Iterator[Batch]:
    """The training batches of a dp rank from `start_step`, endless. used: the fields that this rank
    uses, None = all; a rank without any does not read a stream.

    Each is dict(inputs=[B, T], targets=[B, T]), int64, on the CPU, with the other fields
    of the source's samples; B and T by `Config.batch_shape`.
    """
    making = partial(
        DataLoader[Any],
        worker_init_fn=_init_worker,
        # The loader draws a number when it starts: not from the generator of dropout.
        generator=torch.Generator(),
    )
    if isinstance(source, Stream):
        if used is not None and not used:
            return _received(source.unread(config, start_step), config, start_step)
        stream = source.stream(config, dp_rank, start_step, making)
        return _received(stream, config, start_step)
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
    except OSError as error:  # of its semaphores
        raise _not_sent(config, str(error)) from None
    return _received(stream, config, start_step) if loader.num_workers or config.ramp else stream


def _received(stream: Iterable[Any], config: Config, step: int) -> Iterator[Batch]:
    """Batches as loader processes send them; those [samples, seq_len] of a `ramp` cut into the
    sequences of their stage."""
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
    """What each of `validation_batches` counts, so that each sample counts once.

    A last batch that is not full is filled with copies of the last sample, and another batch of
    nothing but these takes them away, by a negative weight: right for every loss and metric.
    """
    total = min(len(source), batches * config.batch_size) if batches else len(source)
    copies = -total % config.batch_size
    whole = [1.0] * -(-total // config.batch_size)
    return [*whole, -copies / config.batch_size] if copies else whole


def validation_batches(
    source: Source, config: Config, *, dp_rank: int, batches: int
) -> Iterator[Batch]:
    """A dp rank's part, shaped as in training, of the first `batches` global batches of a source
    (0 = of all), which count as `validation_weights` says."""
    local, last = config.batch_size // config.dp, len(source) - 1
    for number, weight in enumerate(validation_weights(source, config, batches)):
        start = number * config.batch_size + dp_rank * local if weight > 0 else last
        yield collate(source)([source[min(i, last)] for i in range(start, start + local)])


def collate(source: Source) -> Callable[[list[Batch]], Batch]:
    """The function that makes a batch of a source's samples."""
    return getattr(source, "collate", stack)


def _init_worker(worker_id: int) -> None:
    """Detach a loader process from signals to the process group; it dies with its parent.

    Ctrl-C and torchrun's signals to the process group are handled by the training process alone,
    which may need its loader for a last step. (torch has set the SIGTERM handler with which the
    training process ends its loader.)
    """
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGKILL)
    # W&B would note in the run which packages are imported, and raises in a forked process
    if (hooks := sys.modules.get("wandb.sdk.lib.import_hooks")) is not None:
        hooks.unregister_all_post_import_hooks()
    # the hook of the thread that sends, which has no public one: it would print the error, and the
    # trainer wait for the batch forever
    queues.Queue._on_queue_feeder_error = _send_instead  # type: ignore[attr-defined]


class NotSent(NamedTuple):
    """In place of a batch that a loader process could not send."""

    reason: str
    bytes: int


def _send_instead(queue: queues.Queue[Any], error: Exception, item: Any) -> None:
    number, batch = item
    batch = getattr(batch, "batch", batch)  # of a stream's block
    tensors = batch.values() if isinstance(batch, dict) else ()
    queue.put((number, NotSent(str(error), sum(tensor.nbytes for tensor in tensors))))


# --- the next batch while a step runs -------------------------------------------------------------


def one_ahead(stream: Iterator[_T]) -> Iterator[_T]:
    """The same items, in the same order; what the stream raises is raised where its item would be.

    A thread takes an item from the stream when the one before it is handed out, so it is never more
    than one ahead. It ends with this generator, which is closed or dropped; one that hangs in the
    stream is left behind, and does not keep the process from ending.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()
    made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    arguments = (stream, wanted, made)
    thread = threading.Thread(target=_make_items, args=arguments, daemon=True, name=DATA_THREAD)
    thread.start()
    wanted.put(True)
    try:
        while True:
            # a signal's handler interrupts it; launch/heartbeat.py knows that this function waits
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            wanted.put(True)
            yield item
    finally:
        wanted.put(False)
        thread.join(_JOIN_TIMEOUT)


def _make_items(
    stream: Iterator[Any],
    wanted: SimpleQueue[bool],
    made: SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    """The thread: an item, or what is raised in its place, each time that one is wanted."""
    while wanted.get():
        try:
            made.put((next(stream), None))
        except BaseException as error:  # a SystemExit of the user's code, too
            made.put((None, error))


# --- the fields of a batch, known before any is loaded --------------------------------------------


def example_batch(config: Config, data: Data | None = None) -> dict[str, torch.Tensor]:
    """A batch of one sequence on the meta device, in the dtypes that the model receives.

    Where lengths vary, with the maximal length. data: if already open; otherwise a user's own data
    is opened. Raises DataError for an invalid sample of the user's.
    """
    if data is None and isinstance(config.data, Custom):
        data = open_data(config)
    if data is not None and data.example is not None:
        batch = {name: value.to("meta") for name, value in data.example.items()}
    elif isinstance(config.data, Custom):
        from titanlike.data.checked import CheckedSource
        from titanlike.data.custom import checked

        assert data is not None
        train = data.train
        if not isinstance(train, CheckedSource):  # not opened by its config
            train = checked(data, config.data.name, config.seq_len).train
        batch = cast(CheckedSource, train).example()
    else:
        ids = torch.empty(config.seq_len, dtype=torch.int64, device="meta")
        sample = {"inputs": ids, "targets": ids}
        if getattr(config.data, "documents", False):
            sample["document_ids"] = ids
        batch = stack([sample])
    dtype = torch.bfloat16 if config.precision.low else torch.float32
    dtypes = {name: dtype if t.is_floating_point() else t.dtype for name, t in batch.items()}
    return {n: torch.empty(t.shape, dtype=dtypes[n], device="meta") for n, t in batch.items()}


def field_problems(config: Config, model: nn.Module, fields: Iterable[str]) -> list[Problem]:
    """A problem for each field of the batch that the model's forward has no argument for."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # a cache is for generation, and no field
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
