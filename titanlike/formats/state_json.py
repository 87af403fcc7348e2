"""A reader's state in bytes: what `state_dict` of torchdata, datasets and own streams returns.

The length of a JSON text (8 bytes, little-endian), that text, and the bytes of tensors and arrays.
JSON has objects, lists, texts, numbers and null. Anything else is an object with one key that
begins with "$": {"$tensor": [dtype, shape, begin, end]} with the place of its bytes, $array
(numpy), $bytes, $tuple, $set, $float (nan, inf), and {"$dict": [[key, value], ...]} for keys that
are no texts or begin with "$".
"""

from __future__ import annotations

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
    """Return a state in bytes. Raises NotJson, which names the part that cannot be saved."""
    blobs = bytearray()
    plain = _encoded(state, "state", blobs)
    text = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + blobs


def loads(data: bytes) -> Any:
    """Return what `dumps` was given. Raises ValueError."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        return _decoded(json.loads(data[8:end]), memoryview(data)[end:])
    except (TypeError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"is no state of a reader ({type(error).__name__})") from None


def _encoded(value: Any, path: str, blobs: bytearray) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [_encoded(item, f"{path}[{n}]", blobs) for n, item in enumerate(value)]
    if isinstance(value, dict):
        items = {key: _encoded(item, f"{path}[{key!r}]", blobs) for key, item in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[_encoded(key, path, blobs), item] for key, item in items.items()]}
    if kind in (bytes, bytearray):
        return {"$bytes": _placed(value, blobs)}
    if isinstance(value, Tensor):
        dense = value.detach().cpu().contiguous()
        place = _placed(dense.view(-1).view(torch.uint8).numpy().data, blobs)
        return {"$tensor": [str(value.dtype).removeprefix("torch."), [*value.shape], *place]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMPY:
        place = _placed(value.tobytes(), blobs)
        return {"$array": [value.dtype.str, [*value.shape], *place]}
    if isinstance(value, tuple):
        return {"$tuple": [_encoded(item, f"{path}[{n}]", blobs) for n, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return {"$set": [_encoded(item, path, blobs) for item in sorted(value, key=repr)]}
    raise NotJson(f"{path} is a {kind.__name__}")


def _placed(data: bytes | bytearray | memoryview, blobs: bytearray) -> list[int]:
    """Append bytes; returns their begin and end."""
    blobs += data
    return [len(blobs) - len(data), len(blobs)]


def _decoded(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if not kind.startswith("$"):
        return {key: _decoded(item, blobs) for key, item in value.items()}
    content = value[kind]
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return bytes(blobs[slice(*content)])
    if kind == "$tensor":
        dtype, shape, place = getattr(torch, content[0]), content[1], slice(*content[2:])
        if not isinstance(dtype, torch.dtype):
            raise ValueError("is no state of a reader (a tensor without dtype)")
        data = bytearray(blobs[place])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    if kind == "$array":
        dtype, shape, place = np.dtype(content[0]), content[1], slice(*content[2:])
        if dtype.kind not in _NUMPY:
            raise ValueError("is no state of a reader (an array of objects)")
        array = np.frombuffer(blobs[place], dtype).reshape(shape).copy()
        return array if shape else array[()]
    if kind == "$dict":
        return {_decoded(key, blobs): _decoded(item, blobs) for key, item in content}
    items = [_decoded(item, blobs) for item in content]
    return {"$tuple": tuple, "$set": set}[kind](items)
