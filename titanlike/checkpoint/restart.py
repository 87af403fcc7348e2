"""The config of a restarted run: it resumes from its own newest checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from titanlike.checkpoint.discovery import checkpoint_folder, newest_complete, resolve, step_of
from titanlike.config.schema import Config
from titanlike.launch.failures import JobFailed
from titanlike.metrics.events import Events


def resumed_config(config: Config) -> tuple[Config, int]:
    """The config for a restart, and the step that it resumes from.

    `checkpoint.resume` applies to a run's first start: once the run has saved a checkpoint of its
    own, it is "auto".
    """
    try:
        own = newest_complete(checkpoint_folder(config)).path
        step = step_of(own) if own is not None else 0
        resume = config.checkpoint.resume
        if resume == "auto":
            return config, step
        begin = 0 if resume == "never" else step_of(resolve("checkpoint.resume", resume))
    except (OSError, ValueError):  # reported in detail by the start itself
        return config, 0
    if step <= begin:
        return config, begin
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto")), step


def restarted_config(config: Config, failed: JobFailed, number: int) -> Config:
    """Report restart `number` after a failure, also in events.jsonl; the config for it."""
    resumed, step = resumed_config(config)
    most = config.launch.max_restarts
    where = f"from step {step}" if step else "from the beginning"
    events = Events(
        Path(config.run_dir), lambda line: print(f"\n{line}", file=sys.stderr, flush=True)
    )
    text = f"{failed.error}; restart {number} of {most} {where}"
    events.log("restart", step, text, restart=number, of=most)
    return resumed
