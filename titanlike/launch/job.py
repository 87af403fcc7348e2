"""The description of a job that every rank gets: as JSON, in a file for workers that the driver
starts, in the rendezvous store for ranks that torchrun or srun started."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlike.config.errors import ConfigError
from titanlike.config.imports import import_object
from titanlike.config.parse import parse, to_plain
from titanlike.config.schema import Config


@dataclass(frozen=True)
class Job:
    """A function by its import path (`package.module:function`), and its arguments."""

    function: str
    config: Config
    run_dir: Path  # absolute
    overrides: list[str]  # of the command line
    started: float = field(default_factory=time.time)  # seconds since the epoch; for max_time

    def load(self) -> Callable[..., Any]:
        """The function itself. Raises ValueError naming what cannot be imported."""
        return import_object(self.function.replace(":", "."))

    def to_json(self) -> str:
        plain = {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "config": to_plain(self.config),
            "run_dir": str(self.run_dir),
        }
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Job:
        plain = json.loads(text)
        config, problems = parse(plain["config"])
        if problems:  # the sender runs another version of this program
            raise ConfigError(problems)
        return cls(**{**plain, "config": config, "run_dir": Path(plain["run_dir"])})
