"""Collects all problems of a parsed config from the packages that check it before launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titanlike.core.checkpoint import discovery
from titanlike.core.checkpoint.storage import DamagedCheckpoint, Storage, UnreadableFile
from titanlike.core.config import credentials, files, validate
from titanlike.core.config.errors import Problem, Refused
from titanlike.core.config.groups.watching import MemoryProfile, TensorBoard
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import OPEN_GROUPS, Config
from titanlike.core.data import registry as data
from titanlike.core.launch.environment import RestartState

if TYPE_CHECKING:
    from titanlike.core.training.train_plan import TrainPlan

# keys without which neither mesh nor stages can be derived
_STAGE_KEYS = ("schedule.stages_per_rank", "activation_checkpoint.every")
_LAYOUT_KEYS = (*validate.MESH_KEYS, *_STAGE_KEYS)
RANKS = "ranks"  # key in RestartState: number of ranks at the last launch


def problems(
    config: Config,
    world_size: int | None = None,
    warn: Callable[[str], object] | None = None,
    when_valid: Callable[[], object] | None = None,
) -> list[Problem]:
    """Return all problems of a config.

    world_size: processes launched for the run; None if not launched yet; warn: called with
    warnings; when_valid: called once the cheap checks pass, before those that take seconds.
    """
    if secrets := secret_problems(config):
        return secrets  # nothing else: other checks quote values in their messages
    wrong = validate.problems(config, world_size)
    shapes: dict[str, tuple[int, ...]] = {}  # of the model's parameters
    if not wrong and when_valid is not None:
        when_valid()
    wrong += data.problems(config)
    if not wrong and warn is not None:
        for text in data.warnings(config):
            warn(text)
    if isinstance(config.logger, TensorBoard):
        from titanlike.watch.tensorboard_sink import tensorboard_problem

        wrong += filter(None, [tensorboard_problem()])
    known = {problem.key for problem in wrong}
    # imports torch, so after the quick checks
    from titanlike.core.training.preflight import preflight, too_large

    if not known & {*_LAYOUT_KEYS}:

        def plan(decided: TrainPlan) -> None:
            if wrong:
                return
            named = decided.model_graph.model.named_parameters()
            shapes.update((name, tuple(parameter.shape)) for name, parameter in named)
            empty, count = sum(not units for units in decided.stages), len(decided.stages)
            if empty and warn is not None:
                warn(f"{empty} of {count} stages have no module: fewer ranks of pp do as much")
            if warn is None and config.plan == "warn":
                return
            if too_large(config, decided):
                from titanlike.planning.advice import memory_warning

                text = memory_warning(config, decided)
                if config.plan == "strict":
                    wrong.append(Problem("plan", config.plan, text, "plan=warn"))
                elif warn is not None:
                    warn(text)

        found = preflight(config, plan)
    else:  # the mesh's errors hide none of what the model, loss and optimizer say in one process
        from titanlike.proof.reference import in_one_process

        alone = preflight(replace(in_one_process(config), batch_size=2, ramp=[]))
        found = [problem for problem in alone if problem.key.partition(".")[0] in OPEN_GROUPS]
    wrong += [problem for problem in found if problem.key not in known]
    if not wrong and warn is not None and world_size is not None:  # None: one machine
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        if text := validate.placement_warning(config, local_ranks):
            warn(text)
    return wrong or [*_checkpoint_problems(config, shapes)] or [*_write_problems(config)]


def secret_problems(config: Config | None, overrides: Sequence[str] = ()) -> list[Problem]:
    """Return problems for passwords, keys and tokens: they would be in config.yaml and W&B.

    config: of a sweep its first job's; None if the overrides do not compose. overrides: of the
    command line, before Hydra names folders after them.
    """
    plain = to_plain(config) if config is not None else {}
    secrets = dict(credentials.find_secrets(plain))  # key -> reason
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if key not in secrets and credentials.redact_override(text) != text:
            reasons = (reason for _, reason in credentials.find_secrets(value, key))
            secrets[credentials.redact(key)] = next(reasons, "it contains a secret")
    written = "and the config is written to config.yaml"
    fix = "keep it in the environment, where fsspec, Hugging Face and W&B look for theirs "
    fix += "(AWS_SECRET_ACCESS_KEY, HF_TOKEN, WANDB_API_KEY)"
    hidden = credentials.REDACTED
    return [Problem(key, hidden, f"{why}, {written}", fix) for key, why in secrets.items()]


def _checkpoint_problems(
    config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    """Yield what would prevent resuming or starting the run, as far as it can be checked without
    the data. shapes: of the model's parameters by name."""
    settings = config.checkpoint
    if settings.export != "none" and (problem := _export_problem(config)):
        yield problem
    from_folder = str(settings.start_from).startswith("hf:")
    start_from = None if from_folder else settings.start_from
    for key, location in (("folder", settings.folder), ("start_from", start_from)):
        reason, fix = "", f"checkpoint.{key}=/a/path"
        try:
            if location is not None and Storage(location).process_local and config.world_size > 1:
                reason = "is the memory of one process: the other ranks would not see it"
        except (ValueError, ImportError) as error:
            reason, fix = str(error), f"{fix} or a URL whose file system is installed"
        if reason:
            yield Problem(f"checkpoint.{key}", location, reason, fix)
            return
    try:
        newest = discovery.select_resume(config).path
        if newest is not None and (problem := discovery.incompatibility(newest, config)):
            yield problem
            return
        if newest is None and from_folder:
            from titanlike.hf import warm_start_hf  # imports torch

            yield from warm_start_hf.problems(config)
        elif newest is None and start_from is not None:
            from titanlike.core.checkpoint.integrity import open_header
            from titanlike.core.checkpoint.state_dict import matched_names

            folder = discovery.resolve("checkpoint.start_from", start_from)
            matched_names(settings, open_header(folder), shapes)
    except DamagedCheckpoint as error:
        fix = "checkpoint.resume=/another/checkpoint"
        yield Problem("checkpoint", str(error.folder), str(error), fix)
    except Refused as error:
        yield error.problem
    except ValueError as error:
        yield Problem("checkpoint.resume", "", str(error))
    except UnreadableFile as error:
        yield Problem("checkpoint", str(discovery.checkpoint_folder(config)), str(error))
    except Exception as error:  # fsspec file systems raise exceptions of their own
        reason = f"cannot be read: {type(error).__name__}: {error}"
        fix = "checkpoint.folder=/another/path"
        yield Problem("checkpoint", str(discovery.checkpoint_folder(config)), reason, fix)


