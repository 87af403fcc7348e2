"""Plans of command lines."""

from __future__ import annotations

import pytest

from support.command_lines import examined
from titanlike.planning.estimate import Estimate, make_estimate
from titanlike.planning.known_hardware import planned_hardware
from titanlike.run import tools


def plan(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    """`tools/plan.py`: its exit code, what it prints, and its errors."""
    code = tools.plan([*words])
    return code, *capsys.readouterr()


def planned(*words: str) -> Estimate:
    checked = examined(*words)
    assert checked.config is not None and not checked.problems, checked.problems
    return make_estimate(checked.config, planned_hardware(checked.config))
