"""The workarounds for torch: each test fails on the torch that no longer needs one of them.

What needs ranks runs in three worlds, whatever the number of tests.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from support.models import tiny
from support.opened import Opened, opened
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.schema import Config
from titanlike.core.distributed.mesh import close_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private import pipeline_stage, tensors
from titanlike.core.torch_private.accelerator import use_expandable_segments
from titanlike.core.torch_private.autograd import running_node, sequence_number
from titanlike.core.torch_private.compiler import as_if_compiling, is_graph_break
from titanlike.core.torch_private.fsdp import gather_with, reduce_missing_gradients
from titanlike.core.torch_private.operators import TorchDispatchMode, decomposed, scaled_grouped_mm
from titanlike.core.torch_private.pipeline_runtime import OrderRuntime, _Kind
from titanlike.core.torch_private.process_groups import forget_groups_of_meshes
from titanlike.core.training import checks
from titanlike.proof.verify import verify

Check = Callable[[Opened], None]
CHECKS: dict[str, tuple[Config, Check]] = {}
Found = dict[str, list[Any]]  # what a function returned on each rank


# --- jobs of two ranks, one after the other in one world
# -------------------------------------------


def job_of(config: Config) -> Callable[[Check], Callable[..., None]]:
    """Make a test of a function of a job, which asserts on each rank."""

    def register(check: Check) -> Callable[..., None]:
        name = check.__name__
        CHECKS[name] = config, check

        def test(errors: Found) -> None:
            assert errors[name] == ["", ""]

        test.__name__, test.__doc__ = name, check.__doc__
        return test

    return register


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of each check, on both ranks: "" where it holds."""
    return of_ranks(run_world(all_checks, tiny(pp=2), tmp_path_factory.mktemp("jobs"), timeout=120))


def of_ranks(ranks: list[dict[str, Any]]) -> Found:
    return {name: [found[name] for found in ranks] for name in ranks[0]}


def all_checks(config: Config, worker: Worker) -> dict[str, str]:
    found = {}
    for name, (of_job, check) in CHECKS.items():
        of_job = replace(of_job, run_dir=config.run_dir)
        try:
            with opened(of_job, worker, again=name) as job:
                check(job)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            if dist.is_initialized():  # for the next one
                close_mesh()
    return found


SHARDED = {"layers": 4, "pp": 1, "dp": 2}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(PipelineStage, "_post_metadata_inference_cleanup"), reason="2.11 does not do this"
)
@job_of(tiny(**SHARDED))
def test_torchs_own_eval_still_touches_gradients(job: Opened) -> None:
    """If this passes in torch, `OrderRuntime.evaluate` may use it."""
    run, batch = job.run, job.batch()
    run.pipeline.train(batch)
    before = [p.grad.to_local().clone() for p in run.parameters]
    runtime = run.pipeline._executor(run.pipeline._planned, batch)
    kwargs = runtime._arguments(batch)
    with torch.no_grad():
        runtime.eval(batch["inputs"], **kwargs, target=batch["targets"], losses=[])
    pairs = zip(before, (p.grad for p in run.parameters), strict=True)
    assert not all(now is not None and torch.equal(was, now.to_local()) for was, now in pairs)


