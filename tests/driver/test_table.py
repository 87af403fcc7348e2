"""The table of a sweep on the terminal, and its page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from support.paths import ROOT
from support.sweep_folders import COMMAND, STATUSES, config, done, every_status, log, steps
from titanlike.driver.sweep_status import Job, JobRow, SweepSpec, write_spec
from titanlike.driver.sweep_table import (
    job_command,
    main,
    read_table,
    report,
    terminal_lines,
)
from titanlike.metrics.report import MOST_RUNS
from titanlike.metrics.summary import Summary


def two_by_two(folder: Path, invalid: set[int]) -> list[str]:
    """Jobs of schedule x pp, some invalid, one failed; the table's last lines."""
    jobs = []
    for number in range(4):
        swept = [f"schedule={('gpipe', 'dualpipev')[number // 2]}", f"pp={1 + number % 2}"]
        jobs.append(Job(number, str(number), swept, swept))
        (folder / str(number)).mkdir(parents=True)
        done(folder / str(number), "invalid" if number in invalid else "failed", "it is wrong")
    done(folder / "0")
    write_spec(
        folder, SweepSpec("python train.py -m schedule=gpipe,dualpipev pp=1,2", "loss", "", jobs)
    )
    return terminal_lines(read_table(folder), 120)[-2:]


def test_the_resume_command_excludes_invalid_values(tmp_path):
    """Where every job with a value is invalid; else the invalid jobs are named."""
    assert two_by_two(tmp_path / "value", {2, 3}) == [
        "to run what is left, without schedule=dualpipev:",
        "  python train.py -m schedule=gpipe pp=1,2 sweep.resume=true",
    ]
    again = "  python train.py -m schedule=gpipe,dualpipev pp=1,2 sweep.resume=true"
    assert two_by_two(tmp_path / "pair", {3}) == [
        "to run what is left (jobs 3 are invalid as they are):",
        again,
    ]
    assert two_by_two(tmp_path / "all", {1, 2, 3}) == [
        "to run what is left, with other values for what is invalid (1-3):",
        again,
    ]


def test_of_jobs_that_are_equally_good_the_fastest_is_the_best(tmp_path):
    """Equal up to rounding, as layouts of one model are; then the earlier one."""
    jobs = [Job(n, str(n), [f"seed={n}"], [f"seed={n}"]) for n in range(4)]
    write_spec(tmp_path, SweepSpec("python train.py -m seed=0,1,2,3", "loss", "", jobs))
    for number, (level, speed) in enumerate([(2.0, 1e4), (2 + 1e-8, 3e4), (2.0, 3e4), (2.01, 9e4)]):
        log(tmp_path / str(number), steps(20, level, speed))
        done(tmp_path / str(number))
    assert read_table(tmp_path).best.job.number == 1


# --- the tool ----------------------------------------------------------------------------------


