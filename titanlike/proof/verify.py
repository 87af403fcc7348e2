"""The verify job: a layout is compared with one process; where they differ, it is told where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titanlike.config.schema import Config, Precision
from titanlike.config.validate import problems
from titanlike.launch.worker import Worker
from titanlike.proof.verification import Found, compare_with_one_process, print_found
from titanlike.training.session import open_data_on_every_rank


def verify(config: Config, worker: Worker) -> dict[str, Any]:
    """Compare; prints a table; returns exit_code 0 if everything agrees, 1 if not. Then it tells
    where it is wrong."""
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
    found, agrees = every[0], all(one.agrees for one in every)
    result: dict[str, Any] = {}
    if config.exact:
        from titanlike.proof.exact import first_difference

        data = open_data_on_every_rank(config, worker)
        difference = first_difference(config, data, worker)
        text = f"PASS: all bits of {config.verify.steps} steps are those of one process"
        if difference is not None:
            from titanlike.proof.localization import localize_bits

            agrees, text = False, f"FAIL: the first other bit: {difference}"
            lines = localize_bits(config, difference.step, data, worker)
            text = "\n".join([text, *lines])
            result["first_difference"] = {"first": lines or [str(difference)]}
        if worker.rank == 0:
            print(text)
    worst = max(row.difference for row in found.rows if row.kind == "gradient")
    result |= {"value": worst, "exit_code": 0 if agrees else 1}
    if wrong := [pair for pair in zip(runs, every, strict=True) if not pair[1].agrees]:
        from titanlike.proof.localization import localize

        # the one in fp32, if it fails
        result.setdefault("first_difference", localize(*wrong[-1], worker))
    return result
