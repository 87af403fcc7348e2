"""What a site lacks or sets, and what a run does there: the table in docs/clusters.md."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.file_systems import lacking
from support.forked import run
from support.paths import ROOT
from support.records import numbers

RUN = [word for word in TINY if word != "checkpoint.last=false"]


def at_site(
    *words: str, cwd: Path, env: dict[str, str], tool: str = "train.py"
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: a fork would keep its libc and its imports."""
    return subprocess.run(
        [sys.executable, ROOT / tool, *words],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


LACKING = {"fsync, locks, links": {"fsync_folder": errno.EINVAL, "flock": errno.ENOLCK}}
MORE_LACKING = {
    **{f"fsync, {errno.errorcode[e]}": {"fsync": e, "fsync_folder": e} for e in (22, 9, 38, 95)},
    **{f"flock, {errno.errorcode[e]}": {"flock": e} for e in (22, 37, 38, 95)},
    "links": {"link": errno.EPERM, "symlink": errno.EPERM},
}


@pytest.mark.parametrize(
    "errors",
    [
        *[pytest.param(errors, id=name) for name, errors in LACKING.items()],
        *[
            pytest.param(errors, id=name, marks=pytest.mark.slow)
            for name, errors in MORE_LACKING.items()
        ],
    ],
)
def test_a_file_system_without_an_operation_keeps_the_checkpoints(
    tmp_path: Path, errors: dict[str, int]
) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    env = lacking(place, **{"link": errno.EPERM, "symlink": errno.EPERM, **errors})
    words = [*RUN, "run_dir=mount/run", "checkpoint.every=3"]
    done = at_site(*words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert len([*place.glob("run/checkpoints/*/COMMITTED")]) == 2
    resumed = command(*words, "steps=6", cwd=tmp_path)
    assert "checkpoint of step 5" in resumed.stdout, resumed.stderr
    assert [step for step, *_ in numbers(place / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_file_system_that_replaces_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    env = lacking(tmp_path / "mount", rename_over=errno.EPERM)
    done = at_site(*RUN, "run_dir=mount/run", cwd=tmp_path, env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Operation not permitted" in done.stderr and "mount/run" in done.stderr


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "none-[07-08,12],m3",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "PATH": "/nowhere",  # of scontrol
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {},
            "the first node, none-07, does not resolve, .*; export MASTER_ADDR=ADDRESS of none-07",
        ),
        ({"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST: is not set, while"),
        ({"SLURM_LOCALID": None, "MASTER_ADDR": "127.0.0.1"}, "SLURM_LOCALID: is not set, while"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two: not of the form"),
    ],
)
def test_srun_without_scontrol_or_its_variables_is_a_line(
    tmp_path: Path, change: dict[str, str | None], error: str
) -> None:
    env = {name: value for name, value in (os.environ | STEP | change).items() if value is not None}
    done = run([str(ROOT / "train.py"), *RUN, f"run_dir={tmp_path}/run"], tmp_path, env)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(error, done.stderr), done.stderr


@pytest.mark.slow
def test_one_node_of_srun_needs_no_scontrol_no_name_and_no_ipv6(tmp_path: Path) -> None:
    """Two tasks of a step on a host whose name does not resolve, in a network without IPv6."""
    apart = ["unshare", "--uts", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    words = [sys.executable, str(ROOT / "train.py"), *RUN, "dp=2", f"run_dir={tmp_path}/run"]
    ranks = [
        f"SLURM_PROCID={i} SLURM_LOCALID={i} timeout 280 {shlex.join(words)} &" for i in (0, 1)
    ]
    alone = (
        "hostname nowhere && ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
    )
    line = f"{alone} && {{ {' '.join(ranks)} wait -n && wait -n; }}"
    env = os.environ | STEP | {"SLURM_STEP_TASKS_PER_NODE": "2", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [*apart, "bash", "-c", line], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_a_home_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, dp: int) -> None:
    home = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache", "XDG_STATE_HOME": "/dev/null"}
    words = [word for word in RUN if word != "logger=none"]
    words += [f"dp={dp}", "run_dir=run", "data.cache=cache"]
    done = at_site(*words, cwd=tmp_path, env=home)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
