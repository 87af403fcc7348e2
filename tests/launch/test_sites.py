"""What a site lacks or sets, and what a run does there: the table in docs/clusters.md."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import TINY, command
from support.file_systems import lacking
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
