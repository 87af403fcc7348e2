"""Hugging Face datasets (`data=hf`), local or from the hub, as a sequence of texts, or of token ids
(`data.ids_key`).

Texts are read once, in the dataset's order, and tokenized into the same cache as data=text's
(token_folder.py). So a run's position is an index, in any layout, and ranks do not import `datasets` once
the cache is written.
"""

from __future__ import annotations

import bz2
import glob
import importlib.util
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlike.core.config.errors import Problem
from titanlike.core.config.groups.data import HFData
from titanlike.core.config.schema import Config
from titanlike.core.data.kinds import DataError, Vocabulary, missing_package
from titanlike.formats import text
from titanlike.formats.folder_splits import folder_splits, saved_files, split_names
from titanlike.formats.tables import TABLES, check_tables, largest
from titanlike.formats.token_folder import cached_corpus, token_dtype
from titanlike.formats.token_formats import recognized
from titanlike.formats.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from titanlike.core.data.sources import Data

# suffix of a file -> the builder of `datasets` that reads it
BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".tar": "webdataset",
}
SAVED = ("state.json", "dataset_dict.json")  # files that save_to_disk writes


def open_data(data: HFData, config: Config) -> Data:
    if data.ids_key is None:
        return text.open_texts(data, config, data.path, identity(data), texts(data))
    from titanlike.formats.packed import packed_data  # imports torch

    size, name, _ = vocabulary(data)
    assert size is not None
    source, documents = [*identity(data), data.ids_key], ids_of_rows(data, size)
    tokens = cached_corpus(data, source, documents, Vocabulary(size), 0.0)
    tokenizer = None if name is None else open_tokenizer(name)
    what = f"{data.path} ({data.ids_key} as token ids, documents by rows)"
    return packed_data(config, tokens, tokenizer, what)


def vocabulary(data: HFData) -> Vocabulary:
    if data.ids_key is None:
        return text.vocabulary(data)
    known = Vocabulary(None) if data.tokenizer == "bytes" else text.vocabulary(data)
    size = known.size if data.vocab_size is None else data.vocab_size
    if size is None:
        fix = "data.vocab_size=50257 as it is, or data.tokenizer=PATH of what wrote them"
        raise DataError("data.vocab_size", "null", "rows of ids do not say how many there are", fix)
    return known._replace(size=size)


def check(data: HFData, config: Config) -> Iterator[Problem]:
    if importlib.util.find_spec("datasets") is None:
        raise missing_package("data", "hf", "datasets", "datasets")
    place = _local_path(data)
    if data.ids_key is not None:
        vocabulary(data)
    if place is not None:
        if not text.files_under(place, BUILDERS):
            fix = f"give a folder of save_to_disk, or with files {' '.join(BUILDERS)}"
            yield Problem("data.path", data.path, "no data are in it", fix)
    elif data.path.startswith(("/", ".", "~")) or data.path.count("/") > 1:
        reason = "there is no such file or folder"
        fix = "give a folder that datasets has saved, files of Parquet, Arrow, JSON or CSV, or "
        yield Problem("data.path", data.path, reason, f"{fix}a name")
    elif data.revision is None:
        reason = "a dataset that changes on the hub would not be the same for a run that resumes"
        fix = "data.revision=main, or a commit"
        yield Problem("data.revision", "null", reason, fix)


CHECKS = (text.check_tokenizer, check)


def _local_path(data: HFData) -> Path | None:
    """Return the dataset's path on this machine; None = it is on the hub."""
    place = Path(data.path).expanduser()
    return place.resolve() if place.exists() else None


def identity(data: HFData) -> list[Any]:
    """Return, as JSON, everything that the texts depend on: the key of their cache entry."""
    place = _local_path(data)
    remote = [data.path, data.revision]
    where = remote if place is None else text.file_states(text.files_under(place, BUILDERS))
    return ["hf", where, data.subset, data.split, data.rows]


