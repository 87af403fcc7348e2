"""Locates where a layout that fails `verify` departs from one process: the first tensor of a step
that differs, how it differs, and the dimensions of the layout without which it passes.

1. One process computes the reference again, in the layout's microbatches, and a `Recorder` keeps
   each module's inputs and outputs, and their gradients.
2. The layout is tried with one dimension less at a time, until the smallest failing one is found.
3. That one is recorded, too; each rank compares its part with the reference, in execution order.
"""

from __future__ import annotations

import math
import operator
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from titanlike.core.config.groups.computation import ActivationCheckpoint, Fsdp
from titanlike.core.config.groups.pipeline import EvenSplit, Schedule
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.data.sources import Data
from titanlike.core.launch.failures import describe
from titanlike.core.launch.rendezvous import barrier, in_words
from titanlike.core.launch.signals import GRACE
from titanlike.core.launch.torchrun import leave_groups
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.training.build import Run
from titanlike.core.training.session import open_data_on_every_rank
from titanlike.proof.comparison import Comparison
from titanlike.proof.exact import computed
from titanlike.proof.operations import Operations
from titanlike.proof.recorder import OPERATIONS, TENSORS, Recorder, What, Wrong, times
from titanlike.proof.reference import (
    EARLY,
    REFERENCE_TIMEOUT,
    VALIDATION_LOSS,
    in_one_process,
    microbatches_of,
)
from titanlike.proof.verification import (
    Verdict,
    apart,
    compare_with_one_process,
    compute_reference,
    kind_order,
)

_STEPS = "steps.pt"
_NEAR = 1e-2  # relative; small updates are rounded when added to weights
_OF_STEP = re.compile(r" of step (\d+)$")


# --- the smallest failing layout ------------------------------------------------------------------

_ERROR, _OF_A_PEER = "error: ", "peer: "  # an answer begins with; of several the first counts
_LEFT = "left"  # a key of an attempt's store: a rank has raised
_MESH = ("pp", "cp", "tp", "ep", "replicate", "dp")


