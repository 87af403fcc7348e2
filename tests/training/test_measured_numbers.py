"""A number of a step is one entry: it is summed over all ranks of a layout, and reaches every sink."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.cells import cells, meshes
from support.models import tiny
from support.opened import opened
from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.training.anomalies import AnomalyDetector
from titanlike.core.training.build import Run
from titanlike.core.training.measured import MEASURED, Measured, Measuring
from titanlike.watch.report import write_reports
from titanlike.watch.tensorboard_sink import TensorBoardSink


def _blocks(run: Run) -> list[str]:
    return [unit.name for unit in run.plan.model_graph.units]


def _block_squares(measuring: Measuring) -> Tensor:
    squares, none = measuring.squares(), measuring.norms.new_zeros(())
    sums = (
        sum((square for name, square in squares.items() if name.startswith(f"{block}.")), none)
        for block in _blocks(measuring.run)
    )
    return torch.stack([*sums])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


ENTRIES = [
    Measured("norms", _block_squares, finish=Tensor.sqrt, labels=_blocks),
    Measured("rank", lambda m: torch.tensor(_rank()), reduce="max", every=lambda _: 2),
]


def records(config: Config, worker: Worker) -> list[dict[str, Any]]:
    MEASURED.extend(ENTRIES)
    try:
        with opened(config, worker) as job:
            detector = AnomalyDetector(config, {})
            return [job.step(step, detector).record for step in (1, 2)]
    finally:
        del MEASURED[-len(ENTRIES) :]


LAYOUTS = meshes("one process", "pp=2 dp=2", "dp=2 replicate=2", "tp=2")


@pytest.mark.parametrize("layout", cells(LAYOUTS, {}, most=2))
def test_a_metric_covers_the_full_model_in_every_layout(
    layout: dict[str, int], tmp_path: Path
) -> None:
    config = tiny(**layout)
    (alone,) = run_world(records, tiny(), tmp_path / "one")
    for of_rank in run_world(records, config, tmp_path / "layout"):
        for record, expected in zip(of_rank, alone, strict=True):
            norms = record["norms"]
            assert norms.keys() == expected["norms"].keys()
            whole = math.sqrt(sum(norm**2 for norm in norms.values()))
            assert whole == pytest.approx(record["grad_norm"], rel=1e-6)
            for block, norm in norms.items():
                assert norm == pytest.approx(expected["norms"][block], rel=1e-4)
        assert "rank" not in of_rank[0]
        assert of_rank[1]["rank"] == config.world_size - 1


def test_lists_and_dicts_are_scalars_of_tensorboard_and_curves_of_the_report(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = {f"model.layers.{n}": float(n) for n in range(200)}  # a long line
    rows = [
        {"step": step, "tokens": step, "loss": 2.0, "each": [1.0, 3.0], "norms": names}
        for step in (1, 2)
    ]
    sink = TensorBoardSink(tmp_path, 0)
    for row in rows:
        sink.log(row)
    sink.close("completed")
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in found.Scalars("train/each/1")] == [3.0, 3.0]
    assert [event.value for event in found.Scalars("train/norms/model.layers.7")] == [7.0, 7.0]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_reports(tmp_path / "page.html", [tmp_path]).read_text()
    assert (
        '"each/1": [[1, 1, 3.0], [2, 2, 3.0]]' in page or '"each/1":[[1,1,3.0],[2,2,3.0]]' in page
    )
