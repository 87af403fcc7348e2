"""Where other processes were started than the mesh needs, the meshes that fit are named."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from titanlike.config.schema import Config, Schedule
from titanlike.config.validate import problems

SMALL = st.integers(1, 12)


def named_in(fix: str) -> list[dict[str, int]]:
    meshes = re.findall(r"pp=\d+ dp=\d+(?: replicate=\d+)?", fix)
    return [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", mesh)} for mesh in meshes]


@given(
    pp=SMALL,
    dp=SMALL,
    each=SMALL,
    microbatches=st.none() | SMALL,
    replicate=SMALL,
    world_size=st.integers(2, 64),
)
def test_each_mesh_that_is_named_would_run_on_the_processes_that_are_there(
    pp: int, dp: int, each: int, microbatches: int | None, replicate: int, world_size: int
) -> None:
    config = Config(
        pp=pp,
        dp=dp * replicate,
        replicate=replicate,
        batch_size=dp * replicate * each * (microbatches or 1),
        schedule=Schedule(microbatches=microbatches),
    )
    assert problems(config) == []
    found = problems(config, world_size)
    assert bool(found) == (config.world_size != world_size)
    for problem in found:
        meshes = named_in(problem.fix)
        assert len(meshes) <= 3
        for mesh in meshes:
            assert mesh["pp"] * mesh["dp"] == world_size
            assert problems(replace(config, **mesh), world_size) == []
        one = replace(config, pp=world_size, dp=1, replicate=1)  # divides any batch
        assert meshes or problems(one, world_size)


def test_the_meshes_most_like_the_one_that_was_asked_for_come_first() -> None:
    (problem,) = problems(Config(pp=2, dp=2), world_size=2)
    assert problem.reason == "pp x dp = 2 x 2 = 4 processes, but 2 were started"
    nodes = "start with --nproc-per-node 4 (times nodes)"
    assert problem.fix == f"pp=2 dp=1, or pp=1 dp=2; or {nodes}"
    (problem,) = problems(Config(pp=1, dp=4, replicate=4), world_size=2)
    assert problem.fix.startswith("pp=1 dp=2 replicate=2, or ")
    (problem,) = problems(Config(pp=2, dp=2, batch_size=6), world_size=257)
    assert problem.fix == nodes, "neither 257 stages nor 6 sequences among 257 ranks"
