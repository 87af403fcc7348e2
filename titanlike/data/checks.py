"""Checks of a config's data before a worker starts: quick, and without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.config.errors import Problem
from titanlike.config.imports import import_object
from titanlike.config.schema import (
    ChatData,
    Config,
    Custom,
    HFData,
    MixtureData,
    SyntheticData,
    TextData,
    TokenData,
)
from titanlike.data import hf_dataset
from titanlike.data.chat_template import find_template
from titanlike.data.corpus import find_files, parquet_file
from titanlike.data.errors import DataError, data_problem
from titanlike.data.token_file import open_tokens
from titanlike.data.token_folder import INDEX, read_tokens
from titanlike.data.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from titanlike.data.sources import Data

_MAX_SEARCHED = 1 << 24  # tokens, for the document boundary
_CHUNK = 1 << 20  # tokens searched at once
_MAX_UNUSED = 4  # the model's token ids for each one of data.path=null
_OWN_KEYS = ("workers", "changed")  # of every data, not arguments of a user's function


def vocab_size(config: Config) -> int:
    """The number of token ids in the data, without tokenizing the corpus.

    A user's own data (Custom) is opened. Raises DataError where that fails.
    """
    data = config.data
    if isinstance(data, TextData | HFData | ChatData):
        return open_tokenizer(data.tokenizer).vocab_size
    if isinstance(data, Custom):
        return call_custom(data, config.seq_len).vocab_size
    if isinstance(data, MixtureData):
        data = data_of_source(data, next(iter(data.sources.values())))
        if isinstance(data, TextData):
            return open_tokenizer(data.tokenizer).vocab_size
    if isinstance(data, TokenData):
        return read_tokens(data).vocab_size
    return data.vocab_size


def tokenizer_of(data: Any) -> tuple[str | None, int | None]:
    """(name or path of the tokenizer, id between documents) of data, None where they have none.
    Raises DataError where files of tokens are not there."""
    if isinstance(data, MixtureData):
        data = data_of_source(data, next(iter(data.sources.values())))
    if isinstance(data, TextData | HFData | ChatData):
        return data.tokenizer, open_tokenizer(data.tokenizer).boundary
    if isinstance(data, TokenData):
        found = read_tokens(data)
        return found.tokenizer, found.boundary
    return None, getattr(data, "boundary", None)


def problems(config: Config) -> list[Problem]:
    """Every error that is quick to find."""
    checks = {
        TextData: (_fraction, _workers, _tokenizer, _text_files, _stand_in_text),
        HFData: (_fraction, _workers, _tokenizer, _hf_dataset),
        TokenData: (_fraction, _workers, _vocabulary, _token_file, _boundary),
        MixtureData: (_fraction, _workers, _sources, _tokenizer),
        ChatData: (_fraction, _workers, _tokenizer, _conversations),
        SyntheticData: (_vocabulary,),
        Custom: (_workers, _changed, _custom),
    }
    found = [
        data_problem(error)
        for check in checks[type(config.data)]
        for error in _errors(check, config)
    ]
    return [problem for at, problem in enumerate(found) if problem not in found[:at]]


def call_custom(data: Custom, seq_len: int) -> Data:
    """The `Data` that the user's function returns.

    It is called with `data.args` and `seq_len`, without `workers` and `changed`, which are not
    its arguments. Raises DataError where the result is not a Data or is empty. Samples are checked when
    they are read.
    """
    function = _custom_function(data)
    arguments = {name: value for name, value in data.args.items() if name not in _OWN_KEYS}
    try:
        result = function(**arguments, seq_len=seq_len)
    except TypeError as error:
        where = error.__traceback__
        if where is not None and where.tb_next is not None:  # raised inside the function
            raise
        reason = f"cannot be called ({error})"
        fix = "Give its arguments as data.NAME"
        raise DataError("data.name", data.name, reason, fix) from None
    from titanlike.data.checked_source import with_checked_samples  # here: it imports torch
    from titanlike.data.sources import Data

    if not isinstance(result, Data):
        reason = f"the function returned {type(result).__name__}"
        fix = "Let it return a titanlike.data.sources.Data"
        raise DataError("data.name", data.name, reason, fix)
    return with_checked_samples(result, data.name, seq_len)


def too_short(spans: dict[str, tuple[int, int]], seq_len: int) -> Iterator[DataError]:
    """An error for each part of the data (part -> first token, end) shorter than one sequence."""
    for part, (start, stop) in spans.items():
        count = stop - start
        if count <= seq_len:
            reason = f"the {part} part of the data has {count} tokens, a sequence needs seq_len + 1"
            fix = "Give more text with data.path"
            fix += ", or raise data.validation_fraction" if part == "validation" else ""
            fix += f", or write seq_len={count - 1}" if count > 1 else ""
            yield DataError("seq_len", seq_len, reason, fix)


def _errors(
    check: Callable[[Config], Iterable[DataError] | None], config: Config
) -> list[DataError]:
    try:
        return list(check(config) or ())
    except DataError as error:
        return [error]


def _fraction(config: Config) -> Iterator[DataError]:
    assert not isinstance(config.data, SyntheticData | Custom)
    key, value = "data.validation_fraction", config.data.validation_fraction
    if not 0 < value < 1:
        yield DataError(key, value, "must be > 0 and < 1", "Write 0.05, for example")


def _workers(config: Config) -> Iterator[DataError]:
    workers = loader_workers(config)
    if not isinstance(workers, int) or workers < 0:
        yield DataError("data.workers", workers, "must be a number >= 0", "Write data.workers=0")


def loader_workers(config: Config) -> int:
    """Loader processes of each rank."""
    data = config.data
    if isinstance(data, Custom):
        return data.args.get("workers", 0)
    return getattr(data, "workers", 0)  # synthetic data has no such key


def data_changed(config: Config) -> bool:
    """Whether this start may resume on other data than the checkpoint's."""
    data = config.data
    return data.args.get("changed", False) if isinstance(data, Custom) else data.changed


