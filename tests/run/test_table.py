"""The table of a sweep on the terminal."""

from __future__ import annotations

import re
import shlex

from support.sweep_folders import STATUSES, a_sweep, done, every_status, log, rows, steps
from titanlike.core.launch.run_dir_lock import lock_run_dir
from titanlike.run.sweep import best_job, sweep_lines


def lines(folder, value="loss", start=(), again=("again",)):
    table = rows(folder, value)
    return sweep_lines(table, value, best_job(table, value), [*start], [*again])


def test_of_jobs_that_are_equally_good_the_fastest_is_the_best(tmp_path):
    """Equal up to rounding, as layouts of one model are; then the earlier one."""
    a_sweep(tmp_path, *([f"seed={n}"] for n in range(4)))
    for number, (level, speed) in enumerate([(2.0, 1e4), (2 + 1e-8, 3e4), (2.0, 3e4), (2.01, 9e4)]):
        log(tmp_path / str(number), steps(20, level, speed))
        done(tmp_path / str(number), value=level)
    assert best_job(rows(tmp_path), "loss").number == 1


AWKWARD = [
    "data.path='/data/a b, c.txt'",
    'model.note="say \\"hi\\" | x=y"',
    "data.text_key=größe_*_`x`",
    "split.points=[layers.1,layers.2]",
    "+extra.key=<b>$\\frac$ 字</b>",
    "~logger",
]


def test_any_override_is_written_so_that_it_can_be_read_again(tmp_path):
    """Commas, quotes, pipes, dollars, unicode and lines, in a command."""
    a_sweep(tmp_path, ["pp=1"], ["pp=1", *AWKWARD])
    log(tmp_path / "0", steps(3))
    done(tmp_path / "0")
    log(tmp_path / "1", steps(3, 1.0))
    done(tmp_path / "1", "failed", 'a, "b" | c\nsecond line')
    assert '  1 failed: a, "b" | c' in lines(tmp_path)
    done(tmp_path / "1", value=1.0)
    (line,) = (line for line in lines(tmp_path, start=["python", "x"]) if line.startswith("  py"))
    assert shlex.split(line) == ["python", "x", "pp=1", *AWKWARD]


def test_the_table_has_what_differs_and_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    a_sweep(tmp_path, ["optimizer.lr=0.0003", "pp=1"], ["optimizer.lr=0.002", "pp=1"])
    log(tmp_path / "0", steps(10, 2 + 1 / 3))
    done(tmp_path / "0", seconds=3725.0)
    head, _, first, second = (line.split() for line in lines(tmp_path)[:4])
    names = ["job", "optimizer.lr", "status", "loss", "val_loss", "tok/s", "memory", "time"]
    assert head == names
    assert first == [
        *("0", "0.0003", "completed", "3.1928", "3.3178", "10.0k", "400", "MiB", "1:02:05")
    ]
    assert second == ["1", "0.002", "waiting", "-", "-", "-", "-", "-"]


def test_the_table_tells_every_status(tmp_path, monkeypatch):
    """One line a job, each error, the best job's command, and the command that runs the rest."""
    monkeypatch.setenv("COLUMNS", "120")
    every_status(tmp_path)
    start = ["python", "train.py", "--config-dir", "$(x)"]
    again = ["python", "train.py", "-m", "data.path=a b", "seed=1,2", "sweep.resume=true"]
    with lock_run_dir(tmp_path / "9"):
        told = lines(tmp_path, "val_loss", start, again)
    text = "\n".join(told)
    found = re.findall(r"^ +(\d+)  (?:gpipe|1f1b|interleaved1f1b) +[12] +[01] +(\w+)", text, re.M)
    assert found == [(str(number), status) for number, status in enumerate(STATUSES)]
    assert "3 failed: the loss of step 15 is nan\n" in text
    assert "best val_loss: 2.5, of job 0\n" in text
    assert "  python train.py --config-dir '$(x)' steps=40 schedule=gpipe pp=1 seed=0\n" in text
    assert "to run what is left (jobs 4 are invalid as they are):" in text
    assert text.endswith("\n  python train.py -m 'data.path=a b' seed=1,2 sweep.resume=true")
    assert max(map(len, told[:14])) <= 120


def test_a_thousand_jobs_end_in_a_few_lines_below_the_table(tmp_path):
    a_sweep(tmp_path, *([f"seed={n}"] for n in range(1000)))
    for n in range(40):
        done(tmp_path / str(n), "failed", "out of memory")
    told = lines(tmp_path)
    assert len(told) < 1000 + 30
    assert "  and 20 other errors, each in its job's result.json" in told
    left = "0, 1, 2, 3, 4, 5, 6, 7, ... 40 in all (failed), 40, 41, 42, 43, 44, 45, 46, 47, ... "
    assert f"0 of 1000 done; left: {left}960 in all (waiting)" in told
