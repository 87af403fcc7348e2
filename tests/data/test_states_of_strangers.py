"""A checkpoint's states of a stream's readers are a stranger's: whatever they say, no file or folder
that they name is opened, nothing is connected to and nothing is run, by this package, torchdata or
datasets."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from support.cells import cells
from support.sources import OWN, STREAMS, of_source
from support.watched import Watch
from titanlike.core.data.loader import batches
from titanlike.core.data.registry import open_data
from titanlike.formats.stream_source import dumped, loaded

FORGED = 15  # states of a kind
NAMES = ("path", "data_files", "folder", "dataset", "iterable", "source", "_target_", "__class__")


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Sees what is opened, connected to and started; a hook cannot be removed, so it is quieted."""
    (outside := tmp_path / "outside").mkdir()
    (outside / "a.jsonl").write_text('{"text": "theirs"}\n')
    watch = Watch(str(outside), str(tmp_path))
    sys.addaudithook(watch)
    yield watch
    watch._busy = True


def changed(plain: Any, draw: random.Random, values: list[Any]) -> Any:
    """A copy of a state with more keys on the way to some place, which may be another value."""
    if isinstance(plain, dict) and plain:
        key = draw.choice([*plain])
        more = {name: draw.choice(values) for name in draw.sample(NAMES, 3)}
        return plain | {key: changed(plain[key], draw, values)} | more
    if isinstance(plain, list) and plain:
        place = draw.randrange(len(plain))
        return [*plain[:place], changed(plain[place], draw, values), *plain[place + 1 :]]
    return draw.choice(values) if draw.random() < 0.5 else plain


FIRST = ("hugging_face", "jsonl")
KINDS = cells({k: k for k in FIRST}, {k: k for k in STREAMS if k not in FIRST})


@pytest.mark.parametrize("kind", KINDS)
def test_a_readers_state_opens_nothing_that_it_names(
    kind: str, tmp_path: Path, watch: Watch
) -> None:
    keys = {} if kind in OWN else {"shuffle_buffer": 64}
    config = of_source(kind, tmp_path, data={"readers": 2, **keys})
    source: Any = open_data(config).train
    list(islice(batches(source, config, dp_rank=0), 3))
    saved, draw = source.saved(3), random.Random(kind)
    outside = watch.outside
    values: list[Any] = [
        None,
        -1,
        7,
        "x",
        [],
        {},
        outside,
        f"{outside}/a.jsonl",
        [f"{outside}/*.jsonl"],
    ]
    values += [f"file://{outside}/a.jsonl", "http://127.0.0.1:9/x", {"path": f"{outside}/a.jsonl"}]
    values += [f"reference::file://{outside}/a.jsonl", {"_target_": "os.system", "command": "true"}]
    watch.breaches.clear()
    reads = 0
    readers = [name for name in saved if name.removeprefix("data.reader.").isdigit()]
    for number in range(FORGED):
        name = readers[number % len(readers)]
        content = loaded(saved[name])
        state = changed(content["state"], draw, values)
        entries = {**saved, name: dumped(state, content["first"], content["step"])}
        source = open_data(config).train
        try:
            source.restore(entries)
            list(islice(batches(source, config, dp_rank=0, start_step=3), 1))
            reads += 1
        except Exception as error:  # refused, as one likes
            assert not isinstance(error, AssertionError), error
        assert watch.breaches == []
    assert reads, "none was read"


def test_a_node_of_torchdata_has_no_state_that_names_a_folder(watch: Watch) -> None:
    """`BaseNode.reset` gives the state to the node, and opens nothing with it."""

    class Noted(BaseNode[int]):
        given: Any = None

        def reset(self, initial_state: Any = None) -> None:
            super().reset(initial_state)
            self.given = initial_state

        def next(self) -> int:
            return 1

        def get_state(self) -> dict[str, Any]:
            return {}

    state = {"path": watch.outside, "iterable": {"data_files": f"{watch.outside}/a.jsonl"}}
    (node := Noted()).reset(state)
    assert next(node) == 1 and node.given == state and watch.breaches == []
