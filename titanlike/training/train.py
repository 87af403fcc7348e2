"""The training job: what every rank does from the start of a run to its end.

1. Open the session: data, mesh, model, the newest checkpoint, metrics (`session`).
2. Train step by step, with validation and checkpoints, to the last step or a stop request (`loop`).
3. Complete the last save, report the result, leave the process group.
"""

from __future__ import annotations

from typing import Any

from titanlike.checkpoint.discovery import checkpoint_folder
from titanlike.config.schema import Config
from titanlike.launch.worker import Worker
from titanlike.metrics.summary import objective_value, summarize
from titanlike.parallel.mesh import close_mesh
from titanlike.training import report
from titanlike.training.loop import train_steps
from titanlike.training.session import Session, open_session

STOPPED_EARLY = 75  # exit code of a run that was stopped and can be resumed (EX_TEMPFAIL)


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """Train to the last step, or until a stop request.

    Returns {"value": last validation loss (or loss), or what `config.value` names}; a run that was
    stopped also has "stopped" (by what) and "exit_code".
    """
    with open_session(config, worker) as session:
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
            value = objective_value(config.value, summarize(worker.run_dir))
    close_mesh()
    if worker.rank == 0 and not stopped and config.checkpoint.export == "hf":
        _export(session)
    if not stopped:
        return {"value": value}
    return {"value": value, "stopped": stopped, "exit_code": STOPPED_EARLY}


def _export(session: Session) -> None:
    """A folder for transformers of the last step. The other ranks have ended: it takes rank 0 alone."""
    from titanlike.checkpoint.hf_export import export

    step, config = session.progress.step, session.config
    kind = "step" if config.checkpoint.model_only == "none" else "model"
    out = session.worker.run_dir / f"hf-{step:08d}"
    if not out.exists():  # of a start that had nothing left to do
        source = checkpoint_folder(config).at(f"{kind}-{step:08d}")
        export(str(source), str(out), say=session.console.line)
