"""After a bad step parameters, optimizer state and statistics are those before it, to the last
bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.bad_numbers import sample_of
from support.cells import cells
from support.models import tiny
from support.opened import Opened, opened
from support.world import run_world
from titanlike.core.config.groups.computation import Fsdp
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer
from titanlike.core.config.optimizers.adamw import AdamW
from titanlike.core.config.optimizers.muon import Muon
from titanlike.core.config.optimizers.sgd import Sgd
from titanlike.core.config.schema import Config
from titanlike.core.distributed.placement import optimizer_state
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.dtensor import local
from titanlike.core.training.anomalies import AnomalyDetector

BAD = (1, 3)  # steps: also the first, in which state begins


def bits(job: Opened) -> dict[str, torch.Tensor]:
    """Everything that a step changes, as bytes. A state of zeros is as good as none."""
    found = {}
    for state in job.run.stage_states:
        for name, parameter in state.parameters():
            kept = {"": parameter, **optimizer_state(state.optimizers, parameter)}
            for key, value in kept.items():
                value = torch.atleast_1d(local(value.detach())).contiguous()
                if key == "" or value.any():
                    found[f"{name} {key}"] = value.view(torch.uint8).clone()
    return found


Steps = list[tuple[str | None, bool]]


def changes(config: Config, worker: Worker) -> Steps:
    """Of each step the kind of anomaly, and whether anything changed."""
    found: Steps = []
    with opened(config, worker) as job:
        detector = AnomalyDetector(config, {})
        for step in range(1, 6):
            before, anomaly, after = bits(job), job.step(step, detector).anomaly, bits(job)
            same = before.keys() == after.keys()
            same = same and all(torch.equal(value, after[name]) for name, value in before.items())
            found.append((anomaly and anomaly.kind, not same))
    return found


def changes_with_each(config: Config, worker: Worker, optimizers: dict) -> dict[str, Steps]:
    """One after the other in this process."""
    configs = {name: replace(config, optimizer=choice) for name, choice in optimizers.items()}
    return {name: changes(config, worker) for name, config in configs.items()}


def spoiled(pp: int = 1, dp: int = 1, **changed: Any) -> Config:
    model = Custom("support.bad_numbers.Touchy", {"dim": 32, "layers": 4, "vocab_size": None})
    config = tiny(pp, dp, model=model, on_nonfinite="skip", **changed)
    poison = [sample_of(config, step, 5) for step in BAD]
    return replace(config, data=Custom("support.bad_numbers.spoiled", {"poison": poison}))


MOMENTUM = Sgd(lr=0.1, momentum=0.9, weight_decay=0.1)
OWN = CustomOptimizer("torch.optim.NAdam", {}, lr=0.01)
OPTIMIZERS = {"AdamW": AdamW(), "momentum": MOMENTUM, "Muon": Muon(), "the user's own": OWN}
KINDS = ["nonfinite" if step in BAD else None for step in range(1, 6)]
EXPECTED = [(kind, kind is None) for kind in KINDS]


def test_a_bad_step_changes_nothing_to_the_last_bit(tmp_path: Path) -> None:
    [found] = run_world(changes_with_each, spoiled(), tmp_path, OPTIMIZERS)
    assert found == dict.fromkeys(OPTIMIZERS, EXPECTED)


LAYOUTS = {"AdamW, shards": spoiled(dp=2)}
MORE_LAYOUTS = {
    "AdamW, CPU offload": spoiled(dp=2, fsdp=Fsdp(cpu_offload=True)),
    "momentum, a pipeline": spoiled(2, optimizer=MOMENTUM),
    "Muon beside state in bf16, a pipeline of shards": spoiled(2, 2, optimizer=Muon()),
    "the user's own, shards": spoiled(dp=2, optimizer=OWN),
}


@pytest.mark.parametrize("config", cells(LAYOUTS, MORE_LAYOUTS))
def test_a_bad_step_changes_nothing_on_any_rank(config: Config, tmp_path: Path) -> None:
    assert run_world(changes, config, tmp_path) == [EXPECTED] * config.world_size


# --- torch's own ---------------------------------------------------------------------------------


def test_torchs_sgd_leaves_its_momentum_uninitialized_if_it_skips_the_first_step() -> None:
    """Why `fused.Sgd` begins with zeros."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    optimizer.found_inf = torch.ones(())
    parameter.grad = torch.ones(1000)
    with _filled_with_nan():
        optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].isnan().all()


class _filled_with_nan:
    """Within it new memory is NaN."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)
        self._before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *unused: Any) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self._before
        torch.use_deterministic_algorithms(False)
