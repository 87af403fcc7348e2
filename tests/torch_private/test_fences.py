"""The workarounds for torch: each test fails on the torch that no longer needs one of them."""

from __future__ import annotations

import copy
import functools
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from support.models import tiny
from support.world import run_world
from titanlike.config.schema import Config, Fsdp
from titanlike.launch.worker import Worker
from titanlike.proof.verification import verify
from titanlike.torch_private import distributed_checkpoint, foreach, pipeline_stage
from titanlike.torch_private.base_classes import TorchDispatchMode
from titanlike.torch_private.compiler import as_if_compiling
from titanlike.torch_private.fsdp import reduce_missing_gradients
from titanlike.torch_private.operators import in_parts
from titanlike.torch_private.pipeline_runtime import FIELD
from titanlike.training import checks


def verify_without_checks(config: Config, worker: Worker) -> dict:
    """`verify` without the refusal of ZeRO 3 under a split backward."""
    checks.sharding_problems = lambda config, order: []
    pipeline_stage._ShardingStage.backward_maybe_with_nosync = (
        PipelineStage.backward_maybe_with_nosync
    )
    return verify(config, worker)


def test_the_place_of_a_piece_is_still_private() -> None:
    """If torch has a public name for it, `written_piece` can use that."""
    from torch.distributed.checkpoint import filesystem

    written = distributed_checkpoint.written_piece(MetadataIndex("a"), "file", 4, 8)
    assert type(written.storage_data).__name__ == "_StorageInfo"
    assert not hasattr(filesystem, "StorageInfo")


@pytest.mark.slow
def test_a_split_backward_still_loses_gradients_when_blocks_are_resharded(tmp_path: Path) -> None:
    """If this passes in torch, `fsdp.zero=3` may be allowed under zero-bubble schedules."""
    config = tiny(2, 2, "zbvzerobubble", fsdp=Fsdp(3))
    results = run_world(verify_without_checks, config, tmp_path, timeout=40)
    assert {result["exit_code"] for result in results} == {1}


def built_in_eval(config: Config, worker: Worker) -> bool:
    """Whether torch's own eval() leaves FSDP's gradients alone."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    batch = next(batches(open_data(config).train, config, dp_rank=mesh.dp_rank))
    batch = to_device(batch, mesh, config)
    run.pipeline.train(batch)
    before = [p.grad.to_local().clone() for p in run.parameters]
    runtime = run.pipeline._runtime(batch)
    first = (batch["inputs"],) if mesh.pp_rank == 0 else ()
    kwargs = {FIELD + name: batch[name] for name in runtime._fields}
    if mesh.pp_rank == config.pp - 1:
        kwargs |= {"target": batch["targets"], "losses": []}
    with torch.no_grad():
        runtime.eval(*first, **kwargs)
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
    distributed_checkpoint.read_newer_checkpoints()
    distributed_checkpoint.read_newer_checkpoints()  # may be called again
    blank.__setstate__(newer)
    assert blank.dtype == torch.float32


@pytest.mark.skipif(
    hasattr(torch.distributed.checkpoint, "CheckpointableTensor"),
    reason="this torch has a public way",
)
def test_blocks_of_a_tensor_have_no_public_way_in_all_versions() -> None:
    """2.15 asks a tensor itself where it is; before, it is saved as if it were the whole."""

    class Located(Tensor):
        global_shape = torch.Size((6, 2))
        global_offsets = ((1, 0), (4, 0))
        local_offsets = ((0, 0), (1, 0))
        local_sizes = ((1, 2), (1, 2))

    rows = torch.ones(2, 2)
    held = {torch.Size((1, 0)): rows[:1], torch.Size((4, 0)): rows[1:]}
    blocks = distributed_checkpoint.Blocks(rows, torch.Size((6, 2)), held)
    for tensor, size, count in ((rows.as_subclass(Located), (2, 2), 1), (blocks, (6, 2), 2)):
        items = create_default_local_save_plan({"a": tensor}, True).items
        assert [item.tensor_data.size for item in items] == [size] * count


def observed(config: Config, worker: Worker) -> list[tuple[list, list]]:
    """Of a step, an evaluation and a step: the actions called back with, and those of the order."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    actions: list = []
    run.pipeline.on_action(lambda action: pytest.fail("this callback was replaced"))
    run.pipeline.on_action(actions.append)
    batch = to_device(next(batches(open_data(config).train, config, dp_rank=0)), mesh, config)
    runtime = run.pipeline._runtime(batch)
    seen = []
    for call in ("train", "evaluate", "train"):
        actions.clear()
        getattr(run.pipeline, call)(batch)
        order = runtime._train if call == "train" else runtime._forward
        copy.deepcopy(order)  # as torch does to print it beside an error: no action begins
        seen.append(([*map(str, actions)], [*map(str, order[mesh.pp_rank][:]), "None"]))
    return seen


