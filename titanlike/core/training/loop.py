"""Train on every rank from a run's launch to its end: the loop over steps trains, validates,
records and saves, and stops, skips or rolls back after a bad step.

Metrics are read one step late: a step is checked and recorded once the forward and backward of the
next one are launched, so that the device has work while the host reads. Before a validation, a save
and the end of the run the loop waits for them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import option
from titanlike.core.data.loader import batches
from titanlike.core.data.sources import Batch, Stream
from titanlike.core.distributed.async_reads import PendingScalars
from titanlike.core.distributed.mesh import close_mesh
from titanlike.core.launch.process_end import no_garbage_collection
from titanlike.core.launch.rendezvous import DATA_TIMEOUT, barrier
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.summary import objective_value
from titanlike.core.torch_private.process_groups import abort_groups
from titanlike.core.training import report
from titanlike.core.training.anomalies import Anomaly, BadNumbers
from titanlike.core.training.checks import may_mix_samples
from titanlike.core.training.device_batches import batches_for
from titanlike.core.training.session import Session, open_session
from titanlike.core.training.step import (
    drop_gradients,
    finish_step,
    forward_backward,
    step_record,
    update,
    validate,
)

STOPPED_EARLY = 75  # exit code of a run that was stopped and can be resumed (EX_TEMPFAIL)


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """Train to the last step, or until a stop request.

    Returns {"value": last validation loss (or loss), or what `config.value` names}; for a stopped
    run also "stopped" (the request) and "exit_code".
    """
    with Watchdog(worker, config.launch, abort_groups) as watchdog:
        return _train(config, worker, watchdog)


def _train(config: Config, worker: Worker, watchdog: Watchdog) -> dict[str, Any]:
    with open_session(config, worker, watchdog) as session:
        start = session.progress.step
        if worker.rank == 0:
            report.opening(session)
        session.console.start_at(start)
        with worker.stop_request.deferred():
            train_steps(session)
            step, stopped = session.progress.step, session.stopped
            session.watchdog.enter_phase(step, "save", config.checkpoint.timeout)
            session.checkpointer.finish(session.progress, done=not stopped)
        if stopped:
            session.events.log("stop", step, by=stopped)
    value = session.progress.value
    if worker.rank == 0:
        report.closing(session, start)
        if config.value is not None:
            value = objective_value(config.value, worker.run_dir)
    close_mesh()
    if worker.rank == 0 and not stopped and config.checkpoint.export == "hf":
        watchdog.enter_phase(step, "export", config.checkpoint.timeout)
        _export(session)
    if worker.store is not None:  # other ranks wait for rank 0, however long it takes
        from titanlike.core.launch.rendezvous import wait_for_rank_0

        watchdog.enter_phase(step, "end", 0 if worker.rank else config.launch.timeout)
        wait_for_rank_0(worker.store, worker, "finished")
    if not stopped:
        return {"value": value}
    return {"value": value, "stopped": stopped, "exit_code": STOPPED_EARLY}


def _export(session: Session) -> None:
    """Export the last step to a folder for transformers. Rank 0 writes it; the others wait."""
    from titanlike.hf.hf_export import export

    step, config = session.progress.step, session.config
    kind = "step" if config.checkpoint.model_only == "none" else "model"
    out = session.worker.run_dir / f"hf-{step:08d}"
    if not out.exists():  # exported before, if this launch had no steps left
        source = session.checkpointer.folder.at(f"{kind}-{step:08d}")

        def say(line: str) -> None:  # every few seconds, unless it stands still
            session.watchdog.start_action("")
            session.console.line(line)

        export(str(source), str(out), say=say, moved=source.moved)


MOST_ROLLBACKS = 3  # to one checkpoint; after that, skipping batches does not help
LAST_NUMBERS = 2.0  # seconds to wait for the last step's metrics after an error


def train_steps(s: Session) -> None:
    """Train from `s.progress` to the last step, or to the stop request that `s.stop_code` names."""
    config, step = s.config, s.progress.step
    stream = batches_from(s)
    if not option(config.data, "repeat", True) and step < s.last:
        stream = _find_end(s, stream)
    rollbacks: list[int] = []  # the steps of the checkpoints that were loaded
    # the first step compiles, allocates, and opens connections to every peer
    timeout: float | None = config.launch.timeout
    stall: float | None = None  # seconds that training waited for the last save
    if not step and may_mix_samples(config):
        from titanlike.core.training.first_batch import refuse_mixed_samples

        s.watchdog.enter_phase(1, "check for mixed samples", timeout)
        stream = refuse_mixed_samples(s.run, config, stream)
    if s.run.compiled and step < s.last and not s.stop_code:
        stream = _compile(s, stream)
    with collected_every(config.gc_every) as collect_garbage, _recorded_on_an_error(s):
        while step < s.last and not s.stop_code:
            step += 1
            collect_garbage(step)
            for recorder in s.recorders:
                recorder.begin_step(step)

            # 1. launch forward and backward of the next batch
            s.watchdog.enter_phase(step, "data", timeout)
            timeout = None
            gradients = forward_backward(s.run, config, step, stream)

            # 2. the previous step's metrics have meanwhile reached the host: check and record them
            if s.pending is not None:
                record = _finish_pending(s, rollbacks)
                if record is None:  # rolled back
                    drop_gradients(s.run)
                    step, stream = s.progress.step, batches_from(s)
                    continue
                _complete(s, record)

            # 3. launch the update, which the device skips if loss or gradient norm are bad
            s.checkpointer.before_update()
            ends = _ends_by(s, step + 1)
            s.pending = update(s.run, config, gradients, s.detector, s.worker, ends)
            if stall is not None:
                s.pending.more["save_stall_seconds"], stall = stall, None  # between the steps

            if _is_due(step, config.numerics.digest_every, False):
                s.pending.more["digest"] = _weights_digest(s)

            # 4. what follows needs this step's numbers now
            final = step == s.last  # completed whatever stop request comes
            save = _is_due(step, config.checkpoint.every, final and config.checkpoint.last)
            sample = _follows(s, config.sample.every, step, final)
            validation = config.validation.every
            if not (final or save or sample or s.stop_code or _is_due(step, validation, False)):
                continue
            record = _finish_pending(s, rollbacks)
            if record is None:
                step, stream = s.progress.step, batches_from(s)
                continue

            # 5. validation
            if _follows(s, validation, step, final):
                _validate(s, step, record, final)
            _complete(s, record)
            if sample:
                _sample(s, step)

            # 6. checkpoint
            if s.stop_code or save:
                stall = _save(s, record)
                s.stop_code = s.stop_code or _agreed_stop_code(s)
    if s.progress.step >= s.last:
        s.stop_code = 0


def _ends_by(s: Session, step: int) -> bool:
    """Whether this rank's data have no batch after a step."""
    ends = s.data.train.ends if isinstance(s.data.train, Stream) else None  # in batches
    return ends is not None and ends <= step + s.progress.left_out


