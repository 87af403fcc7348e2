"""What may go wrong in tensor parallelism without an error: verify finds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from support.cells import slow
from support.models import tiny
from support.proven import assert_proven
from support.world import run_world
from titanlike.config.schema import Config, Model, Sgd, SyntheticData
from titanlike.launch.worker import Worker
from titanlike.parallel.tp import styles
from titanlike.parallel.tp.collectives import TensorRanks
from titanlike.parallel.tp.gradients import PartialGradients
from titanlike.proof.verification import verify
from titanlike.training.build import Run


def normed(**sizes: Any) -> Model:
    return Model("support.tensor_models.Normed", {"vocab_size": None, "layers": 2, **sizes})


TIED = tiny(tp=2, tied=True, layers=2)


def forget_the_norms(worker: Worker) -> None:
    """Gradients of q_norm and k_norm are not summed: a plan that does not say so is refused."""
    begin = PartialGradients.__init__

    def forgetting(self: PartialGradients, parameters: Any, *args: Any) -> None:
        kept = [(p, placement) for p, placement in parameters if placement.partial != "always"]
        begin(self, kept, *args)

    PartialGradients.__init__ = forgetting


def untie(worker: Worker) -> None:
    """Each of two modules that share a weight gets a part of its own."""
    take = styles._Divider._take

    def untying(self: styles._Divider, module: nn.Module, name: str, *args: Any) -> None:
        self._cut.clear()
        take(self, module, name, *args)

    styles._Divider._take = untying


def forget_to_sum(worker: Worker) -> None:
    PartialGradients.sum = lambda self: None


def shift_the_vocabulary(worker: Worker) -> None:
    """The second rank looks up the row behind each id's."""
    look_up = styles._look_up

    def shifted(forward: Any, held: slice, size: int, ranks: TensorRanks, ids: Any) -> Any:
        moved = slice(held.start - 1, held.stop - 1) if ranks.rank == 1 else held
        return look_up(forward, moved, size, ranks, ids)

    styles._look_up = shifted


def count_twice(worker: Worker) -> None:
    """What both ranks hold counts twice in the norm of the gradients."""
    Run.shares = None


FAULTS = {
    "an unnamed q_norm": (forget_the_norms, tiny(tp=2, model=normed())),
    "a tied head that is not tied again": (untie, TIED),
    "gradients that are not summed": (forget_to_sum, tiny(tp=2, layers=2)),
    "a vocabulary that is off by one": (
        shift_the_vocabulary,
        tiny(tp=2, layers=2, data=SyntheticData(vocab_size=97)),
    ),
    "a norm that counts tp twice": (count_twice, tiny(tp=2, layers=2, optimizer=Sgd(clip=0.01))),
}
QUICK = ("gradients that are not summed", "a vocabulary that is off by one")


def verify_with(config: Config, worker: Worker, fault: str) -> dict:
    FAULTS[fault][0](worker)
    return verify(config, worker)


@pytest.mark.parametrize(
    "fault", [*QUICK, *slow(*(fault for fault in FAULTS if fault not in QUICK))]
)
def test_verify_finds(fault: str, tmp_path: Path) -> None:
    results = run_world(verify_with, FAULTS[fault][1], tmp_path, fault)
    assert {result["exit_code"] for result in results} == {1}
    assert (tmp_path / "rank0.out").read_text().splitlines()[-1].startswith("FAIL")


def test_verify_finds_nothing_without_a_fault(tmp_path: Path) -> None:
    config = tiny(
        tp=2, model=normed(tied=True), data=SyntheticData(vocab_size=97), optimizer=Sgd(clip=0.01)
    )
    assert_proven(config, tmp_path)