def test_the_runtime_takes_its_actions_one_by_one_from_a_list(tmp_path: Path) -> None:
    """The watchdog learns from it which action a rank is in: each in its turn, then the end."""
    for calls in run_world(observed, tiny(2, 1, "zbvzerobubble"), tmp_path, timeout=40):
        for actions, order in calls:
            assert actions == order and len(order) > 16


def groups_that_outlive_their_job(config: Config, worker: Worker) -> bool:
    """Whether a mesh of a job that has ended still has its process groups."""
    import gc

    from torch.distributed.device_mesh import DeviceMesh

    verify(config, worker)
    gc.collect()
    meshes = [each for each in gc.get_objects() if type(each) is DeviceMesh]
    return any(getattr(mesh, "_pg_registry", {}) for mesh in meshes)


@pytest.mark.slow
def test_meshes_still_keep_the_groups_of_a_job_that_has_ended(tmp_path: Path) -> None:
    """If not, `forget_groups_of_meshes` may go."""
    kept = run_world(groups_that_outlive_their_job, tiny(1, 2, "1f1b"), tmp_path, timeout=60)
    assert all(kept)


def on_one_rank(_: Config, worker: Worker, test: Callable[[], Any]) -> Any:
    """The result of a test that needs a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return test()


def torch_stage() -> PipelineStage:
    """The first of two stages that are both on this rank."""
    x = torch.empty(2, 4, device="meta")
    stage = PipelineStage(
        nn.Linear(4, 4), 0, 2, torch.device("cpu"), input_args=(x,), output_args=(x,)
    )
    stage.stage_index_to_group_rank = {0: 0, 1: 0}
    return stage


def validates_messages() -> bool | None:
    return getattr(torch_stage(), "_runtime_validate", None)


def test_torch_does_not_validate_messages_by_default(tmp_path: Path) -> None:
    """If it does, `OrderRuntime` need not switch it on."""
    validates = run_world(on_one_rank, tiny(), tmp_path, validates_messages)
    if validates == [None]:
        pytest.skip("2.11 always does, and has no switch")
    assert validates == [False]


def pipeline_and_batch(config: Config, worker: Worker) -> tuple[Any, Any]:
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    stream = batches(open_data(config).train, config, dp_rank=0)
    return run.pipeline, to_device(next(stream), mesh, config)


def validated(config: Config, worker: Worker) -> list[bool]:
    """Whether messages are validated in a step, an evaluation, a step, an evaluation."""
    pipeline, batch = pipeline_and_batch(config, worker)
    seen = []
    for call in (pipeline.train, pipeline.evaluate) * 2:
        call(batch)
        seen.append(pipeline._runtime(batch)._stages[0]._runtime_validate)
    return seen


def test_messages_are_validated_in_the_first_step_alone(tmp_path: Path) -> None:
    results = run_world(validated, tiny(2, 1, layers=2), tmp_path, timeout=40)
    assert results == [[True, True, False, False]] * 2


def error_of_another_dtype(config: Config, worker: Worker) -> str:
    """The error of a first step in which stages send another dtype than they have announced."""
    pipeline, batch = pipeline_and_batch(config, worker)
    forward = pipeline_stage._Stage.forward_maybe_with_nosync
    pipeline_stage._Stage.forward_maybe_with_nosync = lambda *a, **k: forward(*a, **k).double()
    try:
        pipeline.train(batch)
    except RuntimeError as error:
        return f"{error}; {error.__cause__}"
    return ""


def test_a_message_of_another_dtype_is_refused_in_the_first_step(tmp_path: Path) -> None:
    results = run_world(error_of_another_dtype, tiny(2, 1, layers=2), tmp_path, timeout=40)
    assert "dtype" in results[0] and "float64" in results[0], results


def batches_of_one(config: Config, worker: Worker) -> int:
    """How often torch's runtime starts a batch for one message."""
    from torch.distributed.pipelining import schedules

    dist.init_process_group("gloo", store=worker.store, rank=worker.rank, world_size=2)
    batched = []
    dist.batch_isend_irecv = lambda ops: batched.extend(ops) or []
    kind = dist.irecv if worker.rank else dist.isend
    for work in schedules._batch_p2p([dist.P2POp(kind, torch.ones(1), 1 - worker.rank)]):
        work.wait()
    return len(batched)


