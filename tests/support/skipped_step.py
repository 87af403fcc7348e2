"""Three steps of a run, of which the second is not applied."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from titanlike.config.schema import Config
from titanlike.data.loader import batches, open_data
from titanlike.launch.worker import Worker
from titanlike.parallel.mesh import close_mesh, open_mesh
from titanlike.training.build import build
from titanlike.training.guard import Guard, Verdict
from titanlike.training.step import measured_step, validate


class SkipsSecond(Guard):
    def __init__(self, config: Config, state: dict, step: int) -> None:
        super().__init__(config, state)
        self.step = step

    def limits(self) -> tuple[float, float]:
        return (0.0, 0.0) if self.step == 2 else super().limits()

    def judge(self, record: dict, first_bad_gradient: Callable[[], str]) -> Verdict | None:
        return Verdict("spike", "skip", "for the test") if record["step"] == 2 else None


def three_steps(config: Config, worker: Worker) -> list[dict[str, Tensor]]:
    """The buffers after each of three steps, of which the second is not applied."""
    data = open_data(config)
    mesh = open_mesh(config, worker)
    run = build(config, mesh, data)
    stream = batches(data.train, config, dp_rank=mesh.dp_rank)
    after = []
    for step in (1, 2, 3):
        measured_step(run, config, step, stream, SkipsSecond(config, {}, step), worker)
        validate(run, config, data)  # which changes nothing of them
        after.append({n: b.clone() for stage in run.stages for n, b in stage.named_buffers()})
    close_mesh()
    return after
