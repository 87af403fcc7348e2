"""The waits job: where the host waits for the device in a step, which leaves the device idle.

torch reports it for CUDA (`set_sync_debug_mode`): copies to the host and `.item()`, not events. A
CPU has no such waits; the same steps run there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from benchmarks.speed.bench import WARMUP, titanlike_loop
from benchmarks.speed.host_waits import waits_by_place
from titanlike.core.config import files
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.training.build import build
from titanlike.core.training.session import connected, open_data_on_every_rank

STEPS = 4  # measured, unless the command line has steps=


def waits(config: Config, worker: Worker) -> dict[str, Any]:
    """Count and print; return {"value": waits per step of the rank with most; None on a CPU}."""
    given = any(text.startswith("steps=") for text in worker.overrides)
    counted = config.steps if given else STEPS
    config = replace(config, steps=1 + WARMUP + counted)
    data = open_data_on_every_rank(config, worker)
    with connected(config, worker) as mesh:
        run = build(config, mesh, data)
        loop = titanlike_loop(run, config, data, worker)
        for _ in range(1 + WARMUP):
            next(loop)
        with waits_by_place(mesh.device) as places:
            for _ in range(counted):
                next(loop)
        ranks: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(ranks, (places, run.compiled.broken if run.compiled else {}))
    busiest = max((places for places, _ in ranks), key=lambda places: sum((places or {}).values()))
    broken = {name: why for _, blocks in ranks for name, why in blocks.items()}
    value = None if busiest is None else sum(busiest.values()) / counted
    result = {"value": value, "places": busiest, "not_compiled_as_a_whole": broken}
    if worker.rank == 0:
        rows = [(place, f"{n / counted:g}") for place, n in (busiest or {}).items()]
        none = "none" if busiest is not None else "a CPU has none to count"
        Console(steps=1).table("waits of the host a step", (), rows or [("waits", none)])
        files.atomic_write_text(worker.run_dir / "waits.json", json.dumps(result, indent=1))
    return result
