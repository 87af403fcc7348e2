"""The table of a sweep on the terminal."""

from __future__ import annotations

import re
import shlex

from support.sweep_folders import STATUSES, done, every_status, log, steps
from titanlike.driver.sweep_status import Job, SweepSpec, write_spec
from titanlike.driver.sweep_table import read_table, terminal_lines


def test_of_jobs_that_are_equally_good_the_fastest_is_the_best(tmp_path):
    """Equal up to rounding, as layouts of one model are; then the earlier one."""
    jobs = [Job(n, str(n), [f"seed={n}"], [f"seed={n}"]) for n in range(4)]
    write_spec(tmp_path, SweepSpec("loss", "", jobs))
    for number, (level, speed) in enumerate([(2.0, 1e4), (2 + 1e-8, 3e4), (2.0, 3e4), (2.01, 9e4)]):
        log(tmp_path / str(number), steps(20, level, speed))
        done(tmp_path / str(number))
    assert read_table(tmp_path).best.job.number == 1


# --- how it is written -------------------------------------------------------------------------

AWKWARD = [
    "data.path='/data/a b, c.txt'",
    'model.note="say \\"hi\\" | x=y"',
    "data.text_key=größe_*_`x`",
    "split.points=[layers.1,layers.2]",
    "+extra.key=<b>$\\frac$ 字</b>",
    "~logger",
]


def test_any_override_is_written_so_that_it_can_be_read_again(tmp_path):
    """Commas, quotes, pipes, dollars, unicode and lines: as settings, and as a command."""
    jobs = [Job(0, "0", ["pp=1"], []), Job(1, "1", ["pp=1", *AWKWARD], AWKWARD)]
    write_spec(tmp_path, SweepSpec("loss", "", jobs))
    log(tmp_path / "0", steps(3))
    done(tmp_path / "0")
    log(tmp_path / "1", steps(3, 1.0))
    done(tmp_path / "1", "failed", 'a, "b" | c\nsecond line')
    table = read_table(tmp_path)
    settings = table.rows[1].settings
    for text in AWKWARD[:4]:
        key, _, value = text.partition("=")
        assert settings[key] == value
    assert (settings["extra.key"], settings["logger"]) == ("<b>$\\frac$ 字</b>", "deleted")
    done(tmp_path / "1")
    lines = terminal_lines(read_table(tmp_path), ["python", "train.py"], ["again"], 100)
    (line,) = (line for line in lines if line.startswith("  python"))
    assert shlex.split(line) == ["python", "train.py", "pp=1", *AWKWARD]


def test_the_terminal_shows_few_digits(tmp_path):
    """A search's 0.00031622776601683795 is 0.0003162 to the eye; keys lose their group's name."""
    lrs = ["0.00031622776601683795", "0.002"]
    jobs = [Job(i, str(i), [f"optimizer.lr={lr}"], []) for i, lr in enumerate(lrs)]
    write_spec(tmp_path, SweepSpec("loss", "", jobs))
    log(tmp_path / "0", steps(10, 2 + 1 / 3))
    done(tmp_path / "0", seconds=3725.125)
    table = read_table(tmp_path)
    head, _, first, second = terminal_lines(table, [], ["again"], 100)[:4]
    assert head.split() == ["job", "lr", "status", "loss", "val_loss", "tok/s", "memory", "time"]
    assert first.split() == [
        *("0", "0.0003162", "completed", "3.1928", "3.3178", "10.0k", "400", "MiB", "1:02:05")
    ]
    assert second.split() == ["1", "0.002", "waiting", "-", "-", "-", "-", "-"]


def test_a_thousand_jobs_end_in_a_few_lines(tmp_path):
    """Equal errors are told once, and numbers of jobs as ranges."""
    jobs = [Job(i, str(i), [f"seed={i}"], []) for i in range(1000)]
    write_spec(tmp_path, SweepSpec("loss", "", jobs))
    for i in (0, *range(100, 130)):
        done(tmp_path / str(i), "failed", "out of memory")
    lines = terminal_lines(read_table(tmp_path), [], ["again"], 100)
    assert "  0, 100-129 failed: out of memory" in lines
    assert "0 of 1000 done; left: 31 failed (0, 100-129); 969 waiting (1-99, 130-999)" in lines


def test_the_table_tells_every_status(tmp_path):
    """One line a job, each error, the best job's command, and the command that runs the rest."""
    every_status(tmp_path)
    again = ["python", "train.py", "-m", "data.path=a b", "seed=1,2"]
    table = read_table(tmp_path)
    lines = terminal_lines(table, ["python", "train.py", "--config-dir", "$(x)"], again, 120)
    text = "\n".join(lines)
    found = re.findall(r"^ +(\d+)  (?:gpipe|1f1b|interleaved1f1b) +[12] +[01] +(\w+)", text, re.M)
    assert found == [(str(number), status) for number, status in enumerate(STATUSES)]
    assert "3 failed: the loss of step 15 is nan\n" in text
    assert "best val_loss: 2.1452, of job 0\n" in text
    start = "python train.py --config-dir '$(x)'"
    assert f"  {start} steps=40 schedule=gpipe pp=1 seed=0\n" in text
    assert "to run what is left (jobs 4 are invalid as they are):" in text
    assert text.endswith("\n  python train.py -m 'data.path=a b' seed=1,2 sweep.resume=true")
    assert max(map(len, lines[:14])) <= 120
