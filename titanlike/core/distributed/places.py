"""Where ranks are: host, device and NUMA node of each, for the opening table."""

from __future__ import annotations

import json
import re
import socket
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from titanlike.core.config.errors import Refused
from titanlike.core.config.schema import Config
from titanlike.core.device import accelerator
from titanlike.core.device.choose import SYS, allowed_cores, numa_nodes
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.worker import Worker

_MOST = 16  # hosts that are listed


class Place(NamedTuple):
    """The host, device and NUMA node of a rank."""

    host: str
    device: str  # "GPU 3" by the driver's number, or "cpu"
    numa: str  # NUMA node or nodes: "0", "0-1"; "" = not known
    kind: str = ""  # describes hardware and library versions


def compare_places(config: Config, device: torch.device, worker: Worker) -> tuple[str, str]:
    """(where the ranks are, how their hardware differs) in words, on rank 0; "" elsewhere, and
    where it does not. Collective. Raises Refused on all ranks if it does under numerics=exact."""
    if worker.world_size == 1:
        return "", ""
    timeout, here = config.launch.timeout, json.dumps(place_of(device))
    # by the store, as a gather would connect every rank to rank 0
    answers = barrier(worker, "places", timeout, here, listens=worker.rank == 0)
    places = [Place(*json.loads(answers[rank])) for rank in sorted(answers)]
    unlike = unlike_text(places)
    told = {0: unlike}
    if config.exact:
        told = barrier(worker, "places/compared", timeout, unlike, listens=True)
    reason = f"ranks compute other bits on other hardware or libraries: {told.get(0, '')}"
    if config.exact and told:
        raise Refused("numerics", "exact", reason, "numerics=fast, or machines alike")
    slow = f"{reason}; each step is as slow as the slowest of them"
    return places_text(places), slow if unlike else ""


def place_of(device: torch.device, sys: Path = SYS) -> Place:
    """This process's place; sys: Linux' folder that describes the machine."""
    host, kind = socket.gethostname(), accelerator.kind_of(device)
    if not accelerator.is_accelerator(device):
        nodes = _spans([f"{node}" for node in numa_nodes(sys, allowed_cores())])
        return Place(host, device.type, nodes, kind)
    shown = dict(enumerate(accelerator.visible_names())).get(device.index or 0, device.index)
    return Place(host, f"GPU {shown}", _node_of_gpu(device, sys), kind)


def _node_of_gpu(device: torch.device, sys: Path) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    if -1 in parts:
        return ""
    path = sys / "bus/pci/devices" / "{:04x}:{:02x}:{:02x}.0".format(*parts) / "numa_node"
    node = path.read_text().strip() if path.is_file() else "-1"
    return "" if node == "-1" else node  # -1: the machine has one, or does not say


def unlike_text(places: list[Place]) -> str:
    """Name ranks whose hardware or library versions differ from the others'; "" = none do."""
    ranks: dict[str, list[str]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.kind, []).append(f"{rank}")
    texts = [f"rank {_spans(alike)}: {kind}" for kind, alike in ranks.items()]
    return "; ".join(texts) if len(texts) > 1 else ""


def places_text(places: list[Place]) -> str:
    """ "0-3 on node1: GPU 0-3, NUMA 0; 4-7 on node1: GPU 4-7, NUMA 1" """
    texts = []
    for (host, numa), group in groupby(
        enumerate(places), lambda item: (item[1].host, item[1].numa)
    ):
        members = list(group)
        devices = _spans(list(dict.fromkeys(place.device for _, place in members)))
        node = f", NUMA {numa}" if numa else ""
        texts.append(f"{_spans([str(rank) for rank, _ in members])} on {host}: {devices}{node}")
    more = [f"and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    return "; ".join(texts[:_MOST] + more)


def _spans(names: list[str]) -> str:
    """Join names with consecutive numbers: "GPU 0-3", "0-1, 4"."""
    spans: list[tuple[str, str, str]] = []  # (word, first number, last number)
    for name in names:
        word, number = re.fullmatch(r"(.*?)(\d*)", name).groups()  # type: ignore[union-attr]
        if number and spans and spans[-1][0] == word and int(spans[-1][2]) + 1 == int(number):
            spans[-1] = (word, spans[-1][1], number)
        else:
            spans.append((word, number, number))
    texts = [
        f"{word}{first}-{last}" if first != last else word + first for word, first, last in spans
    ]
    return ", ".join(texts)
