"""Where other processes were started than the mesh needs, the meshes that fit are named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config.schema import Config, Schedule
from titanlike.config.validate import placement_warning, problems

SMALL = st.integers(1, 12)


def named_in(fix: str) -> list[dict[str, int]]:
    meshes = re.findall(r"pp=\d+ dp=\d+(?: tp=\d+)?(?: replicate=\d+)?", fix)
    return [{key: int(n) for key, n in re.findall(r"(\w+)=(\d+)", mesh)} for mesh in meshes]


@settings(deadline=None, max_examples=50)
@given(
    pp=SMALL,
    dp=SMALL,
    tp=st.sampled_from([1, 1, 2, 3, 8]),
    each=SMALL,
    microbatches=st.none() | SMALL,
    replicate=SMALL,
    world_size=st.integers(2, 64),
)
def test_each_mesh_that_is_named_would_run_on_the_processes_that_are_there(
    pp: int, dp: int, tp: int, each: int, microbatches: int | None, replicate: int, world_size: int
) -> None:
    config = Config(
        pp=pp,
        dp=dp * replicate,
        tp=tp,
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
            named = replace(config, **mesh)
            assert named.world_size == world_size and tp % named.tp == 0
            assert problems(named, world_size) == []
        one = replace(config, pp=world_size, dp=1, tp=1, replicate=1)  # divides any batch
        assert meshes or problems(one, world_size)


def test_the_meshes_most_like_the_one_that_was_asked_for_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (problem,) = problems(Config(pp=2, dp=2), world_size=2)
    assert problem.reason == "pp x dp = 2 x 2 = 4 processes, but 2 were started"
    nodes = "start with --nproc-per-node 4 (times nodes)"
    assert problem.fix == f"pp=2 dp=1, or pp=1 dp=2; or {nodes}"
    (problem,) = problems(Config(pp=1, dp=4, replicate=4), world_size=2)
    assert problem.fix.startswith("pp=1 dp=2 replicate=2, or ")
    (problem,) = problems(Config(dp=4, replicate=4, batch_size=12), world_size=6)
    assert problem.fix.startswith("pp=1 dp=6 replicate=2, or ")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    (problem,) = problems(Config(dp=2), world_size=1)
    assert problem.fix.endswith(
        "or with launch.elastic=true, so that dp follows the number of ranks"
    )
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    (problem,) = problems(Config(pp=2, dp=2, batch_size=6), world_size=257)
    assert problem.fix == nodes, "neither 257 stages nor 6 sequences among 257 ranks"


def test_a_mesh_with_tensor_parallel_ranks_keeps_them_where_it_can() -> None:
    (problem,) = problems(Config(pp=2, dp=2, tp=2), world_size=4)
    assert problem.reason == "pp x dp x tp = 2 x 2 x 2 = 8 processes, but 4 were started"
    assert problem.fix.startswith("pp=2 dp=1, or pp=1 dp=2, or pp=2 dp=2 tp=1; or start with ")


@settings(deadline=None, max_examples=50)
@given(
    tp=st.sampled_from([2, 4, 6, 8, 16]),
    pp=SMALL,
    dp=SMALL,
    local=st.integers(1, 16),
    machines=st.integers(1, 8),
    each=SMALL,
)
def test_tensor_parallel_ranks_on_several_machines_are_a_warning_with_a_mesh_that_is_not(
    tp: int, pp: int, dp: int, local: int, machines: int, each: int
) -> None:
    config = Config(pp=pp, dp=dp, tp=tp, batch_size=dp * each)
    text = placement_warning(config, local)
    groups = [range(first, first + tp) for first in range(0, config.world_size, tp)]
    spans = any(group[0] // local != group[-1] // local for group in groups)
    assert bool(text) == spans
    for mesh in named_in(text):
        named = replace(config, **mesh)
        assert named.world_size == config.world_size and placement_warning(named, local) == ""
        assert problems(named, config.world_size) == []


def test_what_is_said_of_tensor_parallel_ranks_on_several_machines() -> None:
    assert placement_warning(Config(tp=16), 8) == (
        "tp=16 on machines of 8 ranks: the activations of every layer go over the network; "
        "pp=1 dp=2 tp=8 keeps them within a machine"
    )
    assert "pp=2 dp=1 tp=8 keeps" in placement_warning(Config(tp=16, batch_size=1), 8)
    assert placement_warning(Config(dp=4, tp=8), 8) == ""
