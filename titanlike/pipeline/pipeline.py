"""One rank's part of the pipeline: batches in, the global loss out.

`pp=1` is a pipeline of one stage: its microbatches are gradient accumulation.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlike.data.sources import Batch
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.sharding import is_sharded
from titanlike.distributed.transform import Transform
from titanlike.graph.cut import StageGraph, messages, same_messages
from titanlike.graph.model_graph import Fields, ModelGraph, fields_of, shapes
from titanlike.graph.recording import Node, tree_map
from titanlike.graph.stage import Stage
from titanlike.optim.loss import Kept, Loss
from titanlike.pipeline.microbatch_loop import MicrobatchLoop
from titanlike.pipeline.order import Order

if TYPE_CHECKING:  # imported where there are several stages or ranks
    from titanlike.distributed.gradients import UnusedParameters
    from titanlike.torch_private.pipeline_runtime import OrderRuntime

MOST_SHAPES = 32  # of batches whose runtimes, with their message buffers, are cached


class Pipeline:
    """Runs training and evaluation steps of an Order over this rank's stages.

    Batches may differ in shape from step to step (all ranks of a pipeline have the same batch):
    each shape has a runtime of its own, made at its first batch and cached.
    """

    def __init__(
        self,
        order: Order,
        model_graph: ModelGraph,
        stages: Mapping[int, Stage],
        loss: Loss,
        mesh: Mesh,
        zero: int,
        transforms: Sequence[Transform],
        orders: Mapping[int, Order] | None = None,
    ) -> None:
        """stages: of this rank, by index; zero: see `distributed/sharding.py`; transforms: what was
        done to the stages; orders: of batches with another number of rows on a dp rank."""
        self._order, self._model_graph, self._stages = order, model_graph, stages
        self._loss, self._mesh, self._zero, self._transforms = loss, mesh, zero, transforms
        # rows -> the order and the stages' forwards; empty = all batches have as many
        self._by_rows: dict[int, tuple[Order, ModelGraph]] = {}
        if orders:
            every = {order.microbatches * model_graph.microbatch_size: order, **orders}
            for rows, of_rows in every.items():
                size = rows // of_rows.microbatches
                same = size == model_graph.microbatch_size
                graph = model_graph if same else model_graph.with_microbatches_of(size)
                self._by_rows[rows] = of_rows, graph
        self._sums = next(filter(None, (transform.sums for transform in transforms)), None)
        sums = {index: self._sums.of_stage(index) for index in stages} if self._sums else {}
        self._gradient_sums = {index: of for index, of in sums.items() if of is not None}
        # of several ranks: which parameters have no gradient on any
        self._unused: UnusedParameters | None = None
        if mesh.world_size > 1:
            from titanlike.distributed.gradients import UnusedParameters

            names = model_graph.canonical_names()
            self._unused = UnusedParameters(stages, names, mesh, zero, self._gradient_sums)
        # ranks that compute the same loss of the same batch
        self._loss_copies = mesh.world_size // (mesh.pp * mesh.stage_copies)
        # of the last step: whether this rank, once summed how many ranks, reached each parameter
        self._reached_counts = torch.zeros(0, device=mesh.device)
        self._runtimes: OrderedDict[Any, MicrobatchLoop | OrderRuntime] = OrderedDict()
        self._kind = "loss"  # what the last stage computes of its output
        # called back with each action of the schedule when it begins, with None after the last
        self.on_action: Callable[[Any], None] = lambda _: None
        # called back with each computation once it is in the device's queue, with False; before,
        # with True, once the wait for the messages that it needs is there
        self.on_queued: Callable[[Any, bool], None] | None = None

    def train(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Forward and backward of this dp rank's part of a batch: "inputs", "targets" and what else
        the model takes, [batch / dp, ...] each.

        Returns the loss over the GLOBAL batch, a mean over what the loss counts (valid tokens), and
        that count, fp32 scalars, the same on every rank. The gradients are those of that loss,
        reduced over dp and over the copies of tied weights.
        """
        loss, count, _ = self.forward_backward(batch)
        return self.sum_loss(loss, torch.zeros(0))[0], count

    def used_fields(self) -> set[str]:
        """Fields of a batch whose values this rank's stages read, for batches as in the plan."""
        used = set()
        for index in self._stages:
            used |= {"inputs"} if index == 0 else set()
            used |= {"targets"} if index == self._order.stages - 1 else set()
            for training in (True, False):
                graphs = self._model_graph.graphs(self._model_graph.fields, training)
                used |= graphs[index].fields
        return used

    def forward_backward(self, batch: Batch, each: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Train, but for the sum over all ranks, with `sum_loss`, which must follow: returns the
        loss and the count to be summed, and with `each`, as numbers to be measured, fp32
        [2 x dp x microbatches]: of each microbatch of the global batch, in its order, the sum of
        the loss' terms, then how many there are."""
        batch = self._own(batch)
        runtime = self._runtime(batch)
        count, tokens = self._count(batch)
        with ExitStack() as stack:
            for transform in self._transforms:
                stack.enter_context(transform.training(tokens))
            stack.enter_context(self._computing())
            losses = runtime.train(batch)
        if self._unused is not None:
            self._reached_counts = self._unused.flags()
        for transform in reversed(self._transforms):
            transform.after_backward()
        terms = self._terms(losses, batch) if each else torch.zeros(0)
        return self._sum_of(losses, count), count, terms

    def _terms(self, losses: list[Tensor], batch: Batch) -> Tensor:
        """losses: of this rank's microbatches, of this batch."""
        mesh = self._mesh
        terms = torch.zeros(2, mesh.dp, self._order.microbatches, device=mesh.device)
        if losses:  # the last stage is here
            terms[0, mesh.dp_rank] = torch.stack(losses).detach() / self._loss.scale
            equal = 1.0 / (self._loss.scale * terms[0].numel() * mesh.cp)
            for at, targets in enumerate(batch["targets"].chunk(len(losses))):
                count = self._loss.count(targets)  # None: the targets do not tell
                terms[1, mesh.dp_rank, at] = equal if count is None else count
        return terms.flatten() / self._loss_copies

    def sum_loss(self, loss: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of `forward_backward`, and what is measured of its gradients (an fp32 vector),
        summed over all ranks in one message."""
        mesh = self._mesh
        sums = torch.cat([loss.view(-1), measured.to(mesh.device), self._reached_counts])
        if mesh.world_size > 1:
            mesh.sum(sums)
        sizes = loss.numel(), len(measured), len(self._reached_counts)
        losses, measured, self._reached_counts = sums.split(sizes)
        return self._total(losses) / self._loss_copies, measured

    def _sum_of(self, losses: list[Tensor], like: Tensor) -> Tensor:
        """The sum of this rank's microbatches; 0 where the last stage is on another rank. Or what
        `StepSums` makes of them."""
        if self._sums is not None:
            return self._sums.losses(losses)
        return torch.stack(losses).sum().detach() if losses else torch.zeros_like(like)

    def _total(self, losses: Tensor) -> Tensor:
        """The loss, from the sum of `_sum_of` over all ranks, as a vector."""
        return losses[0] if self._sums is None else self._sums.total(losses)

    def unreached(self) -> dict[nn.Parameter, Tensor]:
        """Parameters whose gradients, zeros, the last `train` perhaps reached on no rank, with a
        flag on the device: 1 = on none, so that an optimizer is to leave them alone."""
        if self._unused is None:  # they have none
            return {}
        return self._unused.unreached(self._reached_counts)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the forward alone; gradients are left as they are."""
        batch = self._own(batch)
        runtime, mesh = self._runtime(batch), self._mesh
        count, _ = self._count(batch)
        with self._computing():
            losses = runtime.evaluate(batch)
        loss = self._sum_of(losses, count).view(-1)
        loss = self._total(mesh.sum(loss) if mesh.world_size > 1 else loss)
        return loss / self._loss_copies, count

    def evaluate_each(self, batch: Batch) -> list[Tensor]:
        """Evaluate; on the rank with the last stage the terms of each microbatch's loss, or
        their sum where the stage computes it in chunks. Elsewhere an empty list."""
        batch = self._own(batch)
        runtime, loss = self._runtime(batch), self._loss
        terms = self._loss = Kept(loss.each)
        try:
            with self._computing():
                sums = runtime.evaluate(batch)
        finally:
            self._loss = loss
        return terms.kept or sums

    def rehearse(self, batch: Batch) -> None:
        """Run each of this rank's stages alone on a microbatch, with made-up messages: forward, and
        backward where gradients are on. Nothing is sent between stages; collective over dp, whose
        ranks gather and reduce. Gradients are dropped."""
        batch = self._own(batch)
        runtime, fields = self._runtime(batch), fields_of(batch)
        microbatch = {n: value[: self._model_graph.microbatch_size] for n, value in batch.items()}
        for index, stage in self._stages.items():
            graph = self._model_graph.graphs(fields, stage.training)[index]
            received = [microbatch["inputs"]]
            if index > 0:
                device, like = self._mesh.device, messages(graph)[0]
                received = [torch.zeros_like(message, device=device) for message in like]
                for message in received:
                    message.requires_grad_(torch.is_grad_enabled())
            with self._computing():
                runtime.run_alone(index, received, microbatch)
            stage.zero_grad()
        if self._unused is not None:
            self._unused.flags()

    def for_outputs(self, keep: Callable[[Any, Tensor], Any], size: int | None = None) -> Pipeline:
        """Over the same stages, for `outputs` of batches as in training; size: of as many
        microbatches of so many samples.

        keep: what is returned, of (output of the model, "targets") of a microbatch.
        """

        def outputs_of(graph: ModelGraph) -> ModelGraph:
            other = graph.with_microbatches_of(size or graph.microbatch_size)
            other.last_stage = lambda last: last  # without a loss in chunks
            return other

        other = copy.copy(self)
        other._model_graph = outputs_of(self._model_graph)
        by_rows = {} if size else self._by_rows
        other._by_rows = {rows: (order, outputs_of(g)) for rows, (order, g) in by_rows.items()}
        other._loss, other._kind, other._runtimes = Kept(keep), "outputs", OrderedDict()
        return other

    def outputs(self, batch: Batch) -> list[Any]:
        """Return what is kept of each microbatch on ranks with the last stage, elsewhere [].
        Forward alone. Of `for_outputs`."""
        batch = self._own(batch)
        runtime, loss = self._runtime(batch), self._loss
        assert isinstance(loss, Kept)
        loss.kept = []
        with self._computing():
            runtime.evaluate(batch)
        return loss.kept

    def for_rows(self, rows: int) -> Pipeline:
        """Over the same stages, for batches of so many rows on a dp rank alone; with `ramp` these
        have an order of their own."""
        if not self._by_rows:
            return self
        other = copy.copy(self)
        other._order, other._model_graph = self._by_rows[rows]
        other._runtimes, other._by_rows = OrderedDict(), {}
        return other

    @property
    def microbatches(self) -> int:
        return self._order.microbatches

    def with_microbatches_of(self, size: int, fields: Fields) -> Pipeline | None:
        """One for batches of as many microbatches of another size, over the same stages; None where
        the model's forward cannot take such a batch."""
        other = copy.copy(self)
        other._model_graph = self._model_graph.with_microbatches_of(size)
        other._runtimes, other._by_rows = OrderedDict(), {}
        try:
            for training in (True, False):
                other._model_graph.recording(fields, training)
        except Exception:  # whatever a forward raises
            return None
        return other

    def _own(self, batch: Batch) -> Batch:
        """What this rank computes with of a batch of its dp rank."""
        if self._by_rows:
            self._order, self._model_graph = self._by_rows[len(batch["inputs"])]
        for transform in self._transforms:
            batch = transform.batch(batch)
        return batch

    def _count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How many terms the loss of the global batch has, which gives the loss its scale, and how
        many tokens it has, padding included."""
        mesh, size = self._mesh, self._model_graph.microbatch_size
        counts = torch.zeros(2, device=mesh.device)
        # counted where the last stage is: the other ranks of a pipeline need no targets
        if self._order.stages - 1 in self._stages:
            targets = batch["targets"]
            terms: Any = self._loss.count(targets)
            if terms is None:
                meta = torch.empty((size, *targets.shape[1:]), dtype=targets.dtype, device="meta")
                output = self._model_graph.meta_output(fields_of(batch), True)
                terms = self._loss.terms(output, meta) * (len(targets) // size)
            counts[0] = terms
            of_sequences = bool(self._model_graph.fields["inputs"].shape)
            in_parts = mesh.stage_copies // mesh.dp  # ranks that share each sequence
            tokens = batch["inputs"].shape[1] // in_parts if of_sequences else 1
            counts[1] = len(targets) * tokens
        if mesh.world_size > 1:
            counts = mesh.sum(counts) / self._loss_copies
        self._loss.scale = 1.0 / counts[0]
        return counts[0], counts[1]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for transform in self._transforms:
                stack.enter_context(transform.computing())
            yield

    def _runtime(self, batch: Batch) -> MicrobatchLoop | OrderRuntime:
        """The runtime for a batch of this shape; the stages' forwards are those for it."""
        fields = fields_of(batch)
        key = self._key(fields)
        for transform in self._transforms:
            transform.prepare(fields)
        if key not in self._runtimes:
            self._runtimes[key] = self._make_runtime(fields)
            if len(self._runtimes) > MOST_SHAPES:
                self._runtimes.popitem(last=False)
        self._runtimes.move_to_end(key)
        runtime = self._runtimes[key]
        runtime.on_action, runtime.on_queued = self.on_action, self.on_queued
        for stage in self._stages.values():
            stage.select_forward(key)
        return runtime

    def _key(self, fields: Fields) -> Hashable:
        """The key of runtimes, and of the stages' forwards."""
        sizes = self._order.microbatches, self._model_graph.microbatch_size
        return self._kind, *sizes, shapes(fields)

    def _make_runtime(self, fields: Fields) -> MicrobatchLoop | OrderRuntime:
        """Add the forwards of such a batch to the stages; the runtime that calls them.

        Raises ValueError where a forward uses modules that it did not use in the plan.
        """
        training, evaluation = (self._model_graph.graphs(fields, on) for on in (True, False))
        used: set[str] = set()
        for index, stage in self._stages.items():
            graphs = {True: training[index], False: evaluation[index]}
            assert same_messages(*graphs.values()), "checked by the plan"
            modules = dict(stage.named_modules())
            for name in (name for graph in graphs.values() for name in graph.units):
                if name not in modules:
                    shown = ", ".join(f"{n} {list(field.shape)}" for n, field in fields.items())
                    raise ValueError(f"model: for a batch of {shown} its forward also uses {name}")
            stage.add_forwards(self._key(fields), graphs, index, self._mesh.device)
            used |= training[index].fields | evaluation[index].fields
        last = self._order.stages - 1

        def loss_of(output: Any, targets: Tensor) -> Tensor:
            graphs = training if self._stages[last].training else evaluation
            return _loss_of_output(self._loss, graphs[last], output, targets)

        if self._is_loop():
            return MicrobatchLoop(self._order, self._stages[0], loss_of, sorted(used))
        from titanlike.pipeline.torch_runtime import make_runtime

        field, size = fields["inputs"], self._model_graph.microbatch_size
        first = torch.empty((size, *field.shape), dtype=field.dtype, device="meta")
        own = self._order, self._stages, training, loss_of, sorted(used), first
        how = self._mesh, self._zero, self._transforms, self._gradient_sums
        return make_runtime(*own, *how)

    def _is_loop(self) -> bool:
        """Whether an order of one stage in one process runs without torch's pipeline runtime."""
        alone = self._mesh.world_size == 1 and self._order.stages == 1
        other_backward = self._order.splits_backward or self._gradient_sums
        return alone and not other_backward and not is_sharded(self._stages[0])


def _loss_of_output(loss: Loss, graph: StageGraph, output: Any, targets: Tensor) -> Tensor:
    """The scaled loss of the last stage's output."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if graph.sends and graph.sends[0].chunked_head is not None:
        return tensors[0].sum() * loss.scale
    rest = iter(tensors)

    def value(leaf: Any) -> Any:
        """An integer output as integer again: `stage.to_send` made it fp64."""
        if not isinstance(leaf, Node):
            return leaf
        tensor, meta = next(rest), leaf.tensor
        same_kind = tensor.is_floating_point() == meta.is_floating_point()
        return tensor if same_kind else tensor.to(meta.dtype)

    structure = graph.output
    # a tensor alone, as nearly always, is no structure to walk through in each microbatch
    whole = value(structure) if isinstance(structure, Node) else tree_map(structure, value)
    return loss(whole, targets)