def texts(data: HFData) -> Iterator[str]:
    """Yield the texts of the rows, without empty and null ones. Raises DataError."""
    rows = _opened(data)
    if features := getattr(rows, "features", None):
        column = data.text_key if data.text_key in features else data.text_key.partition(".")[0]
        if column not in features:
            kinds = {name: getattr(one, "dtype", "list") for name, one in features.items()}
            keys = [f"text_key={name}" for name, kind in kinds.items() if kind == "string"]
            keys += [f"ids_key={name}" for name, kind in kinds.items() if kind == "list"]
            fix = f"data.{[*keys, 'text_key=NAME'][0]} (there are {', '.join(features)})"
            raise DataError("data.text_key", data.text_key, "the dataset has no such column", fix)
        rows = rows.select_columns([column])  # so that images, for example, are not decoded
    try:
        yield from filter(None, (row_text(row, data.text_key) for row in rows))
    except DataError:
        raise
    except Exception as error:  # a damaged file or a network failure
        raise _unreadable(data, error) from None


def row_text(row: Mapping[str, Any], text_key: str) -> str | None:
    """Return the text of a dataset's row. Raises DataError."""
    try:
        return text.text_of(dict(row), text_key)
    except text.BadRow as error:
        raise DataError("data.text_key", text_key, str(error), error.fix) from None


def ids_of_rows(data: HFData, size: int) -> Iterator[np.ndarray]:
    """Yield the rows' token ids, as written to files. Raises DataError."""
    assert data.ids_key is not None
    key, dtype = data.ids_key, np.dtype(token_dtype(size)).newbyteorder("<")
    for number, row in enumerate(_opened(data), 1):
        if not isinstance(row.get(key), list):
            reason = f"row {number} has no list of ids in it (its columns are {', '.join(row)})"
            names = [name for name, value in row.items() if text.is_ids(value)]
            fix = f"data.ids_key={names[0]}" if names else f"data=text data.path={data.path}"
            raise DataError("data.ids_key", key, reason, fix)
        ids = np.array(row[key], np.int64)
        if (mask := row.get("attention_mask")) is not None:
            ids = ids[np.array(mask, bool)]  # drop padding
        if -100 in (row.get("labels") or ()):
            reason = f"row {number} has labels that leave tokens out of the loss: not read here"
            fix = "give the conversations to data=chat, or read the rows in a function of your own"
            raise DataError("data.ids_key", key, reason, f"{fix} (docs/data.md)")
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            reason = f"row {number} has the id {ids.max() if ids.min() >= 0 else ids.min()}"
            fix = f"data.vocab_size={ids.max() + 1}, or more as its tokenizer has"
            raise DataError("data.vocab_size", size, reason, fix)
        yield ids.astype(dtype)


def streamed(data: HFData, reader: int, readers: int) -> Any:
    """Return a reader's shards, or rows if there are fewer shards than readers, as a
    `datasets.IterableDataset`."""
    from datasets.distributed import split_dataset_by_node

    rows = _opened(data)
    if hasattr(rows, "to_iterable_dataset"):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), readers))
    return split_dataset_by_node(rows, rank=reader, world_size=readers)


def _opened(data: HFData) -> Any:
    """Load the dataset's split, limited to its first `rows`. Of local data the library gets files
    and their builder, never the folder: what lies in one could name files and servers."""
    try:
        import datasets
    except ImportError:
        raise missing_package("data", "hf", "datasets", "datasets") from None
    datasets.disable_progress_bars()
    place = _local_path(data)
    try:
        if place is None:
            options: dict[str, Any] = {"revision": data.revision, "streaming": data.streaming}
            rows = datasets.load_dataset(data.path, data.subset, split=data.split, **options)
        elif any((place / name).exists() for name in SAVED):
            if not re.fullmatch(r"\w[\w.]*", data.split):
                reason, fix = "save_to_disk's folders are read by split", "data.split=train"
                raise DataError("data.split", data.split, reason, f"{fix} data.rows=N")
            names = split_names(place)
            folders = {"": place} if names is None else {name: place / name for name in names}
            saved = {n: [*map(str, saved_files(folder))] for n, folder in folders.items()}
            _check_unpacked(files := _of_split(saved, data))
            rows = datasets.concatenate_datasets([datasets.Dataset.from_file(f) for f in files])
        else:
            kind, splits = _local_splits(place, data.subset)
            _of_split(splits, data)
            _check_unpacked([*chain(*splits.values())])
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it connects
            options = {"data_files": {name: [*map(glob.escape, f)] for name, f in splits.items()}}
            options |= {"split": data.split, "streaming": data.streaming}
            rows = datasets.load_dataset(BUILDERS.get(kind, "text"), **options)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(data, error) from None
    if data.rows is None:
        return rows
    count = getattr(rows, "num_rows", data.rows)  # a streamed dataset has no num_rows
    return rows.take(min(data.rows, count))