def _find_end(s: Session, stream: Iterator[Batch]) -> Iterator[Batch]:
    """Read the first batch of data that end, and agree whether there is one, and another one after
    it: of later ends each step tells. Collective; returns the same batches."""
    step = s.progress.step
    s.watchdog.enter_phase(step + 1, "data", s.config.launch.timeout)
    first = next(stream, None)
    left = 0 if first is None else 1 if _ends_by(s, step + 1) else 2
    left = -int(s.run.mesh.max_of(-left))
    if left < 2:
        s.last = min(s.last, step + left)
    return chain(iter([] if first is None else [first]), stream)


def _weights_digest(s: Session) -> str:
    """Compute the digest of all parameters. Collective; waits for the step."""
    from titanlike.core.checkpoint.digest import digest
    from titanlike.core.checkpoint.state_dict import placed

    mesh, states = s.run.mesh, s.run.stage_states
    owned = [
        (n, p, state.part(n)) for state in states for n, p in state.parameters() if state.owns(n)
    ]
    by_name = {name: placed(parameter, part) for name, parameter, part in owned}
    return digest(by_name, mesh.dp_rank == mesh.cp_rank == 0, mesh.device, None)


def _finish_pending(s: Session, rollbacks: list[int]) -> dict[str, Any] | None:
    """Wait for the pending step's metrics and return its record. After a bad step the run stops
    (raises BadNumbers), skips the update, or rolls back to a checkpoint: then the result is
    None."""
    assert s.pending is not None
    pending, s.pending = s.pending, None
    finished = finish_step(s.run, s.config, pending, s.detector)
    record, waited, anomaly, stop_code, graphs, ends = finished
    if ends and pending.step + 1 < s.last:
        s.last = pending.step + 1
        s.events.log("data_end", s.last, f"the data end with step {s.last}")
    if s.stragglers is not None:
        s.stragglers.step(pending.step, record["step_seconds"], waited)
    s.stop_code = s.stop_code or stop_code
    if graphs:
        text = f"step {pending.step} compiled {graphs} more graph{'s' * (graphs > 1)} on a rank"
        s.events.log("compile", pending.step, text, graphs=graphs)
    if anomaly is not None:
        s.events.log(anomaly.kind, pending.step, anomaly.text, action=anomaly.action)
        if anomaly.action == "stop":
            advice = f"write {anomaly.fix}" if anomaly.fix else s.checkpointer.resume_hint()
            raise BadNumbers(f"{anomaly.text}; {advice}")
        if anomaly.action == "rollback":
            roll_back(s, anomaly, rollbacks)
            return None
        record["skipped"] = anomaly.kind
    return record


