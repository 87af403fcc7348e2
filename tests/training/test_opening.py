"""What the opening table says of ranks and of what they send."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support.models import tiny
from support.saved_runs import events
from support.stand_in_gpus import driver
from support.vision_models import of_images
from support.world import RankError, run_world
from titanlike import library
from titanlike.core.config.errors import Refused
from titanlike.core.config.groups.computation import Numerics
from titanlike.core.config.groups.pipeline import PointSplit
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import near_device
from titanlike.core.distributed.places import Place, compare_places, place_of, places_text
from titanlike.core.launch.worker import Worker
from titanlike.core.training.loop import train
from titanlike.core.training.report import _sent
from titanlike.core.training.session import connected
from titanlike.core.training.train_plan import make_plan


def test_p2p_bytes_of_each_stage_are_listed() -> None:
    (row,) = _sent(make_plan(tiny(pp=4)))  # four stages, three of which send the same
    assert row == ["0-2", "next", "[1, 16, 32]", "float32", "2 KiB"]
    points = PointSplit(points=["down.2", "up.0", "up.2"])
    rows = _sent(make_plan(of_images("UNet", 4, 1, split=points)))
    assert [row[:3] for row in rows[:3]] == [
        ["0", "next", "[1, 8, 2, 2]"],
        ["0", "2", "[1, 8, 4, 4]"],
        ["0", "3", "[1, 4, 8, 8]"],
    ]
    v = _sent(make_plan(of_images("UNet", 2, 1, "zbvzerobubble", split=points)))
    assert [row[-1] for row in v if row[:2] in (["0", "3"], ["1", "next"])] == ["same rank"] * 3
    assert _sent(make_plan(tiny(dp=2))) == []


def gathered(config: Config, worker: Worker) -> tuple[str, str]:
    return compare_places(config, torch.device("cpu"), worker)


def test_rank_0_knows_the_host_of_every_rank(tmp_path: Path) -> None:
    first, second = run_world(gathered, tiny(pp=2), tmp_path)
    assert first == (places_text([place_of(torch.device("cpu"))] * 2), "")
    assert second == ("", "")


def test_ranks_side_by_side_are_named_together() -> None:
    places = [Place("a", f"GPU {gpu}", str(gpu // 2)) for gpu in range(4)]
    places += [Place("b", "GPU 0", ""), Place("b", "GPU 3", "")]
    assert places_text(places) == (
        "0-1 on a: GPU 0-1, NUMA 0; 2-3 on a: GPU 2-3, NUMA 1; 4-5 on b: GPU 0, GPU 3"
    )
    assert places_text([Place("a", "cpu", "0")] * 8) == "0-7 on a: cpu, NUMA 0"
    many = places_text([Place(f"node{at}", "cpu", "") for at in range(20)])
    assert many.endswith("15 on node15: cpu; and 4 more")


def _two_nodes(sys: Path) -> None:
    """As Linux tells of a machine of 12 cores, with a third node of memory alone."""
    for node, cores in enumerate(("0-3,8-11\n", "4-7\n", "\n")):
        folder = sys / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)


def test_numa_nodes_are_those_of_the_cores_and_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _two_nodes(tmp_path)
    for cores, nodes in (({5}, "1"), ({0, 9}, "0"), ({3, 4}, "0-1"), ({99}, "")):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        assert place_of(torch.device("cpu"), tmp_path).numa == nodes
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    module = SimpleNamespace(get_device_properties=lambda _: gpu, get_device_name=lambda _: "")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr("titanlike.core.device.accelerator.accelerator", lambda: "cuda")
    monkeypatch.setattr("titanlike.core.device.accelerator.count", lambda: 2)
    assert place_of(torch.device("cuda", 1), tmp_path)[1:3] == ("GPU 5", "1")
    (folder / "numa_node").write_text("-1\n")
    assert place_of(torch.device("cuda", 1), tmp_path).numa == ""


@pytest.mark.parametrize(
    ("gpu", "allowed", "variable", "bound"),
    [
        (0, range(12), "", {4, 5, 6, 7}),
        (1, range(12), "", {0, 1, 2, 3, 8, 9, 10, 11}),
        (2, range(12), "", None),  # the machine does not say where it is
        (0, range(4, 8), "", None),  # bound already
        (0, range(1, 11), "", {4, 5, 6, 7}),  # a container has some cores of each node
        (0, range(12), "OMP_PLACES", None),
    ],
)
def test_a_rank_is_bound_to_the_node_of_its_gpu_unless_somebody_has_bound_it(
    gpu: int,
    allowed: range,
    variable: str,
    bound: set[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver(monkeypatch, tmp_path, 3)
    if variable:
        monkeypatch.setenv(variable, "cores")
    calls: list[set[int]] = []
    _two_nodes(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*allowed})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: calls.append(cores))
    with near_device(torch.device("cuda", gpu), tmp_path):
        assert calls == ([] if bound is None else [bound])
    assert calls == ([] if bound is None else [bound, {*allowed}]), "the next job is free again"


def train_on_machines_that_differ(config: Config, worker: Worker) -> None:
    with mock.patch.object(accelerator, "kind_of", lambda _: f"a GPU of kind {worker.rank // 2}"):
        train(config, worker)


def opened_on_machines_that_differ(config: Config, worker: Worker, way: str) -> list[str]:
    """What a verification, a bench or an evaluation, or else a loop of one's own is told."""
    told: list[str] = []
    with (
        mock.patch.object(accelerator, "kind_of", lambda _: f"a GPU of kind {worker.rank // 2}"),
        warnings.catch_warnings(record=True) as warned,
    ):
        try:
            if way == "job":
                with connected(config, worker, say=told.append):
                    pass
            else:
                ranks = {"rank": worker.rank, "world_size": worker.world_size}
                dist.init_process_group("gloo", store=worker.store, **ranks)
                library.build(config)
        except Refused as refused:
            told.append(f"refused: {refused}")
    return told + [str(warning.message) for warning in warned]


