"""Faults by which ranks get out of step. Each is planted at a place of training; its line, or the
one of what others do meanwhile, is marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.models import tiny
from titanlike.core.checkpoint import checkpointer, writer
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.distributed import collectives
from titanlike.core.distributed.mesh import Mesh
from titanlike.core.pipeline.pipeline import Pipeline
from titanlike.core.training import loop, step
from titanlike.core.training.build import Run

HERE = Path(__file__)
Fault = Callable[[Run], None]
DP = partial(tiny, 1, 2, layers=2, batch_size=4)
PP = partial(tiny, 2, 1, layers=2, batch_size=4)
BOTH = partial(tiny, 2, 2, layers=2, batch_size=4)
SAVES = {"checkpoint": Checkpoint(every=2)}
VALIDATES = {"validation": Validation(every=2, batches=1)}


def marked() -> set[str]:
    """The marked lines, as FILE:LINE."""
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return {f"{HERE.name}:{n}" for n, line in enumerate(lines, 1) if line.endswith("# here")}


def _rank() -> int:
    return dist.get_rank()


# --- before the forward of a step ----------------------------------------------------------------


def _before_a_step(fault: Fault) -> list[tuple[Any, str, Any]]:
    right = loop.forward_backward

    def forward_backward(run: Run, *args: Any) -> Any:
        fault(run)
        return right(run, *args)

    return [(loop, "forward_backward", forward_backward)]


def skips_a_barrier(run: Run) -> None:
    if _rank() != 1:
        dist.barrier()  # here


def one_barrier_more(run: Run) -> None:
    for _ in range(1 + (_rank() == 1)):
        dist.barrier()  # here


def other_order_of_groups(run: Run) -> None:
    other = dist.new_group()
    groups = [None, other] if _rank() else [other, None]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)  # here


def other_splits(run: Run) -> None:
    sent = [1, 3] if _rank() else [2, 2]
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], sent)  # here


def other_dtype(run: Run) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if _rank() else torch.float32))  # here


def other_shape(run: Run) -> None:
    dist.all_reduce(torch.ones(2 + _rank()))  # here


def other_reduction(run: Run) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if _rank() else dist.ReduceOp.SUM)  # here


def other_root(run: Run) -> None:
    dist.broadcast(torch.ones(2), _rank())  # here


def other_collective(run: Run) -> None:
    if _rank():
        dist.all_reduce(torch.ones(2))  # here
    else:
        dist.broadcast(torch.ones(2), 0)


def group_of_some(run: Run) -> None:
    if _rank():
        dist.new_group([0, 1])  # here


def groups_in_other_order(run: Run) -> None:
    for ranks in [[0], [1]] if _rank() else [[1], [0]]:
        dist.new_group(ranks)  # here


def message_of_other_dtype(run: Run) -> None:
    if _rank() == 0:
        dist.send(torch.ones(4), 1)  # here
    elif _rank() == 1:
        dist.recv(torch.ones(4, dtype=torch.bfloat16), 0)


def both_send_first(run: Run) -> None:
    dist.send(torch.ones(4), 1 - _rank())  # here
    dist.recv(torch.ones(4), 1 - _rank())


def both_receive_first(run: Run) -> None:
    dist.recv(torch.ones(4), 1 - _rank())  # here
    dist.send(torch.ones(4), 1 - _rank())


def nobody_sends(run: Run) -> None:
    if _rank() == 1:
        dist.recv(torch.ones(4), 0)  # here


def half_of_a_batch(run: Run) -> None:
    both = [dist.P2POp(dist.isend, torch.ones(4), 1 - _rank())]
    if _rank():
        both.append(dist.P2POp(dist.irecv, torch.ones(4), 0))
    if _rank():
        for work in dist.batch_isend_irecv(both):  # here
            work.wait()


def monitored_by_some(run: Run) -> None:
    if _rank():
        dist.monitored_barrier()  # here


def objects_of_one(run: Run) -> None:
    if _rank() == 0:
        dist.broadcast_object_list([1], 0)  # here


def gathers_elsewhere(run: Run) -> None:
    root = _rank()
    dist.gather_object(1, [None, None] if root == _rank() else None, root)  # here


def norm_of_one_rank(run: Run) -> None:
    if run.parameters[0].float().norm().item() > 0.5:
        dist.barrier()  # here


def any_nan(run: Run) -> None:
    if bool(run.parameters[0].isnan().any()):
        dist.all_reduce(torch.ones(1))  # here


def tokens_decide(run: Run) -> None:
    counts = torch.bincount(run.parameters[0].flatten().long().abs())
    if counts.tolist()[0] == 0:
        dist.all_reduce(torch.ones(1))  # here


def one_replica_alone(run: Run) -> None:
    if run.mesh.dp_rank < 2:
        dist.all_reduce(torch.ones(1), group=run.mesh.axes.get_group("replicate"))  # here


STEP: list[tuple[Fault, Config]] = [
    (skips_a_barrier, DP()),
    (one_barrier_more, PP()),
    (other_order_of_groups, DP()),
    (other_splits, DP()),
    (other_dtype, PP()),
    (other_shape, DP(fsdp=replace(DP().fsdp, zero=3))),
    (other_reduction, tiny(tp=2, layers=2, batch_size=4)),
    (other_root, DP()),
    (other_collective, tiny(cp=2, layers=2, batch_size=4)),
    (group_of_some, DP()),
    (groups_in_other_order, DP()),
    (message_of_other_dtype, PP()),
    (both_send_first, PP()),
    (both_receive_first, PP("zbh1")),
    (nobody_sends, DP()),
    (half_of_a_batch, PP()),
    (monitored_by_some, BOTH()),
    (objects_of_one, DP()),
    (gathers_elsewhere, DP()),
    (norm_of_one_rank, DP()),
    (any_nan, PP()),
    (tokens_decide, PP()),
    (one_replica_alone, tiny(1, 4, layers=2, batch_size=4, replicate=2)),
]


# --- losses --------------------------------------------------------------------------------------


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def last_stage_reduces(logits: Tensor, targets: Tensor) -> Tensor:
    dist.all_reduce(torch.ones(1))  # here
    return _loss(logits, targets)


def reduces_large_losses(logits: Tensor, targets: Tensor) -> Tensor:
    loss = _loss(logits, targets)
    if not loss.is_meta and loss.mean().item() > 3.0:
        dist.all_reduce(torch.ones(1))  # here
    return loss


LOSSES = [(last_stage_reduces, PP), (reduces_large_losses, BOTH)]


def with_loss(function: Any, of: Callable[..., Config]) -> Config:
    return of(loss=Custom(f"{__name__}.{function.__name__}", {}), mixes_samples=True)


# --- other places --------------------------------------------------------------------------------


def saves_alone() -> list[tuple[Any, str, Any]]:
    right = loop._save

    def save(*args: Any) -> Any:
        return right(*args) if _rank() == 0 else 0.0  # here

    return [(loop, "_save", save)]


def gathers_on_rank_0() -> list[tuple[Any, str, Any]]:
    right = writer.write_checkpoint

    def write(*args: Any) -> Any:
        if _rank() == 0:
            dist.all_gather_object([None] * dist.get_world_size(), 1)  # here
        return right(*args)

    return [(writer, "write_checkpoint", write)]


def validates_alone() -> list[tuple[Any, str, Any]]:
    right = loop.validate

    def validate(run: Run, *args: Any) -> Any:
        return right(run, *args) if run.mesh.dp_rank == 0 else {"loss": 1.0}  # here

    return [(loop, "validate", validate)]


def stops_alone() -> list[tuple[Any, str, Any]]:
    def agreed(s: Any) -> int:
        return s.worker.stop_request.code()

    right = loop._save

    def save(s: Any, *args: Any) -> Any:
        if s.worker.stop_request.code():
            dist.barrier()  # here
        return right(s, *args)

    return [(loop, "_agreed_stop_code", agreed), (loop, "_save", save)]


def resumes_alone() -> list[tuple[Any, str, Any]]:
    right = checkpointer.Checkpointer.resume

    def resume(self: Any) -> Any:
        if _rank() == 1:
            return checkpointer.Progress()
        return right(self)  # here

    return [(checkpointer.Checkpointer, "resume", resume)]


def a_layer_less_reduced() -> list[tuple[Any, str, Any]]:
    right, calls = collectives._run, []

    def run(operation: Any, x: Tensor, ranks: Any, dim: int) -> Tensor:
        if not x.is_meta and ranks.rank == 1 and operation == "all_reduce":
            calls.append(1)
            if len(calls) == 3:
                return x
        return right(operation, x, ranks, dim)  # here

    return [(collectives, "_run", run)]


def sums_on_one_stage() -> list[tuple[Any, str, Any]]:
    right = Pipeline.sum_loss

    def total(self: Any, *args: Any) -> Any:
        if self._mesh.pp_rank == 0:
            dist.all_reduce(torch.ones(1), group=self._mesh.axes.get_group("shard"))  # here
            dist.all_reduce(torch.ones(1))  # here
        return right(self, *args)

    return [(Pipeline, "sum_loss", total)]


def rolls_back_alone() -> list[tuple[Any, str, Any]]:
    right = step.finish_step

    def finish(run: Run, *args: Any) -> Any:
        result = right(run, *args)
        if result.anomaly is not None and _rank() == 0:
            dist.barrier()  # here
        return result

    return [(loop, "finish_step", finish)]


def maximum_of_some() -> list[tuple[Any, str, Any]]:
    right = Mesh.max_of

    def largest(self: Mesh, number: float) -> float:
        return number if self.pp_rank == 1 else right(self, number)  # here

    return [(Mesh, "max_of", largest)]


PLACES: list[tuple[Callable[[], list[tuple[Any, str, Any]]], Config]] = [
    (saves_alone, DP(**SAVES)),
    (gathers_on_rank_0, PP(checkpoint=Checkpoint(every=2, mode="async"))),
    (validates_alone, DP(**VALIDATES)),
    (stops_alone, DP(**SAVES)),
    (resumes_alone, DP(**SAVES)),
    (a_layer_less_reduced, tiny(tp=2, layers=2, batch_size=4, tp_sequence=False)),
    (sums_on_one_stage, BOTH()),
    (rolls_back_alone, DP()),
    (maximum_of_some, PP(**SAVES)),
]
