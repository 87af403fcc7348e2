"""Find the config errors that need the model, before a worker starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups import computation, user_code
from titanlike.core.config.groups.hardware import Hardware
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError
from titanlike.core.device.choose import choose_device, first_device
from titanlike.core.launch.environment import available_cores
from titanlike.core.optim.loss import build_loss
from titanlike.core.training.train_plan import (
    TrainPlan,
    local_ranks,
    make_plan,
    memory_for_training,
    started_outside,
)


def preflight(
    config: Config, plan: Callable[[TrainPlan], object] = lambda _: None
) -> list[Problem]:
    """Return every problem that only the model shows, before a worker starts; allocates nothing.

    plan: called with the plan if there is no problem.
    """
    problems = []
    try:
        choose_device(config, 0, local_ranks(config), one_each=started_outside())
    except ConfigError as error:
        problems += error.problems
    if config.compile:
        from titanlike.techniques.compiled_blocks import compiler_problem

        problem = compiler_problem(first_device(config.device))
        problems += [] if problem is None else [problem]
    if config.tp_async:
        from titanlike.techniques.tp.tensor_parallel import async_problems

        problems += async_problems(config)
    if isinstance(config.optimizer, user_code.CustomOptimizer) or isinstance(config.lr, Custom):
        from titanlike.core.optim import custom

        problems += custom.problems(config, "tp=1" if config.tp > 1 else "")
    try:  # before the model, whose problems would hide it
        build_loss(config.loss)
    except ConfigError as error:
        problems += error.problems
    try:
        decided = make_plan(config)
        for stage in config.ramp:
            size, length = stage.batch_size or config.batch_size, stage.seq_len or config.seq_len
            if size % config.dp == 0:  # else it is told, and a dp rank may have no sequence
                make_plan(replace(config, batch_size=size, seq_len=length, ramp=[]))
        if not problems:
            plan(decided)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem not in problems]
    except DataError as error:  # custom data are opened here
        problems.append(error.problem)
    return problems


def too_large(config: Config, plan: TrainPlan, room: int | None = None) -> tuple[int, int] | None:
    """Return (peak bytes of the fullest rank, `room`) if the run does not fit. None if it fits, if
    memory is unknown, and if CPUs have more ranks than cores: such a run is meant for a different
    machine.

    room: bytes available for training on a rank; None = from the config, or this machine's.
    """
    how = config.activation_checkpoint
    if room is None and isinstance(how, computation.FitActivationCheckpoint):
        room = how.memory
    if room is None:
        here = not isinstance(config.hardware, Hardware)
        on_cpu = here and first_device(config.device).type == "cpu"
        if on_cpu and config.world_size > available_cores():
            return None
        room = memory_for_training(config)
    needed = None if room is None else plan.peak_bytes()
    return None if room is None or needed is None or needed <= room else (needed, room)