def _complete(s: Session, record: dict[str, Any]) -> None:
    """Update progress and write metrics of a step that is good, or whose update was skipped."""
    value = record.get("val_loss", record["loss"])
    s.progress = replace(s.progress, step=record["step"], value=value, guard=s.detector.state())
    s.run.phases.begin("metrics")
    if s.data.progress is not None:
        record |= s.data.progress(record["step"] + s.progress.left_out)
    s.log(record)
    s.worker.notify("step", record)
    s.checkpointer.poll()


@contextmanager
def _recorded_on_an_error(s: Session) -> Iterator[None]:
    """A context that, after an error, still records the pending step if its metrics arrive soon and
    are good; it saves no checkpoint."""
    try:
        yield
    except BaseException:
        pending, s.pending = s.pending, None
        with contextlib.suppress(Exception):
            numbers = pending and pending.sent.read(LAST_NUMBERS)
            if pending and numbers and not numbers["bad"]:
                s.log(step_record(s.run, s.config, pending, numbers))
        raise


def _compile(s: Session, stream: Iterator[Batch]) -> Iterator[Batch]:
    """Compile blocks with the first batch and return the same batches. A watchdog phase of its own
    keeps a rank that compiles from being reported as a hang."""
    from titanlike.core.training.first_batch import compile_blocks

    s.watchdog.enter_phase(s.progress.step + 1, "compile", s.config.launch.timeout)
    if s.worker.rank == 0:
        s.console.line("compiling the blocks")
    first = next(stream)
    s.events.log("compile", s.progress.step, compile_blocks(s.run, s.config, first, s.worker))
    return chain(iter([first]), stream)  # a list would keep the batch


def batches_from(s: Session) -> Iterator[Batch]:
    """This dp rank's batches after `s.progress`: the position in the data is a function of the
    step. Collective for a stream: all ranks wait until each has its first batch, to which it may
    read forward for long."""
    start = s.progress.step + s.progress.left_out
    used = None if s.run.plan.variable else s.run.pipeline.used_fields()
    dp_rank = s.run.mesh.dp_rank
    stream = batches(s.data.train, s.config, dp_rank=dp_rank, start_step=start, used=used)
    stream = batches_for(s.run, s.config, stream)
    if not isinstance(s.data.train, Stream) or s.progress.step >= s.last:
        return stream
    s.watchdog.enter_phase(s.progress.step + 1, "data", s.config.launch.timeout)
    first = next(stream, None)
    s.watchdog.enter_phase(s.progress.step + 1, "data of other ranks", 0)
    barrier(s.worker, f"data/{start}", DATA_TIMEOUT)
    return chain(iter([] if first is None else [first]), stream)


def roll_back(s: Session, anomaly: Anomaly, rollbacks: list[int]) -> None:
    """Load the newest checkpoint; the batches from there to the bad step are skipped from now on.

    rollbacks: steps rolled back to so far; this one is appended. Raises BadNumbers if there is no
    checkpoint, or the last MOST_ROLLBACKS were to the same one.
    """
    bad = s.progress.step + 1
    s.watchdog.enter_phase(bad, "load", s.config.checkpoint.timeout)
    restored = s.checkpointer.rollback()
    if restored is None:
        raise BadNumbers(f"{anomaly.text}; there is no checkpoint to go back to")
    step = restored.step
    if rollbacks[-MOST_ROLLBACKS:] == [step] * MOST_ROLLBACKS:
        raise BadNumbers(f"{anomaly.text}, after {MOST_ROLLBACKS} rollbacks to step {step}")
    rollbacks.append(step)
    left_out = bad - step
    text = f"back to step {step}; the batches of {left_out} step{'s' * (left_out > 1)} are left out"
    s.events.log("rollback", bad, text, to=step, left_out=left_out)
    s.detector.load(restored.guard)
    s.console.start_at(step)
    for sink in s.sinks:
        sink.rewind(step)
    if s.files is not None:
        s.files.renew()  # metrics.jsonl was rewritten
    s.progress = replace(restored, left_out=s.progress.left_out + left_out)


