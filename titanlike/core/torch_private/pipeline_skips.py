"""Skip connections in torch's pipeline runtime: a value goes directly from the stage that has it to
a later one that uses it, in one message or on the same rank; its gradient goes back the same way.

torch's runtime sends only between consecutive stages (2.11 to 2.15: "Backward of skip connections
not supported yet"). Here a stage has additional inputs and outputs (`SkippingStage`), whose
messages are placed among its actions (`skip_posts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# a mixin before a stage class of torch
_Base: Any = object
if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage as _Base  # noqa: F811

Metas = Mapping[int, Sequence[Tensor]]  # by the other stage: meta tensors like those of a message


class SkipMessage(NamedTuple):
    """A microbatch's values that pass from one stage to another, or their gradients."""

    forward: bool
    source: int  # the stage that sends
    to: int
    mb: int


class SkippingStage(_Base):
    """A mixin before torch's stage: inputs and outputs from and to non-adjacent stages."""

    _microbatch = -1

    def open_skips(self, skips_in: Metas, skips_out: Metas) -> None:
        """skips_in, skips_out: inputs from and outputs to non-adjacent stages, after torch's own;
        `requires_grad` where a gradient comes back."""
        self._in, self._out = skips_in, skips_out
        self._back_in, self._back_out = _differentiated(skips_out), _differentiated(skips_in)
        self.on_this_rank: Mapping[int, Any] = {}  # stages, by index
        self._arrived: dict[SkipMessage, list[Tensor]] = {}
        self._leaving: dict[SkipMessage, list[Tensor]] = {}
        # by microbatch: inputs, and outputs whose gradients come back
        self._graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        for state in (self._arrived, self._leaving, self._graphs):
            state.clear()

    def skip_sends(self, message: SkipMessage) -> list[Any]:
        """The P2P operations that send the message."""
        return self._operations(dist.isend, self._leaving.pop(message), message.to)

    def skip_receives(self, message: SkipMessage) -> list[Any]:
        """The P2P operations that receive the message, into new buffers."""
        metas = (self._in if message.forward else self._back_in)[message.source]
        device = self.device
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=device) for like in metas]
        self._arrived[message] = buffers
        return self._operations(dist.irecv, buffers, message.source)

    def _operations(self, kind: Any, tensors: Sequence[Tensor], stage: int) -> list[Any]:
        peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])
        return [dist.P2POp(kind, tensor, peer, self.group) for tensor in tensors]

    def _take(self, forward: bool, skips: Metas) -> list[Tensor]:
        messages = (
            SkipMessage(forward, source, self.stage_index, self._microbatch) for source in skips
        )
        return [tensor for message in messages for tensor in self._arrived.pop(message)]

    def _pass_on(self, forward: bool, skips: Metas, tensors: Sequence[Tensor]) -> None:
        left = iter(tensors)
        for stage, metas in skips.items():
            passed = [next(left).detach() for _ in metas]
            for tensor, like in zip(passed, metas, strict=True):
                if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
                    shown = [f"{list(t.shape)} {t.dtype}" for t in (tensor, like)]
                    way = f"from stage {self.stage_index} to {stage}"
                    raise ValueError(f"a skip connection {way} is {shown[0]}, planned {shown[1]}")
            message = SkipMessage(forward, self.stage_index, stage, self._microbatch)
            local = self.on_this_rank.get(stage)
            (self._leaving if local is None else local._arrived)[message] = passed

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        inputs = [tensor.requires_grad_(training) for tensor in self._take(True, self._in)]
        output = super().forward_maybe_with_nosync(*args, *inputs, **kwargs)
        metas = [meta for metas in self._out.values() for meta in metas]
        skipped: Sequence[Tensor] = ()
        if metas:
            near = len(output) - len(metas)
            output, skipped = output[:near], output[near:]
        if training:
            pairs = zip(skipped, metas, strict=True)
            back = [tensor for tensor, meta in pairs if meta.requires_grad]
            self._graphs[self._microbatch] = inputs, back
        self._pass_on(True, self._out, skipped)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self._microbatch not in self._graphs:  # `run_alone`, with skips among its values
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        inputs, outputs = self._graphs.pop(self._microbatch)
        values = dict(bwd_kwargs)
        values["input_values"] = [*values["input_values"], *inputs]
        if outputs:
            values["stage_output"] = (*values["stage_output"], *outputs)
            values["output_grads"] = (*values["output_grads"], *self._take(False, self._back_in))
        result = super().backward_maybe_with_nosync(backward_type, values, last_backward)
        near = len(bwd_kwargs["input_values"])
        gradients, rest = result
        metas = [meta for metas in self._in.values() for meta in metas]
        pairs = zip(gradients[near:], metas, strict=True)
        back = [gradient for gradient, meta in pairs if meta.requires_grad]
        self._pass_on(False, self._back_out, back)
        return gradients[:near], rest


def _differentiated(skips: Metas) -> Metas:
    some = {stage: [like for like in metas if like.requires_grad] for stage, metas in skips.items()}
    return {stage: metas for stage, metas in some.items() if metas}


def skip_posts(
    ranks: Mapping[int, Sequence[Any]], place: Sequence[int], skips: Mapping[tuple[int, int], bool]
) -> dict[int, dict[int, list[SkipMessage]]]:
    """Map each rank to: index of an action -> skip messages launched before it (after the last:
    their number).

    ranks: torch's actions; skips: (stage, later stage) -> whether gradients come back. Walks
    through all ranks' actions once, a send together with its receive. A skip has one position in
    this walk at both ends: so two ranks launch their messages to each other in the same order, and
    all messages that one waits for are launched before. It is launched when it is computed, after
    the message to the next stage: launched later, 1F1B over 8 ranks takes up to 1.3 of its time.
    """
    posts: dict[int, dict[int, list[SkipMessage]]] = {rank: {} for rank in ranks}
    sent = {
        (action.computation_type.name, action.stage_index, action.microbatch_index)
        for actions in ranks.values()
        for action in actions
    }
    position = dict.fromkeys(ranks, 0)

    def next_of(rank: int) -> tuple[str, int, int]:
        """(name, stage, microbatch) of a rank's next action."""
        if position[rank] == len(ranks[rank]):
            return "", -1, -1
        action = ranks[rank][position[rank]]
        return action.computation_type.name, action.stage_index, action.microbatch_index

    walked = True
    while walked:
        walked = False
        for rank in ranks:
            name, stage, mb = next_of(rank)
            kind, _, way = name.partition("_")
            if kind in ("", "RECV"):  # a receive advances with its send
                continue
            if kind == "SEND":
                to = stage + (1 if way == "F" else -1)
                if next_of(place[to]) != (f"RECV_{way}", to, mb):
                    continue
                position[place[to]] += 1
            position[rank] += 1
            walked = True
            forward = way == "F" or name == "FORWARD"
            computes = name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT")
            follows = ("SEND_F" if forward else "SEND_B", stage, mb) in sent
            if kind != "SEND" and (not computes or follows):
                continue
            for (early, late), back in skips.items():
                source, to = (early, late) if forward else (late, early)
                if source == stage and place[source] != place[to] and (forward or back):
                    for end in (place[source], place[to]):
                        message = SkipMessage(forward, source, to, mb)
                        posts[end].setdefault(position[end], []).append(message)
    assert all(position[rank] == len(actions) for rank, actions in ranks.items()), (
        "never a deadlock"
    )
    return posts
