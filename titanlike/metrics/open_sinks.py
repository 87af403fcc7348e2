"""The sinks of a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config import schema
from titanlike.metrics.sinks import JsonlSink, Sink
from titanlike.metrics.tensorboard_sink import TensorBoardSink
from titanlike.metrics.wandb_sink import WandbSink


def open_sinks(
    config: schema.Config,
    plain_config: dict[str, Any],
    run_dir: Path,
    start_step: int,
    say: Callable[[str], None],
) -> list[Sink]:
    """metrics.jsonl, always and first, then the configured logger.

    plain_config: the resolved config as plain dicts, uploaded to W&B. start_step: the step that the
    run resumes from. say: prints a line (Console.line).
    """
    sinks: list[Sink] = [JsonlSink(Path(run_dir) / "metrics.jsonl", start_step)]
    match config.logger:
        case schema.Wandb():
            sinks.append(WandbSink(config.logger, plain_config, Path(run_dir), say))
        case schema.TensorBoard():
            sinks.append(TensorBoardSink(run_dir, start_step))
    return sinks
