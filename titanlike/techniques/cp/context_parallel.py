"""Context parallelism: how sequences are sharded, decided and checked before anything is allocated,
and the rank's batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.pipeline import TraceSplit
from titanlike.core.config.schema import Config
from titanlike.core.device.choose import first_device
from titanlike.core.distributed.mesh import Mesh, new_group
from titanlike.core.distributed.placement import Placement, in_bf16
from titanlike.core.distributed.transform import Plan, Recorded, Transform
from titanlike.core.graph.loss import Loss
from titanlike.core.graph.model_graph import Field, Fields, ModelGraph, fields_of
from titanlike.core.graph.record_forward import record_forward
from titanlike.core.graph.recording import Recording, UnknownTokens, replay
from titanlike.core.graph.sequence_shard import SequenceShard, shard_sequence
from titanlike.core.models.documents import (
    document_spans,
    host_copy,
    sequence_spans,
    with_host_copy,
)
from titanlike.core.optim.custom_loss import CustomLoss
from titanlike.core.optim.loss import takes_divided_logits
from titanlike.core.torch_private.tensors import tensors_in
from titanlike.techniques.cp.context_attention import ContextAttention, Looking, heads_not_shareable
from titanlike.techniques.cp.context_tokens import ContextRanks, Take
from titanlike.techniques.tp.operators import Layout, Shard, ShardingError
from titanlike.techniques.tp.plan import Entry
from titanlike.techniques.tp.sharded_trace import ShardedTrace, Tracked
from titanlike.techniques.tp.traces import ReferenceTrace, first_line, shapes_of

IGNORED = -100  # a target without loss
_PADDING = {"targets": IGNORED, "document_ids": -1}  # else 0, or False
# functions of documents, which each rank has for all tokens
_OFFSETS = frozenset({document_spans, sequence_spans})


@dataclass(frozen=True)
class Attended:
    """The sizes and options of a recorded attention call: queries [B, H, T, E], keys and values
    [B, K, T, E]."""

    heads: int  # H; 0 = no such dimension
    kv_heads: int  # K
    width: int  # E; 0 = keys and values differ
    causal: bool
    masked: bool
    dropout: bool


class ContextParallel(Transform):
    """Shards sequences over cp ranks, by a method chosen from the model's attention calls."""

    ranks: ContextRanks

    def __init__(self, config: Config, ranks: ContextRanks) -> None:
        self._config = config
        self.first = self.ranks = ranks
        self.attention = ContextAttention(ranks)
        self.sequence = self
        self.why = ""  # why the method was chosen
        self._calls: list[Attended] = []  # distinct calls of attention
        self._offsets = False  # whether attention gets documents, or a window, as offsets
        self._recordings: tuple[Recording, Recording]  # with full sequences, and with shorter ones

    @property
    def name(self) -> str:
        return f"{self.ranks.method} of {self.ranks.size}"

    def describe(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """The method, and each rank's tokens."""
        text = {
            "gather": "keys and values are all-gathered",
            "ulysses": "an all-to-all trades heads for tokens",
            "ring": "keys and values pass around a ring",
        }[self.ranks.method]
        tokens = plan.fields["inputs"].shape[0] // self._config.cp
        text += f" ({self.why}); {tokens} tokens a rank"
        yield "context parallel", f"{self.ranks.method}, {text}"

    def open(self, mesh: Mesh, plan: Plan) -> None:
        timeout = self._config.launch.timeout
        self.ranks.group = new_group(mesh.neighbours("shard", mesh.cp), timeout)

    def on_stage(self, index: int, stage: nn.Module, units: Sequence[str]) -> None:
        for name in units:
            self.attention.around(stage.get_submodule(name), name)

    def why_not_compiled(self, block: str) -> str:
        counts = self.attention.counts(block)
        return "it counts tokens, of which cp ranks have parts" if counts else ""

    # --- batches -------------------------------------------------------------------------------

    def batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pad a batch of full sequences [B, T, ...]; keep only this rank's tokens of the targets.

        The other fields stay full: see `core/graph/sequence_shard.py`.
        """
        batch = self.padded(batch)
        return {**batch, "targets": self.ranks.take(batch["targets"], 1)}

    def logits(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.ranks.size)]
        dist.all_gather(parts, part.contiguous(), group=self.ranks.group)
        return self.ranks.in_order(torch.cat(parts, 1), 1)

    def padded(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = batch["inputs"].shape[1]
        missing = -tokens % self._multiple()
        if not missing:
            return batch
        padded = dict(batch)
        for name, x in batch.items():
            for dim in _token_dims(name, x.shape[1:], tokens):
                sizes = [0, 0] * (x.dim() - 2 - dim) + [0, missing]
                value = _PADDING.get(name, 0)
                whole, host = padded[name], host_copy(padded[name])
                padded[name] = F.pad(whole, sizes, value=value)
                if host is not None:
                    with_host_copy(padded[name], F.pad(host, sizes, value=value))
        return padded

    def _multiple(self) -> int:
        """Lengths are padded to a multiple of this; tp ranks shard a rank's tokens once more."""
        return lcm(self.ranks.multiple, self.ranks.size * self._config.tp)

    # --- called by ModelGraph --------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A context in which the model computes with full sequences; its attention calls are
        recorded."""
        self.attention.instead = self._note
        self.attention.active = False
        try:
            with self.attention:
                yield
        finally:
            self.attention.instead, self.attention.active = None, True

    def shorter(self, fields: Fields) -> Fields:
        """Sequences of half the length, or slightly less if tensor-parallel ranks cannot shard
        that."""
        tokens, tp = fields["inputs"].shape[0], self._config.tp
        less = tokens // 2 if tokens // 2 % tp == 0 else tokens - tp
        return {
            name: Field(
                tuple(
                    less if dim in _token_dims(name, shape, tokens) else size
                    for dim, size in enumerate(shape)
                ),
                dtype,
            )
            for name, (shape, dtype) in fields.items()
        }

    def shard(self, recording: Recording, shorter: Recording) -> SequenceShard:
        if not self.why:
            self._offsets = any(node.target in _OFFSETS for node in recording.nodes)
            self._choose()
            self._recordings = recording, shorter
        return _shard(self.ranks, self.ranks.take, self.attention)

    def problem(self, error: UnknownTokens) -> Problem:
        """The problem of a model whose recorded forward hides which of its values are per token."""
        return self._problem(f"{error.call} {error.reason}, and a cp rank has a part of the tokens")

    def _problem(self, reason: str) -> Problem:
        cp, dp = self._config.cp, self._config.dp
        return Problem("cp", cp, reason, f"cp=1 dp={dp * cp}")

    def _note(self, given: Mapping[str, Any]) -> Tensor:
        q, k, mask = given["query"], given["key"], given["attn_mask"]
        call = Attended(
            heads=q.shape[1] if q.dim() == 4 else 0,
            kv_heads=k.shape[1] if k.dim() == 4 else 0,
            width=q.shape[-1] if q.shape[-1] == given["value"].shape[-1] else 0,
            causal=given["is_causal"],
            masked=mask is not None,
            dropout=given["dropout_p"] > 0,
        )
        if call not in self._calls:
            self._calls.append(call)
        return F.scaled_dot_product_attention(**given)

    # --- the method ----------------------------------------------------------------------------

    def _choose(self) -> None:
        method = self._config.context_parallel
        # why each is not possible; auto takes the first that is
        problems = {"ulysses": self._no_ulysses(), "ring": self._no_ring(), "gather": ""}
        chosen: Any = next(name for name, reason in problems.items() if not reason)
        if method != "auto":
            if reason := problems[method]:
                fix = f"context_parallel={chosen}"
                raise ConfigError([Problem("context_parallel", method, reason, fix)])
            self.ranks.method, self.why = method, "asked for"
            return
        refused = next(filter(None, problems.values()), "")
        self.why = "the ranks can share its heads" if chosen == "ulysses" else refused
        self.ranks.method = chosen

    def _no_ulysses(self) -> str:
        for call in self._calls:
            if not call.heads:
                return "a call of attention has no dimension of heads"
            if heads_not_shareable(call.heads, call.kv_heads, self.ranks.size):
                scope = " of a tp rank" if self._config.tp > 1 else ""
                heads = f"{call.heads} heads and {call.kv_heads} key/value heads{scope}"
                return f"{heads} cannot be shared by {self.ranks.size} ranks"
        return ""

    def _no_ring(self) -> str:
        no_mask = "a ring takes no mask, and documents are one"
        if self._config.compile:
            return "torch.compile cannot trace a ring"
        if self._offsets:
            return no_mask
        for call in self._calls:
            if call.masked:
                return no_mask
            if call.dropout:
                return "a ring has no dropout in attention"
            if not call.heads or not call.width:
                return "a ring takes heads whose keys and values have one size"
            on_cpu = first_device(self._config.device).type == "cpu"  # its kernel takes any size
            if (call.width % 8 or call.width > 256) and not on_cpu:
                return f"a ring takes heads of a multiple of 8, up to 256, not of {call.width}"
        return ""

    # --- checks --------------------------------------------------------------------------------

    def recorded(self, graph: ModelGraph) -> None:
        for unit in graph.units:
            self.attention.around(graph.model.get_submodule(unit.name), unit.name)

    def check(self, recorded: Recorded) -> None:
        self._check_loss(recorded.loss, recorded.output, recorded.targets)
        model, graph = recorded.graph.model, recorded.graph
        if self._config.tp > 1:
            model = recorded.unchanged()
        model.train()
        size = graph.microbatch_size if self._config.tp == 1 else 2
        batch = {n: x.repeat_interleave(size, 0) for n, x in recorded.batch.items()}
        with in_bf16(model.modules()):  # a scale in float8 is that of all ranks' tokens
            self._check_tokens(model, {n: x for n, x in batch.items() if n != "targets"}, graph)
        if recorded.variable:
            self._check_padding(graph.fields)

    def _check_tokens(
        self, model: nn.Module, batch: Mapping[str, Tensor], graph: ModelGraph
    ) -> None:
        """Raise ConfigError if the model would compute different results from parts of sequences.

        model: as recorded, or without tensor parallelism, which is checked separately; batch: a
        microbatch on meta.
        """
        recordings, attention = self._recordings, self.attention
        if self._config.tp > 1:  # without tp's shards of heads and features
            attention = ContextAttention(replace(self.ranks))
            names = [unit.name for unit in graph.units]
            for name in names:
                attention.around(model.get_submodule(name), name)
            attention.active = False
            less = self.shorter(fields_of(dict(batch)))
            shorter = {name: batch[name].new_empty(2, *f.shape) for name, f in less.items()}
            first, second = (record_forward(model, dict(x), names) for x in (batch, shorter))
            recordings = first, second
        try:
            for training in (True, False):
                if not (training or attention.counted):
                    break  # evaluation matters only if blocks count tokens
                model.train(training)
                _check_mode(model, attention, recordings, batch, graph.trained_outputs)
                self.attention.counted = attention.counted
        except Unchecked as error:
            self.unchecked = f"whether a token sees others by attention alone: {error}"
            if attention.counted:
                reason = "its blocks count their tokens, and their evaluation is not known"
                problem = Problem("cp", self._config.cp, f"{reason}: {error}", "cp=1")
                raise ConfigError([problem]) from None
        except ShardingError as error:
            alone = "a token sees others by scaled_dot_product_attention alone"
            reason = f"its {error.module or 'forward'} {error.reason}; with cp {alone}"
            raise ConfigError([self._problem(reason)]) from None
        finally:
            model.train()
        for node in recordings[0].nodes:
            # a recomputation inside the module would count from zero
            if node.checkpoints_inside and self.attention.counts(node.target):
                reason = f"its {node.target} counts its tokens, and calls torch.utils.checkpoint"
                raise ConfigError([self._problem(reason)])

    def _check_loss(self, loss: Loss, output: Any, targets: Tensor) -> None:
        """Raise ConfigError if a custom loss is not one per token; output and targets on meta."""
        if not isinstance(loss, CustomLoss):
            return
        with torch.device("meta"):
            shape = tuple(loss.each(output, targets).shape)
        if shape[:2] != tuple(targets.shape[:2]):
            reason = f"it returns losses {list(shape)} for targets {list(targets.shape)}"
            reason += ": with cp a rank has a part of the tokens, and each must have its own"
            fix = "return losses [B, T, ...]"
            raise ConfigError([Problem("loss.name", self._config.loss.name, reason, fix)])

    def _check_padding(self, fields: Fields) -> None:
        """Raise ConfigError if batches of varying length cannot be padded for cp."""
        if not takes_divided_logits(self._config.loss):
            reason = "a loss that is no cross entropy would count what they are padded with"
        elif any(not call.causal for call in self._calls) and "document_ids" not in fields:
            reason = "attention that is not causal alone may see what they are padded with"
        else:
            return
        differ = f"batches differ in length, are padded to a multiple of {self._multiple()}"
        raise ConfigError([self._problem(f"{differ}, and {reason}")])


def _shard(ranks: ContextRanks, take: Take, attention: ContextAttention) -> SequenceShard:
    """take: as `ContextRanks.take`."""

    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        return attention.attention if function is F.scaled_dot_product_attention else function

    return SequenceShard(ranks.size, take, ranks.balanced, replaced, _OFFSETS)


def _token_dims(name: str, shape: Sequence[int], tokens: int) -> list[int]:
    """Token dimensions of a batch field, without its first dimension: the first, and in masks and
    biases all others of that size."""
    pairwise = any(word in name for word in ("mask", "bias"))
    return [dim for dim, size in enumerate(shape) if size == tokens and (pairwise or dim == 0)]


def context_parallel(
    config: Config, mesh: Mesh | None, batch: Mapping[str, Tensor]
) -> ContextParallel:
    """Decide how cp shards these sequences. Raises ConfigError.

    mesh: None in the launcher; batch: one sequence, on meta.
    """
    if isinstance(config.split, TraceSplit):
        reason = "a traced graph has the lengths of whole sequences written into it"
        raise ConfigError([Problem("split", "trace", reason, "split=points")])
    ids, targets = batch["inputs"], batch["targets"]
    if ids.dim() < 2 or targets.dim() < 2 or ids.shape[1] != targets.shape[1]:
        shapes = f"{list(ids.shape[1:])} and targets {list(targets.shape[1:])}"
        reason = f"a sample's inputs {shapes} are no sequences of the same tokens"
        raise ConfigError([Problem("cp", config.cp, reason, f"cp=1 dp={config.dp * config.cp}")])
    tokens = ids.shape[1]
    multiple = lcm(2 * config.cp, config.cp * config.tp)
    if tokens % multiple:
        fits = -(-tokens // multiple) * multiple
        both = f"2 x cp{f' and cp x tp = {config.cp * config.tp}' if config.tp > 1 else ''}"
        reason = f"{tokens} tokens are no multiple of {both} = {2 * config.cp}"
        raise ConfigError([Problem("seq_len", tokens, reason, f"seq_len={fits}")])
    return ContextParallel(config, ContextRanks(config.cp, 0 if mesh is None else mesh.cp_rank))


# --- whether a model computes the same from a rank's tokens ---------------------------------------
#
# As for tensor parallelism (`techniques/tp/check.py`): a forward runs on meta twice, with full
# sequences and with a rank's tokens, and the second trace checks that each operation returns its
# part of the result. Only scaled_dot_product_attention may use other tokens: custom attention, and
# convolutions or recurrences over tokens, are found here.


class Unchecked(Exception):
    """A forward that meta tensors cannot run with full sequences."""


def _check_mode(
    model: nn.Module,
    attention: ContextAttention,
    recordings: tuple[Recording, Recording],
    batch: Mapping[str, Tensor],
    trained: Sequence[bool] | None,
) -> None:
    """Check the model in its current mode, training or evaluation, and record the calls that count
    tokens in `attention`, which is around its modules.

    recordings: with full and with shorter sequences; trained: whether the loss uses each output
    tensor. Raises Unchecked, and ShardingError for a call that mixes tokens.
    """
    ranks = attention.ranks
    # not traced inside: leaves, as for tensor parallelism
    token_wise: dict[str, Entry] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in token_wise)
        if getattr(module, "token_wise", False) and not inside:
            token_wise[name] = Entry(name, "sequence")

    # 1. full sequences
    reference = ReferenceTrace(model, token_wise)
    looking = Looking(batch["inputs"].shape[1], lambda x, dim: trace.take(x, dim, ranks.size))
    attention.active, attention.looking = False, looking
    try:
        outputs = shapes_of(tensors_in(reference.run(partial(replay, recordings[0], model, batch))))
    except Exception as error:  # whatever a forward raises
        raise Unchecked(first_line(error) or repr(error)) from error
    finally:
        attention.active, attention.looking = True, None
    looking.alike = reference.alike

    # 2. a rank's tokens
    placements = {name: Placement(None, ranks.size) for name, _ in model.named_parameters()}
    trace = _TokenTrace(model, token_wise, reference.steps, placements)
    divided = shard_sequence(*recordings, _shard(ranks, looking.take, attention))
    attention.instead, attention.looking = trace.attention, looking
    try:
        results = trace.run_checked(partial(replay, divided, model, batch), outputs)
        used = trained if trained and len(trained) == len(results) else [True] * len(results)
        for tensor, shape in compress(results, used):
            layout = trace.layout(tensor, shape)
            if not _tokens_at(layout, 1):
                wrong = next(filter(None, layout), None) or "a whole tensor"
                raise ShardingError(f"it returns {wrong}, and the loss is of tokens [B, T, ...]")
        trace.complete([])
    finally:
        attention.instead = attention.looking = None
        calls = attention.counted
        for name, like in trace.repeated:
            modes = [mode for mode in (True, False) if (like, mode) in calls]
            calls |= {(name, mode): calls[like, mode] for mode in modes}
        counting = {mode: every for mode, every in calls.items() if any(c.dims for c in every)}
        attention.counted = counting

    # 3. random draws and weights that are not per token
    if path := next((path for path, parts in trace.draws.items() if False in parts), None):
        reason = "draws random numbers for whole sequences, which ranks have parts of"
        raise ShardingError(reason, module=path)
    if name := next((name for name, needs in trace.needs.items() if "never" in needs), ""):
        reason = "it is used apart from the tokens, and its gradient would count on each rank"
        raise ShardingError(reason, module=name)


class _TokenTrace(ShardedTrace):
    def take(self, x: Tensor, dim: int, ranks: int) -> Tensor:
        with self.muted():
            result = x.narrow(dim, 0, x.shape[dim] // ranks).clone()
        layout: list[Shard | None] = [None] * x.dim()
        layout[dim] = Shard("tokens", (x.shape[dim],))
        # each rank has its part of the gradient
        self._resolve(self._pending([x]), {"tokens"})
        self._track(Tracked(result, tuple(layout)))
        return result

    def attention(self, given: dict[str, Any]) -> Tensor:
        """Called instead of scaled_dot_product_attention."""
        tensors = [x for x in given.values() if isinstance(x, Tensor)]
        step = self._must_find("operation", "aten::scaled_dot_product_attention", self.path)
        self.called = "scaled_dot_product_attention"
        q, k, v, *masks = self.operands(tensors, step)
        for x, what in ((q, "queries"), (k, "keys"), (v, "values")):
            if len(x.whole) != 4:
                raise ShardingError(
                    f"its {what} have {len(x.whole)} dimensions, and 4 are expected"
                )
            if not _tokens_at(x.layout, 2):
                raise ShardingError(f"its {what} are not those of the rank's tokens")
        for mask in masks:
            pairs = mask.layout[-2:]
            others = any(mask.layout[:-2]) or any(
                s is not None and s.kind != "tokens" for s in pairs
            )
            if others or all(pairs):
                raise ShardingError("its mask is not that of the rank's tokens")
        for name in ("is_causal", "scale", "dropout_p"):
            here, there = given[name], step.given.get(name, given[name])
            if here != there:
                raise ShardingError(f"its {name} is {here}, and {there} with all tokens")
        query, value = tensors[0], tensors[2]
        with self.muted():
            result = query.new_empty(*query.shape[:-1], value.shape[-1])
        self._resolve(self._pending(tensors), {"tokens"})
        self._track(Tracked(result, q.layout))
        self.called = ""
        return result


def _tokens_at(layout: Layout, dim: int) -> bool:
    """Whether a rank's tokens are along this dimension, and all others are full."""
    others = [shard for at, shard in enumerate(layout) if at != dim]
    shard = layout[dim] if dim < len(layout) else None
    return shard is not None and shard.kind == "tokens" and shard.plain and not any(others)
