"""Hugging Face datasets (`data=hf`): a local folder or file, or a name on the hub, as a series of
texts.

The texts are read once, in the dataset's own order, and tokenized into the cache as those of
data=text (text.py). So a run's position in them is a number, in any layout, and no rank imports
`datasets` where the cache has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config.errors import Problem
from titanlike.config.schema import Config, HFData
from titanlike.data.registry import DataError, missing_package
from titanlike.data.text import check_tokenizer, file_states, files_under, open_texts, vocabulary

if TYPE_CHECKING:
    from titanlike.data.sources import Data

__all__ = ["CHECKS", "open_data", "vocabulary"]

# suffix of a file -> what `datasets` reads it with
BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".tar": "webdataset",
}
SAVED = ("state.json", "dataset_dict.json")  # files of save_to_disk


def open_data(data: HFData, config: Config) -> Data:
    return open_texts(data, config, data.path, identity(data), texts(data))


def check(data: HFData, config: Config) -> Iterator[Problem]:
    if importlib.util.find_spec("datasets") is None:
        raise missing_package("data", "hf", "datasets", "datasets")
    place = _local_path(data)
    if place is not None:
        if not files_under(place, BUILDERS):
            fix = f"give a folder of save_to_disk, or with files {' '.join(BUILDERS)}"
            yield Problem("data.path", data.path, "no data are in it", fix)
    elif data.path.startswith(("/", ".", "~")) or data.path.count("/") > 1:
        fix = (
            "give a folder that datasets has saved, files of Parquet, Arrow, JSON or CSV, or a name"
        )
        yield Problem("data.path", data.path, "there is no such file or folder", fix)
    elif data.revision is None:
        reason = "a dataset that changes on the hub would not be the same for a run that resumes"
        fix = "data.revision=main, or a commit"
        yield Problem("data.revision", "null", reason, fix)


CHECKS = (check_tokenizer, check)


def _local_path(data: HFData) -> Path | None:
    """Where the data are on this machine; None = on the hub."""
    place = Path(data.path).expanduser()
    return place.resolve() if place.exists() else None


def identity(data: HFData) -> list[Any]:
    """All that the texts depend on, as JSON: the key of their cache entry."""
    place = _local_path(data)
    remote = [data.path, data.revision]
    where = remote if place is None else file_states(files_under(place, BUILDERS))
    return ["hf", where, data.subset, data.split, data.rows]


def texts(data: HFData) -> Iterator[str]:
    """The texts of its rows, without empty and null ones. Raises DataError."""
    rows = _opened(data)
    columns = [*(getattr(rows, "features", None) or {})]
    if columns and data.text_key not in columns:
        fix = f"name one of its columns: data.text_key={columns[0]} ({', '.join(columns)})"
        raise DataError("data.text_key", data.text_key, "the dataset has no such column", fix)
    if columns:
        rows = rows.select_columns([data.text_key])  # images and the like are not decoded
    try:
        yield from filter(None, (text_of(row, data.text_key) for row in rows))
    except DataError:
        raise
    except Exception as error:  # of a damaged file, or of the network
        raise _unreadable(data, error) from None


def text_of(row: Mapping[str, Any], text_key: str) -> str | None:
    """A row's text. Raises DataError."""
    if text_key not in row:
        fix = f"name one of its columns: data.text_key={next(iter(row))} ({', '.join(row)})"
        raise DataError("data.text_key", text_key, "the dataset has no such column", fix)
    text = row[text_key]
    if not isinstance(text, str | None):
        reason = f"holds {type(text).__name__}, not text"
        fix = f"name a text column; there are {', '.join(row)}"
        raise DataError("data.text_key", text_key, reason, fix)
    return text


def streamed(data: HFData, reader: int, readers: int) -> Any:
    """A reader's share of the dataset's shards, or of its rows where these are fewer, as a
    `datasets.IterableDataset`."""
    from datasets.distributed import split_dataset_by_node

    rows = _opened(data)
    if hasattr(rows, "to_iterable_dataset"):
        rows = rows.to_iterable_dataset(num_shards=min(len(rows), readers))
    return split_dataset_by_node(rows, rank=reader, world_size=readers)


def _opened(data: HFData) -> Any:
    """The dataset's split, its first `rows`."""
    try:
        import datasets
    except ImportError:
        raise missing_package("data", "hf", "datasets", "datasets") from None
    datasets.disable_progress_bars()
    place = _local_path(data)
    try:
        if place is not None and any((place / f).exists() for f in SAVED):
            rows = datasets.load_from_disk(str(place))
            if isinstance(rows, dict):  # else a single split, without a name
                if data.split not in rows:
                    fix = f"data.split={next(iter(rows))} (there are {', '.join(rows)})"
                    reason = "the dataset has no such split"
                    raise DataError("data.split", data.split, reason, fix)
                rows = rows[data.split]
        else:
            source, options = data.path, {"revision": data.revision}
            if place is not None and place.is_file():
                source = BUILDERS.get(place.suffix.lower(), "text")
                options = {"data_files": str(place)}
            elif place is not None:
                source, options = str(place), {}
                if tars := [str(file) for file in files_under(place, (".tar",))]:
                    source, options = "webdataset", {"data_files": tars}
            common = {"split": data.split, "streaming": data.streaming}
            rows = datasets.load_dataset(source, data.subset, **options, **common)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(data, error) from None
    if data.rows is None:
        return rows
    count = getattr(rows, "num_rows", data.rows)  # a stream has none
    return rows.take(min(data.rows, count))


def _unreadable(data: HFData, error: Exception) -> DataError:
    words = " ".join(str(error).split())[:300]
    reason = f"datasets cannot read it ({type(error).__name__}: {words})"
    return DataError("data.path", data.path, reason, "give a dataset that it loads")