@job_of(tiny(**SHARDED))
def test_hooks_of_fsdp_inside_of_a_block_break_its_graph(job: Opened) -> None:
    """Fence: `fsdp.gather_with`."""
    for moved in (False, True):
        torch.manual_seed(0)
        block, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
        block(x).sum().backward()
        right = [parameter.grad for parameter in block.parameters()]
        block.zero_grad()
        part = fully_shard(block[1], mesh=job.mesh.axes[("shard",)])
        if moved:
            gather_with(part, block)
        fully_shard(block, mesh=job.mesh.axes[("shard",)])
        block.forward = torch.compile(block.forward, fullgraph=True, backend="eager")
        if not moved:
            with pytest.raises(Exception) as caught:
                block(x)
            assert is_graph_break(caught.value)
            continue
        block(x).sum().backward()  # reduced: equal on both ranks, so is their mean
        for parameter, gradient in zip(block.parameters(), right, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@job_of(tiny(pp=2, schedule="zbvzerobubble", layers=4))
def test_the_runtime_takes_its_actions_one_by_one_from_a_list(job: Opened) -> None:
    """The watchdog learns from it which action a rank is in: each in its turn, then the end."""
    run, batch, actions = job.run, job.batch(), []
    run.pipeline.on_action = lambda action: actions.append((str(action), len(ran)))
    runtime, ran = run.pipeline._executor(run.pipeline._planned, batch), []
    functions = runtime._comp_type_to_function_map
    for kind in (_Kind.SEND_F, _Kind.RECV_F):
        if kind in functions:
            functions[kind] = functools.partial(_noting, ran, functions[kind])
    for call in ("train", "evaluate", "train"):
        actions.clear()
        ran.clear()
        getattr(run.pipeline, call)(batch)
        order = runtime._train if call == "train" else runtime._forward
        copy.deepcopy(order)  # as torch does to print it beside an error: no action begins
        mine = [*map(str, order[job.mesh.pp_rank][:]), "None"]
        assert [action for action, _ in actions] == mine and len(mine) > 16
        # each is told before it is run
        assert all(actions[mine.index(str(action))][1] == at for at, action in enumerate(ran))


def _noting(ran: list[Any], function: Any, action: Any, context: Any) -> None:
    ran.append(action)
    function(action, context)


@job_of(tiny(pp=2, layers=2))
def test_messages_are_validated_in_the_first_step_alone(job: Opened) -> None:
    """And the first evaluation."""
    batch, seen = job.batch(), []
    for call in (job.run.pipeline.train, job.run.pipeline.evaluate) * 2:
        call(batch)
        seen.append(
            job.run.pipeline._executor(job.run.pipeline._planned, batch)
            ._stages[0]
            ._runtime_validate
        )
    assert seen == [True, True, False, False]


@job_of(tiny(fsdp=Fsdp(2), **SHARDED))
def test_torchs_stage_accumulates_unsharded_gradients(job: Opened) -> None:
    """If it reduces in each backward, `_ShardingStage` may go."""
    seen = set()
    for stage in job.run.stages:
        stage.set_requires_gradient_sync = lambda on, recurse=True: seen.add(on)
    with torchs_backward():
        job.train()
    assert False in seen


@contextlib.contextmanager
def torchs_backward() -> Iterator[None]:
    kind = pipeline_stage._ShardingStage
    kind.backward_maybe_with_nosync = PipelineStage.backward_maybe_with_nosync
    yield
    del kind.backward_maybe_with_nosync


class Gathering:
    """Handles of FSDP's units whose gathers have begun, and not ended."""

    now = most = 0

    def begin(self, unshard: Any, async_op: bool = False) -> Any:
        handle = unshard(async_op)
        self.now += 1
        self.most = max(self.most, self.now)
        wait = getattr(handle, "wait", None)

        def end() -> None:
            self.now -= 1
            if wait is not None:
                wait()

        if wait is None:
            end()
            return None
        handle.wait = end
        return handle


def gathered_at_once(job: Opened) -> int:
    """The most units of a stage that are gathered at a time."""
    gathering = Gathering()
    for part in (part for stage in job.run.stages for part in stage.modules()):
        if isinstance(part, FSDPModule):
            part.unshard = functools.partial(gathering.begin, part.unshard)
    job.train()
    return gathering.most


@job_of(tiny(fsdp=Fsdp(1), **SHARDED))
def test_of_a_stage_a_unit_is_gathered_while_the_one_before_is_copied(job: Opened) -> None:
    assert gathered_at_once(job) == 2


@job_of(tiny(fsdp=Fsdp(1), **SHARDED))
def test_torch_gathers_all_units_of_a_stage_at_once(job: Opened) -> None:
    """If it does not, `OrderRuntime._gather` may go."""
    register = OrderRuntime.register_custom_function
    OrderRuntime.register_custom_function = lambda self, kind, function: (
        None if kind.name == "UNSHARD" else register(self, kind, function)
    )
    count = gathered_at_once(job)
    OrderRuntime.register_custom_function = register
    assert count > 4


@job_of(tiny(schedule="zbvzerobubble", **SHARDED))
def test_a_split_backward_still_loses_gradients_when_blocks_are_resharded(job: Opened) -> None:
    """If this passes in torch, `fsdp.zero=3` may be allowed under zero-bubble schedules."""
    close_mesh()
    checks.SHARDING, refusal = (), checks.SHARDING
    store = dist.PrefixStore("verify", job.worker.store)
    with torchs_backward():
        result = verify(replace(job.config, fsdp=Fsdp(3)), replace(job.worker, store=store))
    checks.SHARDING = refusal
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # to be closed
    assert result["exit_code"] == 1


@job_of(tiny(pp=2, layers=2))  # the last: a rank leaves
def test_a_message_of_another_dtype_is_refused_in_the_first_step(job: Opened) -> None:
    forward = pipeline_stage._Stage.forward_maybe_with_nosync
    pipeline_stage._Stage.forward_maybe_with_nosync = lambda *a, **k: forward(*a, **k).double()
    with pytest.raises(RuntimeError) as raised:
        job.train()
    said = f"{raised.value}; {raised.value.__cause__}"
    assert job.worker.rank or ("dtype" in said and "float64" in said), said


# --- without a job --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(on_one_rank, tiny(), tmp_path_factory.mktemp("one"))[0]


def on_one_rank(_: Config, worker: Worker) -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    use_expandable_segments()  # in a process that has imported torch, as a rank on a GPU does
    read = getattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:True"
    )
    used, unused = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    kwargs = {"stage_output": (2 * used,), "output_grads": (torch.ones(1),)}
    kwargs["input_values"] = [used, unused]
    stage = torch_stage()
    first = getattr(stage, "_get_init_p2p_neighbors_ops", list)
    return {
        "validates": getattr(stage, "_runtime_validate", None),
        "peers of first messages": [operation.peer for operation in first()],
        "gradients": stage.backward_maybe_with_nosync("full", kwargs)[0],
        "settings of the allocator": read(),
    }


