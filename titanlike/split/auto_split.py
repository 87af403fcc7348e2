"""`split=auto`: stages by what the units cost, and where measured times come from.

Every rank of a run must find the same stages. Parameters, FLOPs and memory are counted by each of
them, with the same numbers. Time is measured by one rank, which tells the others, and kept in
run_dir/split.json: a run that goes on has the stages it had, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.files import atomic_write_text
from titanlike.config.schema import AutoSplit, Config, EvenSplit
from titanlike.graph.unit import Unit
from titanlike.parallel.mesh import Mesh
from titanlike.pipeline.order import Order
from titanlike.split.best_split import CostedSplit, best_split, cost_of_split
from titanlike.split.partition import partition
from titanlike.split.stage_costs import StageCosts
from titanlike.split.unit_costs import CostError, UnitCosts, memory_costs

MeasureTimes = Callable[[UnitCosts], list[int]]  # nanoseconds of each unit
TIMES_FILE = "split.json"


@dataclass(frozen=True)
class AutoSplitResult:
    """What was chosen, and what `even` would have given."""

    cost: str  # what was made even: params, flops, time or memory
    chosen: CostedSplit
    even: CostedSplit
    scale: int  # of the costs in both

    def stages(self, units: list[Unit]) -> list[list[str]]:
        """Names of the units of each stage."""
        names = [unit.name for unit in units]
        return [names[start:stop] for start, stop in pairwise([*self.chosen.starts, len(names)])]


def find_auto_split(
    config: Config,
    profile: UnitCosts,
    units: list[Unit],
    order: Order,
    zero: int,
    timing: MeasureTimes | None,
) -> AutoSplitResult:
    """The best split by `split.cost`; without `timing` FLOPs stand for times.

    Raises ConfigError where a unit's cost cannot be found.
    """
    assert isinstance(config.split, AutoSplit)
    cost = config.split.cost
    if cost == "time" and timing is None:
        cost = "flops"
    try:
        costs = _costs(cost, config, profile, order, zero, timing)
    except CostError as error:
        others = {"params": "split=even", "time": "split.cost=flops"}
        fix = others.get(config.split.cost, "split.cost=params")
        problem = Problem("split.cost", config.split.cost, str(error), fix)
        raise ConfigError([problem]) from error
    starts, position = [], 0
    for part in partition(units, EvenSplit(), order.stages):
        starts.append(position)
        position += len(part)
    chosen = best_split(costs, order.place)
    return AutoSplitResult(cost, chosen, cost_of_split(costs, order.place, starts), costs.scale)


def _costs(
    cost: str,
    config: Config,
    profile: UnitCosts,
    order: Order,
    zero: int,
    timing: MeasureTimes | None,
) -> StageCosts:
    once = [1] * order.stages
    nothing = profile.held(lambda _: 0)
    match cost:
        case "params":
            return StageCosts(profile.held(lambda p: p.numel()), [0] * (len(nothing) - 1), once)
        case "memory":
            return memory_costs(profile, config, order, zero)
        case "time":
            assert timing is not None
            return StageCosts(nothing, timing(profile), once)
        case _:
            return StageCosts(nothing, profile.flops(), once)


def measured_times(config: Config, mesh: Mesh, profile: UnitCosts) -> list[int]:
    """Nanoseconds of each unit, measured by rank 0 or kept from before. Collective.

    Raises CostError on every rank.
    """
    answer: list[list[int] | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_kept_or_measured(config, mesh.device, profile)]
        except Exception as error:  # the other ranks wait
            answer = [f"{error}"]
    if mesh.world_size > 1:
        dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    (found,) = answer
    if not isinstance(found, list):
        raise CostError(str(found))
    return found


def _kept_or_measured(config: Config, device: torch.device, profile: UnitCosts) -> list[int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    key = {"device": name, "calls": profile.signature}
    path = Path(config.run_dir) / TIMES_FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if {name: kept[name] for name in key} == key:
            return [int(time) for time in kept["nanoseconds"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, or of another program
    times = profile.nanoseconds(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    atomic_write_text(path, json.dumps({**key, "nanoseconds": times}) + "\n")
    return times