def _follows(s: Session, every: int, step: int, final: bool) -> bool:
    """Whether something is due after this step: after the last one, and after every `every`-th one
    unless a stop request ends the run there."""
    return _is_due(step, every, final and every > 0) and (final or not s.stop_code)


def _sample(s: Session, step: int) -> None:
    """Generate text from the prompts of `sample`."""
    from titanlike.use.samples import write_samples

    s.watchdog.enter_phase(step, "samples", s.config.launch.timeout)
    assert s.sampler is not None
    say = s.console.line if s.worker.rank == 0 else None
    write_samples(s.sampler, s.config, step, s.sinks, s.worker.run_dir, say)


def _validate(s: Session, step: int, record: dict[str, Any], final: bool) -> None:
    """Add `val_loss`, of several sets `val_loss/NAME` too, to the record; a stop request ends the
    validation of all steps but the last."""
    s.watchdog.enter_phase(step, "validation")
    s.run.phases.begin("validation")
    should_stop = None if final else _stop_of_the_batch_before(s)
    metrics = validate(s.run, s.config, s.data, should_stop)
    if metrics is None:
        s.stop_code = _agreed_stop_code(s)
        return
    record |= {f"val_{name}": value for name, value in metrics.items()}
    s.worker.notify("validation", step, metrics["loss"])
    if s.config.ema.decay is not None:
        from titanlike.techniques.ema import averaged

        with averaged(s.run.stage_states):
            ema_metrics = validate(s.run, s.config, s.data, should_stop)
        if ema_metrics is None:
            s.stop_code = _agreed_stop_code(s)
        else:
            for name, value in ema_metrics.items():
                number, slash, suffix = name.partition("/")
                record[f"val_{number}_ema{slash}{suffix}"] = value


def _save(s: Session, record: dict[str, Any]) -> float:
    """Save a checkpoint, or start an async save; returns the seconds that training waited."""
    s.watchdog.enter_phase(s.progress.step, "save", s.config.checkpoint.timeout)
    s.run.phases.begin("save")
    for sink in s.sinks:
        sink.flush()  # a checkpoint must not outlive the records of its steps
    s.check_run_dir()
    stall = s.checkpointer.save(s.progress, record.get("val_loss"))
    s.worker.notify("save", s.progress.step, str(s.checkpointer.folder_of(s.progress.step)))
    return stall


def _agreed_stop_code(s: Session) -> int:
    """All-reduce the stop code between steps: the same on every rank. Collective."""
    return int(s.run.mesh.max_of(s.worker.stop_request.code(s.config.max_time)))


def _stop_of_the_batch_before(s: Session) -> Callable[[], int]:
    """Return a function that all-reduces the stop code asynchronously, and returns the result of
    its previous call, so that neither host nor device waits."""
    sent: list[PendingScalars] = []

    def code() -> int:
        now = s.worker.stop_request.code(s.config.max_time)
        sent.append(s.run.async_scalars.send({}, {"code": now}))
        before = sent.pop(0).read() if len(sent) > 1 else None
        return int(before["code"]) if before else 0

    return code


def _is_due(step: int, every: int, anyway: bool) -> bool:
    """Whether `step` is a multiple of `every` (0 = never), or `anyway`."""
    return anyway or (every > 0 and step % every == 0)


@contextmanager
def collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """A context that disables automatic garbage collection; the function that it yields collects
    when called with a multiple of `steps`. So all ranks collect in the same steps, where each
    would otherwise do so in a different one while all others wait. 0 = leave it to Python.
    Reference cycles are rare in a step; all other objects are freed at once in any case.

    Objects that exist at the beginning, the model and torch itself, are frozen: never collected.
    """
    if not steps:
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % steps == 0:
            gc.collect()

    with no_garbage_collection():
        gc.collect()  # garbage must not be frozen: it would never be freed
        gc.freeze()
        try:
            yield collect
        finally:
            gc.unfreeze()