def smaller(config: Config, microbatches: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (a dimension, the keys without it; "" = with less of it); microbatches: of the global
    batch, unchanged."""
    if config.compile:
        yield "compile=true", {"compile": False}
    if config.activation_checkpoint.name != "none":
        name = f"activation_checkpoint={config.activation_checkpoint.name}"
        yield name, {"activation_checkpoint": ActivationCheckpoint()}
    if config.pp > 1 and config.schedule.name != "1f1b":
        plain = Schedule("1f1b", microbatches // config.dp)
        yield f"schedule={config.schedule.name}", {"schedule": plain}
    if config.fsdp != Fsdp():
        yield f"fsdp.zero={config.fsdp.zero}", {"fsdp": Fsdp()}
    for axis in _MESH:
        size = getattr(config, axis)
        if size > 1:
            without: dict[str, Any] = {axis: 1} | ({"replicate": 1} if axis == "dp" else {})
            # of whose ranks those of ep are
            yield axis, {"ep": replace(config, **without).fitting_ep, **without}
        if size > 3:
            yield "", {axis: 2}


def least_failing(
    config: Config, microbatches: int, fails: Callable[[Config], bool | None]
) -> tuple[Config, list[str], bool]:
    """(the smallest failing config, its dimensions, whether it is known to pass without any of
    them); fails: None = it cannot run."""
    needed: list[str] = []
    known = True
    for name, without in smaller(config, microbatches):
        other = replace(config, **without)
        if other.pp == 1 < config.pp:
            other = replace(other, schedule=Schedule("1f1b"), split=EvenSplit())
        if isinstance(other.schedule, Schedule):
            each = microbatches // other.dp
            other = replace(other, schedule=replace(other.schedule, microbatches=each))
        failed = fails(other)
        if failed:
            config = other
        elif name:
            needed.append(name)
            known = known and failed is not None
    shown = [f"{name}={getattr(config, name)}" if name in _MESH else name for name in needed]
    return config, shown, known


def axis_text(needed: list[str], known: bool) -> str:
    if not needed:
        return "fails in one process, too: it is not the layout"
    text = f"fails with {' '.join(needed)} alone"
    without = "it" if len(needed) == 1 else "any of them"
    return f"{text}; passes without {without}" if known else text


def localize(config: Config, result: Verdict, worker: Worker) -> dict[str, Any]:
    """Find and print the first difference of a failing layout; return its fields, see
    `first_place`. Collective."""
    wrong = [row for row in result.rows if not row.agrees]
    if all(row.name != VALIDATION_LOSS for row in wrong):
        config = replace(config, validation=replace(config.validation, batches=1))
    attempts = Attempts(config, worker)
    steps = _steps(wrong, config.verify.steps)
    for step in steps:
        config = replace(attempts.config, verify=replace(config.verify, steps=step))
        names = {row.name for row in (result.rows if step > 1 else wrong) if row.kind == "gradient"}
        attempts.prepare(config, Recorder(frozenset(names), step))
        if len(steps) == 1:
            break
        attempt = attempts.run(config)
        if attempts.failed:
            wrong = [row for row in attempt.rows if not row.agrees] if attempt else []
            break
    else:  # each step by itself is right within rounding
        step, config = 1, attempts.config
        attempts.prepare(config, Recorder(frozenset(), step))
    shares = frozenset(row.name for row in wrong if row.kind == "gradient")
    least, needed, known = least_failing(config, attempts.microbatches, attempts.fails)
    # hooks would break compiled blocks' graphs
    recorded = attempts.run(least, None if least.compile else Recorder(shares, step))
    operation = attempts.first_operation(config, least, recorded, step)
    barrier(worker, "localized", REFERENCE_TIMEOUT)
    located: dict[str, Any] = {}
    if worker.rank == 0:
        for name in (TENSORS, OPERATIONS, _STEPS):
            (attempts.folder / name).unlink(missing_ok=True)
        located = first_place(recorded or result, least)
        located |= {"axis": axis_text(needed, known), "needed": needed}
        located["least"] = {axis: getattr(least, axis) for axis in _MESH}
        located["tensors"] = [str(path) for path in sorted(attempts.folder.iterdir())]
        located["operation"] = operation
        lines = [*located["first"], *([operation] if operation else []), located["axis"]]
        lines.append(f"tensors: {attempts.folder}")
        for line in lines:
            Console(steps=1).line(line)
    barrier(worker, "shown", REFERENCE_TIMEOUT)
    return located


def localize_bits(config: Config, step: int, data: Data, worker: Worker) -> dict[str, Any]:
    """With numerics=exact: the first tensor of a step that differs from one process, with its
    element and bit; {} = all module tensors are equal. Collective."""
    config, out = replace(config, verify=replace(config.verify, steps=step)), Verdict([], [], 1)
    folder = worker.run_dir / "first_difference"
    if worker.rank == 0:
        folder.mkdir(exist_ok=True)
        recorder = Recorder(step=step)
        one = apart(worker, "", 1)
        for _ in computed(in_one_process(config), data, one, recorder=recorder):
            pass
        torch.save(recorder.tensors, folder / TENSORS)
    barrier(worker, "localization of bits", REFERENCE_TIMEOUT)
    recorder = Recorder(step=step, bits=True)

    def end(run: Run) -> None:
        out.wrong.extend(recorder.compared(run, config, folder)[0])

    for _ in computed(config, data, apart(worker, "bits of modules"), end, recorder):
        pass
    barrier(worker, "bits localized", REFERENCE_TIMEOUT)
    if worker.rank == 0:
        (folder / TENSORS).unlink()
    return first_place(out, config) if out.wrong else {}


def _steps(wrong: list[Comparison], last: int) -> list[int]:
    """The steps that may be the first that differs."""
    early = "promise", "initial", "gradient", "buffer"
    first = any(row.kind in early or row.name in EARLY for row in wrong)
    return [1] if first else [*range(1, last + 1)]


class Attempts:
    """Comparisons of layouts, on the first ranks of a job, with one recorded reference."""

    def __init__(self, config: Config, worker: Worker) -> None:
        self.config, self.worker = config, worker
        self.folder = worker.run_dir / "first_difference"
        self._path = self.folder / _STEPS
        if worker.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        self._data = open_data_on_every_rank(config, apart(worker, "data of localization"))
        (self.microbatches,) = {*microbatches_of(config, self._data).values()}  # of a global batch
        self._answers: list[str] = []

    def prepare(self, config: Config, recorder: Recorder) -> None:
        """Compute and record the reference. Collective."""
        alone = apart(self.worker, f"localization {len(self._answers)}")
        compute_reference(config, self._data, alone, self._path, recorder)
        if self.worker.rank == 0:
            if recorder.operations is None:
                torch.save(recorder.tensors, self.folder / TENSORS)
            else:
                torch.save(recorder.operations.found, self.folder / OPERATIONS)

    @property
    def failed(self) -> bool | None:
        """Whether the last attempt failed; None = it could not run. The same on all ranks."""
        return {"agrees": False, "": None}.get(self._answers[-1], True)

    def run(
        self, config: Config, recorder: Recorder | None = None, wrong: Wrong | None = None
    ) -> Verdict | None:
        """Collective; None on unused ranks, and if the layout cannot run."""
        name, result, text = f"attempt {len(self._answers)}", None, ""
        if self.worker.rank < config.world_size and not problems(config):
            part = apart(self.worker, name, config.world_size)
            options: dict[str, Any] = {"reference": self._path, "recorder": recorder}
            try:
                with _told_of_peers(part):
                    result = compare_with_one_process(config, part, **options, wrong=wrong)
            except Exception as error:  # whatever is wrong with it
                failure = describe(part.rank, error)
                text = f"{_OF_A_PEER if failure.transport else _ERROR}{failure.error}"
            # only now, as the error's frames held the groups
            if text and not leave_groups(GRACE):
                raise RuntimeError(f"{name} could not be left after {text}")
        if result is not None:
            text = "agrees" if result.agrees else "in modules" if result.wrong else "fails"
        answers = barrier(self.worker, name, REFERENCE_TIMEOUT, text, listens=True)
        causes = sorted(text for text in answers.values() if text.startswith((_ERROR, _OF_A_PEER)))
        self._answers.append("" if causes else answers.get(0, ""))
        if causes and self.worker.rank == 0:
            cause = causes[0].removeprefix(_ERROR).removeprefix(_OF_A_PEER)
            layout = [f"{axis}={size}" for axis in _MESH if (size := getattr(config, axis)) > 1]
            layout += [f"schedule={config.schedule.name}"] * (config.pp > 1)
            text = (
                f"{' '.join(layout) or 'one process'}: not known whether it is right, as it could"
            )
            Console(steps=1).line(f"{text} not be run ({' '.join(cause.split())[:300]})")
        return result

    def first_operation(
        self, config: Config, least: Config, recorded: Verdict | None, step: int
    ) -> str:
        """A text about the first differing operation before the wrong module tensor of the last
        attempt. Collective."""
        if self._answers[-1] != "in modules":
            return ""
        if least.activation_checkpoint.name != "none":
            return "operation: not told, of blocks that are computed twice"
        wrong = recorded.wrong[0] if recorded else None

        def recorder() -> Recorder:
            operations = Operations(wrong.place, wrong.microbatch) if wrong else None
            return Recorder(step=step, operations=operations)

        self.prepare(config, recorder())
        result = self.run(least, recorder(), wrong)
        return result.operation if result else ""

    def fails(self, config: Config) -> bool | None:
        self.run(config)
        return self.failed


@contextmanager
def _told_of_peers(part: Worker) -> Iterator[None]:
    """A context that its ranks leave once one of them has raised. gloo's peers notice that a rank
    leaves its groups; NCCL's wait on, and are let out by the watchdog, which asks here."""
    store, stop = part.store, part.stop_request
    if store is None:
        yield
        return
    failed = stop.peer_failed
    stop.peer_failed = lambda: failed() or store.check([_LEFT])
    try:
        yield
    except Exception:
        store.set(_LEFT, "")
        raise
    finally:
        stop.peer_failed = failed


def first_place(
    result: Verdict,
    config: Config,
    gradients: str = "in what is done to gradients: those of modules' outputs agree",
) -> dict[str, Any]:
    """The place of the first difference, and how it differs; as `first` in words: a line for the
    place, and lines for the difference."""
    order = partial(_causes_first, step=result.step)
    wrong = sorted((row for row in result.rows if not row.agrees), key=order)
    rows = [row for row in wrong if row.kind == wrong[0].kind]
    how = result.gradients
    if rows and all(row.summed_in_bf16 for row in rows):
        how = {row.name: What("has the digits of bf16 alone: summed in bf16") for row in rows}
    place: dict[str, Any] = {}
    groups: dict[What, list[Any]] = {}
    lines: list[str] = []
    if result.wrong and not (rows and rows[0].kind in ("promise", "initial")):
        first = result.wrong[0]
        place = first.place._asdict() | {"relative": first.relative}
        text = f"{first.place}, by {first.relative:.1e} of its norm; what comes before it differs "
        text += f"by at most {first.before:.1e}"
        for each in result.wrong:
            groups.setdefault(each.what, []).append(each)
    elif not rows:
        text = next(iter(result.missing), "none in this run")
    elif rows[0].kind == "gradient" and how:
        place = {"phase": "reduction", "name": next(iter(how))}
        text = gradients
    else:
        row = max(
            rows, key=lambda row: row.along * row.along / (row.scale * row.squared or math.inf)
        )
        if row.kind in ("update", "state"):  # of small ones rounding of the weights leaves nothing
            row = sorted(rows, key=lambda row: row.factor)[len(rows) // 2]
        place = {"phase": row.kind, "name": row.name, "relative": row.relative}
        what = _of_ranks(row, result, config)
        if row.kind == "promise":
            what = What("of the data, the loss or the model, in every layout alike")
        if row.kind == "update" and not what.where and (cause := _of_update(rows, result, config)):
            what = what._replace(cause=cause)
        text = f"{row.full_name}{_more(rows)}, by {row.relative:.1e}: {what}"
        groups = {what: [row.full_name for row in rows]}
    if result.step > 1:
        place["step"], text = result.step, f"in step {result.step}: {text}"
    for name, what in () if result.wrong else how.items():
        groups.setdefault(what, []).append(f"gradient of {name}")
    differs = []
    for what, of in groups.items():
        entry: dict[str, Any] = what._asdict()
        if result.wrong and of[0] in result.wrong:
            ranks, numbers = ({getattr(e, field) for e in of} for field in ("rank", "microbatch"))
            entry |= {"ranks": sorted(ranks), "microbatches": sorted(numbers)}
            where = f"rank {in_words(sorted(ranks))}, microbatch {in_words(sorted(numbers))}"
            lines.append(f"  {where} of the global batch: {what}")
        else:
            entry["names"] = of
            if how:
                lines.append(f"  {of[0]}{_more(of)}: {what}")
        differs.append(entry)
    first_lines = [f"first difference: {text}", *lines[:4]]
    return {"first": first_lines, "place": place, "differs": differs}


def _of_ranks(row: Comparison, result: Verdict, config: Config) -> What:
    """A tensor's factor to the reference; with the ranks, if only some are wrong."""
    parts = {
        rank: part
        for rank, of in enumerate(result.ranks)
        for part in of
        if (part.kind, part.name) == (row.kind, row.name)
    }
    wrong = {} if row.agrees else {rank: part for rank, part in parts.items() if not part.agrees}
    some = bool(wrong) and len(wrong) < len(parts)
    factor = (reduce(operator.add, wrong.values()) if some else row).factor
    finite = math.isfinite(factor)
    what = times(round(factor, 3), config) if finite else What("missing or not finite")
    return what._replace(where=f"rank {in_words(sorted(wrong))}") if some else what


def _of_update(rows: list[Comparison], result: Verdict, config: Config) -> str:
    """Why updates differ although their gradients agree; "" = unknown."""
    if all(row.decayed for row in rows):
        return "by a multiple of the weights: weight decay"
    state = [row for row in result.rows if row.kind == "state" and not row.name.endswith(" step")]
    state = state or [row for row in result.rows if row.kind == "update"]  # SGD has no state
    factors, limit = sorted(row.factor for row in state if not row.agrees), config.optimizer.clip
    factor = factors[len(factors) // 2] if factors else math.inf
    near = [each for each in factors if math.isclose(each, factor, rel_tol=_NEAR)]
    known = factor != 0 and math.isfinite(factor) and 2 * len(near) > len(state)
    if limit is None or not known:
        return ""
    norm = next(row.largest for row in reversed(result.rows) if row.kind == "norm")
    how = {norm / limit: "not clipped"}
    how |= {limit / norm: "scaled up to the limit of the norm"} if norm else {}
    reasons = (text for right, text in how.items() if math.isclose(factor, right, rel_tol=_NEAR))
    reason = next(reasons, "clipped by another norm, or scaled")
    return f"the optimizer gets gradients {factor:.4g} times: {reason} (optimizer.clip={limit:g})"


def _more(of: list[Any]) -> str:
    return f" and {len(of) - 1} more" if len(of) > 1 else ""


def _causes_first(row: Comparison, step: int) -> tuple[Any, ...]:
    number = _OF_STEP.search(row.name)
    late = int(number[1]) > step if number else row.kind == "loss" and row.name not in EARLY
    return row.kind not in ("promise", "initial"), late, *kind_order(row), -row.relative
