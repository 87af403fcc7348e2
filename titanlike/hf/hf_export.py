"""`titanlike export RUN OUT`: writes a folder for transformers, one file in memory at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlike.core.checkpoint.format import SavedTensor
from titanlike.core.checkpoint.integrity import MODEL
from titanlike.core.checkpoint.reader import SavedModel, ShardReader, dtype_of, saved_model
from titanlike.core.checkpoint.state_dict import DTYPES, cast_weights
from titanlike.core.checkpoint.storage import Moved, Storage
from titanlike.core.config.files import read_object
from titanlike.core.config.groups.data import ChatData, HFData, StreamData, TextData
from titanlike.core.config.imports import TRUST_CODE
from titanlike.core.config.parse import bytes_of
from titanlike.core.config.program import argument_parser, exit_code
from titanlike.core.config.received import Consent, check_places
from titanlike.core.data.kinds import DataError, vocabulary
from titanlike.core.metrics import units
from titanlike.core.models.registry import build_model, complete_arguments
from titanlike.formats.chat_template import find_template
from titanlike.formats.tokenizer import copy_tokenizer, write_tokenizer
from titanlike.hf.hf_config import exported_config
from titanlike.hf.hf_names import FAMILIES, counterpart
from titanlike.hf.hf_weights import source_of
from titanlike.hf.safetensors_folder import DTYPES as SAFETENSORS_DTYPES
from titanlike.hf.safetensors_folder import write_folder

_GENERATION = "generation_config.json"
_DTYPE = ("dtype", "torch_dtype")  # of transformers 5, and of 4
_PROGRESS = 5.0  # seconds between lines of progress
_DESCRIPTION = """\
Write a checkpoint as a folder that transformers loads with AutoModelForCausalLM.from_pretrained. RUN is
a run directory, of which the newest checkpoint is taken, or a checkpoint; a path or the URL of an object store."""


def main(argv: list[str]) -> int:
    """Run the command. The exit code is 2 if nothing could be written."""
    parser = argument_parser(_DESCRIPTION)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("out", metavar="OUT", help="a new folder")
    text = "of the weights; default: that of the folder from which the model was started, or fp32"
    parser.add_argument("--dtype", choices=[*DTYPES], help=text)
    text = "largest size of a file (default: %(default)s)"
    parser.add_argument("--shard", default="5GiB", metavar="SIZE", help=text)
    parser.add_argument("--ema", action="store_true", help="the average of the weights (ema.decay)")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="data.tokenizer=PATH")
    parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    arguments = parser.parse_intermixed_args(argv)

    def command() -> int:
        size = bytes_of(arguments.shard)
        if not size:
            raise ValueError(f"--shard {arguments.shard}: not a size; write --shard 5GiB")
        say = partial(print, flush=True)
        check_places(arguments.settings)
        consent = Consent(arguments.settings, argv, arguments.trust_code)
        how = {"ema": arguments.ema, "consent": consent}
        export(arguments.run, arguments.out, arguments.dtype, size, say, **how)
        return 0

    return exit_code(command)


def export(
    location: str,
    out: str,
    dtype: str | None = None,
    shard_bytes: int = 5 * 2**30,
    say: Callable[[str], object] = lambda _: None,
    *,
    ema: bool = False,
    consent: Consent = Consent(files=True),  # noqa: B008
    moved: Moved | None = None,
) -> None:
    """Write the folder `out`, which appears only when complete.

    say: called with lines of progress and a summary; ema: export the averaged weights; consent:
    permission to open the tokenizer's files; moved: counts what is read of the checkpoint. Raises
    ValueError, DamagedCheckpoint, OSError.
    """
    begin = time.monotonic()
    if "://" in out:
        raise ValueError(f"{out}: a folder is written to a local path; copy it there afterwards")
    folder = Path(out).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; write another name, or remove it first")
    rows = ShardReader.open("RUN", location, ema=ema, moved=moved)
    saved = saved_model(rows.folder, location, consent, builds=False)
    entries = rows.entries(MODEL)
    config, tensors = plan_export(saved, entries, DTYPES[dtype] if dtype else None)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        note = _write_small_files(unfinished, config, saved)
        sizes = {output.name: output.bytes for tensor in tensors for output in tensor.outputs}
        total = sum(sizes.values())

        def values() -> Iterator[tuple[str, Tensor]]:
            done, reported = 0, begin
            for tensor in tensors:
                for output, value in tensor.values(rows.whole(MODEL + tensor.name)):
                    yield output.name, cast_weights(value, output.dtype, output.name).contiguous()
                    done += output.bytes
                if time.monotonic() > reported + _PROGRESS:
                    reported = time.monotonic()
                    share = f"{done / max(1, total):.0%} of {units.size(total)}"
                    say(f"{share} after {reported - begin:.0f} s")

        write_folder(unfinished, sizes, shard_bytes, values())
        if folder.is_dir():  # it is empty
            folder.rmdir()
        unfinished.rename(folder)
        Storage(folder.parent).sync()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    kind = next(config[key] for key in _DTYPE if key in config)
    count = f"{len(sizes)} tensors ({kind}, {units.size(total)})"
    say(f"{folder}: {count} of {rows.folder}; {note}")


# --- which tensors --------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Exported(NamedTuple):
    """A checkpoint's tensor and what is exported of it: consecutive slices of its flattened values,
    or the tensors that `convert` returns by name."""

    name: str
    outputs: list[Planned]
    convert: Callable[[Tensor], dict[str, Tensor]] | None = None

    def values(self, tensor: Tensor) -> Iterator[tuple[Planned, Tensor]]:
        if self.convert is None:
            parts = tensor.flatten().split([prod(output.shape) for output in self.outputs])
        else:
            converted = self.convert(tensor)
            parts = [converted[output.name] for output in self.outputs]
        for output, part in zip(self.outputs, parts, strict=True):
            yield output, part.view(output.shape)


def plan_export(
    saved: SavedModel, entries: Mapping[str, SavedTensor], dtype: torch.dtype | None
) -> tuple[dict[str, Any], list[Exported]]:
    """Return config.json, and what is written for each of the checkpoint's entries.

    dtype: None = that of the folder from which the model was started, else the checkpoint's. Raises
    ValueError for a model that transformers does not have.
    """
    model, tensors = saved.model, []
    dtypes = {name: dtype or dtype_of(tensor) for name, tensor in entries.items()}
    if model.name in FAMILIES:
        sizes = complete_arguments(model)
        theirs = counterpart(model.name, sizes)
        for name, entry in entries.items():
            source = source_of(theirs, name, entry.shape)
            shape, turn = entry.shape, None
            if source.form == "stacked":
                shape = shape[1:]
            elif source.form == "transposed":
                shape = (*shape[:-2], shape[-1], shape[-2])
                turn = lambda tensor, key=source.name: {key: tensor.mT}  # noqa: E731
            outputs = [Planned(key, shape, dtypes[name]) for (key,) in source.rows]
            if outputs[0].name:  # not a buffer that only training needs
                tensors.append(Exported(name, outputs, turn))
        config = theirs.config_json(sizes, saved.config.seq_len) | {"use_cache": True}
    elif model.name == "hf":
        built: Any = build_model(model)
        weights = built.folder_weights()
        if weights is None:
            tensors = _reverted(built, entries, dtypes)
        else:
            for name in entries:
                keys = [key for row in weights.sources[name].rows for key in row]
                stored = [weights.files.slice(key) for key in keys]
                kind = dtype or SAFETENSORS_DTYPES.get(stored[0].get_dtype(), dtypes[name])
                shapes = [tuple(tensor.get_shape()) for tensor in stored]
                outputs = [Planned(k, shape, kind) for k, shape in zip(keys, shapes, strict=True)]
                tensors.append(Exported(name, outputs))
        import transformers

        config = exported_config(transformers, built.config, model.args.get("path"))
        config.setdefault("architectures", [type(built).__name__])
    else:
        raise ValueError(
            f"model.name={model.name}: transformers has no such model, and a folder for it can be "
            f"written of {', '.join([*FAMILIES, 'hf'])}; write titanlike checkpoint consolidate for "
            "the weights alone"
        )
    values: Counter[torch.dtype] = Counter()
    for output in (output for tensor in tensors for output in tensor.outputs):
        values[output.dtype] += prod(output.shape)
    kind = str(values.most_common(1)[0][0]).removeprefix("torch.")
    names = [key for key in _DTYPE if key in config] or _DTYPE
    return config | dict.fromkeys(names, kind), tensors


def _reverted(
    built: Any, entries: Mapping[str, SavedTensor], dtypes: Mapping[str, torch.dtype]
) -> list[Exported]:
    """Map each tensor to the names and shapes that transformers' save_pretrained writes, by its
    conversion of one tensor at a time. Where that differs from converting all at once, names and
    shapes stay the model's."""
    from transformers.core_model_loading import revert_weight_conversion

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return revert_weight_conversion(built, tensors)

    meta = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}
    alone = {name: {name: tensor} for name, tensor in meta.items()}
    with contextlib.suppress(Exception):  # one that needs several raises whatever it finds missing
        by_itself = {name: revert(tensors) for name, tensors in alone.items()}
        union = {key: t.shape for tensors in by_itself.values() for key, t in tensors.items()}
        if union == {key: tensor.shape for key, tensor in revert(meta).items()}:
            alone = by_itself
    tensors = []
    for name, reverted in alone.items():
        outputs = [Planned(key, tuple(t.shape), dtypes[name]) for key, t in reverted.items()]
        plain = len(outputs) == 1 and outputs[0].shape == entries[name].shape
        convert = None if plain else lambda tensor, name=name: revert({name: tensor})
        tensors.append(Exported(name, outputs, convert))
    return tensors


