"""What identifies data in a checkpoint: their content, and nothing else."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchdata.nodes import IterableWrapper

from support.models import tiny
from support.sources import of_source
from titanlike.core.config.groups.data import StreamData, SyntheticData, TextData, TokenData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data import sources
from titanlike.core.data.registry import open_data
from titanlike.core.data.sources import Data, VariableLength, data_fingerprint, fingerprint_changes
from titanlike.formats.packed import PackedSource


def of(data: Any, **keys: Any) -> dict[str, Any]:
    return of_config(replace(tiny(), data=data, **keys))


def of_config(config: Config) -> dict[str, Any]:
    return data_fingerprint(open_data(config), config.data)


def token_file(path: Path, tokens: np.ndarray, dtype: str = "<u2") -> TokenData:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, tokens.astype(dtype))
    else:
        tokens.astype(dtype).tofile(path)
    name = np.dtype(dtype).name if path.suffix == ".bin" else "uint16"
    return TokenData(path=str(path), dtype=name, vocab_size=256)


def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, 20_000)


tokens = pytest.fixture(random_tokens)


def test_the_fingerprint_does_not_depend_on_where_tokens_are_stored(
    tokens: np.ndarray, tmp_path: Path
) -> None:
    first = of(token_file(tmp_path / "a.bin", tokens))
    for name, dtype in (("b/c.bin", "<u2"), ("a.bin", "<u4"), ("a.npy", "<i8"), ("b.npy", ">u2")):
        assert of(token_file(tmp_path / name, tokens, dtype)) == first, (name, dtype)
    for layout in ({"pp": 2}, {"dp": 2}, {"batch_size": 8}):
        assert of(token_file(tmp_path / "a.bin", tokens), **layout) == first, layout


@settings(max_examples=10)
@given(data=st.data())
def test_any_changed_token_or_length_changes_the_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    tokens = random_tokens()
    # in blocks of a thousand tokens, as larger files are read
    with mock.patch.multiple(sources, _BLOCKS=10, _BLOCK=100):
        first = of(token_file(folder / "a.bin", tokens))
    at = data.draw(st.integers(0, len(tokens) - 1))
    change = data.draw(st.sampled_from(["another", "more", "fewer", "swapped"]))
    other = tokens.copy()
    if change == "another":
        other[at] += 1
    elif change == "more":
        other = np.append(other, other[: data.draw(st.integers(1, 5))])
    elif change == "fewer":
        other = other[: -data.draw(st.integers(1, 5))]
    else:
        other[[at, 0]] = other[[0, at]] + [0, 1]
    with mock.patch.multiple(sources, _BLOCKS=10, _BLOCK=100):
        assert fingerprint_changes(first, of(token_file(folder / "b.bin", other)))


def test_the_fingerprint_covers_documents_and_the_validation_split(
    tokens: np.ndarray, tmp_path: Path
) -> None:
    data = token_file(tmp_path / "a.bin", tokens)
    first = of(data)
    others = {
        "documents": {"documents": True, "boundary": 0},
        "training": {"validation_fraction": 0.1},
    }
    for name, keys in others.items():
        changes = fingerprint_changes(first, of(replace(data, **keys)))
        assert changes and any(change.startswith(name) for change in changes), keys


def test_the_fingerprint_of_text_covers_content_and_tokenizer(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("the same words, more than once " * 50)
    cache = str(tmp_path / "cache")
    first, second = (of(TextData(path=str(tmp_path / name), cache=cache)) for name in ("a", "b"))
    assert first == second and first["tokenizer"] == "bytes"
    (tmp_path / "b" / "b.txt").write_text("The same words, more than once " * 50)
    assert fingerprint_changes(first, of(TextData(path=str(tmp_path / "b"), cache=cache)))
    assert fingerprint_changes(first, {**first, "tokenizer": "another"})


def test_the_fingerprint_of_random_tokens_covers_size_and_seed() -> None:
    first = of(SyntheticData())
    assert of(SyntheticData()) == first
    assert fingerprint_changes(first, of(SyntheticData(vocab_size=255)))
    assert fingerprint_changes(first, of(SyntheticData(), seed=1))


class Own:
    """What a user writes: samples of one length or of several."""

    def __init__(self, size: int, shift: int, drawn: str) -> None:
        self.size, self.shift, self.drawn = size, shift, drawn

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(8) * 7 + i + self.shift) % 50
        if self.drawn == "torch":
            ids = torch.randint(50, (8,))
        elif self.drawn == "python":
            ids = ids + random.randrange(50)
        elif self.drawn == "numpy":
            ids = ids + int(np.random.randint(50))
        image = torch.full((2, 3), float(i), dtype=torch.bfloat16)
        return {"inputs": ids, "targets": ids, "image": image, "flag": torch.tensor(True)}


def own(
    seq_len: int, size: int = 100, shift: int = 0, drawn: str = "", bucket: int = 0, name: str = ""
) -> Data:
    variable = VariableLength(bucket=bucket) if bucket else None
    parts = Own(size, shift, drawn), Own(10, shift, drawn)
    return Data(*parts, 256, "", variable=variable, fingerprint=name or None)


def of_own(**arguments: Any) -> dict[str, Any]:
    return of(Custom(f"{__name__}.own", arguments), seq_len=8)


def test_the_fingerprint_of_custom_data_covers_length_and_samples() -> None:
    first = of_own()
    assert of_own() == first == of_own(workers=2, changed=True)
    for arguments in ({"size": 101}, {"shift": 1}, {"bucket": 4}):
        assert fingerprint_changes(first, of_own(**arguments)), arguments
    named = of_own(name="corpus 7")
    assert of_own(name="corpus 7", shift=1) == named and fingerprint_changes(first, named)


def streamed(seq_len: int, shift: int, name: str = "") -> Data:
    stream: Any = IterableWrapper([Own(40, 0, "")[i] for i in range(40)])
    return Data(stream, Own(10, shift, ""), 256, "", fingerprint=name or None)


def test_the_fingerprint_of_a_stream_covers_its_validation_part() -> None:
    def of_stream(**arguments: Any) -> dict[str, Any]:
        data = Custom(f"{__name__}.streamed", {**arguments, "readers": 1})
        return of(data, seq_len=8, batch_size=4)

    first = of_stream(shift=0)
    assert of_stream(shift=0) == first and fingerprint_changes(first, of_stream(shift=1))
    assert of_stream(shift=0, name="corpus 7") == of_stream(shift=1, name="corpus 7")


@pytest.mark.parametrize("kind", ["saved", "tars"])
def test_a_streams_fingerprint_covers_the_sizes_of_its_files(kind: str, tmp_path: Path) -> None:
    config = of_source(kind, tmp_path)
    first = of_config(config)
    assert isinstance(config.data, StreamData) and config.data.path is not None
    moved = str(shutil.move(config.data.path, tmp_path / "moved"))
    config = replace(config, data=replace(config.data, path=moved))
    assert of_config(config) == first
    (another, *_) = [*Path(moved).rglob("*.arrow"), *Path(moved).rglob("*.tar")]
    another.write_bytes(another.read_bytes() + bytes(10240))
    assert fingerprint_changes(first, of_config(config))


@pytest.mark.parametrize("drawn", ["torch", "python", "numpy"])
def test_samples_that_draw_are_the_same_in_every_launch(drawn: str) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = of_own(drawn=drawn)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert fingerprint_changes(first, of_own(drawn=drawn)) == []
    assert fingerprint_changes(first, of_own(drawn=drawn, size=101))


def test_a_fingerprint_reads_little_of_a_huge_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 GB, of which almost nothing is on the disk: a million tokens of each part are read."""
    path, numbers = tmp_path / "tokens.bin", list[int]()
    with path.open("wb") as file:
        file.truncate(400 * 10**9)
    read = PackedSource.read
    monkeypatch.setattr(
        PackedSource, "read", lambda source, at, n: (numbers.append(n), read(source, at, n))[1]
    )
    data = TokenData(path=str(path), vocab_size=256)
    first = of(data)
    assert 0 < sum(numbers) <= 2 << 20
    with path.open("r+b") as file:
        file.truncate(400 * 10**9 + 2)
    assert fingerprint_changes(first, of(data))
