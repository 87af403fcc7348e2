"""Declares config keys with their bounds and conditions, and checks values against them."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, NewType

from titanlike.core.config.errors import Problem, as_override, override_text

if TYPE_CHECKING:  # types in Python; the names tell `parse` which spellings a config may use
    Seconds = float
    Bytes = int
    Batches = int
    Paths = str | list[str]
else:
    Seconds = NewType("Seconds", float)  # written as a number, or as 45s, 90m, 11h30m, 11:30:00
    Bytes = NewType("Bytes", int)  # written as a number, or as 75GiB, 75GB, 75G (powers of 1024)
    Batches = NewType("Batches", int)  # written as a number, or as all, which is 0
    Paths = NewType("Paths", list)  # a path, or a list of paths


MAX_RANKS = 1_000_000
MAX_VOCAB = 2**31 - 1
_MOST_ITEMS = 10_000  # length limit of a list
_MOST_OF_ARGUMENT = {  # of a model's constructor, and of a user's own data
    **dict.fromkeys(("num_hidden_layers", "n_layer", "layers"), 2_000),
    **dict.fromkeys(("hidden_size", "n_embd", "dim"), 2**20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2**16),
    "intermediate_size": 2**24,
    **dict.fromkeys(("max_seq_len", "n_positions", "max_position_embeddings"), 2**27),
    "vocab_size": MAX_VOCAB,
}
BOUNDS: dict[str, dict[str, Any]] = {  # default bounds of numbers, by a key's annotation
    "int": {"le": 2**40},
    "Batches": {"ge": 0, "le": 2**40},
    "float": {"le": 1e18},
    "Seconds": {"gt": 0, "le": 1e9, "example": "12h"},
    "Bytes": {"ge": 2**20, "le": 2**60, "example": "80GiB"},
}


# conditions of a text, or of each text in a list: (predicate, error if it is false)
Texts = tuple[tuple[Callable[[str], object], str], ...]
LONGEST_FILE = 200  # bytes of a file name: 255 less what temporary names append
# fmt: off
PATH: Texts = (
    (lambda path: max(len(name.encode()) for name in path.split("/")) <= LONGEST_FILE,
     f"a name in it has more than {LONGEST_FILE} bytes"),
    (re.compile(r"[^\x00-\x1f\x7f]*").fullmatch,
     "a path with a line break or another control character cannot be printed"),
)
# fmt: on
# W&B refuses others, but only once the run has started
NAME: Texts = ((lambda name: 1 <= len(name) <= 128, "must have 1 to 128 characters"),)
PROJECT: Texts = (*NAME, (re.compile(r"[^/\\#?%:]*").fullmatch, r"cannot have / \ # ? % : in it"))
TAG: Texts = ((lambda tag: 1 <= len(tag) <= 64, "a tag has 1 to 64 characters"),)
RENAME: Texts = ((lambda rule: ":" in rule, "is not old:new"),)


def key(default: Any, doc: str, texts: Texts = (), **bounds: Any) -> Any:
    """Declare a config field: default, the line that `--help` prints, conditions of its texts, and
    bounds of its numbers.

    bounds: >= (ge), > (gt), <= (le), < (lt), where narrower than BOUNDS; items: length of a list;
    example: the value that an error proposes if neither the bound nor the default works.
    """
    metadata = {"doc": doc, "bounds": bounds, "texts": texts}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: Any) -> Any:
    """Declare a config field without a default: its choice is an error until the user gives a
    value."""
    return field(metadata={"doc": doc, "bounds": {"example": 1e12} | bounds})


# --- values, by themselves ------------------------------------------------------------------------

_SIDES = {  # name of a bound -> its text, its predicate
    **{"ge": ("at least", operator.ge), "gt": ("above", operator.gt)},
    **{"le": ("at most", operator.le), "lt": ("below", operator.lt)},
}


def value_problems(owner: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield the problems of the values of a config, or of a part whose keys begin with `prefix`."""
    for each in dataclasses.fields(owner):
        yield from field_problems(each, getattr(owner, each.name), f"{prefix}.{each.name}")


def field_problems(owner: dataclasses.Field[Any], value: Any, key: str) -> Iterator[Problem]:
    """Yield the problems of a field's value of the right type: numbers beyond their bounds, texts
    against their conditions, lists of a wrong length; each with a value that is possible."""
    kind = next((kind for kind in BOUNDS if kind in str(owner.type)), "float")
    bounds = BOUNDS[kind] | owner.metadata.get("bounds", {})
    default = owner.default
    if owner.default_factory is not dataclasses.MISSING:
        default = owner.default_factory()
    elif default is None or default is dataclasses.MISSING:  # null, or required
        default = bounds.get("example")
    texts = owner.metadata.get("texts", ())
    # arguments of user code are keys of their group
    yield from _inside(value, key.removesuffix(".args").lstrip("."), bounds, default, texts)


def _inside(
    value: Any, key: str, bounds: dict[str, Any], default: Any, texts: Texts
) -> Iterator[Problem]:
    if dataclasses.is_dataclass(value):
        yield from value_problems(value, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            most = _MOST_OF_ARGUMENT.get(name, BOUNDS["int"]["le"])
            yield from _inside(item, f"{key}.{name}", {"le": most}, None, ())
    elif isinstance(value, (list, tuple)):
        if len(value) > _MOST_ITEMS:
            yield Problem(key, f"[{len(value)} items]", f"has more than {_MOST_ITEMS}")
        elif len(value) != bounds.get("items", len(value)):
            reason = f"must be {bounds['items']} numbers"
            yield Problem(key, value, reason, _override(key, default))
        else:
            for i, item in enumerate(value):
                yield from _inside(item, f"{key}[{i}]", bounds, default, texts)
    elif isinstance(value, str):
        if reason := next((reason for holds, reason in texts if not holds(value)), ""):
            yield Problem(key, value, reason, _override(key, bounds.get("example", "NAME")))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _number_problem(value, key, bounds, default)


def _number_problem(
    value: float, key: str, bounds: dict[str, Any], default: Any
) -> Iterator[Problem]:
    finite, is_bytes = value - value == 0, bounds["le"] == BOUNDS["Bytes"]["le"]
    sides = (side for side in _SIDES if side in bounds and finite)
    side = next((side for side in sides if not _SIDES[side][1](value, bounds[side])), "")
    if side:
        limit = f"{bounds[side] >> 20}MiB" if is_bytes else bounds[side]
        reason = f"must be {_SIDES[side][0]} {limit}"
    elif finite and value >= -bounds["le"]:
        return
    else:
        reason = "is too far below 0" if finite else "must be finite"
    fix = default
    if isinstance(value, int) and side in ("ge", "le") and "[" not in key:
        fix = bounds[side] if side == "le" else bounds.get("example", bounds["ge"])
    if is_bytes and 0 < value < 1024:
        fix = f"{value}GiB"
    yield Problem(key, value, reason, _override(key, fix))


def _override(key: str, value: Any) -> str:
    """Return the override that sets a key, or the list whose item it is; "" without a value."""
    if value is None or value == []:
        return ""
    if match := re.fullmatch(r"(optimizer\.groups)\.(.+)\.(\w+)", key):  # set within the mapping
        return as_override(match[1], {match[2]: {match[3]: value}})
    return f"{key.partition('[')[0]}={override_text(value)}"  # an example is a plain word
