"""A layout proven by the verify job, on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.world import run_world
from titanlike.core.config.schema import Config
from titanlike.proof.verify import verify


def assert_proven(config: Config, folder: Path, timeout: float = 60) -> None:
    # in this precision alone: tables of layouts have fp32 as another cell
    config = replace(config, verify=replace(config.verify, as_is=True))
    results = run_world(verify, config, folder, timeout=timeout)
    assert {result["exit_code"] for result in results} == {0}, (folder / "rank0.out").read_text()