@pytest.mark.skipif(
    hasattr(PipelineStage, "_setup_forward_recv_info"), reason="2.13 and later do not"
)
def test_torch_batches_single_messages(tmp_path: Path) -> None:
    """If it does not, torch's own `_batch_p2p` may start messages in place of `_post`."""
    assert run_world(batches_of_one, tiny(2), tmp_path) == [1, 1]


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy"), reason="this torch has one NCCL"
)
def test_nccl_has_one_communicator_for_all_messages() -> None:
    """If "nccl" is lazy again, `pipeline_backend` may go."""
    from titanlike.torch_private.process_groups import pipeline_backend

    backend = pipeline_backend("cpu:gloo,cuda:nccl")
    devices = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    assert devices == {"cpu": "gloo", "cuda": "nccl-lazy"}
    assert pipeline_backend("gloo") is None
    dist.Backend._ensure_backend_registered("nccl")
    assert dist.Backend._plugins["NCCL"].creator_fn.__name__ == "_create_nccl2_process_group"


def peers_of_first_messages() -> list[int]:
    return [op.peer for op in torch_stage()._get_init_p2p_neighbors_ops()]


@pytest.mark.skipif(
    not hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"), reason="this torch sends none"
)
def test_torch_sends_first_messages_to_the_rank_itself(tmp_path: Path) -> None:
    """If it does not, `make_stage` need not filter them."""
    assert 0 in run_world(on_one_rank, tiny(), tmp_path, peers_of_first_messages)[0]


def gradients_of_two_inputs() -> tuple[torch.Tensor | None, ...]:
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    kwargs = {"stage_output": (2 * used,), "output_grads": (torch.ones(1),)}
    kwargs["input_values"] = [used, unused]
    return torch_stage().backward_maybe_with_nosync("full", kwargs)[0]


def test_torchs_stage_expects_a_gradient_of_every_input(tmp_path: Path) -> None:
    """If it gives zeros itself, `_Stage` need not."""
    (gradients,) = run_world(on_one_rank, tiny(), tmp_path, gradients_of_two_inputs)
    assert gradients[0] is not None and gradients[1] is None


def timeout_of_mesh(_: Config, worker: Worker) -> timedelta:
    limit = timedelta(seconds=77)
    dist.init_process_group(
        "gloo", store=worker.store, rank=worker.rank, world_size=2, timeout=limit
    )
    group = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")).get_group("a")
    return group._get_backend(torch.device("cpu")).options._timeout


def test_a_device_mesh_ignores_the_timeout_of_the_process_group(tmp_path: Path) -> None:
    """If it does not, `set_timeout` may go."""
    timeouts = run_world(timeout_of_mesh, tiny(2), tmp_path)
    assert min(timeouts) >= timedelta(minutes=10)


