"""Where a layout that fails `verify` departs from one process: the first tensor of a step, what
differs in it, and the dimensions of the layout without which it passes.

1. One process computes the reference once more, in the layout's microbatches, and a `Recorder` keeps
   what goes into and comes out of each module, and the gradients of that.
2. The layout is tried with one dimension less at a time, until the least that still fails is found.
3. That one is recorded, too; each rank compares its part with the reference, in its order.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlike.config.schema import ActivationCheckpoint, Config, EvenSplit, Fsdp, Schedule
from titanlike.config.validate import problems
from titanlike.data.registry import open_data
from titanlike.data.sources import Data
from titanlike.distributed.mesh import close_mesh
from titanlike.launch.rendezvous import barrier, in_words
from titanlike.launch.worker import Worker
from titanlike.metrics.console import Console
from titanlike.proof.comparison import Comparison
from titanlike.proof.exact import computed
from titanlike.proof.recorder import TENSORS, Recorder, What, times
from titanlike.proof.reference import (
    EARLY_LOSSES,
    REFERENCE_TIMEOUT,
    in_one_process,
    microbatches_of,
)
from titanlike.proof.repro import shrunk, write_repro
from titanlike.proof.verification import (
    Found,
    apart,
    compare_with_one_process,
    compute_reference,
    kind_order,
)
from titanlike.training.build import Run
from titanlike.training.session import open_data_on_every_rank

_STEPS = "steps.pt"


# --- the least layout that fails ------------------------------------------------------------------

_MESH = ("pp", "cp", "tp", "ep", "replicate", "dp")


def smaller(config: Config, microbatches: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(a dimension, the keys without it; "" = with less of it); microbatches: of the global batch,
    which are kept."""
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
    """(the least config that fails, its dimensions, whether it is known to pass without any of
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


def localize(config: Config, found: Found, worker: Worker) -> dict[str, Any]:
    """Find the first difference of a layout that fails, and print it; returns its fields, see
    `first_place`. Collective."""
    wrong = [row for row in found.rows if not row.agrees]
    shares = frozenset(row.name for row in wrong if row.kind == "gradient")
    if shares or any(
        row.kind in ("initial", "buffer") or row.name in EARLY_LOSSES for row in wrong
    ):
        config = replace(config, verify=replace(config.verify, steps=1))
    attempts = Attempts(config, worker, shares)
    least, needed, known = least_failing(config, attempts.microbatches, attempts.fails)
    # hooks would take compiled blocks apart
    recorded = attempts.run(least, None if least.compile else Recorder(shares))
    barrier(worker, "localized", REFERENCE_TIMEOUT)
    small = shrunk(least, attempts.fails_alone) if config.verify.repro else least
    located: dict[str, Any] = {}
    if worker.rank == 0:
        for name in (TENSORS, _STEPS):
            (attempts.folder / name).unlink()
        located = first_place(recorded or found, least)
        located |= {"axis": axis_text(needed, known), "needed": needed}
        located["least"] = {axis: getattr(least, axis) for axis in _MESH}
        located["tensors"] = [str(path) for path in sorted(attempts.folder.iterdir())]
        lines = [*located["first"], located["axis"], f"tensors: {attempts.folder}"]
        if config.verify.repro:
            lines.append(write_repro(small, located, Path(config.verify.repro)))
            located["repro"] = lines[-1]
        for line in lines:
            Console(steps=1).line(line)
    barrier(worker, "shown", REFERENCE_TIMEOUT)
    return located


def localize_bits(config: Config, step: int, data: Data, worker: Worker) -> dict[str, Any]:
    """With numerics=exact: the first tensor of a step that is not that of one process, and its
    element and bit; {} = those of modules are equal. Collective."""
    config, found = replace(config, verify=replace(config.verify, steps=step)), Found([], [], 1)
    folder = worker.run_dir / "first_difference"
    if worker.rank == 0:
        folder.mkdir(exist_ok=True)
        recorder = Recorder(step=step)
        one = replace(apart(worker, "", 1), local_world_size=1)
        for _ in computed(in_one_process(config), data, one, recorder=recorder):
            pass
        torch.save(recorder.tensors, folder / TENSORS)
    barrier(worker, "localization of bits", REFERENCE_TIMEOUT)
    recorder = Recorder(step=step, bits=True)

    def end(run: Run) -> None:
        found.wrong.extend(recorder.compared(run, config, folder)[0])

    for _ in computed(config, data, apart(worker, "bits of modules"), end, recorder):
        pass
    barrier(worker, "bits localized", REFERENCE_TIMEOUT)
    if worker.rank == 0:
        (folder / TENSORS).unlink()
    return first_place(found, config) if found.wrong else {}


class Attempts:
    """Comparisons of layouts on the first ranks of a job with one reference, whose tensors are
    recorded."""

    def __init__(self, config: Config, worker: Worker, shares: frozenset[str]) -> None:
        self.worker, self.folder = worker, worker.run_dir / "first_difference"
        if worker.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        data = open_data_on_every_rank(config, apart(worker, "data of localization"))
        recorder, self._path = Recorder(shares), self.folder / _STEPS
        alone = apart(worker, "localization")
        compute_reference(config, data, alone, self._path, recorder)
        if worker.rank == 0:
            torch.save(recorder.tensors, self.folder / TENSORS)
        (self.microbatches,) = {*microbatches_of(config, data).values()}  # of the global batch
        self._verdicts: list[bool | None] = []
        self._alone = False

    def run(self, config: Config, recorder: Recorder | None = None) -> Found | None:
        """Collective; None on ranks that it has no use for, and where it cannot run."""
        name, result = f"attempt {len(self._verdicts)}", None
        if self.worker.rank < config.world_size and not problems(config):
            part, path = apart(self.worker, name, config.world_size), self._path
            try:
                result = compare_with_one_process(config, part, reference=path, recorder=recorder)
            except Exception as error:  # whatever is wrong with it; peers then see it leave
                if not self._alone:  # else sizes that do not fit each other are tried, too
                    print(f"{name} could not run: {error}", file=sys.stderr)
                if dist.is_initialized():
                    close_mesh()
        text = "" if result is None else str(int(result.agrees))
        answers = barrier(self.worker, name, REFERENCE_TIMEOUT, text, listens=True)
        self._verdicts.append({"1": False, "0": True}.get(answers.get(0, "")))
        return result

    def fails(self, config: Config) -> bool | None:
        self.run(config)
        return self._verdicts[-1]

    def fails_alone(self, config: Config) -> bool:
        """Whether a layout of another model, or on other data, fails."""
        name, error, self._alone = f"reference {len(self._verdicts)}", "", True
        if self.worker.rank == 0:
            alone = replace(apart(self.worker, "", 1), local_world_size=1)
            try:
                compute_reference(config, open_data(config), alone, self._path)
            except Exception as problem:  # of sizes that do not fit each other
                error = str(problem) or type(problem).__name__
        errors = barrier(self.worker, name, REFERENCE_TIMEOUT, error, listens=True)
        return not errors and bool(self.fails(config))


def first_place(
    found: Found,
    config: Config,
    gradients: str = "in what is done to gradients: those of modules' outputs agree",
) -> dict[str, Any]:
    """The place of the first difference, and what differs there; in words as `first`: a line for
    the place, and lines for what differs."""
    wrong = sorted((row for row in found.rows if not row.agrees), key=_causes_first)
    rows = [row for row in wrong if row.kind == wrong[0].kind]
    place: dict[str, Any] = {}
    groups: dict[What, list[Any]] = {}
    lines: list[str] = []
    if found.wrong and not (rows and rows[0].kind == "initial"):
        first = found.wrong[0]
        place = first.place._asdict() | {"relative": first.relative}
        text = f"{first.place}, by {first.relative:.1e} of its norm; what comes before it differs "
        text += f"by at most {first.before:.1e}"
        for each in found.wrong:
            groups.setdefault(each.what, []).append(each)
    elif not rows:
        text = next(iter(found.missing), "none in this run")
    elif rows[0].kind == "gradient" and found.gradients:
        place = {"phase": "reduction", "name": next(iter(found.gradients))}
        text = gradients
    else:
        # the one that is most nearly a multiple: rounding is large beside small updates
        row = max(rows, key=lambda row: row.along**2 / (row.scale * row.squared or math.inf))
        factor = 1 + row.along / row.scale if row.scale else math.inf
        finite = math.isfinite(factor)
        what = times(round(factor, 3), config) if finite else What("missing or not finite")
        place = {"phase": row.kind, "name": row.name, "relative": row.relative}
        text = f"{row.full_name}{_more(rows)}, by {row.relative:.1e}: {what}"
        groups = {what: [row.full_name for row in rows]}
    for name, what in () if found.wrong else found.gradients.items():
        groups.setdefault(what, []).append(f"gradient of {name}")
    differs = []
    for what, of in groups.items():
        entry: dict[str, Any] = what._asdict()
        if found.wrong and of[0] in found.wrong:
            ranks, numbers = ({getattr(e, at) for e in of} for at in ("rank", "microbatch"))
            entry |= {"ranks": sorted(ranks), "microbatches": sorted(numbers)}
            where = f"rank {in_words(sorted(ranks))}, microbatch {in_words(sorted(numbers))}"
            lines.append(f"  {where} of the global batch: {what}")
        else:
            entry["names"] = of
            if found.gradients:
                lines.append(f"  {of[0]}{_more(of)}: {what}")
        differs.append(entry)
    first_lines = [f"first difference: {text}", *lines[:4]]
    return {"first": first_lines, "place": place, "differs": differs}


def _more(of: list[Any]) -> str:
    return f" and {len(of) - 1} more" if len(of) > 1 else ""


def _causes_first(row: Comparison) -> tuple[Any, ...]:
    late = row.kind == "loss" and row.name not in EARLY_LOSSES
    return row.kind != "initial", late, *kind_order(row), -row.relative
