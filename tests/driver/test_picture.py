"""The picture of a sweep shows every job's curve."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from support.sweep_folders import COMMAND, done, log, steps
from titanlike.driver.sweep_picture import COLOURS, GREY, draw
from titanlike.driver.sweep_status import Job, SweepSpec, write_spec
from titanlike.driver.sweep_table import read_table


@pytest.mark.parametrize("jobs", [2, 12])
def test_the_picture_shows_every_jobs_curve(tmp_path: Path, jobs: int) -> None:
    """Few have a colour each; of many, grey is left to those that did not complete. It says
    nothing on standard error, and changes nothing of the program's own pictures. Made again, it
    replaces the old one."""
    spec = [Job(i, str(i), [f"optimizer.lr={0.001 * i + 0.001}"], []) for i in range(jobs)]
    write_spec(tmp_path, SweepSpec(COMMAND, "loss", "", spec))
    for i in range(jobs):
        records = steps(40, 2 + i / jobs)
        if i == 1:
            records[-1]["loss"] = math.inf
        log(tmp_path / str(i), records)
        done(tmp_path / str(i), *(("failed", "diverged") if i == 1 else ()))
    settings, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = draw(read_table(tmp_path))
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == (settings, backend)
    image = imread(path)[:, :, :3]
    assert image.shape[1] > 1000 and image.shape[0] >= 400
    left = image[:, : int(image.shape[1] * 0.4)]  # the curves
    expected = COLOURS[:jobs] if jobs <= 10 else [GREY]
    for colour in expected:
        near = (abs(left - to_rgb(colour)) < 0.06).all(axis=2)
        assert near.sum() > 20, f"{colour} is not in the picture"
    assert not list(tmp_path.glob(".sweep.png*"))
    before = path.read_bytes()
    shutil.rmtree(tmp_path / "0")
    assert draw(read_table(tmp_path)).read_bytes() != before


def test_curves_that_coincide_are_all_seen(tmp_path: Path) -> None:
    """Layouts of one model have the same losses to the last bit: none hides the others."""
    jobs = [Job(i, str(i), [f"pp={2**i}"], []) for i in range(4)]
    write_spec(tmp_path, SweepSpec(COMMAND, "loss", "", jobs))
    for i in range(4):
        log(tmp_path / str(i), steps(40, val_every=0))
        done(tmp_path / str(i))
    image = imread(draw(read_table(tmp_path)))[:, :, :3]
    curves = image[image.shape[0] // 3 :, : int(image.shape[1] * 0.4)]  # not the legend
    for colour in COLOURS[:4]:
        assert (abs(curves - to_rgb(colour)) < 0.1).all(axis=2).sum() > 100, colour
