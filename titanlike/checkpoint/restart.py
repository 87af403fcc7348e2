"""A run that is started again after a failure goes on with what it has saved, whatever it began with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from titanlike.checkpoint.discovery import checkpoint_folder, newest_complete, resolve, step_of
from titanlike.config.schema import Config
from titanlike.launch.failures import JobFailed
from titanlike.metrics.events import Events


def resumed_config(config: Config) -> tuple[Config, int]:
    """The config to start again with, and the step that it goes on from.

    `checkpoint.resume` says where a run begins: once it has a checkpoint of its own, it is auto.
    """
    try:
        own = newest_complete(checkpoint_folder(config)).path
        step = step_of(own) if own is not None else 0
        resume = config.checkpoint.resume
        if resume == "auto":
            return config, step
        begin = 0 if resume == "never" else step_of(resolve("checkpoint.resume", resume))
    except (OSError, ValueError):  # the new start says it better
        return config, 0
    if step <= begin:
        return config, begin
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto")), step


def restarted_config(config: Config, failed: JobFailed, number: int) -> Config:
    """Tell the user, and events.jsonl, of restart `number` after a failure; the config for it."""
    again, step = resumed_config(config)
    most = config.launch.max_restarts
    where = f"from step {step}" if step else "from the beginning"
    events = Events(
        Path(config.run_dir), lambda line: print(f"\n{line}", file=sys.stderr, flush=True)
    )
    text = f"{failed.error}; restart {number} of {most} {where}"
    events.log("restart", step, text, restart=number, of=most)
    return again
