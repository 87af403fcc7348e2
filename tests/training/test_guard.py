"""Bad numbers: what counts as such, and what a run does: stop, skip the update, or roll back.

Whole runs are compared with a plain loop over one unsharded model that never saw the bad batches.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.bad_numbers import sample_of
from support.cells import GRID, slow
from support.models import tiny
from support.saved_tensors import saved
from support.world import RankError, run_world
from titanlike.config.schema import Checkpoint, Config, ConstantLr, Custom, Fsdp
from titanlike.data.loader import batches, open_data
from titanlike.metrics.sinks import read_jsonl
from titanlike.models.registry import build_model, initial_weights_of, resolve_model
from titanlike.optim.learning_rate import set_lr
from titanlike.optim.optimizer import build_optimizers
from titanlike.parallel.initialize import initialize
from titanlike.training.guard import MOST_IN_A_ROW, Guard
from titanlike.training.loop import MOST_ROLLBACKS
from titanlike.training.train import train

# --- what is a spike ---------------------------------------------------------------------------

NUMBERS = st.floats(1.0, 1.1)


def judge(guard: Guard, step: int, loss: float, grad_norm: float = 1.0):
    return guard.judge({"step": step, "loss": loss, "grad_norm": grad_norm}, lambda: "")


def watching(**changes) -> Config:
    return Config(on_spike="skip", spike_window=20, **changes)


def test_a_spike_is_far_above_the_last_steps_and_named_with_its_zscore() -> None:
    guard = Guard(watching(), {})
    for step in range(1, 10):
        assert judge(guard, step, 2.0 + 0.1 * (step % 2)) is None
    assert judge(guard, 10, 9.0) is None, "half of the window is not there yet"
    guard = Guard(watching(), {})
    for step in range(1, 21):
        assert judge(guard, step, 2.0 + 0.1 * (step % 2)) is None
    assert judge(guard, 21, 0.1) is None, "falling is no spike"
    for loss, norm, name in ((9.0, 1.0, "loss 9 is"), (2.0, 5.0, "grad_norm 5 is")):
        verdict = judge(guard, 22, loss, norm)
        assert verdict is not None and (verdict.kind, verdict.action) == ("spike", "skip")
        assert f"step 22: {name}" in verdict.text
        assert "standard deviations above" in verdict.text
        assert "mean of the last 20 good steps (spike_zscore=6)" in verdict.text
    assert judge(Guard(replace(watching(), on_spike="ignore"), guard.state()), 23, 9.0) is None


def test_after_steps_that_were_all_the_same_a_wiggle_is_no_spike() -> None:
    guard = Guard(watching(), {})
    for step in range(1, 30):
        assert judge(guard, step, 2.0) is None
    assert judge(guard, 30, 2.05) is None
    assert judge(guard, 31, 4.0) is not None


def test_a_level_that_stays_is_taken_in_after_so_many_spikes_in_a_row() -> None:
    guard = Guard(watching(), {})
    for step in range(1, 30):
        judge(guard, step, 2.0 + 0.1 * (step % 2))
    verdicts = [judge(guard, step, 8.0 + 0.1 * (step % 2)) for step in range(30, 100)]
    bad = [verdict is not None for verdict in verdicts]
    assert bad == [True] * (MOST_IN_A_ROW - 1) + [False] * (70 - MOST_IN_A_ROW + 1)
    assert "spike 9 in a row, 10 are taken as a new level" in verdicts[8].text
    assert judge(guard, 101, 20.0) is not None, "the new level is watched in turn"


@given(
    numbers=st.lists(st.tuples(NUMBERS | st.just(9.0), NUMBERS | st.just(9.0)), min_size=30),
    cut=st.integers(0, 30),
)
@settings(max_examples=50, deadline=None)
def test_a_resumed_run_judges_as_one_that_was_not_stopped(numbers, cut) -> None:
    """To the last bit: the state goes through a checkpoint's JSON."""
    whole, part = Guard(watching(), {}), Guard(watching(), {})
    for step, (loss, norm) in enumerate(numbers):
        if step == cut:
            part = Guard(watching(), json.loads(json.dumps(part.state())))
        assert judge(whole, step, loss, norm) == judge(part, step, loss, norm)
    assert whole.state() == part.state()


