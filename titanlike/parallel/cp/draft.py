"""How context parallelism divides sequences, decided before anything is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config, TraceSplit
from titanlike.device.choose import first_device
from titanlike.distributed.mesh import Mesh
from titanlike.distributed.placement import experts_of
from titanlike.distributed.transform import Recorded
from titanlike.graph.equal_units import call_key
from titanlike.graph.model_graph import Field, Fields, ModelGraph, fields_of
from titanlike.graph.record_forward import record_forward
from titanlike.graph.recording import Recording
from titanlike.graph.replay import replay
from titanlike.graph.token_parts import Parts, UnknownTokens, with_parts
from titanlike.models.attention import undivided_attention
from titanlike.models.documents import (
    Documents,
    document_mask,
    document_spans,
    sequence_spans,
)
from titanlike.optim.loss import CustomLoss, Loss, takes_divided_logits
from titanlike.parallel.cp.attention import Attended, ContextAttention, DocumentAttention, repeated
from titanlike.parallel.cp.check import TokenCheck, TokensMixed, Unchecked
from titanlike.parallel.cp.context_parallel import ContextParallel, token_dims_of
from titanlike.parallel.cp.tokens import ContextRanks


@dataclass(eq=False)
class ContextDraft(ContextParallel):
    """How sequences are divided; the method is chosen once the model's attention is known."""

    config: Config
    ranks: ContextRanks
    why: str = ""  # of the method
    seen: list[Attended] = field(default_factory=list)  # calls of attention, each kind once
    offsets: bool = False  # whether documents, or a window, are given to attention by their offsets
    _first: tuple[Recording, Recording] | None = None  # of whole sequences, and of shorter ones

    def __post_init__(self) -> None:
        documents = DocumentAttention(Documents, undivided_attention, document_mask)
        super().__init__(self.ranks, ContextAttention(self.ranks, documents), self.config.tp)
        self.first, self.sequence = self.ranks, self

    @property
    def name(self) -> str:
        return f"{self.ranks.method} of {self.ranks.size}"

    def describe(self, plan: Any) -> Iterator[tuple[str, str]]:
        """How sequences are divided."""
        text = {
            "gather": "keys and values are gathered",
            "ulysses": "heads are exchanged for tokens",
            "ring": "keys and values go round",
        }[self.ranks.method]
        tokens = length(plan.fields) // self.config.cp
        yield (
            "context parallel",
            f"{self.ranks.method}, {text} ({self.why}); {tokens} tokens a rank",
        )

    def open(self, mesh: Mesh, plan: Any) -> None:
        timeout = timedelta(seconds=self.config.launch.timeout)
        ranks = mesh.context_ranks()
        self.ranks.group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def recorded(self, graph: ModelGraph) -> None:
        for unit in graph.units:
            self.attention.around(graph.model.get_submodule(unit.name), unit.name)

    def check(self, recorded: Recorded) -> None:
        if problems := self._loss_problems(recorded.loss, recorded.output, recorded.targets):
            raise ConfigError(problems)
        model, graph = recorded.graph.model, recorded.graph
        if self.config.tp > 1:
            model = recorded.unchanged()
        model.train()
        size = graph.microbatch_size if self.config.tp == 1 else 2
        batch = {n: x.repeat_interleave(size, 0) for n, x in recorded.batch.items()}
        self._check_tokens(model, {n: x for n, x in batch.items() if n != "targets"}, graph)
        if recorded.variable:
            self._check_padding(graph.model, graph.fields)

    def problem(self, error: UnknownTokens) -> Problem:
        """Of a model whose recorded forward does not tell which of its values are a token's."""
        reason = f"{error.call} {error.reason}, and a cp rank has a part of the tokens"
        return Problem("cp", self.config.cp, reason, f"cp=1 dp={self.config.dp * self.config.cp}")

    def _check_tokens(
        self, model: nn.Module, batch: Mapping[str, Tensor], graph: ModelGraph
    ) -> None:
        """Raise ConfigError where the model would compute other numbers with parts of sequences.

        model: as it was recorded, or without tensor parallelism where that divides it, which is checked
        by itself; batch: a microbatch on meta.
        """
        assert self._first is not None
        recordings = self._first
        attention = self.attention
        if self.config.tp > 1:  # operations on parts of heads and features would only be noise
            attention = ContextAttention(replace(self.ranks))
            names = [unit.name for unit in graph.units]
            for name in names:
                attention.around(model.get_submodule(name), name)
            attention.active = False
            fields = fields_of(dict(batch))
            shorter = {
                name: batch[name].new_empty(2, *f.shape) for name, f in self.shorter(fields).items()
            }
            first, second = (record_forward(model, dict(x), names) for x in (batch, shorter))
            recordings = first, second
        try:
            for training in (True, False):
                if not (training or attention.counted):
                    break  # what blocks count in evaluation, only where they count tokens at all
                model.train(training)
                check = TokenCheck(model, call_key, attention, batch["inputs"].shape[1])
                check.whole(partial(replay, recordings[0], model, batch))
                divided = with_parts(*recordings, _parts(self.ranks, check.take, attention))
                check.parts(partial(replay, divided, model, batch), graph.trained_outputs)
                self.attention.counted = attention.counted
            self._check_recomputed(recordings[0])
        except Unchecked as error:
            self.unchecked = f"whether a token sees others by attention alone: {error}"
            if attention.counted:
                reason = (
                    f"its blocks count their tokens, and their evaluation is not known: {error}"
                )
                raise ConfigError([Problem("cp", self.config.cp, reason, "cp=1")]) from None
        except TokensMixed as mixed:
            where = f"its {mixed.module} " if mixed.module else "its forward "
            alone = "a token sees others by scaled_dot_product_attention alone"
            reason = f"{where}{mixed.reason}; with cp {alone}"
            fix = f"cp=1 dp={self.config.dp * self.config.cp}"
            raise ConfigError([Problem("cp", self.config.cp, reason, fix)]) from None
        finally:
            model.train()

    def _check_recomputed(self, recording: Recording) -> None:
        """What a module recomputes by itself runs apart from it, and would count from zero."""
        for node in recording.nodes:
            if node.checkpoints_inside and self.attention.counts(node.target):
                reason = f"its {node.target} counts its tokens, and calls torch.utils.checkpoint"
                fix = f"cp=1 dp={self.config.dp * self.config.cp}"
                raise ConfigError([Problem("cp", self.config.cp, reason, fix)])

    def _loss_problems(self, loss: Loss, output: Any, targets: Tensor) -> list[Problem]:
        """What is wrong with a loss of a rank's tokens; output and targets on meta."""
        if not isinstance(loss, CustomLoss):
            return []
        with torch.device("meta"):
            shape = tuple(loss.losses(output, targets).shape)
        if shape[:2] == tuple(targets.shape[:2]):
            return []
        reason = f"it returns losses {list(shape)} for targets {list(targets.shape)}"
        reason += ": with cp a rank has a part of the tokens, and each must have its own"
        return [Problem("loss.name", self.config.loss.name, reason, "return losses [B, T, ...]")]

    def _check_padding(self, model: nn.Module, fields: Fields) -> None:
        """Raise ConfigError where batches, which differ in length, cannot be padded to what cp needs."""
        reason = ""
        if not takes_divided_logits(self.config.loss):
            reason = "a loss that is no cross entropy would count what they are padded with"
        elif any(not call.causal for call in self.seen) and "document_ids" not in fields:
            reason = "attention that is not causal alone may see what they are padded with"
        elif experts_of(model):
            reason = "what they are padded with would count where experts are balanced"
        if reason:
            multiple = self.multiple()
            text = f"batches differ in length, are padded to a multiple of {multiple}, and {reason}"
            fix = f"cp=1 dp={self.config.dp * self.config.cp}"
            raise ConfigError([Problem("cp", self.config.cp, text, fix)])

    # --- of ModelGraph -------------------------------------------------------------------------

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within it, the model computes with whole sequences; its calls of attention are noted."""
        self.attention.instead = self._note
        self.attention.active = False
        try:
            with self.attention:
                yield
        finally:
            self.attention.instead, self.attention.active = None, True

    def shorter(self, fields: Fields) -> Fields:
        """Of half the length, or a little less where tensor-parallel ranks could not divide that."""
        tokens, tp = length(fields), self.config.tp
        less = tokens // 2 if tokens // 2 % tp == 0 else tokens - tp
        found = {}
        for name, (shape, dtype) in fields.items():
            dims = token_dims_of(name, shape, tokens)
            sizes = (less if dim in dims else size for dim, size in enumerate(shape))
            found[name] = Field(tuple(sizes), dtype)
        return found

    def parts(self, recording: Recording, shorter: Recording) -> Parts:
        if not self.why:
            self.offsets = any(node.target in _OFFSETS for node in recording.nodes)
            self._choose()
            self._first = recording, shorter
        ranks = self.ranks
        return _parts(ranks, ranks.take, self.attention)

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
        if call not in self.seen:
            self.seen.append(call)
        return F.scaled_dot_product_attention(**given)

    def _choose(self) -> None:
        wanted = self.config.context_parallel
        problems = {name: problem(self) for name, problem in _METHODS.items()}
        if wanted != "auto":
            if reason := problems[wanted]:
                fits = next(name for name, text in problems.items() if not text)
                fix = f"context_parallel={fits}"
                raise ConfigError([Problem("context_parallel", wanted, reason, fix)])
            self.ranks.method, self.why = wanted, "asked for"
            return
        chosen: Any = next(name for name, reason in problems.items() if not reason)
        before = [reason for name, reason in problems.items() if reason and name != chosen]
        first = next(iter(problems))
        self.ranks.method, self.why = chosen, _WHY_FIRST if chosen == first else before[0]


# of documents, which are those of all tokens on each rank
_OFFSETS = frozenset({document_spans, sequence_spans})


def _parts(
    ranks: ContextRanks, take: Callable[[Tensor, int], Tensor], attention: ContextAttention
) -> Parts:
    """take: as `ContextRanks.take`."""

    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        return attention.attention if function is F.scaled_dot_product_attention else function

    return Parts(ranks.size, take, ranks.balanced, replaced, _OFFSETS)


def length(fields: Fields) -> int:
    """Tokens of a sequence."""
    return fields["inputs"].shape[0]


_NO_MASK = "a ring takes no mask, and documents are one"
_WHY_FIRST = "the ranks can share its heads"


def _no_ulysses(draft: ContextDraft) -> str:
    size = draft.ranks.size
    for call in draft.seen:
        if not call.heads:
            return "a call of attention has no dimension of heads"
        if call.heads % size or call.heads % (call.kv_heads * repeated(call.kv_heads, size)):
            of_rank = " of a tp rank" if draft.config.tp > 1 else ""
            heads = f"{call.heads} heads and {call.kv_heads} key/value heads{of_rank}"
            return f"{heads} cannot be shared by {size} ranks"
    return ""


def _no_ring(draft: ContextDraft) -> str:
    if draft.config.compile:
        return "torch.compile cannot trace a ring"
    if draft.offsets:
        return _NO_MASK
    for call in draft.seen:
        if call.masked:
            return _NO_MASK
        if call.dropout:
            return "a ring has no dropout in attention"
        if not call.heads or not call.width:
            return "a ring takes heads whose keys and values have one size"
        on_cpu = first_device(draft.config.device).type == "cpu"  # whose kernel takes any
        if (call.width % 8 or call.width > 256) and not on_cpu:
            return f"a ring takes heads of a multiple of 8, up to 256, not of {call.width}"
    return ""


# the first that fits is taken by context_parallel=auto
_METHODS: dict[str, Callable[[ContextDraft], str]] = {
    "ulysses": _no_ulysses,
    "ring": _no_ring,
    "gather": lambda draft: "",
}


def context_draft(config: Config, mesh: Mesh | None, batch: Mapping[str, Tensor]) -> ContextDraft:
    """How cp divides these sequences. Raises ConfigError.

    mesh: None in the launcher; batch: of one sequence, on meta.
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
        each = f"2 x cp{f' and cp x tp = {config.cp * config.tp}' if config.tp > 1 else ''}"
        reason = f"{tokens} tokens are no multiple of {each} = {2 * config.cp}"
        raise ConfigError([Problem("seq_len", tokens, reason, f"seq_len={fits}")])
    return ContextDraft(config, ContextRanks(config.cp, 0 if mesh is None else mesh.cp_rank))