def _changed(config: Config) -> Iterator[DataError]:
    if not isinstance(changed := data_changed(config), bool):
        yield DataError("data.changed", changed, "must be true or false", "Write data.changed=true")


def _vocabulary(config: Config) -> Iterator[DataError]:
    assert isinstance(config.data, TokenData | SyntheticData)
    size = config.data.vocab_size
    if size is not None and size < 1:
        yield DataError("data.vocab_size", size, "must be at least 1", "Write 256, or more")


def _tokenizer(config: Config) -> None:
    assert not isinstance(config.data, TokenData | SyntheticData | Custom)
    open_tokenizer(config.data.tokenizer)


def _text_files(config: Config) -> None:
    assert isinstance(config.data, TextData)
    files = find_files(config.data.path)
    if (parquet := next((f for f in files if f.suffix.lower() == ".parquet"), None)) is not None:
        parquet_file(parquet).close()


def _hf_dataset(config: Config) -> Iterator[DataError]:
    assert isinstance(config.data, HFData)
    yield from hf_dataset.check(config.data)


def _stand_in_text(config: Config) -> Iterator[DataError]:
    """A model of a large vocabulary needs real data: data.path=null is for the small ones."""
    assert isinstance(config.data, TextData)
    model_size = config.model.args.get("vocab_size")
    if config.data.path is not None or not isinstance(model_size, int):
        return
    try:
        size = vocab_size(config)
    except DataError:  # of the tokenizer, found by `_tokenizer`
        return
    if model_size > _MAX_UNUSED * size:
        reason = (
            f"the model has {model_size:,} token ids, and without data.path it would be trained on "
            f"Python's own sources, which have {size}"
        )
        tokens = f"data=tokens data.path=FILE data.vocab_size={model_size}"
        if model_size > 1 << 16:
            tokens += " data.dtype=uint32"
        synthetic = f"data=synthetic data.vocab_size={model_size}"
        text = "data=text data.path=FOLDER data.tokenizer=TOKENIZER"
        fix = f"Write {tokens}, or {text}; to try the model's speed, {synthetic}"
        yield DataError("data.path", "null", reason, fix)


def _token_file(config: Config) -> Iterator[DataError]:
    assert isinstance(config.data, TokenData)
    found = read_tokens(config.data)
    if 0 < config.data.validation_fraction < 1:
        yield from too_short(found.spans(config.data.validation_fraction), config.seq_len)


