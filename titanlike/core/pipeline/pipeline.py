"""One rank's part of the pipeline: batches in, the global loss out.

`pp=1` is a pipeline of one stage, whose microbatches are gradient accumulation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from titanlike.core.data.sources import REAL, Batch
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.distributed.sharding import is_sharded
from titanlike.core.distributed.transform import Transform
from titanlike.core.graph.cut import StageGraph, messages, same_messages
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.model_graph import Fields, ModelGraph, fields_of, shapes
from titanlike.core.graph.recording import Node, tree_map
from titanlike.core.graph.stage import FIELD, Stage
from titanlike.core.optim.loss import Kept
from titanlike.core.pipeline.microbatch_loop import MicrobatchLoop
from titanlike.core.pipeline.order import Order

if TYPE_CHECKING:  # imported where there are several stages or ranks
    from titanlike.core.distributed.gradients import UnusedParameters
    from titanlike.core.torch_private.pipeline_runtime import OrderRuntime

MOST_SHAPES = 32  # batch shapes whose executors, with their receive buffers, are cached


@dataclass(frozen=True, eq=False)
class Runtime:
    """What a pipeline runs on a batch: a schedule (Order), the model's forward for microbatches of
    one size, and the loss.

    Batches may differ in shape from step to step (all ranks of a pipeline have the same batch):
    each shape has an executor, created for its first batch and cached.
    """

    order: Order
    graph: ModelGraph
    loss: Loss
    name: str = "loss"  # distinguishes the forwards that stages cache for it
    executors: OrderedDict[Hashable, MicrobatchLoop | OrderRuntime] = field(
        default_factory=OrderedDict
    )

    def with_microbatches_of(self, size: int, fields: Fields) -> Runtime | None:
        """Make a runtime with equally many microbatches of `size` samples; None if the model's
        forward fails on them."""
        graph = self.graph.with_microbatches_of(size)
        try:
            for training in (True, False):
                graph.recording(fields, training)
        except Exception:  # whatever a forward raises
            return None
        return replace(self, graph=graph, executors=OrderedDict())

    def key(self, fields: Fields) -> Hashable:
        """The cache key of an executor and of the stages' forwards."""
        return self.name, self.order.microbatches, self.graph.microbatch_size, shapes(fields)