# --- whole runs --------------------------------------------------------------------------------


def touchy(pp: int = 1, dp: int = 1, schedule: str = "1f1b", **changes) -> Config:
    model = Custom("support.bad_numbers.Touchy", {"dim": 32, "layers": 4, "vocab_size": None})
    same = {"lr": ConstantLr(warmup=0), "checkpoint": Checkpoint(every=2, last=True)}
    config = tiny(pp, dp, schedule, model=model, steps=6, **(same | changes))
    return spoil(config)


def spoil(config: Config, **steps: list[int]) -> Config:
    """With bad samples in the batches that these steps read; poison=[3] for example."""
    spoils = {kind: [sample_of(config, step, 5) for step in at] for kind, at in steps.items()}
    return replace(config, data=Custom("support.bad_numbers.spoiled", spoils))


def plain_loop(config: Config, updates: dict[int, int]) -> dict[str, Tensor]:
    """Parameters after updates (step -> whose batch), by one process in plain torch."""
    config = replace(config, pp=1, dp=1)
    resolved = resolve_model(config)
    model = build_model(resolved)
    initialize(model, initial_weights_of(resolved, config.seed), torch.device("cpu"))
    (optimizer,) = build_optimizers(dict(model.named_parameters()), model, config)
    source = open_data(config).train
    for step, place in updates.items():
        batch = next(batches(source, config, dp_rank=0, start_step=place - 1))
        logits = model(batch["inputs"])
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        set_lr([optimizer], config, step)
        optimizer.step()
        optimizer.zero_grad()
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


def assert_same(run_dir: Path, truth: dict[str, Tensor]) -> None:
    """Parameters as in the truth, and no NaN anywhere in the checkpoint."""
    tensors = saved(run_dir)
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor.float()).all(), name
    for name, right in truth.items():
        assert torch.allclose(tensors[name], right, atol=2e-5), name


def records(run_dir: Path) -> list[dict]:
    return read_jsonl(run_dir / "metrics.jsonl")


def events(run_dir: Path, *kinds: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] in kinds]


LAYOUTS = {
    "one process": touchy(),
    "FSDP": touchy(1, 2),
    "FSDP, ZeRO 1": touchy(1, 2, fsdp=Fsdp(1)),
    "pipeline, ZeRO 2": touchy(2, 2, fsdp=Fsdp(2)),
    "zero bubble, ZeRO 1": touchy(2, 2, "interleavedzerobubble"),
    "zero bubble in a V": touchy(2, 1, "zbvzerobubble"),
}


QUICK = ("one process", "pipeline, ZeRO 2")
LEFT_OUT = ("FSDP", "zero bubble in a V")  # by .ci/run, too
OTHERS = [layout for layout in LAYOUTS if layout not in QUICK + LEFT_OUT]


@pytest.mark.parametrize("layout", [*QUICK, *slow(*OTHERS), *slow(*LEFT_OUT, marks=GRID)])
def test_a_skipped_step_leaves_no_trace_but_its_record(layout: str, tmp_path: Path) -> None:
    end = Checkpoint(every=0, last=True)
    config = replace(LAYOUTS[layout], on_nonfinite="skip", checkpoint=end)
    config = spoil(config, poison=[3])
    run_world(train, config, tmp_path)
    assert_same(tmp_path, plain_loop(config, {step: step for step in (1, 2, 4, 5, 6)}))
    assert [row["step"] for row in records(tmp_path)] == [1, 2, 3, 4, 5, 6]
    skipped = {row["step"]: row["skipped"] for row in records(tmp_path) if "skipped" in row}
    assert skipped == {3: "nonfinite"}
    assert math.isnan(records(tmp_path)[2]["loss"])
    (event,) = events(tmp_path, "nonfinite")
    assert (event["step"], event["action"]) == (3, "skip")
    assert "not finite on rank 0: gradient of " in event["text"]


