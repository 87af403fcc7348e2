"""Every problem of a config that takes the model to be found: a draft, before a worker starts."""

from __future__ import annotations

import os

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.schema import Config
from titanlike.data.errors import DataError
from titanlike.parallel.device import choose_device
from titanlike.training.draft import draft


def preflight(config: Config) -> list[Problem]:
    """Allocates nothing."""
    problems = []
    try:
        # ranks on this machine: of torchrun or srun, or all of them in the launcher's own process
        external = int(os.environ.get("WORLD_SIZE", "1")) > 1
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if external else config.world_size
        choose_device(config.device, 0, ranks)
    except ValueError as error:
        problems.append(Problem.parse("device", str(error)))
    try:
        draft(config)
    except ConfigError as error:
        problems += error.problems
    except DataError as error:  # of a user's own data, which are opened
        fix = error.remedy[:1].lower() + error.remedy[1:]
        problems.append(Problem(error.key, error.value, error.reason, fix))
    return problems
