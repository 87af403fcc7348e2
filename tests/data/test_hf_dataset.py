"""data=hf: a Hugging Face dataset is read as its texts would be, from whatever files it has."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from titanlike.core.config.groups.data import HFData, TextData
from titanlike.core.config.schema import Config
from titanlike.core.data import kinds, registry
from titanlike.core.data.registry import DataError, open_data
from titanlike.formats import hf_dataset

datasets = pytest.importorskip("datasets")

TEXTS = [f"def f{n}():\n    return '{'x' * (n % 37)}'\n" for n in range(300)]
ROWS = {"text": [*TEXTS[:7], None, "", *TEXTS[7:]], "number": [*range(302)]}


def saved(kind: str, folder: Path) -> Path:
    rows = datasets.Dataset.from_dict(ROWS)
    folder.mkdir()
    if kind == "splits":
        splits = datasets.DatasetDict({"test": rows.select([0]), "train": rows})
        splits.save_to_disk(str(folder / "data"), num_shards={"test": 1, "train": 3})
    elif kind == "parquet folder":
        (folder / "data").mkdir()
        for part in range(2):
            part_rows = rows.select(range(151 * part, 151 * part + 151))
            part_rows.to_parquet(str(folder / "data" / f"train-0000{part}.parquet"))
    elif kind == "parquet":
        rows.to_parquet(str(folder / "data.parquet"))
        return folder / "data.parquet"
    elif kind == "json":
        rows.to_json(str(folder / "data.json"))
        return folder / "data.json"
    elif kind == "arrow":
        rows.save_to_disk(str(folder / "data"))
        return next((folder / "data").glob("*.arrow"))
    return folder / "data"


def config(path: Path, cache: Path, **more: Any) -> Config:
    return Config(data=HFData(path=str(path), cache=str(cache), **more), seq_len=32, batch_size=4)


def as_text(tmp_path: Path) -> Config:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    data = TextData(path=str(tmp_path / "text.jsonl"), cache=str(tmp_path / "cache"))
    return Config(data=data, seq_len=32, batch_size=4)


def sequences(config: Config) -> list[list[int]]:
    data = open_data(config)
    sources = (data.train, data.validation)
    return [source[i]["inputs"].tolist() for source in sources for i in range(len(source))]


@pytest.mark.parametrize("kind", ["splits", "parquet folder", "parquet", "json", "arrow"])
def test_a_hub_dataset_is_tokenized_like_its_texts(kind: str, tmp_path: Path) -> None:
    """In their order, whatever files it has; streamed or not; without null and empty rows."""
    path = saved(kind, tmp_path / "saved")
    expected = sequences(as_text(tmp_path))
    if kind == "splits":  # what `map` leaves there
        shutil.copy(next((path / "train").glob("data-*.arrow")), path / "train" / "cache-1.arrow")
        with pytest.raises(DataError, match=r"data.split=.* write data.split=train data.rows=N"):
            open_data(config(path, tmp_path / "some", split="train[:10%]"))
    for streaming in (True, False) if kind == "parquet" else (True,):
        cache = tmp_path / f"cache {streaming}"
        found = config(path, cache, streaming=streaming)
        assert registry.problems(found) == []
        assert sequences(found) == expected
    few = config(path, tmp_path / "few", rows=100)
    assert 0 < len(sequences(few)) < len(expected) / 2
    assert sequences(config(path, tmp_path / "few", rows=9999)) == expected


def test_an_unreadable_dataset_is_refused_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = saved("splits", tmp_path / "saved"), tmp_path / "cache"
    for more, key, words in (
        ({"text_key": "body"}, "data.text_key", "data.text_key=text"),
        ({"text_key": "number"}, "data.text_key", "not text"),
        ({"split": "dev"}, "data.split", "data.split=test"),
    ):
        with pytest.raises(DataError) as raised:
            open_data(config(path, cache, **more))
        assert raised.value.problem.key == key and words in str(raised.value)
    for splits in ({"train": 1}, ["../saved"], [["train"]]):
        (path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        with pytest.raises(DataError, match="dataset_dict.json has no list of splits; save it"):
            open_data(config(path, cache))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(
        DataError, match="cannot read it .OSError: broken.parquet: Parquet magic bytes"
    ):
        open_data(config(broken, cache))

    def problem(path: str, **more: Any) -> tuple[str, str]:
        [found] = registry.problems(config(Path(path), cache, **more))
        return found.key, str(found)

    (tmp_path / "empty").mkdir()
    assert "there is no such file" in problem(str(tmp_path / "nowhere"))[1]
    assert "no data are in it" in problem(str(tmp_path / "empty"))[1]
    assert problem("owner/name")[0] == "data.revision"
    assert registry.problems(config(Path("owner/name"), cache, revision="main")) == []
    monkeypatch.setattr(hf_dataset.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'titanlike[datasets]'" in problem(str(path))[1]


def test_rows_of_token_ids_are_documents(tmp_path: Path) -> None:
    """Without padding; the column is found, and so is an id that is none."""
    ids = [[n % 50 + 1] * (3 + n % 5) for n in range(100)]
    padded = [row + [0] * (8 - len(row)) for row in ids]
    mask = [[1] * len(row) + [0] * (8 - len(row)) for row in ids]
    rows = datasets.Dataset.from_dict({"input_ids": padded, "attention_mask": mask})
    rows.to_parquet(str(tmp_path / "a.parquet"))
    given = config(tmp_path / "a.parquet", tmp_path / "cache", validation_fraction=0.2)
    with pytest.raises(DataError, match="data.ids_key=input_ids"):
        open_data(given)
    given.data.ids_key = "input_ids"
    [problem] = registry.problems(given)
    assert problem.fix.startswith("data.vocab_size=50257 ")
    for size, told in ((40, "row 40 has the id 40; write data.vocab_size=41, "), (51, "")):
        given.data.vocab_size = size
        if told:
            with pytest.raises(DataError, match=told):
                open_data(given)
    given.data.documents = True
    data = open_data(given)
    flat = [token for row in ids for token in row]
    assert [*data.train.read(0, 9999), *data.validation.read(0, 9999)] == flat
    begins = data.train[0]["document_ids"].diff().nonzero().flatten() + 1
    assert begins.tolist() == [3, 7, 12, 18, 25, 28]
    assert (data.train[0]["targets"][begins - 1] == -100).all()
    assert kinds.vocabulary(given.data) == (51, None, None)
    rows.add_column("labels", [[-100, *row[1:]] for row in padded]).save_to_disk(
        str(tmp_path / "b")
    )
    given.data.path = str(tmp_path / "b")
    with pytest.raises(DataError, match="row 1 has labels that leave tokens out"):
        open_data(given)


def test_a_compressed_file_is_read_by_its_inner_format(tmp_path: Path) -> None:
    expected = sequences(as_text(tmp_path))
    (tmp_path / "in").mkdir()
    packed = gzip.compress((tmp_path / "text.jsonl").read_bytes())
    (tmp_path / "in" / "text.jsonl.gz").write_bytes(packed)
    for path in (tmp_path / "in", tmp_path / "in" / "text.jsonl.gz"):
        found = config(path, tmp_path / f"cache {path.name}")
        assert registry.problems(found) == [] and sequences(found) == expected
    (tmp_path / "a.bin").write_bytes(b"MMIDIDX\0\0")
    with pytest.raises(DataError, match="the index of a Megatron"):
        open_data(config(tmp_path / "a.bin", tmp_path / "cache"))


def sparse_tar(path: Path) -> None:
    """A member of 128 MiB, of which the archive holds nothing."""
    path.with_name("a.txt").touch()
    os.truncate(path.with_name("a.txt"), 1 << 27)
    subprocess.run(["tar", "-cSf", path, "-C", path.parent, "a.txt"], check=True)


LONG = b'{"text": "' + b"a" * (70 << 20) + b'"}\n'
PACKED: dict[str, Callable[[Path], object]] = {
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LONG, 1)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LONG)),
    "a.txt.bz2": lambda path: path.write_bytes(bz2.compress(LONG, 1)),
    "a.txt.xz": lambda path: path.write_bytes(lzma.compress(LONG, preset=0)),
    "gzip.csv": lambda path: path.write_bytes(gzip.compress(LONG, 1)),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b'{"text": "a"}\n' * (5 << 20), 1)),
    "a.tar": sparse_tar,
    "zip.jsonl": lambda path: zipfile.ZipFile(path, "w").writestr("a.jsonl", "{}"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_a_file_that_datasets_would_unpack_to_much_more_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the library reads it, which has no bound, by whatever it begins with."""
    monkeypatch.setattr(datasets, "load_dataset", None)
    (tmp_path / "in").mkdir()
    PACKED[name](tmp_path / "in" / name)
    assert 0 < (tmp_path / "in" / name).stat().st_size < 1 << 20
    said = "is zip, which is not read" if "zip.j" in name else "unpacks to more than 64 MiB"
    with pytest.raises(DataError, match=f"{name}.* {said}"):
        list(hf_dataset.texts(HFData(path=str(tmp_path / "in" / name))))