def _export_problem(config: Config) -> Problem | None:
    """Return why a run could not export a transformers folder at its end, if so."""
    from titanlike.hf.hf_names import FAMILIES, counterpart

    settings, families = config.checkpoint, (*FAMILIES, "hf")
    reason, fix = "", "checkpoint.export=none"
    if config.model.name not in families:
        reason = f"transformers has no {config.model.name}; a folder is written of "
        reason += ", ".join(families)
    elif config.model.name in FAMILIES:
        from titanlike.core.models.registry import complete_arguments  # imports torch

        try:
            counterpart(config.model.name, complete_arguments(config.model))
        except ValueError as error:
            reason = str(error)
    if not reason and not settings.last and settings.model_only == "none":
        reason = "there is nothing to export: neither checkpoint.last nor model_only saves the end"
        fix = "checkpoint.last=true"
    return Problem("checkpoint.export", settings.export, reason, fix) if reason else None


def _write_problems(config: Config) -> Iterator[Problem]:
    """Yield problems if run_dir or checkpoint.folder is not writable, by writing there."""
    fix = "run_dir=outputs/NAME"
    if (Path(config.run_dir) / "config.yaml").exists():  # the run will be resumed
        fix += f" checkpoint.resume={config.run_dir}"
        fix += " checkpoint.folder=null" if config.checkpoint.folder is not None else ""
    folders = [("run_dir", config.run_dir, Path(config.run_dir), fix)]
    if isinstance(config.profile, MemoryProfile):
        folder = Path(config.run_dir, "profile")
        folders.append(("profile", config.profile.name, folder, "profile=none"))
    for key, value, folder, fix in folders:
        try:
            files.check_writable(folder)
        except OSError as error:
            yield Problem(key, value, f"{folder} cannot be written: {error.strerror}", fix)
            return
    if config.checkpoint.folder is not None:
        try:
            Storage(config.checkpoint.folder).check_writable()
        except Exception as error:  # fsspec file systems raise exceptions of their own
            reason = f"cannot be written: {type(error).__name__}: {error}"
            fix = "checkpoint.folder=/another/path, or null for run_dir/checkpoints"
            yield Problem("checkpoint.folder", config.checkpoint.folder, reason, fix)


def available_ranks(started: int | None, restart_state: RestartState) -> int | None:
    """Return the number of ranks that torchrun or srun launched for the run; None if the run
    launches its own.

    started: number of processes, None if this is the only one. A single process under torchrun
    launches the others itself, unless an earlier launch had several.
    """
    if started is None and "TORCHELASTIC_RUN_ID" in os.environ:
        return 1 if restart_state.get(RANKS) not in (None, "1") else None
    return started
