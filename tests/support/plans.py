"""Plans of command lines."""

from __future__ import annotations

from support.command_lines import examined
from titanlike.planning.estimate import Estimate, make_estimate
from titanlike.planning.known_hardware import planned_hardware


def planned(*words: str) -> Estimate:
    checked = examined(*words)
    assert checked.config is not None and not checked.problems, checked.problems
    return make_estimate(checked.config, planned_hardware(checked.config))
