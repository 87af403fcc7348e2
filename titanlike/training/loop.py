"""The loop over steps: train, validate, record, save; stop, skip or roll back after a bad step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from titanlike.data.loader import batches
from titanlike.data.sources import Batch
from titanlike.training.compiling import compile_blocks
from titanlike.training.feed import batches_for
from titanlike.training.guard import BadNumbers, Verdict
from titanlike.training.mixing import refuse_mixed_samples
from titanlike.training.session import Session
from titanlike.training.step import measured_step, validate

MOST_ROLLBACKS = 3  # to one checkpoint: then leaving batches out does not help


def train_steps(s: Session) -> None:
    """Train from `s.progress` to the last step, or to the stop request that `s.stop_code` names."""
    config, last = s.config, s.config.last_step
    stream = batches_from(s)
    rollbacks: list[int] = []  # to these steps
    # the first step compiles, allocates, and opens connections to every peer
    timeout: float | None = config.launch.timeout
    stall: float | None = None  # seconds that training waited for the last save
    if not s.progress.step:
        s.watchdog.enter_phase(1, "check for mixed samples", timeout)
        stream = refuse_mixed_samples(s.run, config, stream)
    if s.run.compiled and s.progress.step < last and not s.stop_code:
        stream = _compile(s, stream)
    while s.progress.step < last and not s.stop_code:
        step = s.progress.step + 1
        final = step == last  # completed whatever stop request comes
        s.profile.begin_step(step)

        # 1. forward, backward and update on the next batch
        s.watchdog.enter_phase(step, "data", timeout)
        result = measured_step(s.run, config, step, stream, s.guard, s.worker)
        record, verdict, s.stop_code, graphs = result
        timeout = None
        if graphs:
            text = f"step {step} compiled {graphs} more graph{'s' * (graphs > 1)} on a rank"
            s.events.log("compile", step, text, graphs=graphs)
        if stall is not None:
            record["save_stall_seconds"], stall = stall, None  # between the last step and this one

        # 2. after a bad step: stop, roll back, or skip it
        if verdict is not None:
            s.events.log(verdict.kind, step, verdict.text, action=verdict.action)
            if verdict.action == "stop":
                raise BadNumbers(f"{verdict.text}; {s.checkpointer.resume_hint()}")
            if verdict.action == "rollback":
                roll_back(s, verdict, rollbacks)
                stream = batches_from(s)
                continue
            record["skipped"] = verdict.kind

        # 3. validation
        if _validation_is_due(s, step, final):
            _validate(s, step, record, final)

        # 4. progress and metrics
        value = record.get("val_loss", record["loss"])
        s.progress = replace(s.progress, step=step, value=value, guard=s.guard.state())
        s.run.ranges.begin("metrics")
        s.log(record)
        s.checkpointer.poll()

        # 5. checkpoint
        if s.stop_code or _is_due(step, config.checkpoint.every, final and config.checkpoint.last):
            stall = _save(s, record)
            s.stop_code = s.stop_code or _agreed_stop_code(s)
    if s.progress.step >= last:
        s.stop_code = 0


def _compile(s: Session, stream: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches. A wait for a rank that compiles is not a hang."""
    s.watchdog.enter_phase(s.progress.step + 1, "compile", s.config.launch.timeout)
    if s.worker.rank == 0:
        s.console.line("compiling the blocks")
    first = next(stream)
    s.events.log("compile", s.progress.step, compile_blocks(s.run, s.config, first, s.worker))
    return chain([first], stream)


def batches_from(s: Session) -> Iterator[Batch]:
    """This dp rank's batches after `s.progress`: the position in the data is a function of the step."""
    start = s.progress.step + s.progress.left_out
    stream = batches(s.data.train, s.config, dp_rank=s.run.mesh.dp_rank, start_step=start)
    return batches_for(s.run, s.config, stream)


def roll_back(s: Session, verdict: Verdict, rollbacks: list[int]) -> None:
    """Load the newest checkpoint; the batches from there to the bad step are left out from now on.

    rollbacks: the steps rolled back to so far; this one is appended. Raises BadNumbers where there
    is no checkpoint, or the last MOST_ROLLBACKS were to the same one.
    """
    bad = s.progress.step + 1
    s.watchdog.enter_phase(bad, "load", s.config.checkpoint.timeout)
    restored = s.checkpointer.rollback()
    if restored is None:
        raise BadNumbers(f"{verdict.text}; there is no checkpoint to go back to")
    step = restored.step
    if rollbacks[-MOST_ROLLBACKS:] == [step] * MOST_ROLLBACKS:
        raise BadNumbers(f"{verdict.text}, after {MOST_ROLLBACKS} rollbacks to step {step}")
    rollbacks.append(step)
    left_out = bad - step
    text = f"back to step {step}; the batches of {left_out} step{'s' * (left_out > 1)} are left out"
    s.events.log("rollback", bad, text, to=step, left_out=left_out)
    s.guard.load(restored.guard)
    s.console.start_at(step)
    for sink in s.sinks:
        sink.rewind(step)
    if s.files is not None:
        s.files.renew()  # metrics.jsonl was rewritten
    s.progress = replace(restored, left_out=s.progress.left_out + left_out)


def _validation_is_due(s: Session, step: int, final: bool) -> bool:
    """After the last step, and every so many others that no stop request follows."""
    every = s.config.validation.every
    return _is_due(step, every, final and every > 0) and (final or not s.stop_code)


def _validate(s: Session, step: int, record: dict[str, Any], final: bool) -> None:
    """Add `val_loss` to the record; a stop request ends the validation of all steps but the last."""
    s.watchdog.enter_phase(step, "validation")
    s.run.ranges.begin("validation")
    should_stop = None if final else lambda: _agreed_stop_code(s)
    val_loss = validate(s.run, s.config, s.data, should_stop)
    if val_loss is None:
        s.stop_code = _agreed_stop_code(s)
    else:
        record["val_loss"] = val_loss


def _save(s: Session, record: dict[str, Any]) -> float:
    """Save a checkpoint of `s.progress`, or begin to; the seconds that training waited."""
    s.watchdog.enter_phase(s.progress.step, "save", s.config.checkpoint.timeout)
    s.run.ranges.begin("save")
    for sink in s.sinks:
        sink.flush()  # a checkpoint must not outlive the records of its steps
    s.check_run_dir()
    return s.checkpointer.save(s.progress, record.get("val_loss"))


def _agreed_stop_code(s: Session) -> int:
    """The stop code between steps, the same on every rank. Collective."""
    mesh, stop_code = s.run.mesh, s.worker.stop_request.code(s.config.max_time)
    if mesh.world_size > 1:
        stop_code = int(mesh.max(torch.tensor([stop_code], device=mesh.device)).item())
    return stop_code


def _is_due(step: int, every: int, anyway: bool) -> bool:
    """Every so many steps (0 = never), or anyway."""
    return anyway or (every > 0 and step % every == 0)