# --- config, generation config and tokenizer ------------------------------------------------------


def _write_small_files(folder: Path, config: dict[str, Any], saved: SavedModel) -> str:
    """Write config, tokenizer and generation config; return a text about the tokenizer, which is
    that of the run's data, or else of the folder that the model started from."""
    data, path = saved.config.data, saved.model.args.get("path")
    source = Path(path) if path and saved.model.name == "hf" else None
    name = boundary = generation = None
    ends: set[int] = set()  # ids that end an answer of a chat
    note = "without a tokenizer: the data were token ids"
    with contextlib.suppress(DataError):  # token files may be on another machine; reported below
        _, name, boundary = vocabulary(data)
    if isinstance(data, TextData | HFData | ChatData | StreamData):
        name = name if getattr(data, "ids_key", None) else data.tokenizer
    if name is not None:
        try:
            chat = find_template(data.template, name) if isinstance(data, ChatData) else None
            written = write_tokenizer(name, folder)
            if chat is not None:
                (folder / "chat_template.jinja").write_text(chat.source, encoding="utf-8")
                ends = {*chat.ends}
            note, boundary = f"tokenizer: {name}", written.boundary
        except (ValueError, OSError) as error:
            note, boundary = f"WARNING: without a tokenizer: {' '.join(str(error).split())}", None
    elif source is not None and copy_tokenizer(source, folder):
        note = f"tokenizer of {source}"
    if source is not None and (source / _GENERATION).is_file():
        generation = read_object(source / _GENERATION)
    elif saved.model.name != "hf":
        ids = {"bos_token_id": boundary, "eos_token_id": boundary}
        config |= {**ids, "pad_token_id": None}
        generation = {} if boundary is None else ids
    if ends:
        generation = {**(generation or {}), "eos_token_id": sorted(ends)}
    for file, content in (("config.json", config), (_GENERATION, generation)):
        if content is not None:
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            (folder / file).write_text(text, encoding="utf-8")
    return note
