"""Use the first batch before the first step: compile blocks while no rank waits in a P2P receive,
and refuse models that couple samples. Modules are unchanged afterwards.

Coupled samples (a mean over dim 0, attention over samples) would make each layout a different
model, as they are the samples of a microbatch. The graph of operations does not show them; but
without them a sample's loss does not depend on its neighbours in the microbatch. So the first batch
is evaluated with different neighbours: each microbatch as it is, its first half twice, and its
second half twice.

A norm or a sum over the batch hardly depends on the neighbours but on their number, so the halves
are evaluated in microbatches of half the size, too.

Microbatches of one sample are paired for the check. torch's own modules are in evaluation mode (no
dropout, running statistics), custom ones in training mode, to find couplings that exist only in
training. A forward that still draws random numbers is compared in evaluation mode instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.sources import Batch
from titanlike.core.device.accelerator import kept_rng
from titanlike.core.distributed.initialize import seeded
from titanlike.core.distributed.placement import in_bf16
from titanlike.core.graph.model_graph import fields_of
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.worker import Worker
from titanlike.core.pipeline.pipeline import Runtime
from titanlike.core.torch_private.compiler import compiler_error
from titanlike.core.torch_private.operators import BatchNorm
from titanlike.core.training.build import Run
from titanlike.core.training.checks import may_mix_samples
from titanlike.core.training.device_batches import to_device

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def unchanged(run: Run, seed: int) -> Iterator[None]:
    """A context with random numbers seeded by `seed`. On exit, buffers, plain attributes of modules
    and random states are restored."""
    saved = [
        (
            module,
            {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)},
            {name: (b, None if b is None else b.clone()) for name, b in module._buffers.items()},
        )
        for stage in run.stages
        for module in stage.modules()
    ]
    try:
        with kept_rng(run.mesh.device), seeded(seed):
            yield
    finally:
        with torch.no_grad():
            for module, plain, buffers in saved:
                vars(module).update(plain)
                for name, (buffer, value) in buffers.items():
                    if buffer is not None and value is not None:
                        buffer.copy_(value)
                    module._buffers[name] = buffer  # the forward may have replaced it


def compile_blocks(run: Run, config: Config, batch: Batch, worker: Worker) -> str:
    """Compile the blocks of all stages for batches such as this one. Collective.

    Returns a summary on rank 0, "" elsewhere. Raises ConfigError if the compiler fails,
    BarrierTimeout if a rank has not compiled its blocks within `launch.timeout`.
    """
    assert run.compiled is not None
    begin = time.perf_counter()
    run.compiled.new_graphs()
    batch = to_device(batch, run.mesh, config)
    try:
        with unchanged(run, config.seed):
            run.train_mode(True)
            run.pipeline.rehearse(batch)
            if config.validation.every:
                run.train_mode(False)
                with torch.no_grad():
                    run.pipeline.rehearse(batch)
    except Exception as error:
        if reason := compiler_error(error):
            raise ConfigError([Problem("compile", True, reason, "compile=false")]) from error
        raise
    compiled = [run.compiled.new_graphs(), time.perf_counter() - begin, run.compiled.notes]
    first = worker.rank == 0
    gathered = barrier(
        worker, "compile", config.launch.timeout, json.dumps(compiled), listens=first
    )
    if not first:
        return ""
    from_ranks = [gathered[rank] for rank in range(worker.world_size)]
    graphs, seconds, notes = zip(*map(json.loads, from_ranks), strict=True)
    count = f"{max(graphs)} graph{'s' * (max(graphs) != 1)}" + " a rank" * (len(from_ranks) > 1)
    unique = dict.fromkeys(note for rank_notes in notes for note in rank_notes)
    return "; ".join([f"compiled the blocks: {count}, {max(seconds):.1f} s", *unique])


# bounds of relative differences of losses (root mean square):
NO_CHANGE = 2e-6  # rounding, in any precision
ROUNDING = 10.0  # times the difference if the same rows only change positions
MOST_ROUNDING, MOST_ROUNDING_IN_BF16 = 1e-5, 1e-2  # a larger difference is not rounding
# of the same samples in microbatches of a different size, whose kernels round differently
MOST_BY_SIZE, MOST_BY_SIZE_IN_BF16 = 1e-4, 1e-2


def refuse_mixed_samples(run: Run, config: Config, stream: Iterator[Batch]) -> Iterator[Batch]:
    """Return the same batches. Raises ConfigError if the model or the loss couples samples of a
    batch. Collective."""
    if not may_mix_samples(config):
        return stream
    own_loss = isinstance(config.loss, Custom)
    first = [next(stream)]
    if len(first[0]["targets"]) == 1:
        first.append(next(stream))  # a second sample to pair it with
    change = _change_by_companions(run, config, [to_device(b, run.mesh, config) for b in first])
    if change is not None:
        what = config.model.name + (f" or the loss {config.loss.name}" if own_loss else "")
        reason = (
            f"{what} mixes the samples of a batch: {change}. Remove what mixes them (a mean, norm, "
            "sum or sort over dim 0, a division by the batch size, or attention that takes dim 0 as "
            "the sequence where batch_first=True is missing), or accept that every layout and number "
            "of microbatches trains another model"
        )
        raise ConfigError([Problem("mixes_samples", False, reason, "mixes_samples=true")])
    return chain(first, stream)


def _change_by_companions(run: Run, config: Config, first: list[Batch]) -> str | None:
    """Describe how much a sample's loss depends on the rest of its microbatch. None if it does not,
    or nothing can be compared."""
    # a custom loss may return the losses of a row at any position
    rows = _Rows.of(run, first, by_row=not isinstance(config.loss, Custom))
    if rows is None:
        return None
    for training in (True, False):
        eager = torch.compiler.set_stance("force_eager") if run.compiled else nullcontext()
        with eager, unchanged(run, config.seed), _mode(run, training):
            baseline = rows.losses(0)
            change = rows.change(baseline, 1, 2)
            by_size = rows.change_in_halves(baseline)
            exact = not config.precision.low and config.matmul_precision == "highest"
            depends_on_size = by_size > (MOST_BY_SIZE if exact else MOST_BY_SIZE_IN_BF16)
            # NaN is not reported here, but by the first step
            if not (change > NO_CHANGE or depends_on_size):
                return None
            if rows.change(baseline, 0) > NO_CHANGE:
                continue  # it draws random numbers
            if depends_on_size:
                half = "in a microbatch of half as many samples the losses of a sample"
                return f"{half} change by {by_size:.0e} of their size"
            rounding = rows.change(baseline, 3)
            rounding_limit = MOST_ROUNDING_IN_BF16 if config.precision.low else MOST_ROUNDING
            if rounding > rounding_limit or change > ROUNDING * rounding:
                neighbours = "beside other samples in its microbatch the losses of a sample"
                return f"{neighbours} change by {change:.0e} of their size"
            return None
    return None


@dataclass
class _Rows:
    """Samples, and the orders in which they are arranged in microbatches."""

    run: Run
    runtime: Runtime
    batch: Batch
    # for each arrangement, the index of each position's sample in the first arrangement
    places: list[Tensor]
    by_row: bool  # whether losses are known per row, not only per microbatch

    @classmethod
    def of(cls, run: Run, first: list[Batch], by_row: bool) -> _Rows | None:
        """Arrange the samples of `first`. Returns None if a rank's batches cannot be paired."""
        batch = first[0]
        runtime: Runtime | None = run.pipeline.for_terms(len(batch["targets"]))
        assert runtime is not None
        count = runtime.order.microbatches
        size = len(batch["targets"]) // count
        if size == 1:
            runtime = runtime.with_microbatches_of(2, fields_of(batch))
            alike = all(fields_of(other) == fields_of(batch) for other in first)
            if run.mesh.max_of(runtime is None or not alike):  # on any rank
                return None
            batch = {name: torch.cat([other[name] for other in first]) for name in batch}
            rows, size = torch.arange(count), 2
            rows = torch.stack([rows, (rows + 1) % len(batch["targets"])], 1).flatten()
            batch = {name: value[rows.to(value.device)] for name, value in batch.items()}
        place = torch.arange(size)
        each = (place, place // 2, (place + size) // 2, (place + 1) % size)
        starts = torch.arange(count)[:, None] * size
        places = [(starts + one).flatten() for one in each]
        assert runtime is not None
        return cls(run, runtime, batch, places, by_row)

    def losses(self, arrangement: int) -> Tensor:
        """fp64 losses of each sample or the sum of each microbatch, on the last stage's rank;
        elsewhere an empty tensor."""
        return self._evaluate(self.runtime, self.places[arrangement])

    def change_in_halves(self, plain: Tensor) -> float:
        """Difference from the first arrangement when each half of a microbatch is one microbatch; 0
        if there are no halves, or the forward rejects them."""
        size = len(self.places[0]) // self.runtime.order.microbatches
        runtime = None
        if size % 2 == 0:
            runtime = self.runtime.with_microbatches_of(size // 2, fields_of(self.batch))
        if self.run.mesh.max_of(runtime is None):  # on any rank
            return 0.0
        assert runtime is not None
        places = self.places[0].view(-1, 2, size // 2)
        halves = [self._evaluate(runtime, places[:, half].flatten()) for half in (0, 1)]
        if len(plain) == len(self.places[0]):
            losses = torch.stack([half.view(-1, size // 2, plain.shape[1]) for half in halves], 1)
            return self._over_all_ranks([(losses.view_as(plain), plain)])
        return self._over_all_ranks([(halves[0] + halves[1], plain)])

    def _evaluate(self, runtime: Runtime, places: Tensor) -> Tensor:
        """Evaluate the samples at these places, see `losses`."""
        batch = {name: value[places.to(value.device)] for name, value in self.batch.items()}
        losses = self.run.pipeline.evaluate_each(batch, runtime)
        count = len(batch["targets"]) // runtime.order.microbatches
        # a chunked loss is already a sum
        by_row = self.by_row and all(part.dim() for part in losses)
        parts = [
            part.double().reshape(count, -1) if by_row else part.double().sum().view(1, 1)
            for part in losses
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, 1)

    def change(self, plain: Tensor, *arrangements: int) -> float:
        """Difference of other arrangements from the first, over all ranks."""
        others = [self.losses(arrangement) for arrangement in arrangements]
        if len(plain) == len(self.places[0]):
            expected = [plain[self.places[arrangement]] for arrangement in arrangements]
            return self._over_all_ranks([*zip(others, expected, strict=True)])
        # only a microbatch's sum is known: the halves, each twice, sum to twice the full one
        total: Any = sum(others)
        return self._over_all_ranks([(total, len(others) * plain)])

    def _over_all_ranks(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Relative root mean square difference of the losses in pairs, over all ranks."""
        squares = [((a - b).square().sum(), b.square().sum()) for a, b in pairs]
        total = torch.tensor(squares, dtype=torch.float64).sum(0).to(self.run.mesh.device)
        difference, size = self.run.mesh.sum(total).tolist()
        return (difference / size) ** 0.5 if size else 0.0


@contextmanager
def _mode(run: Run, training: bool) -> Iterator[None]:
    """A context in which the model is in training mode (or not), and torch's modules in evaluation
    mode. `unchanged` restores the modes."""
    modules = [module for stage in run.stages for module in stage.modules()]
    run.train_mode(training)
    for module in modules:
        kind = type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)
        if kind.__module__.startswith("torch.nn.") or isinstance(module, BatchNorm):
            module.training = False
    with in_bf16(modules):  # the largest value of a microbatch sets its scale in float8
        yield
