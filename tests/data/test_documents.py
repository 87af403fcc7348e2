"""Packed documents: attention stays within each; layouts: `proof/test_layouts.py`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.forwards import Lstm
from support.models import tiny
from support.real_model import real
from titanlike.core.config.groups.data import TextData, TokenData
from titanlike.core.config.groups.user_code import Custom
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, example_batch
from titanlike.core.data.registry import open_data
from titanlike.run.checks import problems


def text(folder: Path, **changes: Any) -> TextData:
    """400 documents of up to 20 bytes: about three in 32 tokens."""
    path = folder / "short.jsonl"
    lines = (json.dumps({"text": chr(97 + i % 26) * (i * 7 % 21)}) for i in range(400))
    path.write_text("\n".join(lines))
    return TextData(path=str(path), cache=str(folder / "cache"), documents=True, **changes)


def packed(folder: Path, *args: Any, **changes: Any) -> Config:
    return tiny(*args, data=text(folder), **{"seq_len": 32, "layers": 4, **changes})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_document_begins_at_each_boundary(tmp_path: Path, workers: int) -> None:
    """Inputs and targets are those that there are without documents."""
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([5, 0, 1, 2, 0, 0, 3, 4, 5, 0, 6, 7, 8, 9, 10, 11, 12, 0] * 2))
    data = TokenData(
        path=str(path), vocab_size=13, validation_fraction=0.5, boundary=0, documents=True
    )
    config = Config(data=data, seq_len=8, batch_size=2, device="cpu")
    opened = open_data(config)
    assert opened.boundary == 0
    source = pickle.loads(pickle.dumps(opened.train))
    assert source[0]["document_ids"].tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert source[1]["document_ids"].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
    data.workers = workers
    (with_ids,) = islice(batches(opened.train, config, dp_rank=0), 1)
    plain = replace(config, data=replace(data, documents=False))
    (without,) = islice(batches(open_data(plain).train, plain, dp_rank=0), 1)
    assert set(with_ids) == {"inputs", "targets", "document_ids"}
    assert all(torch.equal(with_ids[name], without[name]) for name in ("inputs", "targets"))


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"family": "gpt2"}], ids=str)
def test_a_packed_document_has_the_logits_it_has_alone(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = packed(tmp_path, **changes)
    model = real(config)
    batch = next(batches(open_data(config).train, config, dp_rank=0))
    ids, documents = batch["inputs"], batch["document_ids"]
    logits = model(ids, document_ids=documents)
    most, alike = 0, 0
    for row in range(len(ids)):
        for number in documents[row].unique():
            its = documents[row] == number
            alone = model(ids[row, its][None])[0]
            torch.testing.assert_close(logits[row, its], alone, rtol=0, atol=2e-6)
        most = max(most, documents[row].unique().numel())
        alike += torch.allclose(logits[row], model(ids[row][None])[0], atol=1e-3)
    assert most >= 3 and alike == 0  # without document_ids it is another function


@pytest.mark.parametrize("kind", ["text", "tokens"])
@pytest.mark.parametrize("on", [True, False])
def test_the_example_input_has_the_shapes_of_a_batch(tmp_path: Path, kind: str, on: bool) -> None:
    data: Any = text(tmp_path)
    if kind == "tokens":
        np.save(tmp_path / "a.npy", np.arange(4000) % 50)
        data = TokenData(path=str(tmp_path / "a.npy"), vocab_size=50, boundary=7)
    config = tiny(data=replace(data, documents=on))
    found, batch = example_batch(config), next(batches(open_data(config).train, config, dp_rank=0))
    assert ("document_ids" in batch) == on
    assert {k: (v.shape[1:], v.dtype) for k, v in found.items()} == {
        k: (v.shape[1:], v.dtype) for k, v in batch.items()
    }


# --- what cannot be is told before a worker starts ---------------------------------------------


def told(config: Config) -> str:
    return "\n".join(map(str, problems(config)))


def test_a_model_without_document_masks_is_refused_with_a_fix(tmp_path: Path) -> None:
    model = Custom(f"{Lstm.__module__}.{Lstm.__name__}")
    config = packed(tmp_path, run_dir=str(tmp_path / "run"))
    text = told(replace(config, model=model))
    assert text.startswith("data.documents=true: gives the batch a field document_ids")
    assert text.endswith("(it takes inputs only); write data.documents=false")
    assert not told(config)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, "data.boundary=null: documents=true needs the boundary"),
        ({"boundary": 50}, "data.boundary=50: is not a token id below data.vocab_size=50"),
        ({"boundary": -1}, "data.boundary=-1: is not a token id below data.vocab_size=50"),
        ({"boundary": 49}, "data.boundary=49: is not among the first 400 tokens"),
        ({"boundary": 48}, ""),
        ({"documents": False}, ""),
    ],
)
def test_token_files_need_a_boundary_that_is_in_them(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    np.save(tmp_path / "a.npy", np.arange(400) % 49)
    data = TokenData(
        **{"path": str(tmp_path / "a.npy"), "vocab_size": 50, "documents": True, **changes}
    )
    config = tiny(data=data, run_dir=str(tmp_path / "run"))
    assert said in told(config) and bool(said) == bool(told(config))
