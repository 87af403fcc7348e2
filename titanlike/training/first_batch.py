"""What is done with the first batch before the first step: blocks are compiled, while no rank waits
for a message of another, and a model that mixes samples is refused. Modules are as they were
afterwards.

Mixing is a mean over dim 0, or attention over samples.

What such a model mixes are the samples of a microbatch, so that it is another model in each layout.
A graph of operations does not tell; but where nothing is mixed, the losses of a sample do not
depend on the samples beside it. So the pipeline evaluates the first batch with other companions:
each microbatch once as it is, once with its first half twice, once with its second half twice.

A norm or a sum over the batch hardly changes with the company, but with the number of samples: the
halves of each microbatch are evaluated in microbatches of half the size, too.

Microbatches of one sample are laid in pairs for it, as in other layouts. torch's own modules
evaluate meanwhile (dropout is off, batch norm uses its running statistics) and the model's own ones
train, so that a loss which exists in training alone is found. If a forward still draws random
numbers, it is compared in evaluation instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, Custom
from titanlike.data.sources import Batch
from titanlike.device.accelerator import kept_rng
from titanlike.distributed.initialize import seeded
from titanlike.graph.model_graph import fields_of
from titanlike.launch.rendezvous import barrier
from titanlike.launch.worker import Worker
from titanlike.pipeline.pipeline import Runtime
from titanlike.torch_private.compiler import compiler_error
from titanlike.torch_private.operators import BatchNorm
from titanlike.training.build import Run
from titanlike.training.checks import may_mix_samples
from titanlike.training.feed import to_device

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def unchanged(run: Run, seed: int) -> Iterator[None]:
    """A context in which random numbers follow from `seed`. Afterwards buffers, plain attributes of
    modules and random states are what they were."""
    modules = [module for stage in run.stages for module in stage.modules()]
    plain = [
        {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        for module in modules
    ]
    buffers = [
        {name: (b, None if b is None else b.clone()) for name, b in module._buffers.items()}
        for module in modules
    ]
    try:
        with kept_rng(run.mesh.device), seeded(seed):
            yield
    finally:
        for module, values in zip(modules, plain, strict=True):
            vars(module).update(values)
        with torch.no_grad():
            for module, own in zip(modules, buffers, strict=True):
                for name, (buffer, value) in own.items():
                    if buffer is not None and value is not None:
                        buffer.copy_(value)
                    module._buffers[name] = buffer  # one may have been put in its place


def compile_blocks(run: Run, config: Config, batch: Batch, worker: Worker) -> str:
    """Compile the blocks of all stages for batches such as this one. Collective.

    Returns what to say of it, on rank 0. Raises ConfigError where the compiler fails,
    BarrierTimeout where a rank has not compiled its blocks in `launch.timeout`.
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
    mine = [run.compiled.new_graphs(), time.perf_counter() - begin, run.compiled.notes]
    first = worker.rank == 0
    told = barrier(worker, "compile", config.launch.timeout, json.dumps(mine), listens=first)
    if not first:
        return ""
    every = [told[rank] for rank in range(worker.world_size)]
    graphs, seconds, notes = zip(*map(json.loads, every), strict=True)
    count = f"{max(graphs)} graph{'s' * (max(graphs) != 1)}" + " a rank" * (len(every) > 1)
    unique = dict.fromkeys(note for own in notes for note in own)
    return "; ".join([f"compiled the blocks: {count}, {max(seconds):.1f} s", *unique])


# differences of losses, relative (root mean square):
NO_CHANGE = 2e-6  # rounding, in any precision
ROUNDING = 10.0  # times what the same rows at other positions of their microbatch change
MOST_ROUNDING, MOST_ROUNDING_IN_BF16 = 1e-5, 1e-2  # if that is more, it is no rounding
# of the same samples in microbatches of another size, for which kernels round in another order
MOST_BY_SIZE, MOST_BY_SIZE_IN_BF16 = 1e-4, 1e-2


