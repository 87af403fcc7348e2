"""Real steps of `schedule=auto` beside those of every other schedule, on stages that are unequal.

For a machine that does nothing else: `pytest -m grid -s tests/planning/test_real_orders.py`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.models import SCHEDULES, tiny
from support.planned_runs import compared_in_turns
from support.world import run_world
from titanlike.config.groups import AutoSchedule, EveryActivationCheckpoint
from titanlike.config.hardware import MeasuredHardware
from titanlike.config.schema import AutoSplit, Config, Custom, SyntheticData
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.planning.auto_schedule import with_found_order
from titanlike.planning.known_hardware import planned_hardware
from titanlike.planning.plan import make_plan
from titanlike.training.build import build
from titanlike.training.feed import to_device

ROUNDS, MICROBATCHES = 7, 8
MODEL = {"dim": 256, "heads": 4, "kv_heads": 4, "ffn_dim": 704, "layers": 8, "vocab_size": None}
CASES: dict[str, dict[str, Any]] = {
    "heavy head": {"data": SyntheticData(vocab_size=16_000)},
    "heavy head, split=auto": {"data": SyntheticData(vocab_size=16_000), "split": AutoSplit()},
    "some blocks recomputed": {"activation_checkpoint": EveryActivationCheckpoint(every=3)},
}
BUILT_IN = [name for name in SCHEDULES if name != "csv"]

pytestmark = [pytest.mark.slow, pytest.mark.grid]


def configs_of(case: str, pp: int, kept: Path, folder: Path) -> dict[str, Config]:
    """By schedule; auto with the order that was found, and the split where that is open."""
    changes = {"data": SyntheticData(), **CASES[case]}
    own = {"seq_len": 128, "batch_size": 2 * MICROBATCHES, **changes}
    own["hardware"] = MeasuredHardware(folder=str(kept))
    own["model"] = Custom("llama", MODEL)
    found = {}
    for name in BUILT_IN:
        config = tiny(pp, 1, name, **own)
        schedule = replace(config.schedule, microbatches=MICROBATCHES)
        found[name] = replace(config, schedule=schedule)
    search = "split" if isinstance(own.get("split"), AutoSplit) else "placement"
    auto = AutoSchedule(microbatches=MICROBATCHES, search=search, memory=3.0)
    found["auto"] = with_found_order(tiny(pp, 1, auto, run_dir=str(folder / "auto"), **own))
    return found


def timed(config: Config, worker: Worker, configs: dict[str, Config]) -> dict[str, list[float]]:
    """Seconds of steps, one of each schedule after the other."""
    torch.set_num_threads(1)
    mesh = open_mesh(config, worker)
    runs = {name: build(config, mesh) for name, config in configs.items()}
    streams = {name: batches(open_data(c).train, c, dp_rank=0) for name, c in configs.items()}
    found: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(ROUNDS + 2):
        for name, run in runs.items():
            batch = to_device(next(streams[name]), mesh, configs[name])
            dist.barrier()
            begin = time.perf_counter()
            run.pipeline.train(batch)  # ends in an all-reduce
            found[name].append(time.perf_counter() - begin)
            for state in run.stage_states:
                state.zero_grad()
    close_mesh()
    return {name: times[2:] for name, times in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_auto_is_as_fast_as_the_fastest_of_two_real_ranks(case: str, tmp_path: Path) -> None:
    configs = configs_of(case, 2, tmp_path / "kept", tmp_path)
    real = max(
        run_world(timed, configs["auto"], tmp_path, configs, timeout=500),
        key=lambda times: sum(map(sum, times.values())),
    )
    predicted = {
        name: make_plan(config, planned_hardware(config)).simulation.pipeline
        for name, config in configs.items()
    }
    shares = {
        name: statistics.median(a / b for a, b in zip(times, real["auto"], strict=True))
        for name, times in real.items()
    }
    show(case, 2, shares, predicted, {n: statistics.median(t) for n, t in real.items()})
    # steps of two cores that are shared with other programs vary by some percent
    assert min(shares.values()) > 0.95


@pytest.mark.parametrize("case", CASES)
def test_auto_is_as_fast_as_the_fastest_of_four_ranks_with_a_core_each(
    case: str, tmp_path: Path
) -> None:
    """Actions' CPU time, and the step that they would make (`support/planned_runs.py`)."""
    configs = configs_of(case, 4, tmp_path / "kept", tmp_path)
    both = compared_in_turns(configs, tmp_path)
    real = {name: simulation.pipeline for name, (_, simulation, _) in both.items()}
    predicted = {name: plan.simulation.pipeline for name, (plan, _, _) in both.items()}
    shares = {name: seconds / real["auto"] for name, seconds in real.items()}
    show(case, 4, shares, predicted, real)
    assert min(shares.values()) > 0.95


def show(case: str, pp: int, shares: dict, predicted: dict, seconds: dict) -> None:
    print(
        f"\n{case}, pp={pp}: step of each schedule, of auto's; by the plan; seconds, of the plan; tokens/s"
    )
    for name in sorted(shares, key=shares.__getitem__):
        tokens = 2 * MICROBATCHES * 128 / seconds[name]
        of_plan = predicted[name] / predicted["auto"]
        both = f"{seconds[name]:.3f} {predicted[name]:.3f}"
        print(f"  {name:22} {shares[name]:.3f} {of_plan:.3f} {both} {tokens:,.0f}")
