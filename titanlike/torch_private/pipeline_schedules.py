"""The orders of computing that torch's schedule classes generate."""

from __future__ import annotations

import contextlib
import io

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops


def generated_order(
    class_name: str, pp: int, microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """The compute actions that torch's own schedule class generates, without running anything.

    class_name: as for torch's `get_schedule_class`, such as "ZBVZeroBubble". Returns
    `(kind, stage, microbatch)` of each pipeline rank in execution order, kind one of F, B, I and W.
    An overlapped pair becomes its forward and its backward: torch's runtime executes it like that.
    Raises ValueError or AssertionError for sizes that the class refuses; for others the order may
    still be wrong: check it.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # torch prints while it inserts sends
        ranks = get_schedule_ops(class_name, pp, microbatches, stages_per_rank)
    return [
        [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in rank
            if action is not None  # a bubble
            for part in action.sub_actions or (action,)
        ]
        for rank in ranks
    ]