def listing(folder: Path, names: list[str], configs: list[dict[str, Any]]) -> Path:
    """A folder as of the hub: each file has its name as its only text; README.md is the card."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}))
    if configs:
        lines = "".join(f"- {json.dumps(config)}\n" for config in configs)
        (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n# words\n")
    return folder


SHARDS = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]
SHARDS += ["data/test-00000-of-00001.jsonl", "data/other-00000-of-00001.jsonl"]
TWO = [{"config_name": "a", "data_files": "a/*"}, {"config_name": "b", "data_dir": "b"}]
BY_SPLIT = [{"split": "train", "path": ["x/**/*.jsonl"]}, {"split": "test", "path": "old/y.jsonl"}]
FOLDERS: list[tuple[list[str], list[dict[str, Any]], list[str | None]]] = [
    (["a.jsonl", "b/c.jsonl"], [], [None]),
    (["trainer.jsonl", "contest.jsonl"], [], [None]),
    (SHARDS, [], [None]),
    (["train.jsonl", "test.jsonl", "my-val.1.jsonl", "more.jsonl"], [], [None]),
    (["data/training/a.jsonl", "old-test/b.jsonl", "x/train-1.jsonl"], [], [None]),
    (["a/train.jsonl", "b/train.jsonl", "b/test.jsonl"], TWO, [None, "a", "b"]),
    (["x/1.jsonl", "x/y/2.jsonl", "old/y.jsonl"], [{"config_name": "c", "data_files": BY_SPLIT}], [None]),
]  # fmt: skip


@pytest.mark.parametrize("names, configs, subsets", FOLDERS)
def test_a_folder_of_the_hub_is_divided_as_datasets_does(
    names: list[str], configs: list[dict[str, Any]], subsets: list[str | None], tmp_path: Path
) -> None:
    folder = listing(tmp_path, names, configs)
    for subset in subsets:
        for split in ("train", "validation", "test", "other"):
            try:
                options = {"split": split, "streaming": True}
                rows = datasets.load_dataset(str(folder), subset, **options)
                expected = sorted(row["text"] for row in rows)
            except ValueError:
                expected = []
            given = HFData(path=str(folder), subset=subset, split=split)
            if expected:
                assert sorted(hf_dataset.texts(given)) == expected, (subset, split)
                continue
            with pytest.raises(DataError, match=r"data\.(split|subset)"):
                [*hf_dataset.texts(given)]


OUTSIDE = ["OUT/secret.txt", "../secret.txt", "OUT/*.txt", "http://127.0.0.1:9/x.txt"]
OUTSIDE += ["hf://datasets/a/b/x.txt", "zip://x.txt::http://127.0.0.1:9/x.zip", "s3://a/x.txt"]
OUTSIDE += ["reference:///x.txt::file://OUT/r.json", "filecache::http://127.0.0.1:9/x.txt"]


@pytest.mark.parametrize("kind", ["card", "state.json", "a FIFO", "a name with ::"])
def test_a_folder_names_no_file_outside_of_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card and state.json choose among what is in it; nothing is connected to."""
    connected = list[Any]()
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, lambda _, address: connected.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address: connected.append(address))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    (tmp_path / "secret.txt").write_text("secret\n")
    folder, found = tmp_path / "own", list[str]()
    texts = {"card": OUTSIDE, "state.json": ["OUT/other/data-00000-of-00001.arrow"]}
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(str(tmp_path / "other"))
    for number, text in enumerate(texts.get(kind, [""])):
        place, text = folder / str(number), text.replace("OUT", str(tmp_path))
        if kind == "card":
            listing(place, ["a.txt"], [{"config_name": "default", "data_files": text}])
        elif kind == "a name with ::":
            listing(place / "a.txt::http:" / "127.0.0.1:9", ["x.txt"], [])
        else:
            datasets.Dataset.from_dict({"text": ["own"]}).save_to_disk(str(place))
            state = json.loads((place / "state.json").read_text())
            state["_data_files"] = [{"filename": text}]
            (place / "state.json").write_text(json.dumps(state))
        if kind == "a FIFO":
            os.mkfifo(place / "data-00001-of-00002.arrow")
        try:
            found += hf_dataset.texts(HFData(path=str(place)))
            assert kind == "state.json"
        except DataError as error:
            reason = {"card": "none of the data files in the folder", "a FIFO": "regular file"}
            assert reason.get(kind, "file within another") in str(error)
    assert found == ["own"] * (kind == "state.json") and not connected
