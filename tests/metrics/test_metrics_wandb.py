"""W&B: offline unless asked, kept for resumes, and never a reason for a run to fail or hang."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cells import slow
from support.paths import ROOT
from support.waiting import until
from support.wandb_file import WandbFile, read_wandb_file
from titanlike.core.metrics.run_files import log_start
from titanlike.core.metrics.sinks import read_jsonl
from titanlike.watch.wandb_sink import _mode, run_id

NO_NETWORK = {"WANDB_BASE_URL": "http://127.0.0.1:9"}
CONFIG = {"pp": 2, "optimizer": {"name": "adamw", "lr": 3e-3}}
LOSSES = [0.1 + 0.2, 1 / 3, 5e-324]

# the program of a run: first and last step, W&B's timeout, what befalls it before it closes
RUN = f"""
import json, os, signal, sys, time
from pathlib import Path
from titanlike.core.config.groups.watching import Wandb
from titanlike.watch import wandb_sink
from titanlike.watch.wandb_sink import WandbSink

folder, first, last, timeout, event, project = sys.argv[1:]
sys.argv += ["steps=7", "logger.password=op3nsesame"]
settings = Wandb(
    project=project or None, group="grp", timeout=float(timeout), entity="team", tags=["a", "b"], notes="why"
)
overrides = ["pp=2", "run_dir=x", "+data.password=sesame", "logger.mode=offline"] * (first == "1")
say = lambda line: print(line, flush=True)
sink = WandbSink(settings, {CONFIG!r}, Path(folder), say, overrides)
for step in range(int(first), int(last) + 1):
    sink.log({{"step": step, "loss": {LOSSES!r}[step % 3], "val_loss": 2.0}})
print("where", sink.location, flush=True)
sink.note("profile", "a trace in a folder")
sink.table("samples", int(last), [{{"step": int(last), "prompt": "def", "text": " main"}}])
if event:
    from wandb.sdk import wandb_setup
    service = wandb_setup.singleton()._connection._proc._process
    print("service", service.pid, flush=True)
if event == "freeze":
    wandb_sink.FINISH_GRACE = 1.0
    service.send_signal(signal.SIGSTOP)
if event == "crash":
    service.kill()
    for step in range(int(last) + 1, int(last) + 100):
        sink.log({{"step": step, "loss": 1.0}})
        time.sleep(0.01)
sink.close("completed")
"""


def run(
    folder: Path,
    first: int,
    last: int,
    timeout: float = 10,
    event: str = "",
    project: str | None = "proj",
    **env: str,
):
    """The output of a run, which ends well."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    clean |= {"HOME": str(folder), "PYTHONPATH": str(ROOT)} | env
    words = [
        sys.executable,
        "-c",
        RUN,
        *map(str, (folder, first, last, timeout)),
        event,
        project or "",
    ]
    log = folder / f"output{first}.txt"
    with log.open("w") as file:  # not a pipe, which W&B's service may keep open
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, env=clean, timeout=40, **streams)
    assert done.returncode == 0, log.read_text()
    return log.read_text()


