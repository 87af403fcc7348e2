"""The bytes of the storages that live, of real tensors and of fake ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within it: bytes of the storages that were made within it and are still there.

    torch's own trackers (`torch.distributed._tools.mem_tracker`) fail with microbatches (2.11 to
    2.15). Tensors on the meta device do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._bytes: dict[int, int] = {}

    def __enter__(self) -> LiveStorages:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = super(torch.UntypedStorage, storage).resize_(size)
            self._resized(storage)
            return result

        # FSDP frees gathered parameters so, which no operator shows
        patched: Any = torch.UntypedStorage
        patched.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        del torch.UntypedStorage.resize_
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # what DTensor calls inside is not seen here
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            # a fake tensor's storage is on meta, whatever its device
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            weakref.finalize(storage, self._gone, key)
            self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._bytes:
            self.now += storage.nbytes() - self._bytes[key]
            self._bytes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._bytes.pop(key)
