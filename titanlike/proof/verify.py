"""The verify job: a layout is compared with one process; where they differ, it is told where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titanlike.config.files import atomic_write_text, dumps
from titanlike.config.schema import Config, Precision
from titanlike.config.validate import problems
from titanlike.launch.worker import Worker
from titanlike.proof.verification import Found, compare_with_one_process, print_found
from titanlike.training.session import open_data_on_every_rank


def verify(config: Config, worker: Worker) -> dict[str, Any]:
    """Compare; prints a table; returns exit_code 0 if everything agrees, 1 if not. Then it tells
    where it is wrong. All of it is in verdict.json, too."""
    runs = [config]
    twin = replace(config, precision=Precision())
    if config.precision.low and not config.verify.as_is and not problems(twin):
        runs.append(twin)
    every: list[Found] = []
    for each in runs:
        apart = worker.store and dist.PrefixStore(each.precision.name, worker.store)
        every.append(compare_with_one_process(each, replace(worker, store=apart)))
        if worker.rank == 0:
            print_found(each, every[-1])
    agrees = all(one.agrees for one in every)
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

        # the one in fp32, if it fails
        located = located or localize(*wrong[-1], worker)
    verdict = {
        "verdict": "PASS" if agrees else "FAIL",
        "comparisons": sum(len(found.rows) for found in every),
        "differ": [row.full_name for found in every for row in found.rows if not row.agrees],
        "missing": [text for found in every for text in found.missing],
        "first_difference": located or None,
    }
    if worker.rank == 0:
        atomic_write_text(worker.run_dir / "verdict.json", dumps(verdict) + "\n")
        if config.verify.json:
            print(dumps(verdict))
    worst = max(row.difference for row in every[0].rows if row.kind == "gradient")
    return verdict | {"value": worst, "exit_code": 0 if agrees else 1}
