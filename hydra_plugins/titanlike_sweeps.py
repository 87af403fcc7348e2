"""The sweeper and the launcher of `-m`. Hydra finds plugins in the package hydra_plugins alone.

The sweeper (`hydra/sweeper=grid`) decides which jobs there are, the launcher (`hydra/launcher=jobs`)
how they run, as processes of this machine. Each also works with Hydra's other plugins, such as
hydra/sweeper=optuna or hydra/launcher=submitit_slurm; ranks that torchrun started have Hydra's basic launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from titanlike.core.config.overrides import to_hydra

if TYPE_CHECKING:
    from titanlike.run.drive import Task
    from titanlike.run.sweep_jobs import Composed

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
        params = [to_hydra(f"{key}={value}") for key, value in self.params.items()]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        (combinations,) = self.split_arguments(parser.parse_overrides([*params, *arguments]), None)
        lists = []
        for number in sweep_run.jobs_to_run(combinations):
            overrides = map(to_hydra, sweep_run.jobs[number])
            lists.append([*overrides, f"hydra.sweep.subdir={number}"])
        return self.launcher.launch(lists, initial_job_idx=0) if lists else []


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
        """Run a batch of jobs that are not done; a job that failed has no return_value."""
        from titanlike.run.sweep_jobs import run_jobs

        setup_globals()
        sweep_run = self.task.sweep_run
        assert sweep_run is not None, "only a sweep has a launcher"
        numbers = [sweep_run.number_of(overrides) for overrides in job_overrides]
        values = {row.number: row.value for row in sweep_run.rows() if row.done}
        wanted = dict(zip(numbers, map(list, job_overrides), strict=True))
        jobs = {n: self._composed(n, words) for n, words in wanted.items() if n not in values}
        values |= run_jobs(sweep_run, self.task.runner, jobs)
        returns = [JobReturn(status=JobStatus.COMPLETED) for _ in numbers]
        for ended, number in zip(returns, numbers, strict=True):
            ended.return_value = values.get(number)
        return returns

    def _composed(self, number: int, overrides: list[str]) -> Composed:
        from titanlike.core.config.errors import Problem
        from titanlike.run.argv import one_line
        from titanlike.run.overrides import parsed

        try:
            composed = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
                composed.hydra.sweep.subdir = str(number)
            _, config, problems = parsed(composed)
            folder = f"{composed.hydra.sweep.dir}/{number}"
            return replace(config, run_dir=folder), problems
        except Exception as error:
            if not type(error).__module__.startswith(("hydra", "omegaconf")):
                raise
            return None, [Problem("config", "", one_line(error))]
