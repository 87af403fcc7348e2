"""`titanlike export RUN OUT`: a checkpoint as a folder that transformers loads, a few rows at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlike.checkpoint.hf_plan import Exported, ExportPlan, plan_export
from titanlike.checkpoint.metadata import MODEL
from titanlike.checkpoint.safetensors_stream import Planned, ShardedSafetensors
from titanlike.checkpoint.shard_reader import SavedModel, ShardReader, saved_model
from titanlike.checkpoint.state_dict import DTYPES
from titanlike.checkpoint.storage import Storage
from titanlike.config.files import read_object
from titanlike.config.parse import bytes_of
from titanlike.config.program import program
from titanlike.config.schema import ChatData, HFData, TextData
from titanlike.data.chat_template import find_template
from titanlike.data.checks import tokenizer_of
from titanlike.data.errors import DataError
from titanlike.data.tokenizer_files import copy_tokenizer, write_tokenizer
from titanlike.metrics import units

_GENERATION = "generation_config.json"
_PROGRESS = 5.0  # seconds between lines of progress
_DESCRIPTION = """\
Write a checkpoint as a folder that transformers loads with AutoModelForCausalLM.from_pretrained. RUN is
a run directory, of which the newest checkpoint is taken, or a checkpoint; a path or an fsspec URL."""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 2 where nothing could be written."""
    parser = argparse.ArgumentParser(prog=shlex.join(program()), description=_DESCRIPTION)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    text = "of the weights; default: that of the folder from which the model was started, or fp32"
    parser.add_argument("--dtype", choices=[*DTYPES], help=text)
    text = "largest size of a file (default: %(default)s)"
    parser.add_argument("--shard", default="5GiB", metavar="SIZE", help=text)
    arguments = parser.parse_args(argv)
    try:
        size = bytes_of(arguments.shard)
        if not size:
            raise ValueError(f"--shard {arguments.shard}: not a size; write --shard 5GiB")
        say = lambda text: print(text, flush=True)  # noqa: E731
        export(arguments.run, arguments.out, arguments.dtype, size, say)
        return 0
    except (ValueError, OSError, ImportError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def export(
    location: str,
    out: str,
    dtype: str | None = None,
    shard_bytes: int = 5 * 2**30,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Write the folder `out`, which is there only once it is whole.

    say: called with lines of progress and a summary. Raises ValueError, DamagedCheckpoint, OSError.
    """
    begin = time.monotonic()
    folder = _new_folder(out)
    rows = ShardReader.open("RUN", location)
    saved = saved_model(rows.folder)
    entries = rows.entries(MODEL)
    kind = DTYPES[dtype] if dtype else None
    plan = plan_export(saved.model, entries, saved.config.seq_len, kind)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        note = _write_small_files(unfinished, plan, saved)
        planned = [one for tensor in plan.tensors for one in tensor.outputs]
        writer = ShardedSafetensors(unfinished, planned, shard_bytes)
        total, done, said = sum(one.bytes for one in planned), 0, begin
        for tensor in plan.tensors:
            _write_tensor(rows, tensor, writer)
            done += sum(one.bytes for one in tensor.outputs)
            if time.monotonic() > said + _PROGRESS:
                said = time.monotonic()
                say(f"{done / max(1, total):.0%} of {units.size(total)} after {said - begin:.0f} s")
        writer.close()
        if folder.is_dir():  # an empty one
            folder.rmdir()
        unfinished.rename(folder)
        Storage(folder.parent).sync()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    count = f"{len(planned)} tensors ({plan.config['dtype']}, {units.size(total)})"
    say(f"{folder}: {count} of {rows.folder}; {note}")


def _new_folder(out: str) -> Path:
    if "://" in out:
        raise ValueError(f"{out}: a folder is written to a local path; copy it there afterwards")
    folder = Path(out).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; write another name, or remove it first")
    return folder


def _write_tensor(rows: ShardReader, tensor: Exported, writer: ShardedSafetensors) -> None:
    name, outputs = MODEL + tensor.name, tensor.outputs
    if tensor.form == "same":
        for slab in rows.rows(name):
            writer.write(_cast(outputs[0], slab))
    elif tensor.form == "transposed":
        writer.write(_cast(outputs[0], rows.whole(name).T))
    elif tensor.form == "stacked":
        rest = iter(outputs)
        for row in (row for slab in rows.rows(name) for row in slab):
            at = 0
            while at < len(row):
                one = next(rest)
                writer.write(_cast(one, row[at : at + one.shape[0]]))
                at += one.shape[0]
    else:
        assert tensor.convert is not None
        converted = tensor.convert(rows.whole(name))
        for one in outputs:
            writer.write(_cast(one, converted[one.name]))


def _cast(planned: Planned, tensor: Tensor) -> Tensor:
    """Floating-point tensors only. Raises ValueError for values that the dtype cannot hold."""
    if not tensor.is_floating_point() or tensor.dtype == planned.dtype:
        return tensor
    cast = tensor.to(planned.dtype)
    if planned.dtype == torch.float16 and not torch.equal(cast.isfinite(), tensor.isfinite()):
        raise ValueError(f"--dtype fp16: {planned.name} has values too large for it; write bf16")
    return cast


@dataclass(frozen=True)
class _Tokenizer:
    """What is known of the tokenizer beside the model."""

    note: str
    boundary: int | None = None  # the id that separates documents
    ends: frozenset[int] = frozenset()  # ids that end an answer of a chat


def _write_small_files(folder: Path, plan: ExportPlan, saved: SavedModel) -> str:
    """Config, tokenizer and generation config; what is to be said of them."""
    config, generation = {**plan.config}, None
    tokenizer = _write_tokenizer(folder, plan, saved)
    if plan.source is not None:
        if (plan.source / _GENERATION).is_file():
            generation = read_object(plan.source / _GENERATION)
    elif saved.model.name != "hf":
        boundary = tokenizer.boundary
        ends = {"bos_token_id": boundary, "eos_token_id": boundary, "pad_token_id": None}
        config |= ends
        generation = {key: value for key, value in ends.items() if value is not None}
    if tokenizer.ends:
        generation = {**(generation or {}), "eos_token_id": sorted(tokenizer.ends)}
    _write_json(folder / "config.json", config)
    if generation is not None:
        _write_json(folder / _GENERATION, generation)
    return tokenizer.note


def _write_tokenizer(folder: Path, plan: ExportPlan, saved: SavedModel) -> _Tokenizer:
    """Of the run's data, or else of the folder in which the model began."""
    data = saved.config.data
    name = boundary = None
    with contextlib.suppress(DataError):  # files of tokens on another machine; a file, told below
        name, boundary = tokenizer_of(data)
    if isinstance(data, TextData | HFData | ChatData):
        name = data.tokenizer
    if name is not None:
        try:
            chat = find_template(data.template, name) if isinstance(data, ChatData) else None
            written, ends = write_tokenizer(name, folder), frozenset[int]()
            if chat is not None:
                (folder / "chat_template.jinja").write_text(chat.source, encoding="utf-8")
                ends = chat.ends(written) | {written.boundary}
            return _Tokenizer(f"tokenizer: {name}", written.boundary, ends)
        except (ValueError, OSError) as error:
            return _Tokenizer(f"WARNING: without a tokenizer: {' '.join(str(error).split())}")
    if plan.source is not None and copy_tokenizer(plan.source, folder):
        return _Tokenizer(f"tokenizer of {plan.source}")
    return _Tokenizer("without a tokenizer: the data were token ids", boundary)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
