"""Bad numbers: what counts as such, and what a run does: stop, skip the update, or roll back.

Whole runs are compared with a plain loop over one unsharded model that never saw the bad batches.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.bad_numbers import sample_of
from support.cells import cells, slow
from support.models import tiny
from support.saved_runs import events, train_all
from support.saved_tensors import saved
from support.world import RankError, run_world
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.jobs import Checkpoint, Validation
from titanlike.core.config.groups.optimization import ConstantLr
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.core.distributed.initialize import initialize
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.models.registry import build_model, initial_weights_of, resolve_model
from titanlike.core.optim.optimizer import build_optimizers, set_lr
from titanlike.core.training import anomalies as guard_module
from titanlike.core.training.anomalies import MOST_IN_A_ROW, AnomalyDetector, is_bad
from titanlike.core.training.loop import MOST_ROLLBACKS, train
from titanlike.proof.verify import verify

# --- what is a spike ---------------------------------------------------------------------------

NUMBERS = st.floats(1.0, 1.1)


def classify(detector: AnomalyDetector, step: int, loss: float, grad_norm: float = 1.0):
    return detector.classify({"step": step, "loss": loss, "grad_norm": grad_norm}, lambda: "")


def watching(**changes) -> Config:
    return Config(on_spike="skip", spike_window=20, **changes)


def settled(steps: int = 20) -> AnomalyDetector:
    """A detector that has seen so many good steps: losses of 2.0 and 2.1, a norm of 1."""
    detector = AnomalyDetector(watching(), {})
    for step in range(1, steps + 1):
        assert classify(detector, step, 2.0 + 0.1 * (step % 2)) is None
    return detector


def test_a_spike_is_far_above_the_last_steps_and_named_with_its_zscore() -> None:
    assert classify(settled(9), 10, 9.0) is None, "half of the window is not there yet"
    detector = settled()
    assert classify(detector, 21, 0.1) is None, "falling is no spike"
    for loss, norm, name in ((9.0, 1.0, "loss 9 is"), (2.0, 5.0, "grad_norm 5 is")):
        anomaly = classify(detector, 22, loss, norm)
        assert anomaly is not None and (anomaly.kind, anomaly.action) == ("spike", "skip")
        assert f"step 22: {name}" in anomaly.text
        assert "standard deviations above" in anomaly.text
        assert "mean of the last 20 good steps (spike_zscore=6)" in anomaly.text
    assert (
        classify(AnomalyDetector(replace(watching(), on_spike="ignore"), detector.state()), 23, 9.0)
        is None
    )


def test_a_small_change_after_constant_losses_is_not_a_spike() -> None:
    detector = AnomalyDetector(watching(), {})
    for step in range(1, 30):
        assert classify(detector, step, 2.0) is None
    assert classify(detector, 30, 2.05) is None
    assert classify(detector, 31, 4.0) is not None


def test_a_lasting_new_level_stops_being_a_spike() -> None:
    detector = settled()
    anomalies = [classify(detector, step, 8.0 + 0.1 * (step % 2)) for step in range(30, 100)]
    bad = [anomaly is not None for anomaly in anomalies]
    assert bad == [True] * (MOST_IN_A_ROW - 1) + [False] * (70 - MOST_IN_A_ROW + 1)
    assert "spike 9 in a row, 10 are taken as a new level" in anomalies[8].text
    assert classify(detector, 101, 20.0) is not None, "the new level is watched in turn"


@given(
    numbers=st.lists(st.tuples(NUMBERS | st.just(9.0), NUMBERS | st.just(9.0)), min_size=30),
    cut=st.integers(0, 30),
)
@settings(max_examples=20)
def test_a_resumed_run_detects_the_same_spikes(numbers, cut) -> None:
    """To the last bit: the state goes through a checkpoint's JSON."""
    whole, part = AnomalyDetector(watching(), {}), AnomalyDetector(watching(), {})
    for step, (loss, norm) in enumerate(numbers):
        if step == cut:
            part = AnomalyDetector(watching(), json.loads(json.dumps(part.state())))
        assert classify(whole, step, loss, norm) == classify(part, step, loss, norm)
    assert whole.state() == part.state()