def data_of_source(data: MixtureData, source: Mapping[str, Any]) -> TokenData | TextData:
    """A source of a mixture by itself: of tokens if its path has their index, or is a file of them."""
    path = source["path"]
    places = [Path(one).expanduser() for one in ([path] if isinstance(path, str) else path)]
    common: dict[str, Any] = {
        "validation_fraction": data.validation_fraction,
        "documents": data.documents,
    }
    if all((p / INDEX).exists() or p.suffix in (".bin", ".npy") for p in places):
        return TokenData(path=path, **common)
    common |= {"text_key": data.text_key, "tokenizer": data.tokenizer, "cache": data.cache}
    return TextData(path=str(path), **common)


def _conversations(config: Config) -> None:
    from titanlike.data.chat import find_conversations  # imports torch

    assert isinstance(config.data, ChatData)
    find_conversations(config.data.path)
    find_template(config.data.template, config.data.tokenizer)


def _sources(config: Config) -> Iterator[DataError]:
    from titanlike.data.mixture import points_of, weight_at  # imports torch

    data, example = (
        config.data,
        "data.sources={web:{path:web/,weight:0.7},code:{path:code/,weight:0.3}}",
    )
    assert isinstance(data, MixtureData)
    if not isinstance(data.sources, dict) or not data.sources:
        yield DataError("data.sources", data.sources, "names no source", f"Write {example}")
        return
    every = []
    for name, source in data.sources.items():
        key = f"data.sources.{name}"
        if not isinstance(source, dict) or set(source) != {"path", "weight"}:
            reason = "a source has a path and a weight, and nothing else"
            yield DataError(key, source, reason, f"Write {key}={{path:FOLDER,weight:0.5}}")
            continue
        try:
            every.append(points_of(source["weight"]))
        except (ValueError, TypeError):
            reason = "is neither a number of at least 0 nor [[step, weight], ...] with rising steps"
            fix = f"Write {key}.weight=0.5, or {key}.weight=[[0,0.9],[1000,0.1]]"
            yield DataError(f"{key}.weight", source["weight"], reason, fix)
        one = data_of_source(data, source)
        try:
            if isinstance(one, TokenData):
                found = read_tokens(one)
                yield from too_short(found.spans(data.validation_fraction), config.seq_len)
            else:
                find_files(one.path)
        except DataError as error:
            yield DataError(f"{key}.path", source["path"], error.reason, error.remedy)
    steps = sorted({int(step) for points in every for step, _ in points})
    for step in steps:
        if every and not sum(weight_at(points, step) for points in every):
            yield DataError(
                "data.sources", "", f"all weights are 0 at step {step}", f"Write {example}"
            )
            return


def _boundary(config: Config) -> Iterator[DataError]:
    """documents=true needs a boundary token that occurs in the file; its beginning is searched."""
    data = config.data
    remedy = "Write the id of the token that begins a document, data.boundary=0"
    assert isinstance(data, TokenData)
    if not data.documents:
        return
    found = read_tokens(data)
    boundary = found.boundary
    if boundary is None:
        yield DataError("data.boundary", "null", "documents=true needs the boundary token", remedy)
    elif not 0 <= boundary < found.vocab_size:
        reason = f"is not a token id below data.vocab_size={found.vocab_size}"
        yield DataError("data.boundary", boundary, reason, remedy)
    else:
        first = found.files[0]
        tokens = open_tokens(first.path, first.dtype)
        searched = range(0, min(len(tokens), _MAX_SEARCHED), _CHUNK)
        if not any((tokens[at : at + _CHUNK] == boundary).any() for at in searched):
            reason = f"is not among the first {min(len(tokens), _MAX_SEARCHED):,} tokens"
            yield DataError("data.boundary", boundary, reason, f"{remedy}, or data.documents=false")


def _custom(config: Config) -> None:
    assert isinstance(config.data, Custom)
    _custom_function(config.data)


def _custom_function(data: Custom) -> Callable[..., Any]:
    remedy = "Name a function as package.module.function, on the Python path"
    try:
        function = import_object(data.name)
    except ValueError as error:
        raise DataError("data.name", data.name, str(error), remedy) from None
    if not callable(function):
        raise DataError("data.name", data.name, "is not a function", remedy)
    return function
