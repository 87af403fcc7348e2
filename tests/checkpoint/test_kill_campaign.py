"""Whatever kills a run, and whenever: the same command goes on as if nothing had been.

What is checked after each kill is in campaign.py, which can also be run by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.campaign import campaign
from support.killed_runs import EVERY


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "async_process"])
def test_a_run_that_is_killed_while_it_saves_loses_nothing(mode: str, tmp_path: Path) -> None:
    places = ("in a save", "before the commit", "half removed")
    only = {"modes": (mode,), "restarts": 0}
    tally = campaign(tmp_path, 3, 0, {"one": 1}, places=places, **only)
    assert tally.runs == 1 and {place for place, _ in tally.kills} == set(places)
    assert max(tally.lost[mode]) <= 2 * EVERY


@pytest.mark.slow
@pytest.mark.grid
def test_a_hundred_kills_at_random_lose_nothing(tmp_path: Path) -> None:
    tally = campaign(tmp_path, 100, 0)
    print(tally.table())
    assert tally.count() == 100
    assert tally.leftovers  # some have hit a save or a removal
