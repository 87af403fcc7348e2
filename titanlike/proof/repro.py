"""A script of at most forty lines that reproduces why a layout fails `verify`, in the smallest mesh
and model that do: in plain torch if the user's module fails alone, else with the verify job. It is
run before it is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pprint import pformat
from typing import Any

from titanlike.core.config.groups.data import SyntheticData
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.parse import to_plain
from titanlike.core.config.schema import Config
from titanlike.core.models.registry import LENGTHS, MODELS, complete_arguments, resolve_model

_ATTEMPTS = 40
_MOST = 40  # lines
_TIMEOUT = 600.0  # seconds for a script
_COUNTS = re.compile("layer|heads?$|depth|blocks?$|batch")
_LAUNCHER = re.compile("(RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|ROLE_|TORCHELASTIC_|SLURM_|PMI_).*")
_OF_VERIFY = '''\
"""{first}
{axis}

{ranks} processes: python {file}
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

sys.path.append(".")  # where your own code is

from titanlike.core.config.parse import parse
from titanlike.run.job import JobRunner

CONFIG = {config}

if __name__ == "__main__":
    config, problems = parse(CONFIG)
    verify = JobRunner("titanlike.proof.verify.verify", "verify")
    sys.exit(verify.run(config, problems, Path(mkdtemp()), []).code)
'''
_OF_MODULE = '''\
"""{first}
{ranks} processes without titanlike, each with its part of a batch, and one with all of it: python {file}
"""

import sys
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy

sys.path.append(".")  # where your own code is


def train(rank, ranks, folder):
    dist.init_process_group("gloo", f"file://{{folder}}/{{ranks}}", rank=rank, world_size=ranks)
    from {module} import {name}

    torch.manual_seed(0)
    model = {name}(**{arguments})
    ids = torch.randint({vocabulary}, ({samples}, {tokens} + 1)).chunk(ranks)[rank]
    cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    for gradient in gradients.values():
        dist.all_reduce(gradient.div_(ranks))
    torch.save(gradients, f"{{folder}}/{{ranks}}.pt")
    dist.destroy_process_group()  # or its threads may abort the process at its end


if __name__ == "__main__":
    folder = mkdtemp()
    for ranks in (1, {ranks}):
        spawn(train, (ranks, folder), ranks)
    one, parts = (torch.load(f"{{folder}}/{{ranks}}.pt") for ranks in (1, {ranks}))
    wrong = {{n: ((parts[n] - g).norm() / g.norm()).item() for n, g in one.items()}}
    wrong = {{name: f"{{by:.1e}}" for name, by in wrong.items() if by > 1e-4}}
    sys.exit(f"FAIL: gradients differ, of their norm by {{wrong}}" if wrong else 0)
'''


def shrunk(config: Config, fails: Callable[[Config], bool]) -> Config:
    """The config with random tokens, and layers, sizes, samples and tokens halved for as long as it
    fails."""
    left, args = _ATTEMPTS, complete_arguments(resolve_model(config))
    config = replace(config, verify=replace(config.verify, against=None))
    sizes = [name for name, value in args.items() if type(value) is int and value > 1]
    sizes = [name for name in sizes if name not in ("vocab_size", *LENGTHS)]
    if "vocab_size" in args:
        model = replace(config.model, args=config.model.args | {"vocab_size": None})
        other = replace(config, data=SyntheticData(vocab_size=64), model=model)
        config = other if fails(other) else config
    for names in (sizes, *([name] for name in (*sizes, "batch_size", "seq_len"))):
        while left and (other := _halved(config, names)) != config and fails(other):
            config, left = other, left - 1
    return config


def _halved(config: Config, names: list[str]) -> Config:
    args = complete_arguments(config.model)
    old = {name: args[name] if name in args else getattr(config, name) for name in names}
    # with fewer channels or tokens errors are not distinguishable
    new = {n: max(1 if _COUNTS.search(n) else min(8, old[n]), old[n] // 2) for n in names}
    sizes = config.model.args | {name: new.pop(name) for name in names if name in args}
    return replace(config, model=replace(config.model, args=sizes), **new)


def write_repro(config: Config, located: dict[str, Any], path: Path) -> str:
    """Write the script if it reproduces the failure; return a line about it."""
    environment = {n: value for n, value in os.environ.items() if not _LAUNCHER.fullmatch(n)}
    last = ""
    for text in scripts(config, located, path):
        path.write_text(text)
        try:
            command = [sys.executable, str(path)]
            options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True}
            done = subprocess.run(command, timeout=_TIMEOUT, **options)
        except subprocess.TimeoutExpired:
            last = f"nothing in {_TIMEOUT:.0f} s"
            continue
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        if done.returncode == 1 and "FAIL: " in done.stdout + done.stderr:
            lines = f"{len(text.splitlines())} lines, {config.world_size} processes"
            return f"repro: python {path} shows it ({lines})"
    path.unlink(missing_ok=True)
    return f"repro: none: what fails here does not in a fresh process: {last}"


def scripts(config: Config, located: dict[str, Any], path: Path) -> Iterator[str]:
    """Yield candidate scripts, the preferred one first."""
    model = resolve_model(config)
    values = {"first": "\n".join(located["first"][:2]), "axis": located["axis"], "file": path.name}
    values["ranks"] = config.world_size
    if model.name not in MODELS and config.dp == config.world_size > 1:
        module, _, name = model.name.rpartition(".")
        sizes = {"samples": config.batch_size, "tokens": config.seq_len}
        sizes["vocabulary"] = model.args.get("vocab_size", 2)
        code = {"module": module, "name": name, "arguments": model.args}
        yield _OF_MODULE.format(**values, **sizes, **code)
    default = Config(model=Model(model.name, complete_arguments(Model(model.name, {}))))
    verify = replace(config.verify, repro=None, json=False)
    config = replace(config, run_dir=default.run_dir, verify=verify)
    changes = _changes(to_plain(config), to_plain(default))
    text = pformat(changes, width=90, sort_dicts=False).replace("\n", "\n" + " " * 9)
    script = _OF_VERIFY.format(**values, config=text)
    short = script.count("\n") <= _MOST
    yield script if short else _OF_VERIFY.format(**values, config=repr(changes))


def _changes(plain: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults; whole groups if their choice differs."""
    result: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in default or value != default[key]:
            both = isinstance(value, dict) and isinstance(default.get(key), dict)
            same = both and value.get("name") == default[key].get("name")
            named = {"name": value["name"]} if same and "name" in value else {}
            result[key] = named | _changes(value, default[key]) if same else value
    return result
