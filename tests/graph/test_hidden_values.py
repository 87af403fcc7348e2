"""A tensor that a block stores for a later one is found before the run, by name."""

from __future__ import annotations

import pytest

from support.models import tiny
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.training.preflight import preflight


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("inputs_in_a_dict", "its blocks.3 reads a tensor of tokens"),
        ("inner_values_in_a_dict", "its blocks.3 reads a tensor of blocks.0"),
        ("values_without_gradient", "its blocks.3 reads a tensor of blocks.0"),
        ("attribute_of_a_hook", "its blocks.3 reads a tensor of blocks.0"),
        ("returned_at_once", "its blocks.3 reads a tensor of blocks.0"),
        ("StoredByTheForward", "its blocks.3 reads a tensor of the model's own forward"),
        ("InnerOutput", "a tensor that is computed inside of blocks.0"),
    ],
)
def test_stash_and_pop_between_blocks_is_refused_by_name(name: str, reason: str) -> None:
    (problem,) = preflight(tiny(pp=2, model=Custom(f"support.stashed.{name}")))
    assert reason in problem.reason
    assert "returns it" in problem.fix
