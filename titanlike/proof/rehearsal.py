"""Run ranks of a job one after the other without the others: the code of `train` under fake tensors,
from the launch over steps, validation and saves to a resume and the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

from torch import nn

from titanlike.core.checkpoint import integrity, reader, state_dict, writer
from titanlike.core.checkpoint.discovery import step_name
from titanlike.core.checkpoint.integrity import CheckpointHeader
from titanlike.core.checkpoint.reader import raise_on_all_ranks
from titanlike.core.checkpoint.storage import MARKER, Storage
from titanlike.core.config.groups.watching import NoLogger
from titanlike.core.config.schema import Config
from titanlike.core.data.loader import batches, validation_batches
from titanlike.core.data.sources import Batch, Data
from titanlike.core.distributed.mesh import axes_along
from titanlike.core.launch.signals import StopRequest
from titanlike.core.launch.worker import Worker
from titanlike.core.torch_private.fake_ranks import allocate
from titanlike.core.torch_private.recorded_ranks import Program, Recorder, recorded_rank
from titanlike.core.training import build, loop, session, step
from titanlike.core.training.anomalies import BadNumbers

STEPS = 3


@dataclass(frozen=True)
class Scenario:
    """What happens in a run besides its steps."""

    name: str
    resumes: bool = False
    stops_at: int = 0  # a stop request in this step; 0 = none
    bad_step: int = 0  # loss and gradients are NaN


@dataclass
class Shared:
    """What ranks of one rehearsal have from each other."""

    config: Config
    data: Data
    objects: dict[str, dict[Any, Any]] = field(default_factory=dict)  # of each scenario
    saved: dict[str, Any] = field(default_factory=dict)  # name -> SavedTensor
    state: dict[str, Any] = field(default_factory=dict)


class _Store:
    """The job's store, of which every request is answered as if all ranks had made it."""

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self._recorder, self._size = recorder, world_size
        self._values: dict[str, str] = {}

    def append(self, key: str, value: str) -> None:
        rank, message = next(iter(json.loads(f"[{value.rstrip(',')}]")))
        every = ([other, message] for other in range(self._size))
        self._values[key] = "".join(f"{json.dumps(each)}," for each in every)

    def add(self, key: str, number: int) -> int:
        if key.endswith("/count"):
            self._recorder.add("store barrier", None, detail=key.removesuffix("/count"))
        return self._size

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values.get(key, "").encode()

    def wait(self, *_: Any) -> None:
        return None

    def check(self, _: Any) -> bool:
        return True

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        return value.encode()


def shortened(config: Config, run_dir: str) -> Config:
    """The run with few steps, of which each kind of step is one; on the CPU, uncompiled."""
    every = {
        name: replace(getattr(config, name), every=2)
        for name in ("validation", "checkpoint", "sample")
        if getattr(config, name).every
    }
    if "validation" in every:
        every["validation"] = replace(every["validation"], batches=config.validation.batches and 1)
    started = {"resume": "auto", "start_from": None, "folder": None}
    every["checkpoint"] = replace(every.get("checkpoint", config.checkpoint), **started)
    return replace(
        config,
        run_dir=run_dir,
        steps=STEPS,
        max_tokens=None,
        device="cpu",
        compile=False,
        logger=NoLogger(),
        **every,
    )


