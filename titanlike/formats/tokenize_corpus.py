"""`titanlike tokenize CORPUS OUT`: tokenizes a corpus of many files into a folder, with several
processes.

1. The sorted files are grouped into units of about 64 MiB: the plan (plan.json), which depends on
   the corpus alone.
2. Each unit is tokenized by one process into a file, renamed once complete; next to it are its
   counts (tokens, documents), checksum and bad records.
3. When all units are complete, index.json is written. A launch on a folder with a plan continues
   with the missing units: so the bytes depend neither on kills nor on the number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import xxhash

from titanlike.core.config import files
from titanlike.core.config.program import argument_parser, exit_code
from titanlike.core.data.kinds import DataError
from titanlike.core.launch.environment import available_cores
from titanlike.core.launch.signals import die_with_parent
from titanlike.core.metrics import units
from titanlike.formats import token_folder
from titanlike.formats.text import documents, file_states, find_files
from titanlike.formats.tokenizer import TOKENIZER, Tokenizer, open_tokenizer, write_tokenizer

BAD = "bad.jsonl"
_UNIT = 1 << 26  # bytes of files
_EVERY = 5.0  # seconds between lines of progress
_MOST_NAMED = 100  # bad records listed per unit; all are counted

_DESCRIPTION = """\
Tokenize text files, JSONL and Parquet, also compressed (.gz, .zst), into a folder that data=tokens
reads: data.path=OUT. Killed at any moment, the same command goes on, and gives the same bytes."""


@dataclass(frozen=True)
class Settings:
    """The settings, besides the corpus, on which the written bytes depend."""

    tokenizer: str
    text_key: str = "text"
    bad: Literal["refuse", "skip"] = "refuse"
    unit_bytes: int = _UNIT


@dataclass
class Unit(token_folder.Entry):
    """A tokenized unit: its file, and what became of its records."""

    text_bytes: int = 0
    bad_records: int = 0


class RefusedRecord(DataError):
    """An unreadable record, when bad records are not skipped."""


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit code: 1 for a bad record or damaged files, 2 for another
    user error."""
    parser = argument_parser(_DESCRIPTION)
    parser.add_argument("corpus", metavar="CORPUS", help="a file or a folder")
    parser.add_argument("out", metavar="OUT", help="a folder")
    text = "bytes, a tokenizer.json, a folder of transformers, or a sentencepiece model"
    parser.add_argument("--tokenizer", default="bytes", help=f"{text} (default: %(default)s)")
    text = "field of JSONL, or column of Parquet (default: %(default)s)"
    parser.add_argument("--text-key", default="text", metavar="KEY", help=text)
    text = "processes (default: one a core)"
    parser.add_argument("--workers", type=int, default=available_cores(), metavar="N", help=text)
    text = "records that cannot be read: refuse = end with the first one's name; skip = count and name "
    text += "them in OUT/bad.jsonl (default: %(default)s)"
    parser.add_argument("--bad", choices=["refuse", "skip"], default="refuse", help=text)
    text = "read OUT, and compare it with its checksums, instead"
    parser.add_argument("--verify", action="store_true", help=text)
    arguments = parser.parse_args(argv)
    out = Path(arguments.out).expanduser()
    command = partial(_verify, out) if arguments.verify else partial(_tokenize, arguments, out)
    return exit_code(command, {RefusedRecord: 1}, "interrupted; the same command goes on")


def _tokenize(arguments: argparse.Namespace, out: Path) -> int:
    begin = time.monotonic()
    settings = Settings(arguments.tokenizer, arguments.text_key, arguments.bad)
    say = lambda text: print(text, flush=True)  # noqa: E731
    index = tokenize_corpus_files(Path(arguments.corpus), out, settings, arguments.workers, say)
    seconds = time.monotonic() - begin
    text = f"{out}: {index['tokens']:,} tokens in {index['documents']:,} documents"
    text += f", {units.size(index['text_bytes'])} of text, in {units.duration(seconds)}"
    if index["bad_records"]:
        text += f"; {index['bad_records']:,} bad records were skipped, see {out / 'bad.jsonl'}"
    say(text)
    say(f"train with: data=tokens data.path={shlex.quote(str(out))}")
    return 0


def _verify(out: Path) -> int:
    """Read all files and name those whose checksums differ."""
    is_damaged = False
    for entry in token_folder.read_index(out)["files"]:
        hasher = xxhash.xxh3_128()
        with files.open_regular(out / entry["name"]) as file:
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
        if hasher.hexdigest() != entry.get("xxh3"):
            print(f"{out / entry['name']} does not match its checksum")
            is_damaged = True
    print(f"{out}: {'damaged' if is_damaged else 'all files are as they were written'}")
    return int(is_damaged)


