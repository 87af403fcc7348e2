"""What tests read of a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from support.records import numbers
from titanlike.core.config.parse import parse
from titanlike.core.config.schema import Config


def config_of(run_dir: Path) -> Config:
    """The config in config.yaml."""
    plain = yaml.safe_load((run_dir / "config.yaml").read_text())
    config, problems = parse({key: plain[key] for key in plain if key not in ("defaults", "hydra")})
    assert problems == []
    return config


def last_step(run_dir: Path) -> int:
    """The last step in metrics.jsonl, 0 without one."""
    path = run_dir / "metrics.jsonl"
    return numbers(run_dir)[-1][0] if path.exists() and numbers(run_dir) else 0


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())
