"""Run directories that somebody else made: copies of a real one, with changes; and titanlike's
commands on them, watched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import watched
from support.exported import LLAMA, byte_text, trained
from support.paths import ROOT
from support.saved_runs import checkpoint, reseal
from titanlike.core.checkpoint.storage import STATE
from titanlike.core.config.groups.watching import Timeline

URL = "http://127.0.0.1:9/x"


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("received") / "run"
    recorded = Timeline(enabled=True, steps=[1, 1])
    trained(folder, LLAMA, data=byte_text(folder / "text"), timeline=recorded)
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """The working directory: what forged values name, and modules that tell on themselves."""
    folder = tmp_path / "outside"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("theirs", "hydra", "yaml", "triton", "kernels"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    for name in ("text.txt", "tokenizer.json", "t.jinja", "order.csv", "x.pt", "c.jsonl", "t.bin"):
        (folder / name).write_text("{}")
    return folder


class Forge:
    """Copies of a run with a change."""

    def __init__(self, source: Path, tmp_path: Path, outside: Path) -> None:
        self.source, self.tmp_path, self.outside, self.made = source, tmp_path, outside, 0

    def filled(self, value: Any, run: Path) -> Any:
        if isinstance(value, dict):
            return {self.filled(k, run): self.filled(v, run) for k, v in value.items()}
        if isinstance(value, list):
            return [self.filled(item, run) for item in value]
        if not isinstance(value, str):
            return value
        return value.replace("OUT", str(self.outside)).replace("RUN", str(run)).replace("URL", URL)

    def run(self) -> Path:
        run = self.tmp_path / "runs" / f"{self.made}"
        self.made += 1
        shutil.copytree(self.source, run)
        (run / "link").symlink_to(self.outside)
        (run / "inner").mkdir()
        (run / "inner" / "a.txt").symlink_to(self.outside / "text.txt")
        (run / "tokens").mkdir()
        index = {"format": 1, "dtype": "uint16", "vocab_size": 9, "boundary": 0, "tokenizer": "x"}
        index |= {"files": [{"name": str(self.outside / "t.bin"), "tokens": 1}]}
        (run / "tokens" / "index.json").write_text(json.dumps(index))
        (run / "model").mkdir()
        (run / "model" / "llama.yaml").write_text("name: theirs.Model\n")
        state = json.loads((checkpoint(run, 1) / STATE).read_text())
        config, text = state["config"], str(run / "text" / "text.txt")
        config["data"] |= {"path": text, "cache": str(run / "text" / "cache")}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        return run

    def config(self, change: dict[str, Any]) -> Path:
        run = self.run()
        plain = yaml.safe_load((run / "config.yaml").read_text()) | self.filled(change, run)
        (run / "config.yaml").write_text(yaml.safe_dump(plain))
        return run

    def json(self, file: str, change: dict[str, Any]) -> Path:
        run = self.run()
        path = run / file
        plain = json.loads(path.read_text())
        for key, value in self.filled(change, run).items():
            *holders, last = key.split(".")
            place = plain
            for holder in holders:
                place = place[holder]
            place[last] = value
        path.write_text(json.dumps(plain))
        if path.name == STATE:
            reseal(path.parent)
        return run


@pytest.fixture
def forge(trained_run: Path, tmp_path: Path, outside: Path) -> Forge:
    return Forge(trained_run, tmp_path, outside)


def environment(home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    own = dict.fromkeys(("HOME", "HF_HOME"), str(home))
    own |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return os.environ | own


def watch(forge: Forge, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What each command did, which has done nothing that it should not."""
    ends = watched_ends(forge, commands)
    falls = [(fall, end) for end in ends if (fall := fall_of(end))]
    assert not falls, falls
    return ends


def watched_ends(forge: Forge, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What each command did; `support.watched` has the keys."""
    inside, env = forge.tmp_path / "runs", environment(forge.tmp_path / "home")
    job = {"outside": str(forge.outside), "inside": str(inside)}
    before = tree(forge.outside)
    done = subprocess.run(
        [sys.executable, "-P", watched.__file__],
        input=json.dumps(job | {"commands": commands}),
        **{"cwd": forge.outside, "env": env, "capture_output": True, "text": True, "timeout": 900},
    )
    assert done.returncode == 0, done.stderr
    assert tree(forge.outside) == before
    return json.loads(done.stdout.splitlines()[-1])


def fall_of(end: dict[str, Any]) -> str:
    """What a command did that it should not; "" = nothing."""
    for child in end["children"]:
        said = str(child["words"]) + child["config"]
        if found := [word for word in ("outside", "theirs", URL) if word in said]:
            return f"starts a process with {found}"
    if "Traceback" in end["text"] or end["code"] not in (0, 1, 2):
        return "an error of its own"
    return "; ".join(end["breaches"])


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}
