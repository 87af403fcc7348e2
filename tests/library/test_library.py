"""A loop of one's own: what `titanlike.build` returns trains as the command does, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import titanlike
from support.cells import cells, slow
from support.models import tiny
from support.runs import trained
from support.world import run_world
from titanlike import library
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Numerics
from titanlike.core.config.groups.data import TextData, TokenData
from titanlike.core.config.groups.jobs import Checkpoint, Launch
from titanlike.core.config.groups.pipeline import Schedule
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.groups.watching import Metrics
from titanlike.core.config.schema import Config
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.core.training.anomalies import BadNumbers

STEPS = 2
ONE = tiny(layers=4, steps=STEPS, schedule=Schedule("gpipe", 4), batch_size=8)
LAYOUTS = {
    "pp=2 dp=2": replace(ONE, pp=2, dp=2, schedule=Schedule("1f1b", 2)),
    "tp=2": replace(ONE, tp=2),
    "cp=2": replace(ONE, cp=2, context_parallel="gather"),
}


class Told(titanlike.Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.events.append(("step", record["step"]))

    def on_validation(self, step: int, val_loss: float) -> None:
        self.events.append(("validation", step, val_loss))

    def on_save(self, step: int, path: str) -> None:
        self.events.append(("save", step, Path(path).name))


def own_loop(config: Config, worker: Worker) -> dict[str, Any]:
    """Steps of a loop over a process group made here, and outputs before and after them."""
    size = {"rank": worker.rank, "world_size": worker.world_size}
    if worker.world_size > 1:
        dist.init_process_group("gloo", store=worker.store, **size)
    told = Told()
    run = titanlike.build(config, callbacks=[told])
    first = next(run.batches())
    outputs = run.forward(first, everywhere=True)
    steps = [run.step(batch) for batch in islice(run.batches(), STEPS)]
    return {
        "dp_rank": run.mesh.dp_rank,
        "steps": [(s.loss, s.losses, s.grad_norm) for s in steps],
        "before": outputs,
        "after": run.forward(first, microbatches=True),
        "validation": run.validate(),
        "saved": Path(run.save()).name,
        "events": told.events,
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_world(own_loop, ONE, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize("layout", ["pp=2 dp=2", *slow("tp=2", "cp=2")])
def test_a_custom_loop_matches_the_command_and_one_process(
    layout: str, one_process: dict[str, Any], tmp_path: Path
) -> None:
    config = LAYOUTS[layout]
    ranks = run_world(own_loop, config, tmp_path / "own")
    command = replace(config, run_dir=str(tmp_path / "command"), metrics=Metrics(True))
    rows = trained(command)
    of_command = [(row["loss"], row["microbatch_losses"], row["grad_norm"]) for row in rows]
    for rank in ranks:
        # the command's, to the last bit
        assert rank["steps"] == of_command
        assert rank["validation"] == rows[-1]["val_loss"]
        # one process's
        for mine, right in zip(rank["steps"], one_process["steps"], strict=True):
            torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(right[0]))
            torch.testing.assert_close(torch.tensor(mine[1]), torch.tensor(right[1]))
            torch.testing.assert_close(torch.tensor(mine[2]), torch.tensor(right[2]))
        rows_of = one_process["before"].chunk(config.dp)[rank["dp_rank"]]
        torch.testing.assert_close(rank["before"], rows_of)
        assert rank["events"][:STEPS] == [("step", step) for step in range(1, STEPS + 1)]
        assert rank["events"][-1] == ("save", STEPS, rank["saved"])
    last = [rank for rank in ranks if rank["after"] is not None]
    assert len(last) == len(ranks) // config.pp
    for rank in last:
        assert len(rank["after"]) == len(one_process["after"]) // config.dp
        whole = torch.cat(one_process["after"]).chunk(config.dp)[rank["dp_rank"]]
        torch.testing.assert_close(torch.cat(rank["after"]), whole)


# --- single calls -----------------------------------------------------------------------------------


def in_one_process(config: Config, worker: Worker) -> dict[str, Any]:
    """Uneven microbatches, batches of another form, steps that are bad."""
    run = titanlike.build(config)
    batch = next(run.batches())
    targets = batch["targets"].clone()
    targets[:2], targets[2:4, 3:] = -100, -100  # of 4 microbatches: nothing, less, all, all
    found = run.step({**batch, "targets": targets})
    wrong = []
    for other in (
        {"inputs": batch["inputs"]},
        {name: value[:3] for name, value in batch.items()},
        {**batch, "labels": targets},
        {**batch, "inputs": batch["inputs"].tolist()},
        {**batch, "inputs": batch["inputs"].float()},
        {**batch, "inputs": batch["inputs"][0]},
        {**batch, "targets": targets[:, :5]},
        batch["inputs"],
        {**batch, "targets": targets.int()},
        {**batch, "inputs": batch["inputs"].byte()},
        {**batch, "inputs": batch["inputs"] > 3},
        {**batch, "inputs": batch["inputs"].to("meta")},
        {**batch, "inputs": batch["inputs"].to_sparse()},
        {**batch, "inputs": batch["inputs"] + 64},
        {**batch, "inputs": batch["inputs"] - 9},
        {**batch, "targets": targets.clamp(min=-3)},
    ):
        with pytest.raises(ConfigError) as error:
            run.step(other)
        wrong.append(str(error.value))
    before = [parameter.detach().clone() for parameter in run.parameters().values()]
    next(iter(run.parameters().values())).data[0] = float("nan")
    with pytest.raises(BadNumbers):
        run.step({**batch, "inputs": batch["inputs"] * 0})
    after = [*run.parameters().values()][1:]
    same = all(map(torch.equal, before[1:], after))
    return {
        "losses": found.losses,
        "loss": found.loss,
        "wrong": wrong,
        "same": same,
        "n": run.steps,
    }


def test_microbatch_losses_are_means_over_their_tokens(tmp_path: Path) -> None:
    found = run_world(in_one_process, ONE, tmp_path)[0]
    tokens = torch.tensor([0, 2 * 3, 2 * 16, 2 * 16])
    assert found["losses"][0] == 0 and min(found["losses"][1:]) > 1
    mean = (torch.tensor(found["losses"]) * tokens).sum() / tokens.sum()
    torch.testing.assert_close(mean, torch.tensor(found["loss"]))
    no_targets, rows, unknown, *forms = found["wrong"]
    assert "has no targets" in no_targets and "[3, 16]" in rows and "8 rows" in rows
    assert "labels" in unknown
    said = ["is a list", "is torch.float32", "has the shape [16]", "and targets [8, 5]", "a Tensor"]
    said += [
        "torch.int32 on cpu",
        "a dense tensor ['B', 16] of torch.int64",
        "bool",
        "meta",
        "sparse",
    ]
    said += [
        "ids from 64 to 127, and the model 64 ids; ids from 0 to 63",
        "ids from -9 to",
        "from -3",
    ]
    assert all(reason in text for reason, text in zip(said, forms, strict=True))
    assert found["same"] and found["n"] == 1  # a bad step changes nothing


def alone(config: Config, worker: Worker, call: str) -> str:
    """What a rank is told that calls a method by itself."""
    dist.init_process_group(
        "gloo", store=worker.store, rank=worker.rank, world_size=worker.world_size
    )
    run = titanlike.build(config)
    batch = next(run.batches())
    run.step(batch)
    if worker.rank == 1:  # until the others have given up
        worker.store.wait(["done"])
        return ""
    try:
        getattr(run, call)(*[batch] * (call in ("step", "forward")))
    except RuntimeError as error:
        return str(error)
    finally:
        worker.store.set("done", "")
    return "it has returned"


CALLS = cells({"save": "save"}, {name: name for name in ("step", "validate", "forward")})


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_skips_a_collective_method_is_named(call: str, tmp_path: Path) -> None:
    config = replace(ONE, pp=2, launch=Launch(timeout=2), schedule=Schedule())
    [told, _] = run_world(alone, config, tmp_path, call)
    assert told.startswith(f"rank 1 did not reach the job's {call}() (call 2 of a run) in 2 s")


def asked_often(config: Config, worker: Worker) -> list[int]:
    """How many keys the store has after some calls of a method, and after more."""
    dist.init_process_group(
        "gloo", store=worker.store, rank=worker.rank, world_size=worker.world_size
    )
    found = []
    with titanlike.build(config) as run:
        batch = next(run.batches())
        for count in (2, 6):
            for _ in range(count):
                run.forward(batch)
            dist.barrier()  # all have left the last call
            found.append(worker.store.num_keys())
            dist.barrier()
    return found


def test_a_loop_that_calls_a_method_often_leaves_nothing_in_the_store(tmp_path: Path) -> None:
    [(few, many), _] = run_world(asked_often, replace(ONE, dp=2), tmp_path)
    assert few == many


def fed(config: Config, worker: Worker) -> str:
    """A model of 64 ids, and data that have 257 and are not read."""
    batch = {"inputs": torch.ones(8, 16, dtype=torch.long) * 63}
    with titanlike.build(config, example={**batch, "targets": batch["inputs"]}) as run:
        run.step({**batch, "targets": batch["inputs"]})
        with pytest.raises(ConfigError) as error:
            run.step({"inputs": batch["inputs"] + 1, "targets": batch["inputs"]})
    return str(error.value)


def test_with_an_example_data_are_not_asked_for_the_models_vocabulary(tmp_path: Path) -> None:
    sizes = {**ONE.model.args, "vocab_size": 64}
    data = TokenData(path="/nowhere")
    for of in (replace(ONE, data=data), replace(ONE, data=TextData(path="/nowhere"))):
        [told] = run_world(fed, replace(of, model=Model("llama", sizes)), tmp_path)
        assert "ids from 64 to 64, and the model 64 ids" in told


def left_by_an_error(config: Config, worker: Worker) -> dict[str, Any]:
    """A loop that raises, as in a notebook, and what goes on after it."""
    torch.set_num_threads(2)
    config = replace(config, numerics=Numerics("exact"), schedule=Schedule())
    with pytest.raises(KeyError), titanlike.build(config) as run:
        whole = torch.randint(64, (8, 17))
        loss = run.step({"inputs": whole[:, :-1], "targets": whole[:, 1:]}).loss
        with run._collective("step"):
            threads = torch.get_num_threads()
        raise KeyError
    value = titanlike.train(config)
    run.close()  # it is already
    return {"loss": loss, "threads": threads, "value": value}


def test_a_loop_that_raises_leaves_a_process_in_which_train_works(tmp_path: Path) -> None:
    """Its tensors had gaps; with numerics=exact a rank computes on one core there, too."""
    found = run_world(left_by_an_error, ONE, tmp_path)[0]
    assert 3 < found["loss"] < 6 and 3 < found["value"] < 6 and found["threads"] == 1


def test_all_errors_of_a_config_are_raised_as_one() -> None:
    with pytest.raises(titanlike.ConfigError) as error:
        titanlike.config("ppp=2", "schedule=gpip", batch_size=0, optimizer={"lr": "high"})
    fixes = {problem.fix for problem in error.value.problems}
    assert fixes == {"pp=2", "schedule=gpipe", "batch_size=1", "optimizer.lr=0.003"}
    for call, said in (
        (lambda: titanlike.config(5), "config=5: is a int"),
        (lambda: titanlike.plan("pp=2"), "config: is a str; what titanlike.config(...) returns"),
        (lambda: titanlike.build({}), "config: is a dict"),
    ):
        with pytest.raises(titanlike.ConfigError) as error:
            call()
        assert said in str(error.value)
    with pytest.raises(titanlike.ConfigError) as error:  # found by its model
        titanlike.config("pp=2", "split=points", "split.points=[model.nowhere]", "data=synthetic")
    assert "model.nowhere" in str(error.value)


def test_a_config_is_that_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a folder, with a comma"
    by_words = titanlike.config("model=gpt2_tiny", "lr.warmup=3", f"run_dir='{path}'", check=False)
    by_name = titanlike.config(model="gpt2_tiny", lr={"warmup": 3}, run_dir=path, check=False)
    assert by_words == by_name and by_name.run_dir == str(path) and by_name.lr.warmup == 3
    # a choice by its name has its own keys, not those of the default one
    names = {"lr": "constant", "optimizer": "sgd", "data": "synthetic", "logger": "none"}
    same = {"run_dir": path, "check": False}
    chosen = titanlike.config(**names, **same)
    named = titanlike.config(**{k: {"name": v} for k, v in names.items()}, **same)
    words = titanlike.config(*(f"{k}.name={v}" for k, v in names.items()), **same)
    assert chosen == named == words and chosen.lr.name == "constant"


def moved(config: Config, worker: Worker, path: str) -> tuple[int, list[float], list[float]]:
    """Steps from a checkpoint of another layout, and from its weights alone."""
    if worker.world_size > 1:
        size = {"rank": worker.rank, "world_size": worker.world_size}
        dist.init_process_group("gloo", store=worker.store, **size)
    run = titanlike.build(config)
    run.load(path, weights_only=True)
    batch = next(titanlike.build(config).batches())
    weights = run.steps, run.forward(batch, everywhere=True).double().sum().item()
    step = run.load(path)
    stream = run.batches()
    return step, weights, [run.step(next(stream)).loss for _ in range(2)]


def test_checkpoints_are_those_of_the_command(tmp_path: Path) -> None:
    """Loaded in another layout, trained on as the command does."""
    saved = Checkpoint(every=2, last=False)
    config = replace(ONE, steps=4, checkpoint=saved, run_dir=str(tmp_path / "run"))
    losses = [row["loss"] for row in trained(config)]
    path = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    one = run_world(moved, config, tmp_path / "one", path)[0]
    assert one[0] == 2 and one[2] == losses[2:]
    assert one[1][0] == 0
    layout = replace(config, pp=2, dp=2, schedule=Schedule("1f1b", 2))
    for step, weights, found in run_world(moved, layout, tmp_path / "other", path):
        assert step == 2 and weights[0] == 0
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[2:]))


def train_and_tell(config: Config, worker: Worker) -> tuple[float | None, list[tuple[Any, ...]]]:
    told = Told()
    return titanlike.train(config, [told]), told.events


def test_train_is_the_command_and_tells_its_callbacks(tmp_path: Path) -> None:
    config = replace(ONE, checkpoint=Checkpoint(every=0))
    value, events = run_world(train_and_tell, config, tmp_path / "run")[0]
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert value == rows[-1]["val_loss"]
    assert events == [
        ("step", 1),
        ("validation", 2, value),
        ("step", 2),
        ("save", 2, "step-00000002"),
    ]
    assert (tmp_path / "run" / "result.json").exists()


class Misspelt:
    def on_steps(self) -> None:
        """Of no event."""


def test_train_and_build_refuse_invalid_arguments(tmp_path: Path) -> None:
    config = replace(ONE, pp=2, run_dir=str(tmp_path / "run"), on_nonfinite="rollback")
    with pytest.raises(ConfigError) as error:
        titanlike.train(config, [Told(), Misspelt()])
    text = str(error.value)
    assert "torchrun --nproc-per-node 2" in text and "define on_step" in text
    with pytest.raises(ConfigError) as error:
        titanlike.build(config, callbacks=[Misspelt()])
    assert len(error.value.problems) == 3  # the callback, rollback, the number of processes
    assert not (tmp_path / "run").exists()


def agreed(config: Config, worker: Worker, other: list[int]) -> str:
    own = replace(config, seed=worker.rank if worker.rank in other else 0)
    try:
        return library._agreed(replace(own, run_dir=f"/of/{worker.rank}"), worker).run_dir
    except ConfigError as error:
        return str(error)


def test_all_ranks_know_which_have_another_config_than_rank_0(tmp_path: Path) -> None:
    config = tiny(dp=4)
    assert run_world(agreed, config, tmp_path / "same", []) == ["/of/0"] * 4
    said = {*run_world(agreed, config, tmp_path / "other", [1, 3])}
    assert len(said) == 1 and "rank 1, 3 has other values than rank 0" in said.pop()
