"""Where a step goes: what it calls, and its time, by kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.speed import bench as benchmark
from benchmarks.speed.step_kinds import CASTS, GAPS, OTHERS, kind_of, seconds_by_kind
from support.counted_calls import CountedCalls
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.optimization import ChunkedCrossEntropy
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import AdamW, Config
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build


@pytest.mark.parametrize(
    "kind, names",
    [
        ("matrix products", ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "aten::mm", "aten::linear"]),
        ("matrix products", ["aten::mm", "MmBackward0", "forward and backward"]),
        ("optimizer", ["aten::bmm", "Optimizer.step#Muon.step"]),
        ("attention", ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "CompiledFunctionBackward"]),
        ("attention", ["triton_tem_fused_flex_attention_2", "Torch-Compiled Region: 3/0"]),
        ("loss", ["aten::_log_softmax", "aten::cross_entropy_loss"]),
        ("loss", ["aten::mul", "_LossInChunksBackward"]),
        ("norm and clip", ["aten::_foreach_mul_", "clip"]),
        ("norm and clip", ["aten::stack", "gradient norm"]),
        ("accumulation", ["aten::add_", "torch::autograd::AccumulateGrad", "forward and backward"]),
        (CASTS, ["aten::copy_", "aten::_to_copy", "ToCopyBackward0"]),
        (CASTS, ["triton_poi_fused__to_copy_3", "Torch-Compiled Region: 0/0"]),
        ("element-wise and others", ["triton_poi_fused__to_copy_mul_silu_3", "CompiledFunction"]),
        ("element-wise and others", ["aten::add_", "AddBackward0"]),
        ("collectives", ["ncclDevKernel_AllGather_RING_LL", "c10d::_allgather_base_", "optimizer?"]),
    ],
)  # fmt: skip
def test_operators_and_kernels_are_of_a_kind(kind: str, names: list[str]) -> None:
    assert kind_of(names) == kind


def span(cat: str, name: str, thread: int, start: float, end: float, **args: int) -> dict:
    """args: "Fwd thread id" is written Fwd_thread_id."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": start, "dur": end - start,
            "args": named}  # fmt: skip


# a step of 1,000 us on a GPU: the host launches forward and update on one thread, the backward on
# another; the copy is a backward of what the loss called
STEP = [
    span("user_annotation", "step 7", 1, 0, 1000),
    span("user_annotation", "forward and backward", 1, 0, 700),
    span("cpu_op", "aten::linear", 1, 10, 60),
    span("cpu_op", "aten::mm", 1, 20, 50),
    span("cuda_runtime", "cudaLaunchKernel", 1, 30, 40, correlation=1),
    span("user_annotation", "loss", 1, 100, 200),
    span("cpu_op", "aten::_to_copy", 1, 110, 120, Sequence_number=5, Fwd_thread_id=0),
    span("cpu_op", "ToCopyBackward0", 2, 310, 340, Sequence_number=5, Fwd_thread_id=1),
    span("cpu_op", "aten::copy_", 2, 315, 335),
    span("cuda_runtime", "cudaLaunchKernel", 2, 320, 330, correlation=2),
    span("cpu_op", "torch::autograd::AccumulateGrad", 2, 400, 450),
    span("cpu_op", "aten::add_", 2, 410, 440),
    span("cuda_runtime", "cudaLaunchKernel", 2, 420, 430, correlation=3),
    span("user_annotation", "clip", 1, 700, 800),
    span("cpu_op", "aten::_foreach_mul_", 1, 710, 760),
    span("cuda_driver", "cuLaunchKernel", 1, 720, 730, correlation=4),
    span("cpu_op", "aten::mm", 1, 1100, 1200),  # of no step
    span("cuda_runtime", "cudaLaunchKernel", 1, 1110, 1120, correlation=5),
]  # fmt: skip
KERNELS = [
    span("kernel", "nvjet_tst_128x256", 7, 50, 350, correlation=1),
    span("kernel", "direct_copy_kernel", 7, 350, 450, correlation=2),
    span("kernel", "vectorized_elementwise_kernel", 9, 400, 500, correlation=3),  # another stream
    span("kernel", "multi_tensor_apply_kernel", 7, 730, 780, correlation=4),
    span("kernel", "nvjet_tst_128x256", 7, 1130, 1150, correlation=5),
]


