"""Plans of command lines."""

from __future__ import annotations

from support.command_lines import examined
from titanlike.costs.known_hardware import planned_hardware
from titanlike.costs.plan import Plan, make_plan


def planned(*words: str) -> Plan:
    checked = examined(*words)
    assert checked.config is not None and not checked.problems, checked.problems
    return make_plan(checked.config, planned_hardware(checked.config))