def _check_unpacked(files: list[str]) -> None:
    """Raise DataError for a file that unfolds to more than `largest`, as `datasets` reads it: it has
    no bound of its own."""
    check_tables([file for file in map(Path, files) if text.kind_of_file(file) in TABLES])
    for file in (file for file in map(Path, files) if text.kind_of_file(file) not in TABLES):
        most = largest(file)
        if any(total > most for total in accumulate(_unpacked(file))):
            reason = f"unpacks to more than {most >> 20} MiB"
            raise DataError("data.path", file, reason, "give it unpacked")


def _unpacked(file: Path) -> Iterator[int]:
    """Yield the bytes of a file's parts, if `datasets` unpacks it: by what it begins with, whatever
    its name is. Raises DataError."""
    from datasets.utils.extract import Extractor

    form = Extractor.infer_extractor_format(file)
    opens: Any = {"gzip": text.opened, "zstd": text.opened, "bz2": bz2.open, "xz": lzma.open}.get(
        form
    )
    if form == "tar" and text.kind_of_file(file) == ".tar":
        with tarfile.open(file) as members:
            yield from (member.size for member in members)
    elif opens is not None:
        with opens(file) as stream:
            yield from map(len, iter(partial(stream.read, 1 << 20), b""))
    elif form is not None:
        raise DataError("data.path", file, f"is {form}, which is not read here", "unpack it")


def _local_splits(place: Path, subset: str | None) -> tuple[str, dict[str, list[str]]]:
    """Return the kind of a folder's files, that of most of them, and their paths by split."""
    if place.is_file():
        kind = text.kind_of_file(place)
        if kind not in BUILDERS and (known := recognized(place)) is not None:
            raise DataError("data.path", place, f"is {known[0]}", known[1])
        splits = {"train": [place]}
    else:
        splits = folder_splits(place, text.files_under(place, BUILDERS), subset)
        kinds = Counter(text.kind_of_file(file) for files in splits.values() for file in files)
        kind = ".tar" if ".tar" in kinds else max(kinds, key=kinds.__getitem__)
    paths = {
        n: [str(f) for f in files if text.kind_of_file(f) == kind] for n, files in splits.items()
    }
    if chained := next((path for path in chain(*paths.values()) if "::" in path), None):
        reason = "fsspec reads :: in a name as one file within another"
        raise DataError("data.path", chained, reason, "rename it")
    return kind, paths


def _of_split(splits: dict[str, list[str]], data: HFData) -> list[str]:
    """Return the files of the split. Raises DataError."""
    names = re.split(r"\[[^]]*\]\+?|\+", data.split)  # train+test, train[:10%]
    if "" in splits:  # saved without a name
        return splits[""]
    if missing := [name for name in names if name and not splits.get(name)]:
        there = [name for name, files in splits.items() if files]
        fix = f"data.split={next(iter(there), 'train')} (there are {', '.join(there) or 'none'})"
        raise DataError("data.split", data.split, f"the dataset has no split {missing[0]}", fix)
    return splits[names[0]]


def _unreadable(data: HFData, error: Exception) -> DataError:
    words = " ".join(str(error).split())[:300]
    reason = f"datasets cannot read it ({type(error).__name__}: {words})"
    return DataError("data.path", data.path, reason, "give a dataset that it loads")