def test_the_tool_shows_the_status_of_every_job(tmp_path):
    """One line a job, each error, the best job's command, and the command that runs the rest."""
    every_status(tmp_path)
    code = (  # as tools/sweep.py, and answers at once: without torch
        "import sys; from titanlike.driver.sweep_table import main; code = main(sys.argv[1:]);"
        "print({'torch', 'matplotlib', 'wandb', 'hydra'} & set(sys.modules)); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (1, "")
    text = ended.stdout
    assert text.endswith("\nset()\n")
    found = re.findall(r"^ +(\d+)  (?:gpipe|1f1b|interleaved1f1b) +[12] +[01] +(\w+)", text, re.M)
    assert found == [(str(number), status) for number, status in enumerate(STATUSES)]
    assert "3 failed: the loss of step 15 is nan\n" in text
    assert "4 invalid: pp=2: the model has 1 layer; write pp=1" in text
    assert "best val_loss: 2.1452, of job 0\n" in text
    assert "  python train.py steps=40 schedule=gpipe pp=1 seed=0\n" in text
    assert (
        "4 of 12 done; left: 3 (failed), 4 (invalid), 5 (stopped), 6 (interrupted), "
        "7 (killed), 8 (killed), 9 (running), 10 (waiting)\n"
    ) in text
    assert f"  {COMMAND} sweep.resume=true\n" in text


def test_the_tool_ends_with_0_where_all_is_done_and_with_2_where_there_is_no_sweep(
    tmp_path, capsys
):
    """A folder that is something else is told in one line."""
    jobs = [Job(i, str(i), [f"pp={i + 1}"], [f"pp={i + 1}"]) for i in range(2)]
    write_spec(tmp_path / "sweep", SweepSpec("python train.py -m pp=1,2", "loss", "", jobs))
    log(tmp_path / "sweep" / "0", steps(10))
    done(tmp_path / "sweep" / "0", overrides=["pp=1"])
    log(tmp_path / "sweep" / "1", steps(10, 1.5))
    done(tmp_path / "sweep" / "1", overrides=["pp=2"])
    assert main([str(tmp_path / "sweep")]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 done\n" in out and "sweep.resume" not in out
    runs = runs_of_page(tmp_path / "sweep")
    assert [run["name"] for run in runs] == ["0: pp=1", "1: pp=2"]
    assert all(len(run["curves"]["loss"]) == 10 for run in runs)
    config(tmp_path / "run")
    for folder in ("empty", "torn"):
        (tmp_path / folder).mkdir()
    (tmp_path / "torn" / "sweep.jsonl").write_text("{torn")
    for folder, why in {
        "run": "one run",
        "empty": "no sweep.jsonl is in it",
        "gone": "is no folder",
        "torn": "no header of a sweep",
    }.items():
        assert main([str(tmp_path / folder)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and why in err and err.count("\n") == 1


def runs_of_page(sweep: Path) -> list[dict]:
    text = (sweep / "sweep.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    return json.loads(found[1])["runs"]


def test_of_many_jobs_the_page_shows_the_best(tmp_path):
    """And of equal ones those that are completed."""
    count = MOST_RUNS + 10
    jobs = [Job(n, str(n), [f"seed={n}"], [f"seed={n}"]) for n in range(count)]
    write_spec(tmp_path, SweepSpec("python train.py -m seed=range(50)", "loss", "", jobs))
    for number in range(count):
        log(tmp_path / str(number), steps(4, 9.0 - 0.1 * number))
        done(tmp_path / str(number), *(("failed", "diverged") if number == count - 1 else ()))
    report(tmp_path, lambda _: None)
    shown = {int(run["name"].partition(":")[0]) for run in runs_of_page(tmp_path)}
    assert shown == {*range(9, count - 1)}


def test_a_folder_that_cannot_be_written_still_shows_its_table(tmp_path, monkeypatch):
    """A full disk must not hide what a sweep came to."""
    every_status(tmp_path)
    (tmp_path / "sweep.html").mkdir()  # stands in the way
    lines: list[str] = []
    report(tmp_path, lines.append)
    assert sum("could not be written" in line for line in lines) == 1
    assert any(line.startswith("4 of 12 done") for line in lines)


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
    write_spec(tmp_path, SweepSpec("python train.py -m pp=1", "loss", "", jobs))
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
    assert shlex.split(job_command(table.spec, table.rows[1])) == [
        *("python", "train.py", "pp=1"),
        *AWKWARD,
    ]


def test_the_terminals_table_fits_and_keeps_what_matters(tmp_path):
    """Job, status and objective are there however narrow it is; memory from 80 columns on."""
    every_status(tmp_path)
    _many_settings(tmp_path / "many")
    for width in (40, 60, 80, 160, 300):
        for lines in _tables(tmp_path, width), _tables(tmp_path / "many", width):
            assert max(map(len, lines)) <= min(width, 160)
            assert lines[0].split()[0] == "job"
            if width >= 60:
                assert {"status", "val_loss", "tok/s"} <= set(lines[0].split())
                assert sum(" completed " in line for line in lines) in (4, 12)  # is not cut
            if width >= 80:
                assert all(not line.rstrip().endswith("…") for line in lines[2:14])
        assert width < 80 or "memory" in _tables(tmp_path, width)[0]


def _tables(folder: Path, width: int) -> list[str]:
    """The lines of the table proper, and of the errors."""
    lines = terminal_lines(read_table(folder), width)
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("best"))]


def _many_settings(folder: Path) -> None:
    """A sweep of nine keys, of long values."""
    jobs = [
        Job(i, str(i), [f"group{k}.key{k}=/a/long/path/{k}/{i}/file.txt" for k in range(9)], [])
        for i in range(12)
    ]
    write_spec(folder, SweepSpec(COMMAND, "val_loss", "", jobs))
    for i in range(12):
        log(folder / str(i), steps(10, 1 + i / 10))
        done(folder / str(i))


def test_the_terminal_shows_few_digits(tmp_path):
    """A search's 0.00031622776601683795 is 0.0003162 to the eye; keys lose their group's name."""
    lrs = ["0.00031622776601683795", "0.002"]
    jobs = [Job(i, str(i), [f"optimizer.lr={lr}"], []) for i, lr in enumerate(lrs)]
    write_spec(tmp_path, SweepSpec(COMMAND, "loss", "", jobs))
    log(tmp_path / "0", steps(10, 2 + 1 / 3))
    done(tmp_path / "0", seconds=3725.125)
    table = read_table(tmp_path)
    head, _, first, second = terminal_lines(table, 100)[:4]
    assert head.split() == ["job", "lr", "status", "loss", "val_loss", "tok/s", "memory", "time"]
    assert first.split() == [
        *("0", "0.0003162", "completed", "3.1928", "3.3178", "10.0k", "400", "MiB", "1:02:05")
    ]
    assert second.split() == ["1", "0.002", "waiting", "-", "-", "-", "-", "-"]


def test_a_thousand_jobs_end_in_a_few_lines(tmp_path):
    """Equal errors are told once, and numbers of jobs as ranges."""
    jobs = [Job(i, str(i), [f"seed={i}"], []) for i in range(1000)]
    write_spec(tmp_path, SweepSpec(COMMAND, "loss", "", jobs))
    for i in (0, *range(100, 130)):
        done(tmp_path / str(i), "failed", "out of memory")
    lines = terminal_lines(read_table(tmp_path), 100)
    assert "  0, 100-129 failed: out of memory" in lines
    assert "0 of 1000 done; left: 31 failed (0, 100-129); 969 waiting (1-99, 130-999)" in lines


def test_the_best_jobs_command_is_the_sweeps_with_its_own_overrides(monkeypatch):
    """The same program, started in the same way, with the same config."""
    monkeypatch.setenv("TITANLIKE_PROGRAM", "titanlike sweep")
    row = JobRow(Job(1, "1", ["pp=2"], []), Path(), "completed", None, 1.0, Summary(), 1.0, {})
    for command, alone in {
        "python train.py -m pp=1,2": "python train.py pp=2",
        "/bin/titanlike --config-dir 'my c' -m pp=1,2": "/bin/titanlike --config-dir 'my c' pp=2",
        "N=1 python train.py pp=1,2 --multirun -cn my": "N=1 python train.py -cn my pp=2",
        "torchrun -n 2 train.py -m pp=1,2": "torchrun -n 2 train.py pp=2",
        "titanlike verify -m pp=1,2": "titanlike verify pp=2",
        "python -m titanlike -m pp=1,2": "python -m titanlike pp=2",
        "": "titanlike train pp=2",
    }.items():
        assert job_command(SweepSpec(command, "loss"), row) == alone
    row = replace(row, job=Job(1, "1", ["model=own", "lr=wsd", "pp=2"], ["lr=wsd"]))
    spec = SweepSpec("python train.py -m pp=2", "loss", implied=["model=own", "lr=wsd"])
    assert job_command(spec, row) == "python train.py lr=wsd pp=2", "what nobody typed is left out"
