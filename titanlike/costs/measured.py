"""`hardware=measure`: this machine's own profile, and the times of a model's units on it.

Both are measured by as many processes at once as a run would have here, each with its share of the
cores, and kept as YAML in a folder: a hardware choice that can be given to others, and times by what
the units compute.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from titanlike.config import files
from titanlike.config.errors import ConfigError, Problem
from titanlike.config.hardware import Hardware, MeasuredHardware
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config
from titanlike.costs.known_hardware import likely_hardware, shipped
from titanlike.device.accelerator import count
from titanlike.launch.environment import available_cores
from titanlike.training.draft import Draft

_FOLDER = "~/.cache/titanlike/hardware"
_TIMEOUT = 300  # seconds

Times = Sequence[float]  # forward, backward, weight gradients that wait of a unit


def measured_hardware(config: Config, ranks: int) -> Hardware:
    """The kept profile of this machine with so many ranks, or a new one. Raises ConfigError."""
    settings = config.hardware
    assert isinstance(settings, MeasuredHardware)
    ranks = _at_once(ranks)
    path = _folder(settings) / f"{platform.node() or 'machine'}-{ranks}-ranks.yaml"
    base = likely_hardware(replace(config, hardware=shipped("cpu") if not count() else settings))
    if path.is_file() and not settings.again:
        kept = yaml.safe_load(path.read_text(encoding="utf-8"))
        return replace(base, **{k: v for k, v in kept.items() if k in vars(base)})
    print(f"measuring this machine with {ranks} processes ...", file=sys.stderr, flush=True)
    numbers: dict[str, Any] = {**_median(_measure(config, "hardware", ranks))}
    hardware = replace(base, title=f"{platform.node()} ({ranks} ranks)", **numbers)
    _write(path, "This machine, measured.", to_plain(hardware))
    print(f"kept in {path}", file=sys.stderr, flush=True)
    return hardware


def measured_times(config: Config, draft: Draft, deferred: Collection[int]) -> list[Times]:
    """Of each unit of a draft in its microbatches, on this machine; kept, too. Raises ConfigError.

    deferred: stages whose weight gradients wait.
    """
    settings, costs = config.hardware, draft.memory().unit_costs
    assert isinstance(settings, MeasuredHardware) and costs is not None
    ranks = _at_once(config.world_size)
    path = _folder(settings) / "units" / f"{costs.signature}-{platform.node()}-{ranks}-ranks.yaml"
    if path.is_file() and not settings.again:
        kept = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _of_stages(kept, draft.stages, deferred)
    print("measuring the model's units ...", file=sys.stderr, flush=True)
    found = _measure(config, "units", ranks)
    units: dict[str, list[Sequence[float]]] = {
        name: [
            [statistics.median(part) for part in zip(*unit, strict=True)]
            for unit in zip(*(one[name] for one in found), strict=True)
        ]
        for name in found[0]
    }
    _write(path, "Seconds of a model's units: forward, backward, weight gradients.", units)
    return _of_stages(units, draft.stages, deferred)


def _of_stages(
    profiles: dict[str, list[Times]], stages: Sequence[Sequence[str]], deferred: Collection[int]
) -> list[Times]:
    found: list[Times] = []
    for stage, names in enumerate(stages):
        profile = profiles["deferred" if stage in deferred else "together"]
        found += profile[len(found) : len(found) + len(names)]
    return found


def _folder(settings: MeasuredHardware) -> Path:
    return Path(settings.folder or _FOLDER).expanduser()


def _at_once(ranks: int) -> int:
    """Processes of a run of so many ranks that would be here at once."""
    return max(1, min(ranks, count() or available_cores()))


def _write(path: Path, comment: str, plain: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(plain, sort_keys=False)
    files.atomic_write_text(path, f"# {comment}\n{text}")


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _measure(config: Config, what: str, ranks: int) -> list[Any]:
    """What each of so many processes finds. Raises ConfigError where one fails."""
    threads = max(1, available_cores() // ranks)
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.json"
        plain = to_plain(config)
        spec.write_text(json.dumps({"what": what, "ranks": ranks, "config": plain}))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        command = [sys.executable, "-m", "titanlike.costs.measuring", str(spec)]
        started = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=_TIMEOUT)[1] for process in started]
        except subprocess.TimeoutExpired:
            errors = [b"it took more than 5 minutes"]
        finally:
            for process in started:
                process.kill()
        results = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        if not all(result.is_file() for result in results):
            lines = b"".join(errors).decode(errors="replace").strip().splitlines() or ["it ended"]
            reason = f"measuring failed: {lines[-1]}"
            fix = "hardware=cpu, or another profile"
            raise ConfigError([Problem("hardware", "measure", reason, fix)])
        return [json.loads(result.read_text()) for result in results]