@pytest.mark.parametrize(
    "events, microseconds",
    [
        (STEP + KERNELS, {"matrix products": 300, "loss": 100, "accumulation": 100,
                          "norm and clip": 50, GAPS: 500}),
        (STEP, {"matrix products": 30, OTHERS: 20, "loss": 40, "accumulation": 50,
                "norm and clip": 50, GAPS: 810}),
    ],
    ids=["by kernels", "by operators"],
)  # fmt: skip
def test_a_trace_says_where_a_step_goes(events: list[dict], microseconds: dict[str, int]) -> None:
    found = seconds_by_kind(events[::-1])
    assert {kind: round(1e6 * t) for kind, t in found.items() if t} == microseconds


def calls_of_third_step(config: Config, worker: Worker) -> tuple[Counter, list[torch.Size]]:
    """What it calls, and shapes of parameters."""
    data = open_data(config)
    mesh = open_mesh(config, worker)
    run = build(config, mesh, data)
    loop = benchmark.titanlike_loop(run, config, data, worker)
    for _ in range(2):
        next(loop)
    with CountedCalls(run.phases) as counted:
        next(loop)
    shapes = [p.shape for stage in run.stages for p in stage.parameters()]
    close_mesh()
    return counted.calls, shapes


def test_a_step_in_bf16_casts_each_weight_once_whatever_the_microbatches(tmp_path: Path) -> None:
    config = tiny(schedule=Schedule("1f1b", 4), layers=2, precision=Precision("bf16"))
    ((calls, shapes),) = run_world(calls_of_third_step, config, tmp_path)
    casts = Counter[torch.Size]()
    for call, times in calls.items():
        if (
            call.casts
            and call.written[0] is torch.bfloat16
            and call.phase == "forward and backward"
        ):
            casts.update({shape: times * n for shape, n in Counter(call.shapes).items()})
    assert {shape: casts[shape] for shape in shapes} == Counter(shapes)
    products = sum(n for call, n in calls.items() if call.kind == "matrix products")
    # 7 products of a block and the head's, forward and two of the backward, in each microbatch
    assert products == 4 * 3 * (2 * 7 + 1)


MICROBATCHES = 4


@pytest.mark.parametrize("schedule, products", [("1f1b", 3), ("gpipe", 4)])
def test_a_chunked_loss_multiplies_each_chunk_by_the_head_three_times(
    schedule: str, products: int, tmp_path: Path
) -> None:
    """Four times where all forwards come first: else a gradient of the head would be in memory for
    each microbatch."""
    config = tiny(
        schedule=Schedule(schedule, MICROBATCHES),
        data=SyntheticData(vocab_size=61),
        layers=2,
        loss=ChunkedCrossEntropy(chunk=8),
    )
    ((calls, _),) = run_world(calls_of_third_step, config, tmp_path)
    of_head = sum(
        n
        for call, n in calls.items()
        # chunks of 8 tokens, 61 ids, 32 features: logits, gradients of the tokens, of the head
        if call.kind == "matrix products" and call.shapes[0] in ((8, 61), (8, 32), (61, 32))
    )
    chunks = config.batch_size * config.seq_len // 8
    assert of_head == chunks * products


def test_gradients_are_added_and_clipped_without_copies_of_them(tmp_path: Path) -> None:
    config = tiny(
        schedule=Schedule("1f1b", MICROBATCHES),
        layers=2,
        precision=Precision("bf16"),
        optimizer=AdamW(clip=1.0),
    )
    ((calls, shapes),) = run_world(calls_of_third_step, config, tmp_path)
    fp32, bf16 = torch.float32, torch.bfloat16
    matrices = Counter(shape for shape in shapes if len(shape) == 2)
    casts, sums, of_lists = Counter[torch.Size](), Counter[torch.Size](), Counter[str]()
    for call, times in calls.items():
        if call.kind == "casts and copies" and (call.read, call.written) == ((bf16,), (fp32,)):
            casts[call.shapes[0]] += times
        if call.kind == "accumulation":
            assert call.read[0] is fp32
            sums[call.shapes[0]] += times * (call.read[1] is bf16)
        if call.kind == "norm and clip" and len(call.shapes) == len(shapes):
            of_lists[call.name] += times
    # the first of a step begins the sum, each other is read as it is
    assert {shape: casts[shape] for shape in matrices} == matrices
    expected = {shape: (MICROBATCHES - 1) * n for shape, n in matrices.items()}
    assert {shape: sums[shape] for shape in matrices} == expected
    assert of_lists == {"aten::_foreach_norm": 1}  # clipped where the optimizer reads them