def tokenize_corpus_files(
    corpus: Path,
    out: Path,
    settings: Settings,
    workers: int,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Tokenize a corpus, or continue; return the index. Raises DataError, RefusedRecord, OSError."""
    tokenizer = open_tokenizer(settings.tokenizer)
    plan = _plan(find_files(str(corpus), key="CORPUS"), settings, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    _check_plan(out, plan)
    count = len(plan["units"])
    todo = [number for number in range(count) if _done(out, number) is None]
    if len(todo) < count:
        say(f"going on: {count - len(todo)} of {count} files of tokens are there")
    sizes = {number: sum(size for _, size, _ in plan["units"][number]) for number in todo}
    jobs = [(str(out), n, [path for path, *_ in plan["units"][n]], settings) for n in todo]
    begin = last_report = time.monotonic()
    done, tokens, total = 0, 0, sum(sizes.values())
    for number, unit in _run(jobs, workers):
        done, tokens = done + sizes[number], tokens + unit.tokens
        if time.monotonic() > last_report + _EVERY:
            last_report = time.monotonic()
            seconds = last_report - begin
            share = f"{done / max(1, total):.0%} of {units.size(total)}"
            rate = f"{units.count(tokens / seconds)} tokens/s, {units.size(done / seconds)}/s"
            say(f"{share}  {units.count(tokens)} tokens  {rate}")
    return _finish(out, count, settings, tokenizer)


def _run(jobs: list[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, Unit]]:
    """Yield (number, unit) as units complete. The first error stops all."""
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job[1], _tokenize_unit(*job)
        return
    context = get_context("spawn")  # a fork loses the threads of the tokenizers library
    workers, parent = min(workers, len(jobs)), os.getpid()
    with ProcessPoolExecutor(workers, context, _init_worker, (parent,)) as pool:
        futures = {pool.submit(_tokenize_unit, *job): job[1] for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _init_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent(parent, signal.SIGKILL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already a process per core


# --- the plan -------------------------------------------------------------------------------------


def _plan(paths: list[Path], settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the plan: units of files with sizes and times, and everything else the bytes depend
    on."""
    dealt: list[list[tuple[str, int, int]]] = []
    unit_size = settings.unit_bytes
    for path, size, time_ns in file_states(paths):
        if unit_size >= settings.unit_bytes or unit_size + size > settings.unit_bytes:
            dealt.append([])
            unit_size = 0
        dealt[-1].append((path, size, time_ns))
        unit_size += size
    saved = asdict(settings) | {"tokenizer": tokenizer.fingerprint}
    return {"format": token_folder.FORMAT, "settings": saved, "units": dealt}


def _check_plan(out: Path, plan: dict[str, Any]) -> None:
    """Write the plan, or compare it with the existing one."""
    path, text = out / token_folder.PLAN, json.dumps(plan)
    if not path.exists():
        if strange := sorted(p.name for p in out.iterdir()):
            raise DataError("OUT", out, f"has other files ({strange[0]})", "give a new folder")
        files.atomic_write_text(path, text)
        return
    before = files.read_object(path)
    if before != json.loads(text):
        what = "the corpus" if before.get("settings") == plan["settings"] else "a setting"
        reason = f"was begun with another state of {what}"
        raise DataError("OUT", out, reason, "give a new folder, or remove this one")


# --- a unit ---------------------------------------------------------------------------------------


def _name(number: int) -> str:
    return f"tokens-{number:05d}"


def _done(out: Path, number: int) -> Unit | None:
    """Return a complete unit; None = it must be tokenized."""
    with suppress(OSError, ValueError, TypeError):
        unit = files.read_object(out / f"{_name(number)}.json", Unit)
        size = (out / unit.name).stat().st_size
        if unit.xxh3 and size in (2 * unit.tokens, 4 * unit.tokens):
            return unit
    return None


def _tokenize_unit(out: str, number: int, paths: list[str], settings: Settings) -> Unit:
    tokenizer = open_tokenizer(settings.tokenizer)
    folder, unit = Path(out), Unit(f"{_name(number)}.bin")
    bad: list[dict[str, Any]] = []

    def skip(path: Path, record: int, reason: str) -> None:
        if settings.bad == "refuse":
            fix = "fix it, or write --bad skip in a new folder"
            raise RefusedRecord("CORPUS", path, f"record {record}: {reason}", fix)
        unit.bad_records += 1
        if len(bad) < _MOST_NAMED:
            bad.append({"file": str(path), "record": record, "reason": reason})

    def texts() -> Iterator[str]:
        for text in documents(map(Path, paths), settings.text_key, skip):
            unit.text_bytes += len(text.encode())
            yield text

    with files.replaced(folder / unit.name) as temporary:
        with token_folder.token_writer(temporary, unit) as write:
            for document in token_folder.separated_documents(tokenizer, texts()):
                write(document)
        with open(temporary, "rb") as file:
            files.sync_to_disk(file.fileno())
    if bad:
        lines = "".join(json.dumps(entry) + "\n" for entry in bad)
        files.atomic_write_text(folder / f"{_name(number)}.{BAD}", lines)
    files.atomic_write_text(folder / f"{_name(number)}.json", json.dumps(asdict(unit)))
    return unit


# --- the end --------------------------------------------------------------------------------------


def _finish(out: Path, count: int, settings: Settings, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write bad.jsonl, the tokenizer and the index from the units' records."""
    done = [unit for number in range(count) if (unit := _done(out, number)) is not None]
    if not sum(unit.documents for unit in done):
        raise DataError("CORPUS", out, "it contains no text", "give files with some text")
    named = [out / f"{_name(number)}.{BAD}" for number in range(count)]
    if lines := "".join(files.read_text(path) for path in named if path.exists()):
        files.atomic_write_text(out / BAD, lines)
    if settings.tokenizer != "bytes":
        (out / TOKENIZER).mkdir(exist_ok=True)
        write_tokenizer(settings.tokenizer, out / TOKENIZER)
    text_bytes = sum(unit.text_bytes for unit in done)
    bad = sum(unit.bad_records for unit in done)
    return token_folder.write_index(
        out, token_folder.vocabulary_of(tokenizer), done, text_bytes=text_bytes, bad_records=bad
    )