def torch_stage() -> PipelineStage:
    """The first of two stages that are both on this rank."""
    x = torch.empty(2, 4, device="meta")
    stage = PipelineStage(
        nn.Linear(4, 4), 0, 2, torch.device("cpu"), input_args=(x,), output_args=(x,)
    )
    stage.stage_index_to_group_rank = {0: 0, 1: 0}
    return stage


def test_torch_does_not_validate_messages_by_default(one_rank: dict[str, Any]) -> None:
    """If it does, `OrderRuntime` need not switch it on."""
    if one_rank["validates"] is None:
        pytest.skip("2.11 always does, and has no switch")
    assert not one_rank["validates"]


@pytest.mark.skipif(
    not hasattr(PipelineStage, "_get_init_p2p_neighbors_ops"), reason="this torch sends none"
)
def test_torch_sends_first_messages_to_the_rank_itself(one_rank: dict[str, Any]) -> None:
    """If it does not, `make_stage` need not filter them."""
    assert 0 in one_rank["peers of first messages"]


def test_torchs_stage_expects_a_gradient_of_every_input(one_rank: dict[str, Any]) -> None:
    """If it gives zeros itself, `_Stage` need not."""
    first, second = one_rank["gradients"]
    assert first is not None and second is None


def test_the_allocator_has_no_public_settings(one_rank: dict[str, Any]) -> None:
    """If it has, `use_expandable_segments` may use them."""
    public = [name for name in dir(torch.accelerator) if not name.startswith("_")]
    assert not [name for name in public if "setting" in name or "expandable" in name]
    assert one_rank["settings of the allocator"] == "expandable_segments:True"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return of_ranks(run_world(on_two_ranks, tiny(pp=2), tmp_path_factory.mktemp("two")))


def on_two_ranks(_: Config, worker: Worker) -> dict[str, Any]:
    group = {"rank": worker.rank, "world_size": 2, "store": worker.store}
    dist.init_process_group("gloo", **group)
    return {
        "gradient": gradient_of_rank_0(worker, False),
        "gradient, fenced": gradient_of_rank_0(worker, True),
        "muon": muon_on_shards(worker),
        "batches": batches_of_one(worker),
        "groups": groups_that_outlive_their_job(),
    }


def groups_that_outlive_their_job() -> tuple[bool, bool]:
    """Whether meshes have process groups when a job has ended; and when they are forgotten."""

    def kept() -> bool:
        gc.collect()
        meshes = [each for each in gc.get_objects() if type(each) is DeviceMesh]
        return any(getattr(mesh, "_pg_registry", {}) for mesh in meshes)

    dist.destroy_process_group()
    before = kept()
    forget_groups_of_meshes()
    return before, kept()


def test_meshes_still_keep_the_groups_of_a_job_that_has_ended(two_ranks: Found) -> None:
    """If not, `forget_groups_of_meshes` may go."""
    assert two_ranks["groups"] == [(True, False)] * 2


class OneForEachRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.choices[dist.get_rank()](x)


def gradient_of_rank_0(worker: Worker, fenced: bool) -> float:
    model = fully_shard(OneForEachRank(), mesh=init_device_mesh("cpu", (2,)))
    if fenced:
        reduce_missing_gradients(model, set(), zero=3)
    model.set_is_last_backward(not fenced)  # as during a step of `_ShardingStage`
    model(torch.full((1, 2), worker.rank + 1.0)).sum().backward()
    model.set_is_last_backward(True)
    gradient = model.choices[0].weight.grad
    return math.nan if gradient is None else gradient.to_local()[0, 0].item()


def test_fsdp_mixes_up_gradients_that_one_rank_alone_has(two_ranks: Found) -> None:
    # the mean of 1 on rank 0 and 0 on rank 1; the gradient of the other parameter there is 2
    assert two_ranks["gradient"][0] == 1.5
    assert two_ranks["gradient, fenced"] == [0.5, 0.5]


def muon_on_shards(worker: Worker) -> tuple[float, int]:
    """(how far torch.optim.Muon's update of shards is from that of the whole matrix, in norms;
    messages)"""
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


