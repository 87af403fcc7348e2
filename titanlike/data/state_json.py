"""A reader's state as JSON: what `state_dict` of torchdata, datasets and own streams returns.

JSON has objects, lists, texts, numbers and null. Anything else is an object with one key that begins
with "$": {"$tensor": [dtype, shape, base64]}, $array (numpy), $bytes, $tuple, $set, $float (nan, inf),
and {"$dict": [[key, value], ...]} for keys that are no texts or begin with "$".
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMPY = "biufc"  # kinds of dtypes that are numbers


class NotJson(ValueError):
    """A part of a state is of a type that cannot be saved."""


def dumps(state: Any) -> bytes:
    """Return a state as JSON. Raises NotJson, which names the part."""
    return json.dumps(_encoded(state, "state"), allow_nan=False, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Return what `dumps` was given. Raises ValueError."""
    try:
        return _decoded(json.loads(data))
    except (TypeError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"is no state of a reader ({type(error).__name__})") from None


def _encoded(value: Any, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [_encoded(item, f"{path}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, dict):
        items = {key: _encoded(item, f"{path}[{key!r}]") for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[_encoded(key, path), item] for key, item in items.items()]}
    if kind in (bytes, bytearray):
        return {"$bytes": _text(value)}
    if isinstance(value, Tensor):
        dense = value.detach().cpu().contiguous()
        data = dense.view(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), [*value.shape], _text(data)]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY:
        array = np.ascontiguousarray(value)
        return {"$array": [value.dtype.str, [*value.shape], _text(array.tobytes())]}
    if isinstance(value, tuple):
        return {"$tuple": [_encoded(item, f"{path}[{n}]") for n, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return {"$set": [_encoded(item, path) for item in sorted(value, key=repr)]}
    raise NotJson(f"{path} is a {kind.__name__}")


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if not kind.startswith("$"):
        return {key: _decoded(item) for key, item in value.items()}
    content = value[kind]
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return base64.b64decode(content, validate=True)
    if kind == "$tensor":
        dtype, shape = getattr(torch, content[0]), content[1]
        if not isinstance(dtype, torch.dtype):
            raise ValueError("is no state of a reader (a tensor without dtype)")
        data = bytearray(base64.b64decode(content[2], validate=True))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    if kind == "$array":
        dtype = np.dtype(content[0])
        if dtype.kind not in _NUMPY:
            raise ValueError("is no state of a reader (an array of objects)")
        data = base64.b64decode(content[2], validate=True)
        array = np.frombuffer(data, dtype).reshape(content[1]).copy()
        return array if content[1] else array[()]
    if kind == "$dict":
        return {_decoded(key): _decoded(item) for key, item in content}
    items = [_decoded(item) for item in content]
    return {"$tuple": tuple, "$set": set}[kind](items)
