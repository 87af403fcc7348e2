"""Copy batches to a rank's device while the previous step runs: only fields that its stages use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import loader_workers
from titanlike.core.data.sources import Batch
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.sharding import compute_dtype
from titanlike.core.models.documents import with_host_copy
from titanlike.core.training.build import Run


def batches_for(run: Run, config: Config, stream: Iterator[Batch]) -> Iterator[Batch]:
    """Yield a dp rank's batches on this rank's device, in the compute dtype.

    A field that no stage of this rank reads is on meta: its shape and dtype are known and nothing
    is copied.

    On a GPU a thread reads the next batch and copies it on a side stream while a step runs. Not on
    the CPU, where the thread would compete with the step for the same cores. A custom source that
    is read in this process (data.workers=0) is read by the main thread: while it reads a sample, the
    process's random generators are the sample's.
    """
    # batches of another length may use other fields
    used = None if run.plan.variable else run.pipeline.used_fields()
    stream = (
        {
            n: x if used is None or n in used else torch.empty_like(x, device="meta")
            for n, x in b.items()
        }
        for b in stream
    )
    if isinstance(config.data, Custom):
        from titanlike.core.training.checks import vocabulary_of, with_known_ids

        vocab_size = vocabulary_of(run.plan.model_graph.model, run.plan.model)
        stream = (with_known_ids(batch, vocab_size, config) for batch in stream)
    if run.mesh.device.type == "cpu":
        return (to_device(batch, run.mesh, config) for batch in stream)
    from titanlike.core.training.copy_ahead import DeviceStreams, copied_ahead

    streams = DeviceStreams(run.mesh.device)
    in_thread = not isinstance(config.data, Custom) or loader_workers(config.data) > 0
    move = partial(to_device, mesh=run.mesh, config=config)
    return copied_ahead(stream, run.mesh.device, move, streams, in_thread)


def to_device(batch: Batch, mesh: Mesh, config: Config) -> Batch:
    """Move a batch to this rank's device, floating-point inputs in the compute dtype. Tensors that
    are there already, or on meta, stay as they are."""
    dtype = compute_dtype(config.precision)
    moved = {}
    for name, value in batch.items():
        moved[name] = here = value if value.is_meta else value.to(mesh.device, non_blocking=True)
        if name == "document_ids" and here.device != value.device:
            with_host_copy(here, value)  # attention reads their number on the host
        if value.is_floating_point() and name != "targets":
            moved[name] = here.to(dtype)
    return moved