@pytest.mark.parametrize(
    ("loss", "norm", "kind"),
    [
        (2.0, 1.0, None),
        (math.nan, 1.0, "nonfinite"),
        (-math.inf, 1.0, "nonfinite"),
        (2.0, math.nan, "nonfinite"),  # as where one rank of many has a bad gradient
        (2.0, math.inf, "nonfinite"),
        (9.0, 1.0, "spike"),
        (2.0, 9.0, "spike"),
    ],
)
def test_the_device_skips_the_steps_that_the_host_reports(
    loss: float, norm: float, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ranks the last two have gradients that are not finite, where any number is not."""

    def gather(found: list[str], mine: str) -> None:
        found[:] = [mine, "wq", "wk"]

    ranks = SimpleNamespace(get_world_size=lambda: 3, all_gather_object=gather)
    monkeypatch.setattr(guard_module, "dist", ranks)
    detector = settled()
    assert bool(is_bad(torch.tensor(loss), torch.tensor(norm), detector.limits())) == bool(kind)
    anomaly = classify(detector, 21, loss, norm)
    assert (anomaly and anomaly.kind) == kind
    if kind == "nonfinite":
        assert "not finite on rank 1: gradient of wq; rank 2: gradient of wk" in anomaly.text


# --- whole runs --------------------------------------------------------------------------------


def touchy(pp: int = 1, dp: int = 1, schedule: str = "1f1b", **changes) -> Config:
    """6 steps, of which each has another learning rate."""
    model = Custom("support.bad_numbers.Touchy", {"dim": 32, "layers": 4, "vocab_size": None})
    same = {"lr": ConstantLr(warmup=10), "checkpoint": Checkpoint(every=2, last=True)}
    config = tiny(pp=pp, dp=dp, schedule=schedule, model=model, steps=6, **(same | changes))
    return spoil(config)


def spoil(config: Config, **steps: list[int]) -> Config:
    """With bad samples in the batches that these steps read; poison=[3] for example."""
    spoils = {kind: [sample_of(config, step, 5) for step in at] for kind, at in steps.items()}
    name = config.data.name if isinstance(config.data, Custom) else "support.bad_numbers.spoiled"
    return replace(config, data=Custom(name, spoils))


def plain_loop(config: Config, updates: dict[int, int]) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after updates (step -> whose batch), and the norm of all gradients in each, by one
    process in plain torch."""
    config = replace(config, pp=1, dp=1)
    resolved = resolve_model(config)
    model = build_model(resolved)
    initialize(model, initial_weights_of(resolved, config.seed), torch.device("cpu"))
    (optimizer,) = build_optimizers(dict(model.named_parameters()), model, config)
    source, norms = open_data(config).train, []
    for step, place in updates.items():
        batch = next(batches(source, config, dp_rank=0, start_step=place - 1))
        logits = model(batch["inputs"])
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        norms.append(norm.item())
        set_lr([optimizer], config, step)
        optimizer.step()
        optimizer.zero_grad()
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}, norms


def assert_same(run_dir: Path, config: Config, updates: dict[int, int]) -> None:
    """Parameters and norms are those of the plain loop; no NaN anywhere in the checkpoint."""
    truth, norms = plain_loop(config, updates)
    tensors = saved(run_dir)
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor.float()).all(), name
    for name, right in truth.items():
        assert torch.allclose(tensors[name], right, atol=2e-5), name
    found = [row["grad_norm"] for row in records(run_dir) if row["step"] in updates]
    assert found == pytest.approx(norms, rel=1e-4)


def records(run_dir: Path) -> list[dict]:
    return read_jsonl(run_dir / "metrics.jsonl")


def steps_of(run_dir: Path) -> list[int]:
    return [row["step"] for row in records(run_dir)]


SHARDED = touchy(2, 2, fsdp=Fsdp(2))
MORE_LAYOUTS = {
    "zero bubble, ZeRO 1": touchy(2, 2, "interleavedzerobubble"),
    "zero bubble in a V": touchy(2, 1, "zbvzerobubble"),
}


@pytest.mark.parametrize("config", cells({"pipeline, ZeRO 2": SHARDED}, MORE_LAYOUTS))
def test_a_skipped_step_leaves_no_trace_but_its_record(config: Config, tmp_path: Path) -> None:
    end = Checkpoint(every=0, last=True)
    config = spoil(replace(config, on_nonfinite="skip", checkpoint=end), poison=[3])
    run_world(train, config, tmp_path)
    assert_same(tmp_path, config, {step: step for step in (1, 2, 4, 5, 6)})
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    skipped = {row["step"]: row["skipped"] for row in records(tmp_path) if "skipped" in row}
    assert skipped == {3: "nonfinite"}
    assert math.isnan(records(tmp_path)[2]["loss"])
    (event,) = events(tmp_path, "nonfinite")
    assert (event["step"], event["action"]) == (3, "skip")
    assert "not finite on rank 0: gradient of " in event["text"]


STREAMED = touchy(data=Custom("support.bad_numbers.spoiled_stream"))


