"""Actions of a schedule in words, for hang reports and profiles."""

from __future__ import annotations

import re

_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "UNSHARD": "all-gather of the parameters",
    "RESHARD": "resharding of the parameters",
    "REDUCE_GRAD": "gradient reduction",
    "WAIT_REDUCE_GRAD": "gradient reduction",
    "SEND_F": "sending activations",
    "RECV_F": "receiving activations",
    "SEND_B": "sending gradients",
    "RECV_B": "receiving gradients",
    "WAIT_SEND_F": "waiting for sent activations",
    "WAIT_SEND_B": "waiting for sent gradients",
}


def read_action(text: str) -> tuple[str, str, str] | None:
    """(words, stage, microbatch or "") of an action as torch writes it, 1F3; None if it is none."""
    match = re.fullmatch(r"([0-9]+)([A-Z_]+?)([0-9]*)", text)
    if match is None:
        return None
    stage, action, microbatch = match.groups()
    return _ACTIONS.get(action, action), stage, microbatch
