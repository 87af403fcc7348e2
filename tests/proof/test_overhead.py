"""What a step costs beside a plain loop: in counts, which no other load on the machine changes. The
seconds are measured by `python tools/bench.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed import bench as benchmark
from benchmarks.speed.plain_loops import plain_loop, why_no_plain_loop
from support.cells import slow
from support.commands import command
from support.live_memory import LiveStorages
from support.models import tiny
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.schema import Config
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.mesh import close_mesh, open_mesh
from titanlike.core.launch.worker import Worker
from titanlike.core.training.build import build
from titanlike.core.training.train_plan import make_plan


def third_steps(config: Config, worker: Worker) -> list[tuple[dict[str, int], int]]:
    """Of the bench's two loops, ours and the plain one: torch's operations, by name, and bytes."""
    data = open_data(config)
    mesh = open_mesh(config, worker)
    run = build(config, mesh, data)
    ours = benchmark.titanlike_loop(run, config, data, worker)
    found = []
    for loop in (ours, plain_loop(config, data, run.plan, mesh)):
        for _ in range(2):  # which allocate and connect
            next(loop)
        with LiveStorages() as live:
            next(loop)
        found.append((live.operators, live.peak))
    close_mesh()
    return found


@pytest.mark.parametrize("pp, dp", [(1, 1), (2, 1), *slow((1, 2))])
def test_a_step_has_the_compute_collectives_syncs_and_memory_of_a_plain_loop(
    pp: int, dp: int, tmp_path: Path
) -> None:
    config = tiny(pp=pp, dp=dp, schedule=Schedule("1f1b", 4), layers=4, fsdp=Fsdp(1))
    for (ours, held), (plain, held_there) in run_world(third_steps, config, tmp_path):
        for name in ("mm", "bmm", "embedding", "send", "recv_"):
            assert ours[name] == plain[name], name
        for name in ("_allgather_base_", "_reduce_scatter_base_"):  # once a step
            assert ours[name] <= plain[name] + 1, name
        # of tokens; loss and norm together; all that is recorded. The plain loop's: loss, norm
        assert ours["allreduce_"] <= (3 if pp * dp > 1 else 0)
        assert ours["_local_scalar_dense"] == 0 < plain["_local_scalar_dense"], "the host waits"
        copies = [found["copy_"] + found["_to_copy"] + found["clone"] for found in (ours, plain)]
        assert copies[0] <= copies[1] + 5
        operations = [
            sum(count for name, count in found.items() if not name.startswith("_record_function"))
            for found in (ours, plain)
        ]
        assert operations[0] <= operations[1] + 80  # of thousands, whatever the model
        # torch 2.15's own schedules give a message free sooner than those of 2.13 and ours
        message = 4 * 16 * 32 * 4 if pp > 1 else 0  # sequences, tokens, channels, bytes
        assert held <= 1.02 * held_there + 2 * message


@pytest.mark.parametrize(
    "ours, plain, ratio",
    [
        ([3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], 1.0),  # the first of a pair is slower
        ([1.2] * 4, [1.0] * 4, 1.2),
        ([1.2, 1.2, 90.0, 1.2, 1.2, 1.2], [1.0] * 6, 1.2),  # another program took the machine
    ],
)
def test_the_bench_compares_loops_pair_by_pair(
    ours: list[float], plain: list[float], ratio: float
) -> None:
    assert benchmark._paired_ratio(ours, plain) == pytest.approx(ratio)


@pytest.mark.parametrize(
    "config, reason",
    [
        (tiny(tp=2, pp=2), "tensor parallelism for a built-in Llama, without a pipeline"),
        # each rank would compute with whole sequences
        (tiny(cp=2, context_parallel="gather"), "without CPU offload, float8 and context parallelism"),
        (tiny(pp=2, tied=True), "weights that are not tied"),
    ],
)  # fmt: skip
def test_settings_without_a_plain_loop_are_reported(config: Config, reason: str) -> None:
    assert reason in why_no_plain_loop(config, make_plan(config))


@pytest.mark.slow
def test_bench_compares_a_command_with_a_plain_loop(tmp_path: Path) -> None:
    done = command(
        "model.num_hidden_layers=2", "steps=10", "logger=none", tool="tools/bench.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for label in (
        "tokens/s",
        "step",
        "first step done",
        "peak memory a rank",
        "titanlike / plain loop",
        "matrix products",
    ):
        assert label in done.stdout
    (figures,) = tmp_path.glob("**/bench.json")
    for seconds in json.loads(figures.read_text())["step_by_kind"].values():
        assert seconds["matrix products"] > seconds["optimizer"] > 0
    assert figures.with_name("step_by_kind.svg").read_text().count("matrix products") == 1


@pytest.mark.slow
def test_every_data_source_is_benchmarked(tmp_path: Path) -> None:
    words = ["--files", "300", "--seconds", "0.05", "--workers", "0", "--least", "0"]
    done = command(*words, tool="tools/bench_data.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("text", "tokens", "mixture", "synthetic", "default model", "300 files"):
        assert name in done.stdout