def test_torchs_muon_sends_many_messages_and_rounds_otherwise_on_shards(two_ranks: Found) -> None:
    """If it does not, `titanlike/techniques/muon.py` may be built on it."""
    for difference, messages in two_ranks["muon"]:
        assert difference > 0.05 and messages > 10


def batches_of_one(worker: Worker) -> int:
    """How often torch's runtime starts a batch for one message."""
    from torch.distributed.pipelining import schedules

    batched = []
    start, dist.batch_isend_irecv = dist.batch_isend_irecv, lambda ops: batched.extend(ops) or []
    kind = dist.irecv if worker.rank else dist.isend
    for work in schedules._batch_p2p([dist.P2POp(kind, torch.ones(1), 1 - worker.rank)]):
        work.wait()
    dist.batch_isend_irecv = start
    return len(batched)


@pytest.mark.skipif(
    hasattr(PipelineStage, "_setup_forward_recv_info"), reason="2.13 and later do not"
)
def test_torch_batches_single_messages(two_ranks: Found) -> None:
    """If it does not, torch's own `_batch_p2p` may start messages in place of `_post`."""
    assert two_ranks["batches"] == [1, 1]


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy"), reason="this torch has one NCCL"
)
def test_nccl_has_one_communicator_for_all_messages() -> None:
    """If "nccl" is lazy again, `pipeline_backend` may go."""
    from titanlike.core.torch_private.process_groups import pipeline_backend

    backend = pipeline_backend("cpu:gloo,cuda:nccl")
    devices = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    assert devices == {"cpu": "gloo", "cuda": "nccl-lazy"}
    assert pipeline_backend("gloo") is None
    dist.Backend._ensure_backend_registered("nccl")
    assert dist.Backend._plugins["NCCL"].creator_fn.__name__ == "_create_nccl2_process_group"


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


def test_the_history_of_memory_has_no_public_name() -> None:
    """Once it has, these functions of core/torch_private/accelerator.py can go."""
    memory = torch.cuda.memory
    assert hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")
    assert not hasattr(memory, "record_memory_history") and not hasattr(memory, "dump_snapshot")


def test_whether_a_fork_can_use_the_accelerator_has_no_public_name() -> None:
    """Once it has, `in_bad_fork` may use it."""
    for module in (torch.cuda, torch.xpu):
        assert callable(module._is_in_bad_fork) and not hasattr(module, "is_in_bad_fork")
    assert not [name for name in dir(torch.accelerator) if "fork" in name]


def test_torchs_norm_of_gradients_does_not_say_of_which() -> None:
    """If it does, `tensors.norms` may go."""
    gradients = [torch.ones(4), torch.tensor([math.nan])]
    total = torch.nn.utils.get_total_norm(gradients)
    assert total.shape == () and total.isnan()
    assert tensors.norms(gradients)[0] == 2


def test_a_dispatch_mode_in_inference_mode_sees_whole_operators() -> None:
    """If it sees their parts, or there is a public way to have them, `decomposed` can go."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(function.name())
            with self:
                result = decomposed(function, args, kwargs or {})
            return function(*args, **(kwargs or {})) if result is NotImplemented else result

    layer = nn.Linear(4, 4, device="meta")
    with torch.inference_mode(), Mode():
        layer(torch.empty(2, 3, 4, device="meta"))
    assert seen[:2] == ["aten::empty.memory_format", "aten::linear"] and "aten::addmm" in seen


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14), reason="2.14 and later have one"
)
def test_the_public_scaled_grouped_product_has_no_meta_kernel() -> None:
    kinds = nn.functional.ScalingType.RowWise
    kind = {"dtype": torch.float8_e4m3fn, "device": "meta"}
    a, b = torch.empty(64, 32, **kind), torch.empty(4, 48, 32, **kind).mT
    of_a, of_b = torch.empty(64, device="meta"), torch.empty(4, 48, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    assert scaled_grouped_mm(a, b, (of_a, of_b), ends, torch.bfloat16).shape == (64, 48)
    with pytest.raises(NotImplementedError):
        nn.functional.scaled_grouped_mm(a, b, of_a, kinds, of_b, kinds, offs=ends)


def test_a_backward_tells_the_forward_that_it_belongs_to() -> None:
    """By sequence numbers, which torch gives to each node of the graph."""
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = function.overloadpacket.__name__
            if (node := running_node()) is None:
                forward.setdefault(name, sequence_number())
            else:
                backward.setdefault(node.name, node.number)
            return function(*args, **(kwargs or {}))

    weight = torch.randn(4, 4, requires_grad=True)
    with Watching():
        ((torch.randn(4, 4) @ weight).exp() * 2.0).sum().backward()
    assert running_node() is None
    assert backward["MmBackward0"] == forward["mm"] < backward["ExpBackward0"] == forward["exp"]
