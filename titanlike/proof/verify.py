"""The verify job: compare a layout with one process, and that with another framework's dump, and
locate differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titanlike.core.config.files import atomic_write_text, dumps
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.schema import Config
from titanlike.core.config.validate import problems
from titanlike.core.launch.worker import Worker
from titanlike.core.training.session import open_data_on_every_rank
from titanlike.proof.verification import (
    Verdict,
    apart,
    compare_with_one_process,
    compute_reference,
    print_found,
)


def verify(config: Config, worker: Worker) -> dict[str, Any]:
    """Compare, print a table, locate failures, write verdict.json; return exit_code 0 if everything
    agrees, else 1."""
    every: list[Verdict] = []
    dump: list[Verdict] = []
    path: Path | None = None
    if config.verify.against:
        from titanlike.proof.against import compare_with_dump, with_batches

        config, path = with_batches(config), worker.run_dir / "reference_for_dump.pt"
        alone = apart(worker, "against")
        compute_reference(config, open_data_on_every_rank(config, alone), alone, path)
        steps = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        dump = [compare_with_dump(config, *steps)]
    runs = [config]
    twin = replace(config, precision=Precision())
    if config.precision.low and not config.verify.as_is and not problems(twin):
        runs.append(twin)
    for each in runs:
        alone = apart(worker, each.precision.name)
        given = path if each is config else None
        every.append(compare_with_one_process(each, alone, reference=given))
        if worker.rank == 0:
            print_found(each, every[-1])
    agrees = all(one.agrees for one in (*every, *dump))
    located: dict[str, Any] = {}
    if config.exact:
        from titanlike.proof.exact import first_difference

        data = open_data_on_every_rank(config, worker)
        difference = first_difference(config, data, worker)
        text = f"PASS: all bits of {config.verify.steps} steps are those of one process"
        if difference is not None:
            from titanlike.proof.localization import localize_bits

            agrees, text = False, f"FAIL: the first other bit: {difference}"
            located = localize_bits(config, difference.step, data, worker)
            text = "\n".join([text, *located.get("first", [])])
            located = {"first": [str(difference)]} | located
        if worker.rank == 0:
            print(text)
    if wrong := [pair for pair in zip(runs, every, strict=True) if not pair[1].agrees]:
        from titanlike.proof.localization import localize

        # the fp32 comparison's, if it fails
        located = located or localize(*wrong[-1], worker)
    verdict = {"verdict": "PASS" if agrees else "FAIL", **_fields(every, located)}
    for each in dump:
        from titanlike.proof.localization import first_place

        first = {} if each.agrees else first_place(each, config, "gradients, from the last layer")
        verdict["against"] = _fields(dump, first)
        if worker.rank == 0:
            print_found(config, each, f"{config.verify.against}")
            print(*first.get("first", ()), sep="\n")
    if worker.rank == 0:
        if path is not None:
            path.unlink()
        atomic_write_text(worker.run_dir / "verdict.json", dumps(verdict) + "\n")
        if config.verify.json:
            print(dumps(verdict))
    worst = max(row.difference for row in every[0].rows if row.kind == "gradient")
    return verdict | {"value": worst, "exit_code": 0 if agrees else 1}


def _fields(of: list[Verdict], first: dict[str, Any]) -> dict[str, Any]:
    return {
        "comparisons": sum(len(result.rows) for result in of),
        "differ": [row.full_name for result in of for row in result.rows if not row.agrees],
        "missing": [text for result in of for text in result.missing],
        "first_difference": first or None,
    }
