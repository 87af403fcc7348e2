"""The fences around torch: each test fails on the torch that no longer needs one of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.pipelining import PipelineStage

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config, Fsdp
from titanlike.launch.worker import Worker
from titanlike.proof.verification import verify
from titanlike.torch_private import checkpoints
from titanlike.torch_private import pipelining as torch_private
from titanlike.training import draft


def verify_unfenced(config: Config, worker: Worker) -> dict:
    """`verify` without the refusal of ZeRO 3 under a split backward."""
    draft._sharding_problems = lambda config, order: []
    torch_private._ShardingStage.backward_maybe_with_nosync = (
        torch_private.PipelineStage.backward_maybe_with_nosync
    )
    return verify(config, worker)


def test_a_split_backward_still_loses_gradients_when_blocks_are_resharded(tmp_path: Path) -> None:
    """If this passes in torch, `fsdp.zero=3` may be allowed under zero-bubble schedules."""
    config = tiny(2, 2, "zbvzerobubble", fsdp=Fsdp(3))
    results = run_world(verify_unfenced, config, tmp_path, timeout=40)
    assert {result["exit_code"] for result in results} == {1}


def built_in_eval(config: Config, worker: Worker) -> bool:
    """Whether torch's own eval() leaves FSDP's gradients alone."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.step import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    batch = next(batches(open_data(config).train, config, dp_rank=mesh.dp_rank))
    batch = to_device(batch, mesh, config)
    run.pipeline.train(batch)
    before = [p.grad.to_local().clone() for p in run.parameters]
    runtime = run.pipeline._runtime(batch)
    first = (batch["inputs"],) if mesh.pp_rank == 0 else ()
    told = {name: batch[name] for name in runtime._fields}
    if mesh.pp_rank == config.pp - 1:
        told |= {"target": batch["targets"], "losses": []}
    with torch.no_grad():
        runtime.eval(*first, **told)
    after = [p.grad for p in run.parameters]
    return all(
        b is not None and torch.equal(a, b.to_local()) for a, b in zip(before, after, strict=True)
    )


@pytest.mark.skipif(
    not hasattr(PipelineStage, "_post_metadata_inference_cleanup"), reason="2.11 does not do this"
)
def test_torchs_own_eval_still_touches_gradients(tmp_path: Path) -> None:
    """If this passes in torch, `OrderRuntime.evaluate` may use it."""
    assert not all(run_world(built_in_eval, tiny(2, 2), tmp_path, timeout=40))


@pytest.mark.skipif(
    "strides" in TensorProperties.__dataclass_fields__, reason="this torch writes that format"
)
def test_a_newer_checkpoint_still_needs_help_to_be_read() -> None:
    """2.15 pickles six fields. Without the fence 2.11 and 2.13 cannot unpack them."""
    state = TensorProperties(dtype=torch.float32).__getstate__()
    newer = (*state, (1,))
    blank = TensorProperties.__new__(TensorProperties)
    if not hasattr(TensorProperties.__setstate__, "cut"):
        with pytest.raises(ValueError, match="too many values"):
            blank.__setstate__(newer)
    checkpoints.read_newer_checkpoints()
    checkpoints.read_newer_checkpoints()  # may be called again
    blank.__setstate__(newer)
    assert blank.dtype == torch.float32


def watched(config: Config, worker: Worker) -> list[tuple[list, list]]:
    """Of a step, an evaluation and a step: what `watch` told, and what was to be done."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.step import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    told: list = []
    run.pipeline.watch(lambda action: pytest.fail("the first watcher was replaced"))
    run.pipeline.watch(told.append)
    batch = to_device(next(batches(open_data(config).train, config, dp_rank=0)), mesh, config)
    runtime = run.pipeline._runtime(batch)
    seen = []
    for call in ("train", "evaluate", "train"):
        told.clear()
        getattr(run.pipeline, call)(batch)
        order = runtime._train if call == "train" else runtime._forward
        copy.deepcopy(order)  # as torch does to print it beside an error: no action is taken
        seen.append(([str(action) for action in told], [*map(str, order[mesh.pp_rank][:]), "None"]))
    return seen


def test_the_runtime_takes_its_actions_one_by_one_from_a_list(tmp_path: Path) -> None:
    """The watchdog sees by it where a rank is: each action in its turn, then the end."""
    for calls in run_world(watched, tiny(2, 1, "zbvzerobubble"), tmp_path, timeout=40):
        for told, order in calls:
            assert told == order and len(order) > 16


def groups_that_outlive_their_job(config: Config, worker: Worker) -> bool:
    """Whether a mesh of a job that has ended still has its process groups."""
    import gc

    from torch.distributed.device_mesh import DeviceMesh

    verify(config, worker)
    gc.collect()
    meshes = [each for each in gc.get_objects() if type(each) is DeviceMesh]
    return any(getattr(mesh, "_pg_registry", {}) for mesh in meshes)


def test_meshes_still_keep_the_groups_of_a_job_that_has_ended(tmp_path: Path) -> None:
    """If not, `forget_groups_of_meshes` may go."""
    kept = run_world(groups_that_outlive_their_job, tiny(1, 2, "1f1b"), tmp_path, timeout=60)
    assert all(kept)