class Pipeline:
    """Runs training and evaluation steps on this rank's stages: with the plan's `Runtime`, with one
    per batch size of `ramp`, or with a given one for evaluation."""

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
        """stages: this rank's, by index; zero: ZeRO level, see `core/distributed/sharding.py`;
        transforms: of the model and its stages; orders: with `ramp`, batch size on a dp rank ->
        Order."""
        self._stages, self._mesh, self._zero, self._transforms = stages, mesh, zero, transforms
        self._planned = Runtime(order, model_graph, loss)
        # batch size on a dp rank -> runtime; empty = it does not change
        self._by_rows: dict[int, Runtime] = {}
        if orders:
            self._by_rows[order.microbatches * model_graph.microbatch_size] = self._planned
            for rows, ramp_order in orders.items():
                size = rows // ramp_order.microbatches
                same = size == model_graph.microbatch_size
                graph = model_graph if same else model_graph.with_microbatches_of(size)
                self._by_rows[rows] = Runtime(ramp_order, graph, loss)
        self._of_outputs: dict[tuple[Any, ...], Runtime] = {}  # see `outputs`
        # sums losses and gradients with numerics=exact; None: autograd and FSDP do
        self.sums = next(filter(None, (transform.sums for transform in transforms)), None)
        sums = {index: self.sums.of_stage(index) for index in stages} if self.sums else {}
        self._gradient_sums = {index: of for index, of in sums.items() if of is not None}
        # with several ranks: finds parameters that have no gradient on any rank
        self._unused: UnusedParameters | None = None
        if mesh.world_size > 1:
            from titanlike.core.distributed.gradients import UnusedParameters

            names = model_graph.canonical_names()
            self._unused = UnusedParameters(stages, names, mesh, zero, self._gradient_sums)
        # number of ranks that compute the same loss of the same batch
        self._loss_copies = mesh.world_size // (mesh.pp * mesh.stage_copies)
        # last step, per parameter: whether this rank has a gradient; once summed, how many ranks do
        self._reached_counts = torch.zeros(0, device=mesh.device)
        # called with each action of the schedule when it begins, with None after the last
        self.on_action: Callable[[Any], None] = lambda _: None
        # called with (action, True) when the wait for its receives is launched, then with
        # (action, False) when its computation is launched
        self.on_queued: Callable[[Any, bool], None] = lambda action, received: None

    def runtime(self, rows: int) -> Runtime:
        """The runtime for batches of `rows` samples on a dp rank."""
        return self._by_rows[rows] if self._by_rows else self._planned

    def train(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run forward and backward on this dp rank's shard of a batch: "inputs", "targets" and
        other fields of the model, each [batch / dp, ...].

        Returns the loss over the GLOBAL batch, a mean over what the loss counts (valid tokens), and
        that count: fp32 scalars, equal on every rank. Gradients are those of that loss, reduced
        over dp and over copies of tied weights.
        """
        loss, count, _ = self.forward_backward(batch)
        return self.sum_loss(loss, torch.zeros(0))[0], count

    def used_fields(self) -> set[str]:
        """Names of fields that this rank's stages and transforms read in batches as in the plan."""
        planned, model_graph = self._planned, self._planned.graph
        used = {name for transform in self._transforms for name in transform.reads}
        read_by = {"inputs": 0, "targets": planned.order.stages - 1}  # the loss needs targets
        used |= {name for name, stage in read_by.items() if stage in self._stages}
        for training in (True, False):
            stage_graphs = model_graph.graphs(model_graph.fields, training)
            used.update(*(stage_graphs[stage].fields for stage in self._stages))
        return used

    def forward_backward(self, batch: Batch, each: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Do `train` without the all-reduce of the loss, which `sum_loss` must do next.

        Returns this rank's loss, the count, and with `each` an fp32 vector [2 x dp x microbatches]:
        for each microbatch of the global batch, in order, the sum of its loss terms, then the
        number of terms of each.
        """
        runtime = self.runtime(len(batch["inputs"]))
        batch = self._own(batch)
        executor = self._executor(runtime, batch)
        count, tokens = self._count(runtime, batch)
        with ExitStack() as stack:
            for transform in self._transforms:
                stack.enter_context(transform.training(tokens))
            stack.enter_context(self._computing())
            losses = executor.train(batch)
        if self._unused is not None:
            self._reached_counts = self._unused.flags()
        for transform in reversed(self._transforms):
            transform.after_backward()
        terms = self._terms(runtime, losses, batch) if each else torch.zeros(0)
        return self._sum_of(losses, count), count, terms

    def _terms(self, runtime: Runtime, losses: list[Tensor], batch: Batch) -> Tensor:
        """This rank's entries of the vector of `forward_backward(each=True)`; losses: of its
        microbatches."""
        mesh, loss = self._mesh, runtime.loss
        terms = torch.zeros(2, mesh.dp, runtime.order.microbatches, device=mesh.device)
        if losses:  # the last stage is here
            terms[0, mesh.dp_rank] = torch.stack(losses).detach() / loss.scale
            equal = 1.0 / (loss.scale * terms[0].numel() * mesh.cp)
            for mb, targets in enumerate(batch["targets"].chunk(len(losses))):
                count = loss.count(targets)  # None: unknown from the targets alone
                terms[1, mesh.dp_rank, mb] = equal if count is None else count
        return terms.flatten() / self._loss_copies

    def sum_loss(self, loss: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        """All-reduce the loss of `forward_backward` together with an fp32 vector of measurements;
        returns both sums."""
        mesh = self._mesh
        sums = torch.cat([loss.view(-1), measured.to(mesh.device), self._reached_counts])
        mesh.sum(sums)
        sizes = loss.numel(), len(measured), len(self._reached_counts)
        losses, measured, self._reached_counts = sums.split(sizes)
        return self._total(losses) / self._loss_copies, measured

    def _sum_of(self, losses: list[Tensor], like: Tensor) -> Tensor:
        """Sum the losses of this rank's microbatches (0 without the last stage); with `StepSums`
        return its vector instead."""
        if self.sums is not None:
            return self.sums.losses(losses)
        return torch.stack(losses).sum().detach() if losses else torch.zeros_like(like)

    def _total(self, losses: Tensor) -> Tensor:
        """The loss, from the vector of `_sum_of` all-reduced over all ranks."""
        return losses[0] if self.sums is None else self.sums.total(losses)

    def unreached(self) -> dict[nn.Parameter, Tensor]:
        """Parameters whose gradient the last `train` filled with zeros on this rank, with a flag on
        the device: 1 = no rank has a gradient, so the optimizer must skip them."""
        if self._unused is None:  # one rank: such parameters have no gradient at all
            return {}
        return self._unused.unreached(self._reached_counts)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the forward only, and return (loss, count); gradients stay as they are."""
        runtime, mesh = self.runtime(len(batch["inputs"])), self._mesh
        batch = self._own(batch)
        executor = self._executor(runtime, batch)
        count, _ = self._count(runtime, batch)
        with self._computing():
            losses = executor.evaluate(batch)
        loss = mesh.sum(self._sum_of(losses, count).view(-1))
        return self._total(loss) / self._loss_copies, count

    def for_terms(self, rows: int) -> Runtime:
        """Make a runtime for `evaluate_each` on batches of `rows` samples on a dp rank."""
        runtime = self.runtime(rows)
        return replace(runtime, loss=Kept(runtime.loss.each), executors=OrderedDict())

    def evaluate_each(self, batch: Batch, runtime: Runtime) -> list[Tensor]:
        """Evaluate with a runtime from `for_terms`. On the rank with the last stage, returns the
        loss terms of each microbatch, or their sum if the stage computes the loss in chunks;
        elsewhere []."""
        sums, terms = self._evaluate_kept(batch, runtime)
        return terms or sums

    def rehearse(self, batch: Batch) -> None:
        """Warm up: run each of this rank's stages on a microbatch with zeros as received
        activations, forward, and backward if gradients are enabled. No P2P between stages;
        collective over dp because of FSDP's all-gather and reduce-scatter. Gradients are dropped.
        """
        runtime = self.runtime(len(batch["inputs"]))
        batch = self._own(batch)
        executor, fields = self._executor(runtime, batch), fields_of(batch)
        microbatch = {n: value[: runtime.graph.microbatch_size] for n, value in batch.items()}
        for index, stage in self._stages.items():
            graph = runtime.graph.graphs(fields, stage.training)[index]
            received = [microbatch["inputs"]]
            if index > 0:
                device, like = self._mesh.device, messages(graph)[0]
                received = [torch.zeros_like(message, device=device) for message in like]
                for message in received:
                    message.requires_grad_(torch.is_grad_enabled())
            for transform in self._transforms:
                transform.begin_microbatch(index, 0)
            with self._computing():
                executor.run_alone(index, received, microbatch)
            stage.zero_grad()
        if self._unused is not None:
            self._unused.flags()

    def outputs(
        self, batch: Batch, keep: Callable[[Any, Tensor], Any], size: int | None = None
    ) -> list[Any]:
        """Run the forward only. Returns `keep(model output, targets)` of each microbatch on the
        rank with the last stage, [] elsewhere.

        size: samples per microbatch, with the plan's number of microbatches; None = as in training.
        keep: must live as long as this pipeline, as it is a cache key.
        """
        runtime = self._planned if size else self.runtime(len(batch["inputs"]))
        key = keep, size, runtime
        if key not in self._of_outputs:
            graph = runtime.graph.with_microbatches_of(size or runtime.graph.microbatch_size)
            graph.last_stage = lambda last: last  # do not fuse the chunked loss into the last stage
            self._of_outputs[key] = Runtime(runtime.order, graph, Kept(keep), "outputs")
        return self._evaluate_kept(batch, self._of_outputs[key])[1]

    def _evaluate_kept(self, batch: Batch, runtime: Runtime) -> tuple[list[Tensor], list[Any]]:
        """Evaluate; returns (losses of this rank's microbatches, what the `Kept` loss collected)."""
        assert isinstance(runtime.loss, Kept)
        batch = self._own(batch)
        executor, runtime.loss.kept = self._executor(runtime, batch), []
        with self._computing():
            losses = executor.evaluate(batch)
        return losses, runtime.loss.kept

    def _own(self, batch: Batch) -> Batch:
        """Select this rank's part of a dp rank's batch, by `Transform.batch`."""
        for transform in self._transforms:
            batch = transform.batch(batch)
        return batch

    def _count(self, runtime: Runtime, batch: Batch) -> tuple[Tensor, Tensor]:
        """Count the loss terms of the global batch, which normalize the loss, and its tokens
        without padding; both summed over all ranks."""
        mesh, graph, size = self._mesh, runtime.graph, runtime.graph.microbatch_size
        counts = torch.zeros(2, device=mesh.device)
        # counted on the last stage, as the other ranks of a pipeline need no targets
        if runtime.order.stages - 1 in self._stages:
            targets = batch["targets"]
            terms: Any = runtime.loss.count(targets)
            if terms is None:
                meta = torch.empty((size, *targets.shape[1:]), dtype=targets.dtype, device="meta")
                output = graph.meta_output(fields_of(batch), True)
                terms = runtime.loss.terms(output, meta) * (len(targets) // size)
            counts[0] = terms
            has_sequences = bool(graph.fields["inputs"].shape)
            sequence_shards = mesh.stage_copies // mesh.dp  # ranks that share each sequence
            tokens = batch["inputs"].shape[1] // sequence_shards if has_sequences else 1
            counts[1] = len(targets) * tokens
            if REAL in batch and not batch[REAL].is_meta:  # experts are balanced
                counts[1] = batch[REAL].sum() / sequence_shards
        if mesh.world_size > 1:
            counts = mesh.sum(counts) / self._loss_copies
        runtime.loss.scale = 1.0 / counts[0]
        return counts[0], counts[1]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for transform in self._transforms:
                stack.enter_context(transform.computing())
            yield

    def _executor(self, runtime: Runtime, batch: Batch) -> MicrobatchLoop | OrderRuntime:
        """Return the executor for a batch's shape, and make the stages use the forwards for it."""
        fields = fields_of(batch)
        key, executors = runtime.key(fields), runtime.executors
        for transform in self._transforms:
            transform.prepare(fields)
        if key not in executors:
            executors[key] = self._make_executor(runtime, fields)
            if len(executors) > MOST_SHAPES:
                executors.popitem(last=False)
        executors.move_to_end(key)
        executor = executors[key]
        executor.on_action, executor.on_queued = self.on_action, self.on_queued
        for stage in self._stages.values():
            stage.select_forward(key)
        return executor

    def _make_executor(self, runtime: Runtime, fields: Fields) -> MicrobatchLoop | OrderRuntime:
        """Generate the stages' forwards for a batch shape, and make the executor that calls them.

        Raises ValueError if the forward uses modules that it did not use in the plan.
        """
        order, graph, loss = runtime.order, runtime.graph, runtime.loss
        training, evaluation = (graph.graphs(fields, on) for on in (True, False))
        used: set[str] = set()
        for index, stage in self._stages.items():
            graphs = {True: training[index], False: evaluation[index]}
            assert same_messages(*graphs.values()), "checked by the plan"
            modules = dict(stage.named_modules())
            for name in (name for graph in graphs.values() for name in graph.units):
                if name not in modules:
                    shown = ", ".join(f"{n} {list(field.shape)}" for n, field in fields.items())
                    raise ValueError(f"model: for a batch of {shown} its forward also uses {name}")
            stage.add_forwards(runtime.key(fields), graphs, index, self._mesh.device)
            used |= training[index].fields | evaluation[index].fields
        last = order.stages - 1
        for cut in (training[last], evaluation[last]):
            if loss.watch and cut.sends and (head := cut.sends[0].chunked_head) is not None:
                head.loss.watch = loss.watch  # the loss of the plan

        def loss_of(output: Any, targets: Tensor) -> Tensor:
            graphs = training if self._stages[last].training else evaluation
            return _loss_of_output(loss, graphs[last], output, targets)

        first_microbatch = self._mesh.dp_rank * order.microbatches

        def begin_microbatch(stage: int, microbatch: int) -> None:
            for transform in self._transforms:
                transform.begin_microbatch(stage, first_microbatch + microbatch)

        if self._is_loop(order):
            return MicrobatchLoop(order, self._stages[0], loss_of, sorted(used), begin_microbatch)
        inputs = fields["inputs"]
        shape = graph.microbatch_size, *inputs.shape
        first = torch.empty(shape, dtype=inputs.dtype, device="meta")
        return self._torch_runtime(order, training, loss_of, used, first, begin_microbatch)

    def _is_loop(self, order: Order) -> bool:
        """Whether an order runs as a plain microbatch loop: one unsharded stage in one process."""
        alone = self._mesh.world_size == 1 and order.stages == 1
        other_backward = order.splits_backward or self._gradient_sums
        return alone and not other_backward and not is_sharded(self._stages[0])

    def _torch_runtime(
        self,
        order: Order,
        graphs: Sequence[StageGraph],
        loss: Callable[[Any, Tensor], Tensor],
        fields: Iterable[str],
        first: Tensor,
        begin_microbatch: Callable[[int, int], None],
    ) -> OrderRuntime:
        """Make torch's pipeline runtime, which adds P2P, all-gathers and reduce-scatters between the
        actions of an order. graphs: of all stages, in training; first: the first stage's input for a
        microbatch, on meta; begin_microbatch: called with (stage, microbatch) before each forward
        and backward."""
        from titanlike.core.torch_private.pipeline_runtime import OrderRuntime
        from titanlike.core.torch_private.pipeline_stage import make_stage

        wrapped = []
        for index, stage in self._stages.items():
            graph, weight_gradients = graphs[index], None
            received, sent = messages(graph)
            if order.splits_backward:
                takers = (transform.weight_gradients(index) for transform in self._transforms)
                # of a stage whose weight gradients are computed in I: W has nothing to do
                weight_gradients = next(filter(None, takers), lambda: lambda: None)
            wrapped.append(
                make_stage(
                    stage,
                    index,
                    order.stages,
                    device=self._mesh.device,
                    group=self._mesh.axes.get_group("pp"),
                    inputs=[first] if index == 0 else received,
                    outputs=sent,
                    zero=self._zero,
                    weight_gradients=weight_gradients,
                    skips_in=graph.skips_in,
                    skips_out=graph.skips_out,
                    begin_microbatch=begin_microbatch,
                    sums=self._gradient_sums.get(index),
                )
            )
        # (source, target) of skip connections, which bypass stages -> whether a gradient comes back
        skips: dict[tuple[int, int], bool] = {}
        for index, graph in enumerate(graphs):
            skipping = graph.sends[len(graph.sends) - len(graph.skips_out) :]
            for to, node in zip(graph.skips_out, skipping, strict=True):
                has_gradient = node in graph.differentiated_later
                skips[index, to] = skips.get((index, to), False) or has_gradient
        arguments = {FIELD + name: name for name in sorted(fields)}
        return OrderRuntime(order, wrapped, loss, arguments, zero=self._zero, skips=skips)


def _loss_of_output(loss: Loss, graph: StageGraph, output: Any, targets: Tensor) -> Tensor:
    """Compute the scaled loss of the last stage's output."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if graph.sends and graph.sends[0].chunked_head is not None:
        return tensors[0].sum() * loss.scale
    rest = iter(tensors)

    def value(leaf: Any) -> Any:
        """Convert an integer output, which `stage.to_send` made fp64, back to its dtype."""
        if not isinstance(leaf, Node):
            return leaf
        tensor, meta = next(rest), leaf.tensor
        same_kind = tensor.is_floating_point() == meta.is_floating_point()
        return tensor if same_kind else tensor.to(meta.dtype)

    structure = graph.output
    # fast path: the output is usually a single tensor
    model_output = value(structure) if isinstance(structure, Node) else tree_map(structure, value)
    with record_function("loss"):  # names it in a profile
        return loss(model_output, targets)
