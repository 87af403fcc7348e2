"""What records a profile on one rank: torch's profiler, or the history of a GPU's memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from titanlike.config.files import temporary_beside
from titanlike.config.profile import MemoryProfile, TraceProfile
from titanlike.torch_private import memory_history

_CURVE = "bytes allocated since the profile began"


class Recorder(Protocol):
    """Records from `start` to `stop`."""

    ending: str  # of the file's name

    def prepare(self) -> None:
        """Optional, a step before `start`: what takes time at first."""

    def start(self) -> None:
        """Record from now on."""

    def stop(self) -> None:
        """Record no more. Does nothing where it neither was prepared nor has started."""

    def write(self, path: Path) -> None:
        """Once it has stopped."""


def recorder_for(settings: MemoryProfile, device: torch.device) -> Recorder:
    """What records such a profile on a rank with this device."""
    if isinstance(settings, TraceProfile):
        return TraceRecorder(device, memory=False, stacks=settings.stacks)
    if memory_history.has_memory_history(device):
        return SnapshotRecorder(device)
    return TraceRecorder(device, memory=True, stacks=False)


def viewer_of(settings: MemoryProfile, device: torch.device) -> str:
    """Where the files that it writes can be looked at."""
    trace = isinstance(settings, TraceProfile) or not memory_history.has_memory_history(device)
    return "https://ui.perfetto.dev" if trace else "https://docs.pytorch.org/memory_viz"


class TraceRecorder:
    """torch's profiler: ranges, operators and kernels; with `memory` also allocations, as a curve."""

    ending = ".json.gz"

    def __init__(self, device: torch.device, *, memory: bool, stacks: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints that it starts, and stops
        self._profiler = profile(
            activities={ProfilerActivity.CPU, getattr(ProfilerActivity, device.type.upper())},
            record_shapes=True,
            profile_memory=memory,
            with_stack=stacks,
        )
        self._memory = memory
        self._prepared = self._started = False

    def prepare(self) -> None:
        if self._prepared:  # the run has rolled back
            return
        with warnings.catch_warnings():  # 2.11 warns of profiles with several cycles: there is one
            warnings.simplefilter("ignore")
            self._profiler.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        self.prepare()
        self._profiler.start_trace()
        self._started = True

    def stop(self) -> None:
        if self._prepared:
            if not self._started:
                self._profiler.start_trace()  # what is prepared cannot be given up otherwise
            self._profiler.stop_trace()
        self._prepared = self._started = False

    def write(self, path: Path) -> None:
        """Raises OSError, or what torch's profiler raises."""
        plain = temporary_beside(path)  # not in /tmp, as torch compresses: a node's may be small
        try:
            self._profiler.export_chrome_trace(str(plain))
            if not plain.exists() or not plain.stat().st_size:
                raise OSError(f"torch's profiler has written nothing to {plain}")
            with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
                if self._memory:
                    trace = _with_curve(json.load(source))
                    target.write(json.dumps(trace).encode())
                else:
                    shutil.copyfileobj(source, target)
        finally:
            with contextlib.suppress(OSError):
                plain.unlink(missing_ok=True)


class SnapshotRecorder:
    """The history of a GPU's memory."""

    ending = ".pickle"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self) -> None:
        """Nothing takes time at first."""

    def start(self) -> None:
        memory_history.start_memory_history(self._device)

    def stop(self) -> None:
        """Nothing: it records until it is written."""

    def write(self, path: Path) -> None:
        try:
            memory_history.write_memory_history(self._device, path)
        finally:
            memory_history.stop_memory_history(self._device)


def _with_curve(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace with a counter over its [memory] events, which Perfetto draws."""
    counters = [
        {
            "ph": "C",
            "name": _CURVE,
            "pid": event["pid"],
            "ts": event["ts"],
            "args": {"bytes": event["args"]["Total Allocated"]},
        }
        for event in trace["traceEvents"]
        if event["name"] == "[memory]"
    ]
    return trace | {"traceEvents": trace["traceEvents"] + counters}
