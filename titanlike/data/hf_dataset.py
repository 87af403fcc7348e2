"""Hugging Face datasets (`data=hf`): a local folder or file, or a name on the hub, as a series of texts.

The texts are read once, in the dataset's own order, and tokenized into the cache as those of data=text
(tokenized_corpus.py). So a run's position in them is a number, in any layout, and no rank imports
`datasets` where the cache has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from titanlike.config.schema import HFData
from titanlike.data.errors import DataError, missing_extra

# suffix of a file -> what `datasets` reads it with
BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
}


def check(data: HFData) -> Iterator[DataError]:
    """What is wrong before anything is read."""
    if importlib.util.find_spec("datasets") is None:
        yield missing_extra("data", "hf", "datasets", extra="datasets")
        return
    if data.rows is not None and data.rows < 1:
        yield DataError(
            "data.rows", data.rows, "must be at least 1", "Write data.rows=null for all"
        )
    place = local_path(data)
    if place is None:
        if data.path.startswith(("/", ".", "~")) or data.path.count("/") > 1:
            fix = "Give a folder that datasets has saved, files of Parquet, Arrow, JSON or CSV, or a name"
            yield DataError("data.path", data.path, "there is no such file or folder", fix)
        elif data.revision is None:
            reason = (
                "a dataset that changes on the hub would not be the same for a run that resumes"
            )
            yield DataError(
                "data.revision", "null", reason, "Write data.revision=main, or a commit"
            )
        return
    if not files_of(place):
        fix = f"Give a folder of save_to_disk, or with files {' '.join(BUILDERS)}"
        yield DataError("data.path", data.path, "no data are in it", fix)


def local_path(data: HFData) -> Path | None:
    """Where the data are on this machine; None = on the hub."""
    place = Path(data.path).expanduser()
    return place.resolve() if place.exists() else None


def files_of(place: Path) -> list[Path]:
    """The files that hold a local dataset, sorted; hidden ones are not read."""
    if place.is_file():
        return [place]
    every = (f for f in place.rglob("*") if f.is_file() and f.suffix.lower() in BUILDERS)
    return sorted(
        f for f in every if not any(p.startswith(".") for p in f.relative_to(place).parts)
    )


def identity(data: HFData) -> list[Any]:
    """What the texts depend on, as JSON: the key of their cache entry."""
    place = local_path(data)
    if place is None:
        where: Any = [data.path, data.revision]
    else:
        where = [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files_of(place)]
    return ["hf", where, data.subset, data.split, data.rows]


def texts(data: HFData) -> Iterator[str]:
    """The texts of its rows, without empty and null ones. Raises DataError."""
    rows = _opened(data)
    columns = [*(getattr(rows, "features", None) or {})]
    if columns and data.text_key not in columns:
        fix = f"Name one of its columns: data.text_key={columns[0]} ({', '.join(columns)})"
        raise DataError("data.text_key", data.text_key, "the dataset has no such column", fix)
    if columns:
        rows = rows.select_columns([data.text_key])  # images and the like are not decoded
    every = iter(rows)
    while True:
        try:
            part = [*islice(every, 1000)]
        except Exception as error:  # of a damaged file, or of the network
            raise _unreadable(data, error) from None
        for number, row in enumerate(part):
            text = row.get(data.text_key)
            if not isinstance(text, str | None):
                reason = f"holds {type(text).__name__} in row {number}, not text"
                fix = f"Name a text column; there are {', '.join(row)}"
                raise DataError("data.text_key", data.text_key, reason, fix)
            if text:
                yield text
        if not part:
            return


def _opened(data: HFData) -> Any:
    """The dataset's split, its first `rows`."""
    try:
        import datasets
    except ImportError:
        raise missing_extra("data", "hf", "datasets", extra="datasets") from None
    datasets.disable_progress_bars()
    place = local_path(data)
    try:
        if place is None:
            source, more = data.path, {"revision": data.revision}
        elif place.is_file():
            source, more = BUILDERS.get(place.suffix.lower(), "text"), {"data_files": str(place)}
        elif (place / "state.json").exists() or (place / "dataset_dict.json").exists():
            return _first(_saved(data, datasets.load_from_disk(str(place))), data.rows)
        else:
            source, more = str(place), {}
        found = datasets.load_dataset(
            source, data.subset, split=data.split, streaming=data.streaming, **more
        )
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(data, error) from None
    return _first(found, data.rows)


def _saved(data: HFData, saved: Any) -> Any:
    """The split of what save_to_disk wrote, which may be a single one without a name."""
    if not isinstance(saved, dict):
        return saved
    if data.split not in saved:
        fix = f"Write data.split={next(iter(saved))} (there are {', '.join(saved)})"
        raise DataError("data.split", data.split, "the dataset has no such split", fix)
    return saved[data.split]


def _first(rows: Any, count: int | None) -> Any:
    if count is None:
        return rows
    known = getattr(rows, "num_rows", None)  # of a stream it is not
    return rows.take(count if known is None else min(count, known))


def _unreadable(data: HFData, error: Exception) -> DataError:
    words = " ".join(str(error).split())[:300]
    reason = f"datasets cannot read it ({type(error).__name__}: {words})"
    return DataError("data.path", data.path, reason, "Give a dataset that it loads")