def gradient_syncs(config: Config, worker: Worker) -> set[bool]:
    """With which values torch's stage calls `set_requires_gradient_sync` in backwards."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    pipeline_stage._ShardingStage.backward_maybe_with_nosync = (
        PipelineStage.backward_maybe_with_nosync
    )
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    batch = next(batches(open_data(config).train, config, dp_rank=mesh.dp_rank))
    seen = set()
    for stage in run.stages:
        stage.set_requires_gradient_sync = lambda on, recurse=True: seen.add(on)
    run.pipeline.train(to_device(batch, mesh, config))
    return seen


class OneForEachRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.choices[dist.get_rank()](x)


def gradient_of_rank_0(_: Config, worker: Worker, fenced: bool) -> float:
    group = {"rank": worker.rank, "world_size": 2, "store": worker.store}
    dist.init_process_group("gloo", **group)
    model = fully_shard(OneForEachRank(), mesh=init_device_mesh("cpu", (2,)))
    if fenced:
        reduce_missing_gradients(model, set(), zero=3)
    model.set_is_last_backward(not fenced)  # as during a step of `_ShardingStage`
    model(torch.full((1, 2), worker.rank + 1.0)).sum().backward()
    model.set_is_last_backward(True)
    gradient = model.choices[0].weight.grad
    return math.nan if gradient is None else gradient.to_local()[0, 0].item()


def test_fsdp_mixes_up_gradients_that_one_rank_alone_has(tmp_path: Path) -> None:
    config = tiny(dp=2)
    # the mean of 1 on rank 0 and 0 on rank 1; the gradient of the other parameter there is 2
    assert run_world(gradient_of_rank_0, config, tmp_path / "torch", False)[0] == 1.5
    assert run_world(gradient_of_rank_0, config, tmp_path / "fenced", True) == [0.5, 0.5]


def muon_on_shards(_: Config, worker: Worker) -> tuple[float, int]:
    """(how far torch.optim.Muon's update of shards is from that of the whole matrix, in norms;
    messages)"""
    group = {"rank": worker.rank, "world_size": 2, "store": worker.store}
    dist.init_process_group("gloo", **group)
    torch.manual_seed(0)
    whole = nn.Linear(24, 40, bias=False)
    model = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (2,)))
    before = whole.weight.detach().clone()
    gradient = torch.randn(40, 8) @ torch.randn(8, 24)  # as of a batch of eight
    whole.weight.grad = gradient
    model.weight.grad = torch.zeros_like(model.weight)
    model.weight.grad.to_local().copy_(gradient.chunk(2)[worker.rank])
    torch.optim.Muon([whole.weight], lr=0.1, weight_decay=0.0).step()
    with CommDebugMode() as messages:
        torch.optim.Muon([model.weight], lr=0.1, weight_decay=0.0).step()
    right = whole.weight.detach().chunk(2)[worker.rank]
    difference = (model.weight.to_local() - right).norm() / (whole.weight - before).norm()
    return difference.item(), messages.get_total_counts()


def test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards(tmp_path: Path) -> None:
    """If it does not, `titanlike/optim/muon.py` may be built on it."""
    for difference, messages in run_world(muon_on_shards, tiny(dp=2), tmp_path):
        assert difference > 0.05 and messages > 10


@pytest.mark.slow
def test_torchs_stage_accumulates_unsharded_gradients(tmp_path: Path) -> None:
    """If it reduces in each backward, `_ShardingStage` may go."""
    config = tiny(2, 2, "1f1b", fsdp=Fsdp(2))
    assert all(False in seen for seen in run_world(gradient_syncs, config, tmp_path))


def gathers_at_once(config: Config, worker: Worker, as_torch_does: bool) -> int:
    """How many units of a stage are being gathered at once, at the most."""
    from titanlike.data.loader import batches, open_data
    from titanlike.parallel.mesh import open_mesh
    from titanlike.torch_private.pipeline_runtime import OrderRuntime
    from titanlike.training.build import build
    from titanlike.training.feed import to_device

    if as_torch_does:
        OrderRuntime._gather = lambda self, index: None
        register = OrderRuntime.register_custom_function
        OrderRuntime.register_custom_function = lambda self, kind, function: (
            None if kind.name == "UNSHARD" else register(self, kind, function)
        )
    mesh = open_mesh(config, worker)
    run = build(config, mesh)
    begun = [0]
    for part in (part for stage in run.stages for part in stage.modules()):
        if isinstance(part, FSDPModule):
            part.unshard = functools.partial(_count_begun, begun, part.unshard)
    batch = next(batches(open_data(config).train, config, dp_rank=mesh.dp_rank))
    run.pipeline.train(to_device(batch, mesh, config))
    return begun[0]


def _count_begun(begun: list[int], unshard: Any, async_op: bool = False) -> Any:
    begun[0] += async_op
    return unshard(async_op)


@pytest.mark.slow
def test_torch_gathers_all_units_of_a_stage_at_once(tmp_path: Path) -> None:
    """If it does not, `OrderRuntime._gather` may go."""
    config = tiny(2, 2, "1f1b", fsdp=Fsdp(1))
    assert all(n > 4 for n in run_world(gathers_at_once, config, tmp_path / "torch", True))
    assert run_world(gathers_at_once, config, tmp_path / "fenced", False) == [0] * 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_a_function_mode_does_not_see_a_custom_function() -> None:
    """If it does, `intercept_custom_functions` may go."""
    with Calls() as calls:
        Doubled.apply(torch.ones(2, requires_grad=True))
    names = [getattr(function, "__name__", "") for function in calls.seen]
    assert names and "apply" not in names


def test_a_reentrant_checkpoint_runs_without_autograd() -> None:
    """If it does not, `intercept_checkpoints` is needed for the other form alone."""
    enabled = []

    def function(x: Tensor) -> Tensor:
        enabled.append(torch.is_grad_enabled())
        return x * 2

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=True)
    assert enabled == [False]


def test_a_forward_can_be_told_that_it_is_compiled() -> None:
    """If torch ever offers a switch, `as_if_compiling` may go."""
    with as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_the_allocator_has_no_public_settings() -> None:
    """If it has, `use_expandable_segments` may use them."""
    public = [name for name in dir(torch.accelerator) if not name.startswith("_")]
    assert not [name for name in public if "setting" in name or "expandable" in name]
    # as a rank on a GPU does, in a process that has imported torch
    code = (
        "import torch; from titanlike.torch_private.allocator import use_expandable_segments; "
        "use_expandable_segments(); "
        "read = getattr(torch._C, '_accelerator_getAllocatorSettings', None); "
        "print(read() if read else 'expandable_segments:True')"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True).strip() == "expandable_segments:True"


def test_the_history_of_memory_has_no_public_name() -> None:
    """Once it has, torch_private/memory_history.py can go."""
    memory = torch.cuda.memory
    assert hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")
    assert not hasattr(memory, "record_memory_history") and not hasattr(memory, "dump_snapshot")


def test_torchs_norm_of_gradients_does_not_say_of_which() -> None:
    """If it does, `foreach.norms` may go."""
    gradients = [torch.ones(4), torch.tensor([math.nan])]
    total = torch.nn.utils.get_total_norm(gradients)
    assert total.shape == () and total.isnan()
    assert foreach.norms(gradients)[0] == 2


def test_a_dispatch_mode_in_inference_mode_sees_whole_operators() -> None:
    """If it sees their parts, or there is a public way to have them, `in_parts` can go."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(function.name())
            with self:
                result = in_parts(function, args, kwargs or {})
            return function(*args, **(kwargs or {})) if result is NotImplemented else result

    layer = nn.Linear(4, 4, device="meta")
    with torch.inference_mode(), Mode():
        layer(torch.empty(2, 3, 4, device="meta"))
    assert seen[:2] == ["aten::empty.memory_format", "aten::linear"] and "aten::addmm" in seen