@pytest.mark.parametrize("layout", ["one process", *slow("pipeline, ZeRO 2")])
def test_a_rollback_ends_where_a_run_without_those_batches_ends(layout, tmp_path: Path) -> None:
    """Also after the run was killed behind the rollback: bitwise as if it had not been."""
    config = replace(LAYOUTS[layout], on_nonfinite="rollback", steps=7)
    config = spoil(config, poison=[4], deadly=[9])  # step 7 after the rollback reads batch 9
    config.data.args["trap"] = str(tmp_path / "trap")
    run_world(train, config, tmp_path / "whole")
    truth = plain_loop(config, {1: 1, 2: 2, 3: 5, 4: 6, 5: 7, 6: 8})
    assert_same(tmp_path / "whole", truth)
    (event,) = events(tmp_path / "whole", "rollback")
    assert (event["step"], event["to"], event["left_out"]) == (4, 2, 2)

    (tmp_path / "trap").touch()
    with pytest.raises(RankError):
        run_world(train, config, tmp_path / "cut")
    (tmp_path / "trap").unlink()
    assert [row["step"] for row in records(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    run_world(train, config, tmp_path / "cut")
    for run in ("whole", "cut"):
        assert [row["step"] for row in records(tmp_path / run)] == [1, 2, 3, 4, 5, 6, 7]
    losses = [[row["loss"] for row in records(tmp_path / run)] for run in ("whole", "cut")]
    assert losses[0] == losses[1]
    cut = saved(tmp_path / "cut", 7)
    for name, tensor in saved(tmp_path / "whole", 7).items():
        assert torch.equal(tensor, cut[name]), name


@pytest.mark.slow
def test_a_spike_is_skipped_and_judged_alike_after_a_restart(tmp_path: Path) -> None:
    """The window is in the checkpoint: a run resumed from step 4 still has steps 1 to 4."""
    config = replace(touchy(2, 2), on_spike="skip", spike_window=8)
    config = spoil(config, loud=[5, 6])
    run_world(train, config, tmp_path / "whole")
    assert_same(tmp_path / "whole", plain_loop(config, {step: step for step in (1, 2, 3, 4)}))
    skipped = [row.get("skipped") for row in records(tmp_path / "whole")]
    assert skipped == [None] * 4 + ["spike"] * 2

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000006")
    run_world(train, config, tmp_path / "again")
    first, again = (events(tmp_path / run, "spike") for run in ("whole", "again"))
    assert [event["text"] for event in again] == [event["text"] for event in first + first]


def test_a_run_stops_with_the_rank_the_parameter_and_the_checkpoint_before(tmp_path: Path) -> None:
    expected = (
        r"BadNumbers: step 4: loss nan, grad_norm nan; not finite on rank 0: gradient of "
        r"\S+.*the last good checkpoint is \S+step-00000002"
    )
    with pytest.raises(RankError, match=expected):
        run_world(train, spoil(touchy(2, 1), poison=[4]), tmp_path)
    assert [row["step"] for row in records(tmp_path)] == [1, 2, 3]


def test_going_back_again_and_again_ends_with_an_error(tmp_path: Path) -> None:
    config = replace(touchy(), on_nonfinite="rollback", steps=20)
    with pytest.raises(RankError, match=f"after {MOST_ROLLBACKS} rollbacks"):
        run_world(train, spoil(config, poison=list(range(3, 40))), tmp_path / "rollback")
    assert len(events(tmp_path / "rollback", "rollback")) == MOST_ROLLBACKS
    with pytest.raises(RankError, match="there is no checkpoint to go back to"):
        run_world(train, spoil(config, poison=[1]), tmp_path / "none")


def test_skipping_step_after_step_ends_with_an_error(tmp_path: Path) -> None:
    config = replace(touchy(), on_nonfinite="skip", steps=20)
    with pytest.raises(RankError, match="step 10 in a row, so that skipping does not help"):
        run_world(train, spoil(config, poison=list(range(3, 20))), tmp_path)
