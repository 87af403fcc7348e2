"""The thread that saves in the background works on its rank's GPU, and on no other."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from titanlike.core.checkpoint import staging, state_dict, writer
from titanlike.core.checkpoint.storage import Storage
from titanlike.core.config.groups.jobs import Checkpoint

GPU = torch.device("cuda", 3)


@pytest.mark.parametrize("mode", ["async", "async_pinned"])
def test_the_saving_thread_sets_its_device_before_it_waits(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[tuple[str, Any]] = []

    def note(what: Any) -> None:
        did.append((threading.current_thread().name, what))

    class Copied(staging.Copy):
        """Of tensors on a GPU."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._gpu_copied: Any = SimpleNamespace(synchronize=lambda: note("waited"))

    monkeypatch.setattr(writer, "Copy", Copied)
    monkeypatch.setattr(writer, "started", lambda: GPU)
    monkeypatch.setattr(writer, "set_device", note)
    monkeypatch.setattr(state_dict, "run_tensors", lambda _: {"model.a": torch.ones(4)})
    monkeypatch.setattr(state_dict, "share_step", lambda tensors, _: tensors)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        folder, events = Storage(tmp_path), mock.Mock()
        saving = writer.CheckpointWriter(Checkpoint(mode=mode), folder, None, events, [])
        state = {"step": 1, "val_loss": None}
        saving.start(folder.at("step-00000001"), state, mode, time.perf_counter())
        saving.wait()
        saving.close()
    finally:
        dist.destroy_process_group()
    waited = [("checkpoint_0", "waited")] * (mode != "async")
    assert did == [("checkpoint_0", GPU), *waited]
    assert events.log.call_args.args[0] == "saved"
