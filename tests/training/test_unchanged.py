"""Forwards that are no training leave nothing behind in modules and in random states."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from titanlike.training.unchanged import unchanged


class Remembers(nn.Module):
    """In every way that a forward can change its module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, None
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("added", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = "forward"
        self.assigned = self.assigned + 1
        self.added += x.sum()
        return x * torch.rand(())


def test_what_forwards_change_is_restored() -> None:
    module = Remembers()
    stage = nn.Sequential(module)
    run = SimpleNamespace(stages=[stage], mesh=SimpleNamespace(device=torch.device("cpu")))
    before, assigned, random = dict(vars(module)), module.assigned, torch.get_rng_state()
    found = []
    for _ in range(2):
        with unchanged(run, seed=3):
            stage.eval()
            found.append(stage(torch.ones(2)))
            assert module.calls == 1 and module.assigned == 1
        assert module.assigned is assigned and assigned == 0
        assert module.added.tolist() == [0, 0] and module.nothing is None
        assert (module.calls, module.last, module.training) == (0, None, True)
        assert vars(module).keys() == before.keys()
        assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(*found), "random numbers follow from the seed"
