"""The sweepers and the launcher of `-m`. Hydra finds plugins in the package hydra_plugins alone.

The sweeper (`hydra/sweeper=grid`) decides which jobs there are, the launcher (`hydra/launcher=jobs`)
how they run: as processes of this machine, or on the ranks that torchrun started. Each also works with
Hydra's other plugins, such as hydra/sweeper=optuna or hydra/launcher=submitit_slurm.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from titanlike.config.overrides import to_hydra

if TYPE_CHECKING:
    from titanlike.config.schema import Config
    from titanlike.driver.drive import Task
    from titanlike.driver.sweep_status import Job


# defaults of hydra.sweeper and hydra.launcher; `params` are the overrides of a sweep written in a
# file, everything else is set in the config group `sweep`
_HERE = "hydra_plugins.titanlike_sweeps"
_store = ConfigStore.instance().store
_store("grid", {"_target_": f"{_HERE}.GridSweeper", "params": None}, group="hydra/sweeper")
_store("jobs", {"_target_": f"{_HERE}.JobLauncher"}, group="hydra/launcher")


class GridSweeper(BasicSweeper):
    """Every combination of the values."""

    def __init__(self, params: DictConfig | None = None) -> None:
        super().__init__(None, {str(key): value for key, value in (params or {}).items()})

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.task: Task = task_function  # type: ignore[assignment]

    def sweep(self, arguments: list[str]) -> Any:
        """Launch the jobs. The launcher reports failures."""
        assert self.hydra_context is not None and self.launcher is not None
        sweep_run = self.task.sweep_run
        assert sweep_run is not None, "only a sweep has a sweeper"
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (combinations,) = self.split_arguments(overrides, None)
        jobs = sweep_run.jobs_to_run(combinations)
        lists = [
            [*map(to_hydra, job.overrides), f"hydra.sweep.subdir={job.folder}"] for job in jobs
        ]
        return self.launcher.launch(lists, initial_job_idx=0) if lists else []

    def _parse_config(self) -> list[str]:
        return [to_hydra(f"{key}={value}") for key, value in self.params.items()]


class JobLauncher(Launcher):
    """Runs jobs as `config.sweep` says."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.task: Task = task_function  # type: ignore[assignment]

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of jobs; a failed one's return_value raises."""
        from titanlike.config.errors import ConfigError, Problem
        from titanlike.driver.argv import one_line
        from titanlike.driver.sweep_jobs import Prepared, run_jobs
        from titanlike.launch.failures import JobFailed

        setup_globals()
        sweep_run = self.task.sweep_run
        assert sweep_run is not None, "only a sweep has a launcher"
        composed: dict[int, DictConfig] = {}

        def compose(overrides: list[str], job: Job) -> tuple[Config | None, list[Any]]:
            try:
                config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
                with open_dict(config):
                    config.hydra.job.id = config.hydra.job.num = job.number
                    config.hydra.sweep.subdir = job.folder
                composed[job.number] = config
                return _parsed(config, sweep_run.folder / job.folder)
            except Exception as error:
                if not type(error).__module__.startswith(("hydra", "omegaconf")):
                    raise
                return None, [Problem("config", "", one_line(error))]

        prepared = []
        for index, overrides in enumerate(map(list, job_overrides)):
            job = sweep_run.job_for(overrides, sweep_run.base + initial_job_idx + index)
            prepared.append(Prepared(job, partial(compose, overrides, job)))

        def here(item: Prepared) -> float | None:
            if item.config is None:
                error = ConfigError(item.composed[1])
                raise JobFailed(str(error), str(error))
            self.task.runner = replace(self.task.runner, checked=item.checked)
            ended = run_job(
                hydra_context=self.hydra_context,
                task_function=self.task,
                config=composed[item.job.number],
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                configure_logging=False,
            )
            if ended.status != JobStatus.COMPLETED:
                raise ended._return_value
            return ended._return_value

        ends = run_jobs(sweep_run, self.task.runner, prepared, here)
        returns = []
        for item, end in zip(prepared, ends, strict=True):
            failed = isinstance(end, Exception)
            status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            ended = Returned(overrides=item.job.overrides, working_dir=os.getcwd(), status=status)
            ended.return_value = end
            returns.append(ended)
        return returns


class Returned(JobReturn):
    """The result of a job. Unlike Hydra's own it prints nothing: the end has been reported."""

    @property
    def return_value(self) -> Any:
        if self.status == JobStatus.COMPLETED:
            return self._return_value
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def _parsed(composed: DictConfig, run_dir: Path) -> tuple[Config, list[Any]]:
    from titanlike.driver.overrides import parsed

    _, config, problems = parsed(composed)
    return replace(config, run_dir=str(run_dir)), problems
