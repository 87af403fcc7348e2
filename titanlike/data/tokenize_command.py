"""`titanlike tokenize CORPUS OUT --tokenizer tokenizer.json`: a corpus as files of token ids."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from titanlike.config.program import program
from titanlike.data.tokenize_corpus import BadRecord, Settings, check_folder, tokenize_corpus_files
from titanlike.launch.environment import available_cores
from titanlike.metrics import units

_DESCRIPTION = """\
Tokenize text files, JSONL and Parquet, also compressed (.gz, .zst), into a folder that data=tokens
reads: data.path=OUT. Killed at any moment, the same command goes on, and gives the same bytes."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 1 for a bad record or damaged files, 2 for another error of the user's."""
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
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
    try:
        return _verify(Path(arguments.out)) if arguments.verify else _tokenize(arguments)
    except BadRecord as error:
        line = f"{' '.join(str(error).split())}; fix it, or write --bad skip in a new folder"
        print("error:", line, file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130


def _tokenize(arguments: argparse.Namespace) -> int:
    begin = time.monotonic()
    out = Path(arguments.out).expanduser()
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
    wrong = check_folder(out)
    for name in wrong:
        print(f"{out / name} does not match its checksum")
    print(f"{out}: {'damaged' if wrong else 'all files are as they were written'}")
    return 1 if wrong else 0
