"""Every problem of a config that parses, from each room that knows of some; before a worker starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from titanlike.checkpoint.find import difference, find
from titanlike.config import validate
from titanlike.config.errors import Problem
from titanlike.config.schema import Config, TensorBoard
from titanlike.data import checks as data
from titanlike.metrics.tensorboard_sink import tensorboard_problem

# with one of these wrong, nothing can be laid out
LAYOUT = ("pp", "dp", "replicate", "batch_size", "seq_len", "schedule.stages_per_rank")


def problems(config: Config, world_size: int | None = None) -> list[Problem]:
    """world_size: processes that were started for the run, None if they will be."""
    found = validate.problems(config, world_size)
    for key, value, reason, remedy in data.problems(config):
        remedy = remedy.removeprefix("Write ")
        found.append(Problem(key, value, reason, remedy[:1].lower() + remedy[1:]))
    if isinstance(config.logger, TensorBoard) and (text := tensorboard_problem()):
        found.append(Problem.parse("logger", text))
    if not any(problem.key in LAYOUT for problem in found):
        from titanlike.draft import preflight  # torch: after what is quick

        found += preflight(config)
    return found or [*_checkpoint(config), *_run_dir(config)]


def _checkpoint(config: Config) -> Iterator[Problem]:
    """What would be found when the run goes on, as far as it can be told without the data."""
    try:
        path = find(config.checkpoint.resume, Path(config.run_dir))
        if path is not None and (text := difference(path, config)):
            raise ValueError(text)
    except ValueError as error:
        yield Problem.parse("checkpoint.resume", str(error))


def _run_dir(config: Config) -> Iterator[Problem]:
    """Whether it can be written, found out by writing."""
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.run_dir).close()
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        yield Problem("run_dir", config.run_dir, reason, "run_dir=outputs/NAME")
