"""A stream trains as one process reads it: in every layout, with any loader processes, and after a
kill."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cells import cells, meshes, slow
from support.models import tiny
from support.paths import ROOT
from support.proven import assert_proven
from support.records import numbers
from support.runs import train_each, trained
from support.sources import SAMPLES, STREAMS, by_step, of_source, rows_of, sample, stateful_loader
from support.tokenizers import write_tokenizer
from support.world import run_world
from titanlike.core.config.errors import ConfigError
from titanlike.core.config.groups.computation import Numerics
from titanlike.core.config.groups.data import RampStage
from titanlike.core.config.groups.jobs import Checkpoint, Launch, Validation
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import DataError, open_data
from titanlike.core.data.registry import problems as data_problems
from titanlike.core.data.sources import Data
from titanlike.formats.stream_nodes import Rows, parts_of


def losses(config: Config, folder: Path) -> list[tuple[float, ...]]:
    """loss and val_loss of each step."""
    rows = trained(replace(config, run_dir=str(folder)))
    return [(row["loss"], row.get("val_loss", 0.0)) for row in rows if "loss" in row]


def test_a_resume_within_a_line_over_several_parts_goes_on_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" + "\u20acc\u00e9d" * 200_000 + "\nlast")
    parts = parts_of([tmp_path / "a.txt"], 1)
    node, rows, states = Rows(parts, "text", 0, 1, 0), list[str](), list[Any]()
    node.reset()
    for row in node:
        rows.append(row.text)
        states.append(node.state_dict())
    assert len(parts) > 4 and len(rows) > 4
    for number, state in enumerate(states, 1):
        again = Rows(parts, "text", 0, 1, 0)
        again.reset(state)
        assert [row.text for row in again] == rows[number:], number


LAYOUTS = meshes("dp=2", "pp=2 dp=2", "pp=3", "dp=4 workers=2", "tp=2", "cp=2")
MOST = [f"{kind} in {layout}" for kind in STREAMS for layout in LAYOUTS]
DEFAULT = ["mixture in pp=2 dp=2"]


@pytest.mark.parametrize(
    "cell",
    cells(
        {name: name for name in DEFAULT},
        {name: name for name in MOST[::4]},
        {name: name for name in MOST if name not in DEFAULT},
    ),
)
def test_every_layout_has_the_losses_of_one_process(cell: str, tmp_path: Path) -> None:
    kind, _, layout = cell.partition(" in ")
    alone = losses(of_source(kind, tmp_path), tmp_path / "alone")
    config = of_source(kind, tmp_path, **LAYOUTS[layout])
    assert len(alone) == 6 and all(validated for _, validated in alone[2::3])
    for found, expected in zip(losses(config, tmp_path / "run"), alone, strict=True):
        assert found == pytest.approx(expected, abs=2e-5)


WITH_THREADS = """
import sys
from pathlib import Path
from support.sources import batches, of_source, open_data
config = of_source("jsonl", Path.cwd(), workers=1, data={"tokenizer": sys.argv[1]})
print(len(next(batches(open_data(config).train, config, dp_rank=0))["inputs"]))
"""


@pytest.mark.slow
def test_loader_processes_do_not_wait_for_threads_of_a_tokenizer(tmp_path: Path) -> None:
    """Which it has started in the process that they are forks of."""
    tokenizer = write_tokenizer("byte-level", tmp_path / "tokenizer")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    more = {"TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": path}
    words = [sys.executable, "-c", WITH_THREADS, tokenizer]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | more, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, b"16\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "nodes", "hugging_face"])
def test_verify_passes_on_streams(kind: str, tmp_path: Path) -> None:
    """Also on one of which nothing is held out."""
    validation = Validation(every=0 if kind == "jsonl" else 3, batches=1)
    config = of_source(kind, tmp_path, pp=2, dp=2, validation=validation)
    assert_proven(config, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "stateful"])
def test_exact_layouts_are_bitwise_equal(kind: str, tmp_path: Path) -> None:
    exact = {"numerics": Numerics(name="exact")}
    alone = losses(of_source(kind, tmp_path, **exact), tmp_path / "alone")
    assert losses(of_source(kind, tmp_path, dp=4, workers=1, **exact), tmp_path / "run") == alone


# --- resumes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    cells(
        {"jsonl": "jsonl"},
        {kind: kind for kind in ("generator", "mixture", "saved", "nodes", "hugging_face")},
        {kind: kind for kind in STREAMS},
    ),
)
def test_a_run_killed_anywhere_resumes_with_the_same_samples(kind: str, tmp_path: Path) -> None:
    """20 kills in a row, each resumed in another layout from a checkpoint some steps before."""
    layouts = [(1, 0), (2, 0), (4, 0), (8, 0), (2, 1), (1, 0)]
    configs = [of_source(kind, tmp_path, dp=dp, workers=workers) for dp, workers in layouts]
    steps = 60
    expected, _ = by_step(configs[0], [], 0, steps)
    assert len({row for rows in expected[:10] for row in rows}) == 160, "no sample twice at first"
    draw = random.Random(kind)
    start, saved = 0, list[dict[str, Any]]()
    for kill in range(20):
        config = configs[kill % (len(configs) - 1 if kill % 5 else len(configs))]
        ahead = min(draw.randint(1, 5), steps - start)
        lost = min(2, steps - start - ahead)  # trained on after the save, and again after the kill
        found, _ = by_step(config, saved, start, ahead + lost)
        assert found == expected[start : start + ahead + lost], f"kill {kill} in {layouts}"
        _, saved = by_step(config, saved, start, ahead)
        start += ahead
        if start >= steps:
            break
    assert start > 20


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    config = of_source("jsonl", tmp_path, checkpoint=Checkpoint(every=2, keep=0))
    whole = replace(config, run_dir=str(tmp_path / "whole"))
    stopped = replace(config, steps=3, run_dir=str(tmp_path / "stopped"))
    other = replace(stopped, dp=2, steps=5)
    for each in (whole, stopped):
        Path(each.run_dir).mkdir()
    run_world(train_each, config, tmp_path / "world", [whole, stopped])
    run_world(train_each, other, tmp_path / "world", [other])
    run_world(train_each, config, tmp_path / "world", [replace(stopped, steps=6)])
    expected, found = (
        [row[1:] for row in numbers(tmp_path / name)] for name in ("whole", "stopped")
    )
    assert len(found) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def unhurried(seq_len: int, seconds: float) -> Data:
    """Without a state; from the tenth on, each sample takes some seconds."""

    def samples() -> Iterator[dict[str, torch.Tensor]]:
        for n in range(100):
            time.sleep(seconds if n >= 10 else 0)
            yield sample(n, seq_len)

    return Data(samples(), None, vocab_size=64, description="")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_resume_may_read_forward_for_longer_than_the_time_limit(tmp_path: Path) -> None:
    """6 samples of 2.5 s each, with a limit of 12 s."""
    keys = {"validation": Validation(every=0), "checkpoint": Checkpoint(every=8)}
    config = replace(tiny(steps=8, batch_size=2), run_dir=str(tmp_path / "run"), **keys)
    config = replace(config, launch=Launch(timeout=12, step_timeout=12))
    (tmp_path / "run").mkdir()
    first, then = (
        replace(config, steps=n, data=Custom(f"{__name__}.unhurried", {"readers": 1, "seconds": s}))
        for n, s in ((8, 0.0), (9, 2.5))
    )
    run_world(train_each, config, tmp_path / "world", [first, then])
    assert [step for step, *_ in numbers(tmp_path / "run")] == [*range(1, 10)]


def test_every_epoch_has_every_sample_once_in_a_new_order(tmp_path: Path) -> None:
    nothing_held = Validation(every=0)
    for kind in ("stateful", "generator", "dividing", "once"):
        config = of_source(kind, tmp_path, validation=nothing_held)
        source = open_data(config).train
        per_epoch = SAMPLES // config.batch_size
        rows = rows_of(source, config, 0, 0, 2 * per_epoch)
        assert Counter(Counter(rows).values()) == {2: SAMPLES}
    config = of_source("jsonl", tmp_path, validation=nothing_held, data={"shuffle_buffer": 8})
    rows = rows_of(open_data(config).train, config, 0, 0, 80)
    assert len({*rows}) > 0.9 * len(rows), "packed anew in a later epoch"


@pytest.mark.parametrize(
    "kind, dp, workers, samples",
    [
        ("stateful", 1, 0, 91),
        ("stateful", 1, 0, 128),
        ("uneven", 1, 2, 128),
        *slow(("stateful", 2, 1, 91)),
    ],
)
def test_a_run_ends_with_its_data(
    kind: str, dp: int, workers: int, samples: int, tmp_path: Path
) -> None:
    """Though some readers have fewer samples than others; and has nothing left to do then."""
    data = {"samples": samples, "repeat": False}
    config = of_source(kind, tmp_path, dp=dp, workers=workers, data=data)
    config = replace(config, steps=50, validation=Validation(every=0), checkpoint=Checkpoint())
    first = losses(config, tmp_path / "run")
    assert len(first) == samples // 8 // 2
    assert (tmp_path / f"run/checkpoints/step-{len(first):08}").exists()
    assert losses(config, tmp_path / "run") == first


def test_a_rollback_skips_batches(tmp_path: Path) -> None:
    config = of_source("jsonl", tmp_path)
    source: Any = open_data(config).train
    expected = rows_of(source, config, 0, 0, 12)
    again: Any = open_data(config).train
    rows_of(again, config, 0, 0, 9)
    rows = config.batch_size
    assert rows_of(again, config, 0, 7, 5) == expected[7 * rows :]


def test_a_ramp_reads_the_same_samples(tmp_path: Path) -> None:
    ramp = [RampStage(tokens=256, batch_size=8), RampStage(tokens=512, seq_len=8)]
    config = of_source("jsonl", tmp_path, ramp=ramp)
    shapes = []
    for dp in (1, 2):
        each = [
            batches(open_data(config).train, replace(config, dp=dp), dp_rank=r) for r in range(dp)
        ]
        steps = [[next(stream)["inputs"] for stream in each] for _ in range(6)]
        shapes.append([torch.cat(step) for step in steps])
    assert [tuple(step.shape) for step in shapes[0]] == [(8, 16)] * 2 + [(16, 8)] * 2 + [
        (16, 16)
    ] * 2
    assert all(map(torch.equal, *shapes))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch does not deprecate it yet")
def test_torchdata_still_calls_a_deprecated_torch_api() -> None:
    """Else the filter in core/torch_private/loader_worker.py can go."""
    with pytest.warns(UserWarning, match="'set_vital' is deprecated"):
        iter(stateful_loader(16, 0, 1).train)


# --- wrong use ------------------------------------------------------------------------------------


WRONG = {
    "drawn_copies": "readers 0 and 1 give the same first sample.*data.readers=1",
    "copies": "readers 0 and 1 give the same first sample.*data.readers=1",
    "unsaved": r"cannot be saved: state\['state'\]\['lock'\] is a builtin_function",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_stream_is_an_error_before_the_first_step(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=WRONG[kind]):
        open_data(of_source(kind, tmp_path))


def test_a_state_that_cannot_be_saved_later_is_named_as_at_the_beginning(tmp_path: Path) -> None:
    config = of_source("unsaved_later", tmp_path)
    with pytest.raises(DataError, match=r"data.name=.* cannot be saved: .*\['lock'\] is a builtin"):
        rows_of(open_data(config).train, config, 0, 0, 30)


def test_a_corpus_of_which_all_is_held_out_is_an_error(tmp_path: Path) -> None:
    for kind, keys in (("stateful", {"samples": 16}), ("tars", {})):
        most = Validation(every=1, batches=1 if kind == "stateful" else 120)
        config = of_source(kind, tmp_path, data=keys, validation=most)
        with pytest.raises(DataError, match="held out for validation"):
            next(batches(open_data(config).train, config, dp_rank=0))


def test_a_sample_of_another_shape_is_named(tmp_path: Path) -> None:
    config = of_source("other_shape", tmp_path, validation=Validation(every=0))
    with pytest.raises(DataError, match="training sample 2 of reader 0 has 'inputs' of shape"):
        rows_of(open_data(config).train, config, 0, 0, 2)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"dp": 3, "batch_size": 12}, "data.readers=8: .* write data.readers=6"),
        ({"data": {"readers": 5}}, "data.readers=5: .* write data.readers=4"),
        ({"data": {"text_key": "body"}}, "data.text_key=body: line 1 of .*has no field body"),
        ({"data": {"path": "/nowhere"}}, "data.path=/nowhere: there is no such file"),
        ({"validation": Validation(every=1, batches=0)}, "write validation.batches=100"),
        ({"data": {"sources": {"a": {"path": "x"}}, "path": None}}, "a path and a weight"),
    ],
)
def test_a_wrong_config_is_an_error_before_launch(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = data_problems(of_source("jsonl", tmp_path, **changes))
    assert found
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(found)


def test_a_resume_on_different_data_is_an_error(tmp_path: Path) -> None:
    config = of_source("jsonl", tmp_path)
    _, saved = by_step(config, [], 0, 3)
    path = tmp_path / "corpus-jsonl" / "a.jsonl"
    path.write_text(path.read_text().replace("<0", "<9"))
    with pytest.raises(DataError, match="the first sample of reader . is not what it was"):
        by_step(config, saved, 3, 1)
    changed = replace(config, data=replace(config.data, changed=True))
    by_step(changed, saved, 3, 1)


def test_a_checkpoint_keeps_its_number_of_readers(tmp_path: Path) -> None:
    config = of_source("jsonl", tmp_path)
    expected, _ = by_step(config, [], 0, 6)
    _, saved = by_step(config, [], 0, 3)
    default = replace(config, data=replace(config.data, readers=None))  # 16
    assert by_step(default, saved, 3, 3)[0] == expected[3:]
    with pytest.raises(
        DataError, match="data.readers=4: the checkpoint has 8; write data.readers=8"
    ):
        by_step(replace(config, data=replace(config.data, readers=4)), saved, 3, 1)