def refuse_mixed_samples(run: Run, config: Config, stream: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. Raises ConfigError where the model or the loss mixes samples.
    Collective."""
    if not may_mix_samples(config):
        return stream
    own_loss = isinstance(config.loss, Custom)
    first = [next(stream)]
    if len(first[0]["targets"]) == 1:
        first.append(next(stream))  # another sample to lay beside it
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
    """How much the losses of samples depend on the others in their microbatch, in words; None = not
    at all, or there is nothing to compare."""
    # a loss of the user's own may return the losses of a row in any place
    rows = _Rows.of(run, first, by_row=not isinstance(config.loss, Custom))
    if rows is None:
        return None
    for training in (True, False):
        eager = torch.compiler.set_stance("force_eager") if run.compiled else nullcontext()
        with eager, unchanged(run, config.seed), _mode(run, training):
            plain = rows.losses(0)
            change = rows.change(plain, rows.losses(1), rows.losses(2))
            by_size = rows.change_in_halves(plain)
            depends_on_size = by_size > _most_by_size(config)
            # nor NaN, of which the first step says more
            if not (change > NO_CHANGE or depends_on_size):
                return None
            if rows.change(plain, rows.losses(0)) > NO_CHANGE:
                continue  # it draws random numbers
            if depends_on_size:
                half = "in a microbatch of half as many samples the losses of a sample"
                return f"{half} change by {by_size:.0e} of their size"
            rounding = rows.change(plain, rows.losses(3))
            most = MOST_ROUNDING_IN_BF16 if config.precision.low else MOST_ROUNDING
            if rounding > most or change > ROUNDING * rounding:
                beside = "beside other samples in its microbatch the losses of a sample"
                return f"{beside} change by {change:.0e} of their size"
            return None
    return None


@dataclass
class _Rows:
    """Some samples, and arrangements of them in microbatches."""

    run: Run
    runtime: Runtime
    batch: Batch
    # of each arrangement, for each place in the microbatches the place in the first arrangement
    places: list[Tensor]
    by_row: bool  # whether the losses of a row are known, not only of a microbatch

    @classmethod
    def of(cls, run: Run, first: list[Batch], by_row: bool) -> _Rows | None:
        """None where the ranks' batches cannot be laid in pairs."""
        batch = first[0]
        runtime: Runtime | None = run.pipeline.for_terms(len(batch["targets"]))
        assert runtime is not None
        count = runtime.microbatches
        size = len(batch["targets"]) // count
        if size == 1:
            runtime = runtime.with_microbatches_of(2, fields_of(batch))
            alike = all(fields_of(other) == fields_of(batch) for other in first)
            if not _everywhere(run, runtime is not None and alike):
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

    def losses(self, arrangement: int) -> tuple[int, Tensor]:
        """(arrangement, losses of each sample, or sum of each microbatch), on the last stage's
        rank."""
        places = self.places[arrangement]
        batch = {name: value[places.to(value.device)] for name, value in self.batch.items()}
        return arrangement, self._evaluate(self.runtime, batch)

    def change_in_halves(self, plain: tuple[int, Tensor]) -> float:
        """Difference from the first arrangement if each half of a microbatch is one; 0 where there
        are no halves, or the forward cannot take them."""
        size = len(self.places[0]) // self.runtime.microbatches
        runtime = None
        if size % 2 == 0:
            runtime = self.runtime.with_microbatches_of(size // 2, fields_of(self.batch))
        if not _everywhere(self.run, runtime is not None):
            return 0.0
        assert runtime is not None
        places = self.places[0].view(-1, 2, size // 2)
        halves = []
        for half in (0, 1):
            at = places[:, half].flatten()
            batch = {name: value[at.to(value.device)] for name, value in self.batch.items()}
            halves.append(self._evaluate(runtime, batch).cpu())
        right = plain[1].cpu()
        if len(right) == len(self.places[0]):
            losses = torch.stack([half.view(-1, size // 2, right.shape[1]) for half in halves], 1)
            return self._over_all_ranks([(losses.view_as(right), right)])
        return self._over_all_ranks([(halves[0] + halves[1], right)])

    def _evaluate(self, runtime: Runtime, batch: Batch) -> Tensor:
        """Losses of each sample, or the sum of each microbatch, on the last stage's rank."""
        losses = self.run.pipeline.evaluate_each(batch, runtime)
        count = len(batch["targets"]) // runtime.microbatches
        # a loss in chunks is a sum already
        by_row = self.by_row and all(part.dim() for part in losses)
        parts = [
            part.double().reshape(count, -1) if by_row else part.double().sum().view(1, 1)
            for part in losses
        ]
        return torch.cat(parts) if parts else torch.zeros(0, 1)

    def change(self, plain: tuple[int, Tensor], *others: tuple[int, Tensor]) -> float:
        """Difference of others from the first arrangement, over all ranks."""
        right = plain[1].cpu()
        if len(right) == len(self.places[0]):
            pairs = [(losses.cpu(), right[self.places[at]]) for at, losses in others]
        else:  # of a microbatch only the sum is known: the halves, each twice, are twice the whole
            total: Any = sum(losses.cpu() for _, losses in others)
            pairs = [(total, len(others) * right)]
        return self._over_all_ranks(pairs)

    def _over_all_ranks(self, pairs: list[tuple[Tensor, Tensor]]) -> float:
        """Difference of the losses in pairs, relative to the second ones."""
        squares = [((a - b).square().sum(), b.square().sum()) for a, b in pairs]
        total = torch.tensor(squares, dtype=torch.float64).sum(0).to(self.run.mesh.device)
        if self.run.mesh.world_size > 1:
            self.run.mesh.sum(total)
        difference, size = total.tolist()
        return (difference / size) ** 0.5 if size else 0.0


def _everywhere(run: Run, possible: bool) -> bool:
    """Whether something is possible on every rank."""
    impossible = torch.tensor(float(not possible), device=run.mesh.device)
    return not (run.mesh.max(impossible) if run.mesh.world_size > 1 else impossible)


def _most_by_size(config: Config) -> float:
    exact = not config.precision.low and config.matmul_precision == "highest"
    return MOST_BY_SIZE if exact else MOST_BY_SIZE_IN_BF16


@contextmanager
def _mode(run: Run, training: bool) -> Iterator[None]:
    """A context in which the model trains, torch's modules in it evaluate; `unchanged` restores the
    modes."""
    modules = [module for stage in run.stages for module in stage.modules()]
    run.train_mode(training)
    for module in modules:
        kind = type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)
        if kind.__module__.startswith("torch.nn.") or isinstance(module, BatchNorm):
            module.training = False
    with ExitStack() as stack:
        if "float8" in run.transforms:  # the largest number of a microbatch sets a scale of it
            from titanlike.parallel.float8 import in_bf16

            stack.enter_context(in_bf16(modules))
        yield
