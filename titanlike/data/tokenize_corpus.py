"""Tokenize a corpus of many files into a folder of ids, by several processes.

1. The files, sorted, are dealt into units of about 64 MiB: the plan (plan.json), which depends on the
   corpus alone.
2. Each unit is tokenized by one process into a file, which gets its name once it is whole; beside it
   is what is known of it (tokens, documents, checksum, bad records).
3. When all are there, index.json is written. A start on a folder with a plan goes on with the units
   that are not there yet: so the bytes do not depend on kills, and not on the number of processes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from titanlike.config.files import atomic_write_text, read_object, temporary_beside
from titanlike.data.errors import DataError
from titanlike.data.records import find_corpus, records
from titanlike.data.token_folder import FORMAT, INDEX, TOKENIZER
from titanlike.data.tokenizer import Tokenizer, open_tokenizer
from titanlike.data.tokenizer_files import write_tokenizer
from titanlike.launch.signals import die_with_parent
from titanlike.metrics import units

PLAN, BAD = "plan.json", "bad.jsonl"
_UNIT = 1 << 26  # bytes of files
_EVERY = 5.0  # seconds between lines of progress
_MOST_NAMED = 100  # bad records of a unit that are named; all are counted


@dataclass(frozen=True)
class Settings:
    """What the bytes depend on, besides the corpus."""

    tokenizer: str
    text_key: str = "text"
    bad: Literal["refuse", "skip"] = "refuse"
    unit_bytes: int = _UNIT


@dataclass
class Unit:
    """What is known of a tokenized unit."""

    name: str
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    checksum: str = ""
    bad_count: int = 0


class BadRecord(ValueError):
    """A record that cannot be read, where these are refused."""


def tokenize_corpus_files(
    corpus: Path,
    out: Path,
    settings: Settings,
    workers: int,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Tokenize, or go on; returns the index. Raises DataError, BadRecord, OSError."""
    tokenizer = open_tokenizer(settings.tokenizer)
    files = find_corpus(corpus.expanduser().resolve())
    plan = _plan(files, settings, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    _check_plan(out, plan)
    todo = [number for number in range(len(plan["units"])) if _done(out, number) is None]
    count = len(plan["units"])
    if len(todo) < count:
        say(f"going on: {count - len(todo)} of {count} files of tokens are there")
    begin = time.monotonic()
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    paths = {number: [path for path, *_ in plan["units"][number]] for number in todo}
    sizes = {number: sum(size for _, size, _ in plan["units"][number]) for number in todo}
    jobs = [(str(out), number, paths[number], settings, dtype) for number in todo]
    done_bytes, tokens, said = 0, 0, begin
    for number, unit in _run(jobs, workers):
        done_bytes, tokens = done_bytes + sizes[number], tokens + unit.tokens
        if time.monotonic() > said + _EVERY:
            said = time.monotonic()
            seconds = said - begin
            share = f"{done_bytes / max(1, sum(sizes.values())):.0%} of {units.size(sum(sizes.values()))}"
            rate = f"{units.count(tokens / seconds)} tokens/s, {units.size(done_bytes / seconds)}/s"
            say(f"{share}  {units.count(tokens)} tokens  {rate}")
    return _finish(out, count, settings, tokenizer, dtype)


def _run(jobs: list[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, Unit]]:
    """(number, unit) as they are completed. The first error ends all."""
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job[1], _tokenize_unit(*job)
        return
    context = get_context("spawn")  # the tokenizers library has threads, which a fork would lose
    parent = os.getpid()
    with ProcessPoolExecutor(
        min(workers, len(jobs)), context, initializer=_init_worker, initargs=(parent,)
    ) as pool:
        futures: dict[Future[Unit], int] = {
            pool.submit(_tokenize_unit, *job): job[1] for job in jobs
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _init_worker(parent: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    die_with_parent(parent, signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process a core is enough


# --- the plan ---------------------------------------------------------------------------------------


def _plan(files: list[Path], settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Units of files with their sizes and times, and what else the bytes depend on."""
    found: list[list[tuple[str, int, int]]] = []
    size = settings.unit_bytes
    for file in files:
        stat = file.stat()
        if size >= settings.unit_bytes or size + stat.st_size > settings.unit_bytes:
            found.append([])
            size = 0
        found[-1].append((str(file), stat.st_size, stat.st_mtime_ns))
        size += stat.st_size
    kept = asdict(settings) | {"tokenizer": tokenizer.fingerprint}
    return {"format": FORMAT, "settings": kept, "units": found}


def _check_plan(out: Path, plan: dict[str, Any]) -> None:
    """Write the plan, or compare it with the one that is there."""
    path, text = out / PLAN, json.dumps(plan)
    if not path.exists():
        if strange := sorted(p.name for p in out.iterdir()):
            raise DataError("OUT", out, f"has other files ({strange[0]})", "Give a new folder")
        atomic_write_text(path, text)
        return
    before = read_object(path)
    if before == json.loads(text):
        return
    what = "the corpus" if before.get("settings") == plan["settings"] else "a setting"
    reason = f"was begun with another state of {what}"
    raise DataError("OUT", out, reason, "Give a new folder, or remove this one")


# --- a unit ----------------------------------------------------------------------------------------


def _name(number: int) -> str:
    return f"tokens-{number:05d}"


def _done(out: Path, number: int) -> Unit | None:
    """A unit that is whole; None = it is to be tokenized."""
    with suppress(OSError, ValueError, TypeError):
        unit = Unit(**read_object(out / f"{_name(number)}.json"))
        size = (out / unit.name).stat().st_size
        if unit.tokens == 0 or size % unit.tokens == 0 and size // unit.tokens in (2, 4):
            return unit
    return None


def _tokenize_unit(out: str, number: int, paths: list[str], settings: Settings, dtype: str) -> Unit:
    tokenizer = open_tokenizer(settings.tokenizer)
    folder, unit = Path(out), Unit(f"{_name(number)}.bin")
    bad: list[dict[str, Any]] = []

    def texts() -> Iterator[str]:
        for path in paths:
            for found in records(Path(path), settings.text_key):
                if isinstance(found, str):
                    unit.text_bytes += len(found.encode())
                    yield found
                    continue
                place = f"{path}, record {found.record}" if found.record else path
                if settings.bad == "refuse":
                    raise BadRecord(f"{place}: {found.reason}")
                unit.bad_count += 1
                if len(bad) < _MOST_NAMED:
                    bad.append({"file": path, "record": found.record, "reason": found.reason})

    form, hasher = np.dtype(dtype).newbyteorder("<"), xxhash.xxh3_128()
    temporary = temporary_beside(folder / unit.name)
    try:
        with open(temporary, "wb") as file:
            for ids in tokenizer.encode_many(texts()):
                document = np.empty(len(ids) + 1, form)
                document[0] = tokenizer.boundary
                document[1:] = ids
                file.write(document.data)
                hasher.update(document.data)
                unit.tokens += len(document)
                unit.documents += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / unit.name)
    finally:
        temporary.unlink(missing_ok=True)
    unit.checksum = hasher.hexdigest()
    if bad:
        lines = "".join(json.dumps(one) + "\n" for one in bad)
        atomic_write_text(folder / f"{_name(number)}.{BAD}", lines)
    atomic_write_text(folder / f"{_name(number)}.json", json.dumps(asdict(unit)))
    return unit


# --- the end -----------------------------------------------------------------------------------------


def _finish(
    out: Path, count: int, settings: Settings, tokenizer: Tokenizer, dtype: str
) -> dict[str, Any]:
    """Write bad.jsonl, the tokenizer and the index, from what is known of all units."""
    found = [unit for number in range(count) if (unit := _done(out, number)) is not None]
    if not sum(unit.documents for unit in found):
        raise DataError("CORPUS", out, "it contains no text", "Give files with some text")
    named = [out / f"{_name(number)}.{BAD}" for number in range(count)]
    if lines := "".join(path.read_text() for path in named if path.exists()):
        atomic_write_text(out / BAD, lines)
    if settings.tokenizer != "bytes":
        (out / TOKENIZER).mkdir(exist_ok=True)
        write_tokenizer(settings.tokenizer, out / TOKENIZER)
    index = {
        "format": FORMAT,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "boundary": tokenizer.boundary,
        "tokenizer": tokenizer.fingerprint,
        "tokens": sum(unit.tokens for unit in found),
        "documents": sum(unit.documents for unit in found),
        "text_bytes": sum(unit.text_bytes for unit in found),
        "bad_records": sum(unit.bad_count for unit in found),
        "files": [
            {"name": unit.name, "tokens": unit.tokens, "xxh3": unit.checksum} for unit in found
        ],
    }
    atomic_write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def check_folder(out: Path) -> list[str]:
    """Files whose bytes are not those that were written; reads all."""
    index = read_object(out / INDEX)
    wrong = []
    for entry in index["files"]:
        hasher = xxhash.xxh3_128()
        with open(out / entry["name"], "rb") as file:
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
        if hasher.hexdigest() != entry["xxh3"]:
            wrong.append(entry["name"])
    return wrong
