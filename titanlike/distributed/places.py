"""Where ranks are: host, device and NUMA node of each, for the opening table."""

from __future__ import annotations

import json
import re
import socket
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from titanlike.device import accelerator
from titanlike.device.numa import SYS, node_of_gpu, nodes_of_cores
from titanlike.launch.rendezvous import barrier
from titanlike.launch.worker import Worker

_MOST = 16  # hosts that are listed


class Place(NamedTuple):
    """Where a rank is."""

    host: str
    device: str  # "GPU 3" by the number that its driver gives it, or "cpu"
    numa: str  # the node, or the nodes: "0", "0-1"; "" = not known
    kind: str = ""  # of hardware and libraries


def gather_places(device: torch.device, worker: Worker, timeout: float) -> list[Place]:
    """Of all ranks, on rank 0; elsewhere an empty list. Collective; once in a job. Through the
    store: a gather would connect every rank to rank 0."""
    mine = json.dumps(place_of(device))
    told = barrier(worker, "places", timeout, mine, listens=worker.rank == 0)
    return [Place(*json.loads(told[rank])) for rank in sorted(told)]


def place_of(device: torch.device, sys: Path = SYS) -> Place:
    """This process's; sys: where Linux describes the machine."""
    host, kind = socket.gethostname(), accelerator.kind_of(device)
    if not accelerator.is_accelerator(device):
        nodes = [f"{node}" for node in nodes_of_cores(sys)]
        return Place(host, device.type, _spans(nodes), kind)
    shown = dict(enumerate(accelerator.visible_names())).get(device.index or 0, device.index)
    return Place(host, f"GPU {shown}", node_of_gpu(_pci_bus(device), sys), kind)


def _pci_bus(device: torch.device) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return "" if -1 in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def unlike_text(places: list[Place]) -> str:
    """Which ranks have other hardware or libraries than others; "" = none."""
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
        found = list(group)
        devices = _spans(list(dict.fromkeys(place.device for _, place in found)))
        node = f", NUMA {numa}" if numa else ""
        texts.append(f"{_spans([str(rank) for rank, _ in found])} on {host}: {devices}{node}")
    more = [f"and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    return "; ".join(texts[:_MOST] + more)


def _spans(names: list[str]) -> str:
    """Names whose numbers follow each other as one: "GPU 0-3", "0-1, 4"."""
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