def kept(folder: Path) -> list[WandbFile]:
    return [read_wandb_file(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def test_without_a_key_config_metrics_and_id_are_kept_for_sync_and_resume(tmp_path):
    """Nor without a network: everything is in run_dir; a resumed run is the same W&B run."""
    output = run(tmp_path, 1, 4)
    assert len(output.splitlines()) == 1, "no chatter of wandb's"
    assert f"where W&B offline; upload with: wandb sync {tmp_path}/wandb/offline-run-" in output
    time.sleep(1)  # wandb names its folders by the second
    output = run(tmp_path, 5, 6, 1, WANDB_MODE="online", WANDB_API_KEY="0" * 40, **NO_NETWORK)
    assert output.count("continuing offline, online failed") == 1
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    line = f"where W&B offline; upload with: wandb sync {folders[0]} {folders[1]}\n"
    assert len(folders) == 2 and line in output, "both are to be uploaded, in their order"
    first, second = kept(tmp_path)
    assert first.config == second.config == CONFIG
    assert first.id == second.id == (tmp_path / "wandb" / "run_id").read_text().strip()
    assert (first.project, first.group, first.entity) == ("proj", "grp", "team")
    assert (first.tags, first.notes) == (["a", "b"], "why")
    assert first.name == second.name == "pp=2,data.password=***", "what differs, the first time"
    history = first.history + second.history
    assert [item["_step"] for item in history] == [1, 2, 3, 4, 5, 6]
    assert all(item["val/loss"] == 2.0 and item["step"] == item["_step"] for item in history)
    assert [item["train/loss"] for item in history] == [LOSSES[step % 3] for step in range(1, 7)]
    assert first.summary["profile"] == "a trace in a folder"
    assert ["samples.path" in item for item in history] == [False, False, False, True, False, True]
    file = Path(folders[0], "files", history[3]["samples.path"])
    table = json.loads(file.read_text())
    assert (table["columns"], table["data"]) == (["step", "prompt", "text"], [[4, "def", " main"]])
    assert first.exit_code == second.exit_code == 0
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"steps=7" in written and b"logger.password=***" in written, (
        "the command line, without secrets"
    )
    assert b"op3nsesame" not in written


UNDONE = """
import sys
from pathlib import Path
from titanlike.core.config.groups.watching import Wandb
from titanlike.core.metrics.run_files import Events
from titanlike.core.metrics.sinks import JsonlSink
from titanlike.watch.tensorboard_sink import TensorBoardSink
from titanlike.watch.wandb_sink import WandbSink

folder, start, attempt, *rest = sys.argv[1:]
folder, start, events = Path(folder), int(start), Events(Path(folder), print)
redone = lambda steps, seconds: events.log("redone", start, steps=steps, seconds=seconds)
sinks = [JsonlSink(folder / "metrics.jsonl", start, redone)]
sinks += [WandbSink(Wandb(mode="offline"), {}, folder, print), TensorBoardSink(folder, start)]
for word in map(int, rest):
    for sink in sinks:
        if word < 0:
            sink.rewind(-word)
            continue
        sink.log({"step": word, "loss": float(attempt) + word, "step_seconds": 1.0})
    attempt = int(attempt) + 100 * (word < 0)
for sink in sinks:
    sink.close("completed")
"""


@pytest.mark.slow
def test_steps_that_are_done_again_replace_those_undone_in_every_sink(tmp_path: Path) -> None:
    """A rollback from 6 to 3, a resume from 4, and a restart from 0: what was logged last for a step
    is what is shown, and W&B's own step always grows, so it drops nothing."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    launches = ["0 0 1 2 3 4 5 6 -3 4 5 6", "4 1000 5 6", "0 2000 1 2"]
    steps, shown, points = [], dict[int, float](), []
    for words in launches:
        program = [sys.executable, "-c", UNDONE, str(tmp_path), *words.split()]
        env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        subprocess.run(program, check=True, env=env, timeout=120)
        time.sleep(1)  # wandb names its folders by the second
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        points.append([(point.step, point.value) for point in events.Scalars("train/loss")])
    for file in kept(tmp_path):
        steps += [item["_step"] for item in file.history]
        shown |= {item["step"]: item["train/loss"] for item in file.history}
        assert {"step", "*"} <= file.metrics.keys() and file.metrics["*"] == "step"
    right = {1: 2001.0, 2: 2002.0, 3: 3.0, 4: 104.0, 5: 1005.0, 6: 1006.0}
    assert shown == right and steps == sorted(set(steps)) and len(steps) == 13
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert {record["step"]: record["loss"] for record in records} == {1: 2001.0, 2: 2002.0}
    before = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0)]
    assert points[0] == [*before, (5, 105.0), (6, 106.0)]
    assert points[1] == [*before, (5, 1005.0), (6, 1006.0)]
    assert points[2] == [(1, 2001.0), (2, 2002.0)]


def test_a_copied_run_is_a_new_wandb_run_and_a_moved_one_is_the_same(tmp_path: Path) -> None:
    def start(name: str) -> tuple[str, str]:
        log_start(tmp_path / name, 0, [], {"run_dir": str(tmp_path / name)}, {})
        return run_id(tmp_path / name)

    (tmp_path / "src").mkdir()
    first, note = start("src")
    assert start("src") == (first, note) == (first, "")
    shutil.copytree(tmp_path / "src", tmp_path / "copied")
    shutil.copytree(tmp_path / "src", tmp_path / "moved")
    (tmp_path / "copied" / "wandb" / "run_url").write_text("https://of/the/original")
    own, note = start("copied")
    assert own != first and note.endswith(f"src, whose W&B run is {first}; it continues as {own}")
    assert not (tmp_path / "copied" / "wandb" / "run_url").exists()
    assert start("copied") == (own, "") and start("src") == (first, "")
    shutil.rmtree(tmp_path / "src")
    assert start("moved") == (first, "")


def test_a_key_alone_sends_nothing_and_the_environment_names_project_and_run(tmp_path):
    env = {"WANDB_API_KEY": "0" * 40, "WANDB_PROJECT": "theirs", "WANDB_NAME": "mine"}
    output = run(tmp_path, 1, 2, 1, project=None, WANDB_RUN_ID="7", **env, **NO_NETWORK)
    unused, where = output.splitlines()
    assert unused.startswith("W&B: WANDB_RUN_ID not used: ")
    assert where.startswith("where W&B offline; upload with: wandb sync ")
    (file,) = kept(tmp_path)
    assert (file.project, file.name, file.group) == ("theirs", "mine", "grp")


@pytest.mark.parametrize(
    ("word", "mode"),
    [("", "offline"), ("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled")]
    + [("online", "online"), ("run", "online"), ("shared", "online"), ("on-line", "offline")],
)
def test_the_environment_may_choose_the_mode(
    monkeypatch: pytest.MonkeyPatch, word: str, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", word)
    assert (_mode("auto"), _mode("online"), _mode("offline")) == (mode, "online", "offline")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "reason"), [("freeze", "did not finish within 2 s"), *slow(("crash", "stopped"))]
)
def test_a_service_that_freezes_or_crashes_neither_fails_nor_holds_up_the_run(
    tmp_path, event, reason
):
    """The user is told once, the run ends well, and no process is left."""
    output = run(tmp_path, 1, 3, 1, event)
    assert output.count("W&B stopped") == 1
    assert reason in output
    assert "Traceback" not in output
    pid = re.search(r"^service (\d+)", output, re.MULTILINE)[1]
    until(lambda: not Path(f"/proc/{pid}").exists(), timeout=20)
