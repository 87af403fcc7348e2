"""The sample job: texts of a run's newest checkpoint, in any layout, for a model that does not fit
one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlike.checkpoint.discovery import checkpoint_folder, resolve, step_of
from titanlike.checkpoint.state_dict import warm_start
from titanlike.checkpoint.storage import Storage
from titanlike.config.errors import ConfigError, Problem, Refused
from titanlike.config.schema import Config
from titanlike.data.sources import Data
from titanlike.distributed.mesh import close_mesh, open_mesh
from titanlike.distributed.readings import device_queue
from titanlike.launch.watchdog import Watchdog
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.torch_private.process_groups import abort_groups
from titanlike.training.build import Run, build
from titanlike.training.samples import Sampler
from titanlike.training.session import open_data_on_every_rank


def sample(config: Config, worker: Worker) -> dict[str, Any]:
    """Continue `sample.prompts`, and print the texts. Raises ConfigError without a checkpoint."""
    if not config.sample.prompts:
        fix = "sample.prompts=['def main']"
        raise ConfigError([Problem("sample.prompts", [], "there is nothing to continue", fix)])
    data = open_data_on_every_rank(config, worker)
    with loaded_run(config, worker, data, "samples") as (run, newest):
        texts = Sampler(run, config, data).sample(config.seed)
    if worker.rank == 0:
        step, console = step_of(newest) if newest.name.startswith("step-") else 0, Console(steps=1)
        for prompt, text in zip(config.sample.prompts, texts, strict=True):
            console.line(f"\n--- step {step}, {prompt!r}")
            console.line(prompt + text)
    return {"value": None, "texts": texts}


@contextmanager
def loaded_run(
    config: Config, worker: Worker, data: Data, phase: str
) -> Iterator[tuple[Run, Storage]]:
    """The run in whose folder the job's own is, with the weights of its newest checkpoint, and that
    checkpoint; for a block that the watchdog calls `phase`. Collective.

    The run may be training: its checkpoints are read and left as they are. Raises ConfigError where
    there is none.
    """
    of_run = replace(config, run_dir=str(Path(config.run_dir).parent))
    mesh = open_mesh(config, worker)
    queue = device_queue(mesh.device)
    with Watchdog(worker, config.launch, worker.report_failure, queue, abort_groups) as watchdog:
        watchdog.enter_phase(0, "build", config.launch.timeout)
        run = build(config, mesh, data)
        watchdog.enter_phase(0, "load", config.checkpoint.timeout)
        newest = _load_newest(of_run, run)
        watchdog.enter_phase(0, phase, config.launch.timeout)
        yield run, newest
    close_mesh()


def _load_newest(config: Config, run: Run) -> Storage:
    """Load the weights of a run's newest checkpoint, and nothing else."""
    try:
        newest = resolve("run_dir", str(checkpoint_folder(config)))
    except Refused as error:
        raise ConfigError([error.problem]) from None
    timeout = timedelta(seconds=config.checkpoint.timeout)
    group = dist.new_group(backend="gloo", timeout=timeout)
    settings = replace(config.checkpoint, start_from=str(newest), rename=[], strict=True)
    warm_start(settings, run.stage_states, group)
    return newest