@pytest.mark.parametrize(
    "config",
    [touchy(), STREAMED, *slow(SHARDED)],
    ids=["one process", "a stream", "ZeRO 2"],
)
def test_a_rollback_matches_a_run_without_those_batches(config: Config, tmp_path: Path) -> None:
    """After two rollbacks, and also after the run was killed behind them: bitwise as if not."""
    config = replace(config, on_nonfinite="rollback", steps=7)
    config = spoil(config, poison=[4, 7], deadly=[10])  # step 7 then reads batch 10
    config.data.args["trap"] = str(tmp_path / "trap")
    run_world(train, config, tmp_path / "whole")
    assert_same(tmp_path / "whole", config, {1: 1, 2: 2, 3: 5, 4: 6, 5: 8, 6: 9})
    found = events(tmp_path / "whole", "rollback")
    assert [(e["step"], e["to"], e["left_out"]) for e in found] == [(4, 2, 2), (5, 4, 1)]

    (tmp_path / "trap").touch()
    with pytest.raises(RankError):
        run_world(train, config, tmp_path / "cut")
    (tmp_path / "trap").unlink()
    assert steps_of(tmp_path / "cut") == [1, 2, 3, 4, 5, 6]
    run_world(train, config, tmp_path / "cut")
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "cut") == [1, 2, 3, 4, 5, 6, 7]
    losses = [[row["loss"] for row in records(tmp_path / run)] for run in ("whole", "cut")]
    assert losses[0] == losses[1]
    cut = saved(tmp_path / "cut", 7)
    for name, tensor in saved(tmp_path / "whole", 7).items():
        assert torch.equal(tensor, cut[name]), name


def test_a_spike_is_skipped_alike_after_a_restart(tmp_path: Path) -> None:
    """The window is in the checkpoint: a run resumed from step 4 still has steps 1 to 4."""
    config = spoil(replace(touchy(), on_spike="skip", spike_window=8), loud=[5, 6])
    run_world(train, config, tmp_path / "whole")
    assert_same(tmp_path / "whole", config, {step: step for step in (1, 2, 3, 4)})
    skipped = [row.get("skipped") for row in records(tmp_path / "whole")]
    assert skipped == [None] * 4 + ["spike"] * 2

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000006")
    run_world(train, config, tmp_path / "again")
    first, again = (events(tmp_path / run, "spike") for run in ("whole", "again"))
    assert [event["text"] for event in again] == [event["text"] for event in first + first]


def test_a_run_stops_with_what_was_bad_and_the_checkpoint_before(tmp_path: Path) -> None:
    """At once, or where going back, and skipping, again and again does not help."""

    def run(name: str, how: str, *steps: int) -> Config:
        config = replace(touchy(), on_nonfinite=how, steps=20, run_dir=str(tmp_path / name))
        return spoil(config, poison=[*steps])

    stop, back, nowhere, skipping = train_all(
        run("stop", "stop", 4),
        run("rollback", "rollback", *range(3, 40)),
        run("none", "rollback", 1),
        run("skip", "skip", *range(3, 20)),
        folder=tmp_path,
    )
    assert stop.startswith(
        "BadNumbers: step 4: loss nan, grad_norm nan; not finite on rank 0: grad"
    )
    assert "the last good checkpoint is " in stop and "step-00000002: resume from it" in stop
    assert steps_of(tmp_path / "stop") == [1, 2, 3]
    assert f"after {MOST_ROLLBACKS} rollbacks to step 2" in back
    assert len(events(tmp_path / "rollback", "rollback")) == MOST_ROLLBACKS
    assert "there is no checkpoint to go back to" in nowhere
    assert "step 10 in a row, so that skipping does not help" in skipping


@pytest.mark.parametrize("pp", [1, *slow(2)])
@pytest.mark.parametrize(
    ("job", "train_counts", "said"),
    [
        (train, False, "no target of step 1 counts: each is -100.*; write on_nonfinite=skip"),
        (train, True, "no target of the 1 batches of the validation .*write validation.every=0"),
        (verify, False, "no target of step 1 counts"),
        (verify, True, "no target of the validation counts"),
    ],
)
def test_a_batch_without_targets_is_reported(
    job: Callable[..., object], train_counts: bool, said: str, pp: int, tmp_path: Path
) -> None:
    """It is no run that diverged, nothing is divided by zero, and no loss is nan in the end."""
    parts = {"train": train_counts, "validation": not train_counts}
    data = Custom("support.data.left_out", {"vocab_size": 64, **parts})
    config = tiny(pp=pp, layers=2, data=data, steps=2, validation=Validation(every=1, batches=1))
    with pytest.raises(RankError, match=said) as raised:
        run_world(job, config, tmp_path)
    assert "learning rate" not in str(raised.value) and "optimizer.lr" not in str(raised.value)


def test_steps_without_targets_are_skipped_on_request(tmp_path: Path) -> None:
    data = Custom("support.data.left_out", {"vocab_size": 64, "train": False, "validation": True})
    config = tiny(layers=2, data=data, steps=2, on_nonfinite="skip", validation=Validation(every=2))
    run_world(train, config, tmp_path)
    texts = [event["text"] for event in events(tmp_path, "nonfinite")]
    assert [text.partition(" counts")[0] for text in texts] == [
        f"data=support.data.left_out: no target of step {step}" for step in (1, 2)
    ]
