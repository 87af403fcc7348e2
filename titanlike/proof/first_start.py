"""The training job, with a comparison with one process before the first launch of a layout.

`verify=auto` compares if there is custom code (a model, loss, optimizer, data, schedule), several
processes, and one process can hold the model and takes at most LIMIT seconds by estimate: no static
check covers all that code may do. `verify=required` compares every layout. `run/job.py`
(`job_of`) decides which runs are such a job. A passed comparison is remembered, by a hash of that
code and of the config, in the run's directory and in the user's cache. The comparison is in fp32
and not compiled, where only the last digits are rounding.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import sysconfig
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import titanlike
from titanlike.core.config import files
from titanlike.core.config.errors import ConfigError, Problem
from titanlike.core.config.groups.computation import Precision
from titanlike.core.config.imports import import_object, outside_code
from titanlike.core.config.parse import to_plain
from titanlike.core.config.program import tool_program
from titanlike.core.config.schema import Config
from titanlike.core.device.accelerator import is_accelerator
from titanlike.core.device.choose import choose_device
from titanlike.core.device.memory import total_memory
from titanlike.core.launch.rendezvous import barrier
from titanlike.core.launch.watchdog import Watchdog
from titanlike.core.launch.worker import Worker
from titanlike.core.metrics.console import Console
from titanlike.core.metrics.run_files import Events
from titanlike.core.models.registry import build_model, resolve_model
from titanlike.core.torch_private.process_groups import abort_groups
from titanlike.core.training import loop

LIMIT = 30.0  # seconds, by estimate
_QUIET = 5.0  # seconds until a line reports progress
_CACHE = "~/.cache/titanlike/verified"
# fp32 FLOP/s of one unoptimized process, and its bytes per parameter: weights, gradients, optimizer
# state, and copies to compare
_SPEED, _ACCELERATOR_SPEED = 2e10, 1e13
_BYTES = 60
# keys that change no gradient
_OTHER_KEYS = (
    *("run_dir", "value", "seed", "steps", "max_tokens", "max_time", "lr", "log_every", "gc_every"),
    *("report", "plan", "precision", "compile", "matmul_precision", "on_nonfinite", "on_spike"),
    *("spike_zscore", "spike_window", "sample", "evaluate", "verify", "bench", "validation"),
    *("checkpoint", "logger", "profile", "timeline", "hardware", "launch", "sweep"),
)


def train(config: Config, worker: Worker) -> dict[str, Any]:
    """`training.loop.train`, after the comparison, unless that has passed before. Raises
    ConfigError if it fails."""
    note = _verified(config, worker)
    return loop.train(config, worker) | {"verification": note}


def _verified(config: Config, worker: Worker) -> str:
    """Compare this layout unless that is known or skipped; return a line about it. Collective."""
    mode, code = config.verify.name, outside_code(config)
    decision: dict[str, Any] = {}
    if worker.rank == 0:
        decision["key"] = key = _verdict_key(config, code)
        if any(path.exists() for path in _places(worker, key)):
            decision["note"] = "verified before"
        elif mode == "auto" and (reason := _too_much(config, worker)):
            decision["note"] = _not_verified(config, reason)
    texts = barrier(worker, "verified", config.launch.timeout, json.dumps(decision), listens=True)
    decision = json.loads(texts[0])
    if note := decision.get("note", ""):
        _say(worker, note)
        return note
    return _compare(config, worker, decision["key"], code)


def _compare(config: Config, worker: Worker, key: str, code: dict[str, str]) -> str:
    from titanlike.proof.verification import OutOfMemory, compare_with_one_process, print_found

    begin = time.monotonic()
    assert worker.store is not None
    apart = replace(worker, store=torch.distributed.PrefixStore("verify", worker.store))
    exact = replace(config, precision=Precision(), compile=False)
    required = config.verify.name == "required"
    text = (
        f"verifying {config.verify.steps} steps against one process, once for this code and layout"
    )
    slow = threading.Timer(_QUIET, Console(steps=1).line, [f"{text} (verify=off skips it)"])
    slow.daemon = True
    if worker.rank == 0:
        slow.start()
    with Watchdog(worker, config.launch, abort_groups) as watchdog:
        watchdog.enter_phase(0, "verify", 0 if required else config.launch.timeout)
        try:
            compared = compare_with_one_process(exact, apart, watchdog)
        except OutOfMemory as error:
            reason = f"one process has too little memory: {error}"
            if required:
                raise ConfigError(
                    [Problem("verify", "required", reason, "verify=auto, or a smaller model")]
                ) from None
            note = _not_verified(config, reason)
            _say(worker, note)
            return note
        finally:
            slow.cancel()
    if not compared.agrees:
        if worker.rank == 0:
            print_found(exact, compared)
        barrier(worker, "told", config.launch.timeout)  # the first to end ends those that print
        first = next(iter(code.items()), ("model.name", config.model.name))
        names = [row.full_name for row in compared.rows if not row.agrees]
        shown = ", ".join([*names, *compared.missing][:3])
        reason = f"in this layout it does not train as in one process: {shown} and more differ"
        fix = "verify=off if that is meant, or another layout"
        raise ConfigError([Problem(*first, reason, fix)])
    seconds = time.monotonic() - begin
    note = (
        f"verified: {config.verify.steps} steps are those of one process in fp32 "
        f"({len(compared.rows)} comparisons, {seconds:.1f} s)"
    )
    if worker.rank == 0:
        text = files.dumps({"time": time.time(), "seconds": seconds, "code": code, "note": note})
        for path in _places(worker, key):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.atomic_write_text(path, text + "\n")
            except OSError as error:  # the next launch compares again
                print(f"{path} could not be written: {error}", file=sys.stderr)
    _say(worker, note)
    return note


def _places(worker: Worker, key: str) -> list[Path]:
    cache = Path(_CACHE).expanduser() / f"{key}.json"
    return [worker.run_dir / f"verified-{key}.json", cache]


def _say(worker: Worker, note: str) -> None:
    if worker.rank == 0:
        Events(worker.run_dir, Console(steps=1).line).log("verify", 0, note)


def _not_verified(config: Config, reason: str) -> str:
    command = shlex.join(tool_program("verify"))
    return (
        f"this layout is not verified against one process ({reason}); `{command}` with the same "
        "overrides does"
    )


def _too_much(config: Config, worker: Worker) -> str:
    """Why one process cannot compute the reference, by estimate; "" = it can."""
    device, _ = choose_device(config, worker.local_rank, worker.local_world_size)
    weights = sum(
        parameter.numel() for parameter in build_model(resolve_model(config)).parameters()
    )
    memory = total_memory(device, 1)
    if memory is not None and _BYTES * weights > memory / 2:
        return "the model is too large for one process"
    batches = (
        3 * config.verify.steps + (config.validation.batches or 4) + 1
    )  # a backward is two forwards
    work = 2.0 * weights * config.batch_size * config.seq_len * batches
    seconds = work / (_ACCELERATOR_SPEED if is_accelerator(device) else _SPEED)
    return f"one process would take {seconds:.0f} s" if seconds > LIMIT else ""


def _verdict_key(config: Config, code: dict[str, str]) -> str:
    """A hash of what the verdict depends on: config keys, torch's version, and the sources of the
    user's modules and of titanlike. code: config keys -> import paths (`outside_code`)."""
    plain = {name: value for name, value in to_plain(config).items() if name not in _OTHER_KEYS}
    for name in ("lr", "weight_decay"):  # these change no gradient, either
        plain["optimizer"].pop(name, None)
    build_model(resolve_model(config))  # imports its modules
    texts = files.dumps(plain), torch.__version__, str(config.verify.steps)
    digest = hashlib.sha256("".join(texts).encode())
    sources = Path(titanlike.__file__).parent.rglob("*.py")
    for path in (*sorted(_sources(code)), *sorted(sources)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _sources(code: dict[str, str]) -> set[Path]:
    """The files of custom modules, and of what the config names."""
    installed = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
    installed += [str(Path(titanlike.__file__).parent)]
    modules = [getattr(import_object(path), "__module__", "") for path in code.values()]
    named = {Path(file) for module in modules if (file := _file(sys.modules.get(module)))}
    loaded = {Path(file) for module in [*sys.modules.values()] if (file := _file(module))}
    custom = {path for path in loaded if not any(map(path.is_relative_to, installed))}
    return {path for path in named | custom if path.suffix == ".py" and path.is_file()}


def _file(module: object) -> str:
    return str(getattr(module, "__file__", None) or "")