@pytest.mark.parametrize("way", ["job", "library"])
def test_whoever_opens_a_mesh_is_told_that_hardware_differs(way: str, tmp_path: Path) -> None:
    config = tiny(dp=3, batch_size=6, layers=2)
    every = run_world(opened_on_machines_that_differ, config, tmp_path / "fast", way)
    assert "rank 0-1: a GPU of kind 0; rank 2: a GPU of kind 1; each step" in "".join(every[0])
    assert not any("a GPU of kind" in text for told in every[1:] for text in told)
    exact = replace(config, numerics=Numerics("exact"))
    for told in run_world(opened_on_machines_that_differ, exact, tmp_path / "exact", way):
        assert "refused: numerics=exact" in "".join(told), "not on all ranks"


def test_ranks_on_other_hardware_are_told_and_refused_with_exact_numerics(tmp_path: Path) -> None:
    config = tiny(dp=3, batch_size=6, steps=1, layers=2)
    run_world(train_on_machines_that_differ, config, tmp_path / "fast")
    (event,) = events(tmp_path / "fast", "unlike")
    assert "rank 0-1: a GPU of kind 0; rank 2: a GPU of kind 1" in event["text"]
    exact = replace(config, numerics=Numerics("exact"))
    with pytest.raises(RankError, match=r"rank 2: a GPU of kind 1; write numerics=fast"):
        run_world(train_on_machines_that_differ, exact, tmp_path / "exact")


def test_the_kind_of_a_gpu_names_what_its_bits_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, tmp_path, 1)
    gpu = SimpleNamespace(multi_processor_count=132)
    module = SimpleNamespace(
        get_device_properties=lambda _: gpu, get_device_name=lambda _: "NVIDIA H100"
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    found = accelerator.kind_of(torch.device("cuda", 0))
    assert found.startswith("NVIDIA H100 with 132 processors, torch ")
    assert ", driver 580.65.06, NCCL " in found and ", cuDNN " in found