def run_rank(
    shared: Shared, rank: int, scenario: Scenario, **flips: Any
) -> tuple[Program, Exception | None]:
    """Run a rank of a job from its launch to its end; returns what it asked of others, and the error
    that ended it."""
    config, objects = shared.config, shared.objects.setdefault(scenario.name, {})
    along = partial(axes_along, config)
    recorder = Recorder(rank, config.world_size, along, objects, **flips)
    stop: Any = StopRequest()
    stop.code = lambda *_: SIGTERM if 0 < scenario.stops_at <= recorder.step else 0

    def enter_phase(step: int, phase: str, timeout: float | None = None) -> None:
        recorder.step, recorder.phase = step, f"{phase} of step {step}"
        recorder.unknown = float("nan") if 0 < scenario.bad_step == step else 1.0

    watchdog = Mock(enter_phase=enter_phase)
    store: Any = _Store(recorder, config.world_size)
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        folder = Path(config.run_dir)
        shutil.rmtree(folder, ignore_errors=True)  # the rank's before
        folder.mkdir(parents=True)
        if scenario.resumes:
            saved = folder / "checkpoints" / step_name(shared.state["step"])
            saved.mkdir(parents=True)
            (saved / MARKER).touch()
        worker = Worker(
            rank=rank,
            world_size=config.world_size,
            local_rank=rank,
            local_world_size=config.world_size,
            run_dir=folder,
            store=store if config.world_size > 1 else None,
            overrides=[],
            stop_request=stop,
        )
        for module, name, value in _stand_ins(shared, recorder, scenario):
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        fake = stack.enter_context(recorded_rank(recorder))

        def fill(stage: nn.Module, _: object, device: Any, *__: object, **___: object) -> None:
            with fake:
                allocate(stage, device)

        stack.enter_context(patch.object(build, "initialize", fill))
        try:
            loop._train(config, worker, watchdog)
        except BadNumbers as failure:  # raised on all ranks: the run's end
            error = None if scenario.bad_step else failure
        except Exception as failure:
            error = failure
        worker.resources.close()
    return recorder.program, error


def _stand_ins(
    shared: Shared, recorder: Recorder, scenario: Scenario
) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, value) of what reads and writes files."""
    yield session, "open_data", lambda _: shared.data
    yield sys, "excepthook", sys.excepthook  # torch names the rank in each line, once a rank

    along = recorder.every & {"replicate", "shard"}

    def read_by_dp_ranks(stream: Callable[..., Any]) -> Callable[..., Iterator[Batch]]:
        def read(*args: Any, **kwargs: Any) -> Iterator[Batch]:
            for batch in stream(*args, **kwargs):
                for tensor in batch.values():
                    recorder.set_differs(tensor, along)
                yield batch

        return read

    if shared.config.dp > 1:
        yield loop, "batches", read_by_dp_ranks(batches)
        yield step, "validation_batches", read_by_dp_ranks(validation_batches)
    prepare = writer.prepare_save

    def prepare_save(tensors: Any) -> writer.PreparedSave:
        prepared = prepare(tensors)
        shared.saved |= prepared.tensors
        return prepared

    def commit(folder: Any, files: Any, state: dict[str, Any]) -> int:
        shared.state = shared.state or state  # a resume is from the first one
        return 0

    def gather(value: Any, group: Any, among: Any = None) -> list[Any]:
        recorder.add("gather of objects", group)
        return [value] * group.size()

    def scatter(values: list[Any], group: Any, among: Any = None) -> Any:
        key, sent = recorder.add("scatter of objects", group), recorder.objects
        if group.rank() == 0:
            sent[key] = values
        return sent[key][group.rank()]

    def submit(function: Callable[[], Any]) -> Future[Any]:
        """Do at once what the saving thread is asked for, as what it asks for."""
        done: Future[Any] = Future()
        recorder.queue = "saving thread"
        try:
            done.set_result(function())
        except OSError as error:
            done.set_exception(error)
        finally:
            recorder.queue = ""
        return done

    yield writer, "prepare_save", prepare_save
    yield writer, "write_pieces", lambda *_: []
    yield writer, "commit", commit
    yield writer, "gather_objects", gather
    yield writer, "scatter_objects", scatter
    yield writer, "ThreadPoolExecutor", lambda *_: Mock(submit=submit)
    yield writer, "HostMemory", Mock
    yield writer, "Copy", lambda sources, *_: Mock(tensors=dict(sources))
    if not scenario.resumes:
        return

    def read(header: Any, tensors: Any, group: Any, unread: str = "") -> None:
        with raise_on_all_ranks(group):
            pass

    def open_header(folder: Storage) -> CheckpointHeader:
        index: Any = SimpleNamespace(tensors=shared.saved)
        return CheckpointHeader(folder, shared.state, index, shared.saved)

    yield integrity, "read_state", lambda *_: shared.state
    yield integrity, "open_header", open_header
    yield reader, "open_header", open_header
    yield reader, "read", read
    yield state_dict, "read", read
