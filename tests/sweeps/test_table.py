"""The table of a sweep: on the terminal, in sweep.csv and sweep.md; and its picture."""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from support.paths import ROOT
from support.sweep_folders import (
    COMMAND,
    STATUSES,
    age,
    config,
    done,
    every_status,
    log,
    steps,
)
from titanlike.launch.heartbeat import Beat, Heartbeat
from titanlike.metrics.events import Events
from titanlike.metrics.summary import OBJECTIVES, Summary, objective_value, summarize
from titanlike.sweeps.picture import draw
from titanlike.sweeps.plan import Job, Plan, add_jobs, read_plan, write_plan
from titanlike.sweeps.report import write_csv, write_markdown
from titanlike.sweeps.table import job_command, read_table, terminal_lines

TOOL = [sys.executable, str(ROOT / "tools" / "sweep.py")]


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """tools/sweep.py as a user runs it."""
    command = [*TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the tool ----------------------------------------------------------------------------------


def test_the_tool_tells_what_became_of_every_job_and_what_is_left(tmp_path):
    """One line a job, each error, the best job's command, and the command that runs the rest."""
    every_status(tmp_path)
    ended = tool(tmp_path, "--no-picture")
    assert (ended.returncode, ended.stderr) == (1, "")
    text = ended.stdout
    found = re.findall(r"^ +(\d+)  (?:gpipe|1f1b|interleaved1f1b) +[12] +[01] +(\w+)", text, re.M)
    assert found == [(str(number), status) for number, status in enumerate(STATUSES)]
    assert "3 failed: the loss of step 15 is nan\n" in text
    assert "4 invalid: pp=2: the model has 1 layer; write pp=1" in text
    assert "10 skipped: pp=2 cannot fit" in text
    assert "best val_loss: 2.1452, of job 0\n" in text
    assert "  python train.py steps=40 schedule=gpipe pp=1 seed=0\n" in text
    assert (
        "4 of 11 done, 1 skipped; left: 3 (failed), 4 (invalid), 5 (stopped), 6 (interrupted), "
        "7 (killed), 8 (killed), 9 (running)\n"
    ) in text
    assert f"  {COMMAND} sweep.resume=true\n" in text
    assert not (tmp_path / "sweep.png").exists()


def test_the_tool_ends_with_0_where_all_is_done_and_with_2_where_there_is_no_sweep(tmp_path):
    """A folder that is something else is told in one line."""
    log(tmp_path / "sweep" / "0", steps(10))
    done(tmp_path / "sweep" / "0", overrides=["pp=1"])
    log(tmp_path / "sweep" / "1", steps(10, 1.5))
    done(tmp_path / "sweep" / "1", overrides=["pp=2"])
    ended = tool(tmp_path / "sweep")
    assert ended.returncode == 0, ended.stderr
    assert "2 of 2 done\n" in ended.stdout and "sweep.resume" not in ended.stdout
    assert (tmp_path / "sweep" / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert "![loss curves and throughput](sweep.png)" in (tmp_path / "sweep/sweep.md").read_text()
    config(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for folder, why in ("run", "one run"), ("empty", "no job is in it"), ("gone", "is no folder"):
        ended = tool(tmp_path / folder)
        assert ended.returncode == 2 and ended.stdout == ""
        assert why in ended.stderr and ended.stderr.count("\n") == 1
    (tmp_path / "empty" / "sweep.jsonl").write_text("{torn")
    ended = tool(tmp_path / "empty")
    assert ended.returncode == 2 and "no header of a sweep" in ended.stderr


def test_the_tool_loads_neither_torch_nor_what_draws_unless_it_draws(tmp_path):
    """So that it answers at once."""
    every_status(tmp_path)
    code = (
        "import sys; from titanlike.sweeps.report import main; main(sys.argv[1:]);"
        "print({'torch', 'matplotlib', 'wandb', 'hydra'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "--no-picture"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.stdout.splitlines()[-1] == "set()", ended.stderr


def test_a_folder_that_cannot_be_written_still_shows_its_table(tmp_path, monkeypatch):
    """A full disk must not hide what a sweep came to."""
    from titanlike.sweeps.report import report

    every_status(tmp_path)
    for name in ("sweep.csv", "sweep.md", "sweep.png"):
        (tmp_path / name).mkdir()  # stands in the way
    lines: list[str] = []
    report(tmp_path, lines.append)
    assert sum("could not be written" in line for line in lines) == 3
    assert any(line.startswith("4 of 11 done") for line in lines)


# --- statuses ----------------------------------------------------------------------------------


def test_a_job_is_running_as_long_as_its_heart_beats(tmp_path):
    """Also where it logs nothing for long; a job without beats was killed."""
    run_dir = tmp_path / "0"
    config(run_dir)
    log(run_dir, steps(5))
    write_plan(tmp_path, Plan(COMMAND, "loss", "", [Job(0, "0", [], [])]))

    def look() -> Beat:
        return Beat(0, 0, 0.0, "host", 1, 5, "step", "", 0.0, 0.0)

    def status(**options: object) -> str:
        return read_table(tmp_path, **options).rows[0].status

    assert status() == "running"  # it has only just begun
    age(run_dir, 1000)
    assert status() == "killed"
    Heartbeat(run_dir, 0, 0.01, look).end("done")
    assert status() == "running"
    assert status(ended={0}) == "killed"  # its processes are known to have ended
    beat = run_dir / "logs" / "rank0.heartbeat"
    os.utime(beat, (beat.stat().st_mtime - 40,) * 2)  # more than three heartbeats of 10 s
    assert status() == "killed"
    done(run_dir)
    assert status() == "completed"


def test_a_job_that_was_not_started_waits_and_one_with_a_result_has_ended(
    tmp_path,
):
    """A tool's jobs keep their files in a folder of their own."""
    jobs = [Job(i, str(i), [f"seed={i}"], [f"seed={i}"]) for i in range(3)]
    write_plan(tmp_path, Plan(COMMAND, "tokens_per_second", "bench", jobs))
    done(tmp_path / "0" / "bench", value=512.0)
    (tmp_path / "1").mkdir()
    done(tmp_path / "1", value=9e9)  # of a training run in the same place: not the tool's
    table = read_table(tmp_path)
    assert [row.status for row in table.rows] == ["completed", "waiting", "waiting"]
    assert [row.value for row in table.rows] == [512.0, None, None]
    assert table.best is None, "whether more of it is better only the tool knows"


def test_jobs_are_found_that_no_plan_names(tmp_path):
    """An older sweep's, and those of a search; their overrides are in what they left."""
    for number, lr in enumerate(("0.1", "0.01", "0.001")):
        config(tmp_path / str(number), f"optimizer:\n  name: adamw\n  lr: {lr}\nsteps: 5")
    for number, lr in enumerate(("0.1", "0.01")):
        done(tmp_path / str(number), overrides=["steps=5", f"optimizer.lr={lr}"])
    (tmp_path / "notes").mkdir()
    table = read_table(tmp_path)
    assert [row.settings for row in table.rows] == [
        {"optimizer.lr": "0.1"},
        {"optimizer.lr": "0.01"},
        {"optimizer.lr": "0.001"},  # is running: of its config.yaml
    ]
    for number in range(2):
        (tmp_path / str(number) / "result.json").unlink()
    configs_alone = [row.settings for row in read_table(tmp_path).rows]
    assert configs_alone == [row.settings for row in table.rows]
    write_plan(tmp_path, Plan(COMMAND, "loss", "", [Job(0, "0", ["optimizer.lr=0.1"], [])]))
    assert [row.job.folder for row in read_table(tmp_path).rows] == ["0", "1", "2"]
    add_jobs(tmp_path, [Job(3, ".", ["optimizer.lr=1"], [])])  # in the sweep's own directory
    assert [row.job.folder for row in read_table(tmp_path).rows] == ["0", "1", "2", "."]


def test_a_result_that_is_torn_is_no_result(tmp_path):
    """As a copy that broke off leaves it: the table still comes."""
    config(tmp_path / "0")
    (tmp_path / "0" / "result.json").write_text('{"status": "comp')
    age(tmp_path / "0", 1000)
    assert [row.status for row in read_table(tmp_path).rows] == ["killed"]


# --- numbers -----------------------------------------------------------------------------------


def test_speed_is_that_of_a_run_in_full_swing(tmp_path):
    """The median of the second half since the last start: compiling and a hiccup do not count."""
    records = steps(20, speed=1000.0)
    records[14]["tokens_per_second"] = 3.0
    path = log(tmp_path, records)
    with path.open("a") as file:
        file.write('{"step": 21, "loss": 9.0, "tokens_per_s')  # it writes this very moment
    first = summarize(tmp_path)
    assert (first.steps, first.tokens_per_second, first.memory_bytes) == (20, 1000.0, 400 << 20)
    assert first.step_seconds == 2.048 and first.mfu is None
    assert first.loss == records[-1]["loss"] and first.val_loss == records[-1]["val_loss"]
    Events(tmp_path, lambda line: None).log("resume", 10)
    faster = [record | {"tokens_per_second": 5000.0} for record in steps(12)[10:]]
    log(tmp_path, faster, start=10)
    assert summarize(tmp_path).tokens_per_second == 5000.0  # step 12, on the new machine
    log(tmp_path, steps(6, speed=7000.0))  # and once more from the beginning
    assert (summarize(tmp_path).steps, summarize(tmp_path).tokens_per_second) == (6, 7000.0)


def test_the_last_numbers_of_a_long_run_are_found_at_its_end(tmp_path):
    """Also a validation that lies far back. 20,000 steps are not read as a whole."""
    records = steps(20_000, val_every=0)
    records[4_000]["val_loss"] = 1.25
    records[150]["val_loss"] = 7.0
    path = log(tmp_path, records)
    found = summarize(tmp_path)
    assert (found.steps, found.val_loss) == (20_000, 1.25)
    assert objective_value("val_loss", found) == 1.25
    path.write_bytes(path.read_bytes().replace(b'"val_loss"', b'"other"'))
    assert objective_value("val_loss", summarize(tmp_path)) == records[-1]["loss"]


@pytest.mark.parametrize("text", [b"", b"\n", b'{"step": 1, "lo', b"\xff\xfe\n[1]\n{}\n"])
def test_a_run_without_a_whole_line_has_no_numbers(tmp_path, text):
    """It is a row like others."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "metrics.jsonl").write_bytes(text)
    assert summarize(tmp_path / "0") == summarize(tmp_path / "none") == Summary()
    assert len(read_table(tmp_path).rows) == 1
    assert draw(read_table(tmp_path)) is None


@pytest.mark.parametrize("value", OBJECTIVES)
def test_the_best_job_is_the_one_that_the_objective_says(tmp_path, value):
    """The most tokens a second, or the least of a loss. A loss that is nan, or of a job that did
    not complete, is never the best."""
    jobs = [Job(i, str(i), [f"seed={i}"], []) for i in range(4)]
    write_plan(tmp_path, Plan(COMMAND, value, "", jobs))
    for number, size in enumerate((2.0, 3.0, math.nan, 1.0 if not OBJECTIVES[value] else 9.0)):
        names = [name for name in OBJECTIVES if name != "memory_bytes" or math.isfinite(size)]
        log(tmp_path / str(number), [{"step": 1, **{name: size for name in names}}])
        done(tmp_path / str(number), "completed" if number < 3 else "failed", "no" * (number == 3))
    table = read_table(tmp_path)
    assert table.best.job.number == (1 if OBJECTIVES[value] else 0)


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
    """Commas, quotes, pipes, dollars, unicode and lines: in CSV, in Markdown, as a command."""
    jobs = [Job(0, "0", ["pp=1"], []), Job(1, "1", ["pp=1", *AWKWARD], AWKWARD)]
    write_plan(tmp_path, Plan("python train.py -m pp=1", "loss", "", jobs))
    log(tmp_path / "0", steps(3))
    done(tmp_path / "0")
    log(tmp_path / "1", steps(3, 1.0))
    done(tmp_path / "1", "failed", 'a, "b" | c\nsecond line')
    table = read_table(tmp_path)
    write_csv(table)
    row = csv_rows(tmp_path)[1]
    for text in AWKWARD[:4]:
        key, _, value = text.partition("=")
        assert row[key] == value
    assert (row["extra.key"], row["logger"]) == ("<b>$\\frac$ 字</b>", "deleted")
    assert row["error"] == 'a, "b" | c\nsecond line'
    assert shlex.split(row["overrides"]) == ["pp=1", *AWKWARD]
    lines = write_markdown(table, picture=False).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows}) == 1
    assert "größe\\_\\*\\_\\`x\\`" in rows[3] and "\\<b>" in rows[3] and "字" in rows[3]
    assert shlex.split(job_command(table.plan, table.rows[1])) == [
        *("python", "train.py", "pp=1"),
        *AWKWARD,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(table) == tmp_path / "sweep.png"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160, 300])
def test_the_terminals_table_fits_and_keeps_what_matters(tmp_path, width):
    """Job, status and objective are there however narrow it is; memory from 80 columns on."""
    every_status(tmp_path)
    for lines in _tables(tmp_path, width), _tables(_many_settings(tmp_path / "many"), width):
        most = min(width, 160)
        assert max(map(len, lines)) <= most
        assert lines[0].split()[0] == "job"
        if width >= 60:
            assert {"status", "val_loss", "tok/s"} <= set(lines[0].split())
            assert sum(" completed " in line for line in lines) in (4, 12)  # is not cut
        if width >= 80:
            assert all(not line.rstrip().endswith("…") for line in lines[2:14])
    if width >= 80:
        assert "memory" in _tables(tmp_path, width)[0]


def _tables(folder: Path, width: int) -> list[str]:
    """The lines of the table proper, and of the errors."""
    lines = terminal_lines(read_table(folder), width)
    return lines[: next(i for i, line in enumerate(lines) if line.startswith("best"))]


def _many_settings(folder: Path) -> Path:
    """A sweep of nine keys, of long values."""
    jobs = [
        Job(i, str(i), [f"group{k}.key{k}=/a/long/path/{k}/{i}/file.txt" for k in range(9)], [])
        for i in range(12)
    ]
    write_plan(folder, Plan(COMMAND, "val_loss", "", jobs))
    for i in range(12):
        log(folder / str(i), steps(10, 1 + i / 10))
        done(folder / str(i))
    return folder


def test_the_csv_has_every_digit_and_the_terminal_few(tmp_path):
    """A search's 0.00031622776601683795 is 0.0003162 to the eye; keys lose their group's name."""
    lrs = ["0.00031622776601683795", "0.002"]
    jobs = [Job(i, str(i), [f"optimizer.lr={lr}"], []) for i, lr in enumerate(lrs)]
    write_plan(tmp_path, Plan(COMMAND, "loss", "", jobs))
    records = steps(10, 2 + 1 / 3)
    log(tmp_path / "0", records)
    done(tmp_path / "0", seconds=3725.125)
    table = read_table(tmp_path)
    write_csv(table)
    row = csv_rows(tmp_path)[0]
    assert row["optimizer.lr"] == lrs[0]
    assert float(row["final_loss"]) == records[-1]["loss"]
    assert float(row["seconds"]) == 3725.125 and row["last_step"] == "10"
    head, _, first, second = terminal_lines(table, 100)[:4]
    assert head.split() == ["job", "lr", "status", "loss", "val_loss", "tok/s", "memory", "time"]
    assert first.split() == [
        *("0", "0.0003162", "completed", "3.1928", "3.3178", "10.0k", "400", "MiB", "1:02:05")
    ]
    assert second.split() == ["1", "0.002", "waiting", "-", "-", "-", "-", "-"]


def test_a_thousand_jobs_end_in_a_few_lines(tmp_path):
    """Equal errors are told once, and numbers of jobs as ranges."""
    jobs = [Job(i, str(i), [f"seed={i}"], []) for i in range(1000)]
    write_plan(tmp_path, Plan(COMMAND, "loss", "", jobs))
    for i in (0, *range(100, 130)):
        done(tmp_path / str(i), "failed", "out of memory")
    lines = terminal_lines(read_table(tmp_path), 100)
    assert "  0, 100-129 failed: out of memory" in lines
    assert "0 of 1000 done; left: 31 failed (0, 100-129); 969 waiting (1-99, 130-999)" in lines


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        ("python train.py -m pp=1,2", "python train.py pp=2"),
        ("/bin/titanlike --config-dir 'my c' -m pp=1,2", "/bin/titanlike --config-dir 'my c' pp=2"),
        ("OMP_NUM_THREADS=1 python train.py pp=1,2 --multirun -cn my", None),
        ("torchrun --nproc-per-node 2 train.py -m pp=1,2", None),
        ("titanlike verify -m pp=1,2", "titanlike verify pp=2"),
        ("python -m titanlike -m pp=1,2", "python -m titanlike pp=2"),
        ("", "titanlike train pp=2"),
    ],
)
def test_the_best_jobs_command_is_the_sweeps_with_its_own_overrides(command, alone, monkeypatch):
    """The same program, started in the same way, with the same config."""
    alone = alone or {
        "O": "OMP_NUM_THREADS=1 python train.py -cn my pp=2",
        "t": "torchrun --nproc-per-node 2 train.py pp=2",
    }.get(command[:1])
    from titanlike.sweeps.job_status import JobRow

    monkeypatch.setenv("TITANLIKE_PROGRAM", "titanlike sweep")
    row = JobRow(Job(1, "1", ["pp=2"], []), Path(), "completed", None, 1.0, Summary(), 1.0, {})
    assert job_command(Plan(command, "loss"), row) == alone


# --- the plan ----------------------------------------------------------------------------------


def test_the_tasks_of_an_array_add_jobs_at_once_and_none_is_lost_or_twice(tmp_path):
    """Nor does a line that a killed task has torn take another with it."""
    write_plan(tmp_path, Plan("python train.py -m", "loss", "", [Job(0, "0", ["pp=1"], ["pp=1"])]))
    with (tmp_path / "sweep.jsonl").open("a") as file:
        file.write('{"number": 7, "fol')
    add_jobs(tmp_path, [Job(41, "41", ["a=" + "y" * 5000], [])])
    code = (
        "import sys; from pathlib import Path; from titanlike.sweeps.plan import *\n"
        "for i in range(1, 41):\n"
        "    add_jobs(Path(sys.argv[1]), [Job(i, str(i), ['a=' + 'x' * 5000], [])])"
    )
    tasks = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(3)
    ]
    assert [task.wait(60) for task in tasks] == [0, 0, 0]
    plan = read_plan(tmp_path)
    assert [job.number for job in plan.jobs] == list(range(42))
    assert plan.jobs[0] == Job(0, "0", ["pp=1"], ["pp=1"], None)
    assert {len(job.overrides[0]) for job in plan.jobs[1:]} == {5002}


def test_a_plan_comes_back_as_it_was_but_for_its_credentials(tmp_path):
    """They are in no file of a sweep."""
    assert read_plan(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        add_jobs(tmp_path, [])
    secret = "hf_" + "a1B2" * 8
    jobs = [Job(0, "0", [f"model.hf_token={secret}", "pp=1"], ["pp=1"], f"no {secret}")]
    plan = Plan(f"python train.py -m pp=1 model.hf_token={secret}", "mfu", "verify", jobs)
    write_plan(tmp_path, plan)
    add_jobs(tmp_path, [Job(1, "1", [f"model.hf_token={secret}"], [])])
    assert secret not in (tmp_path / "sweep.jsonl").read_text()
    back = read_plan(tmp_path)
    assert (back.value, back.inner) == ("mfu", "verify")
    assert back.command == "python train.py -m pp=1 model.hf_token=***"
    assert back.jobs[0] == Job(0, "0", ["model.hf_token=***", "pp=1"], ["pp=1"], "no ***")


# --- the picture -------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2, 12, 70])
def test_the_picture_shows_every_jobs_curve(tmp_path, jobs):
    """Few have a colour each; of many, grey is left to those that did not complete. It says
    nothing on standard error, and changes nothing of the program's own pictures."""
    import matplotlib

    from titanlike.sweeps.picture import COLOURS, GREY

    plan = [Job(i, str(i), [f"optimizer.lr={0.001 * i + 0.001}"], []) for i in range(jobs)]
    write_plan(tmp_path, Plan(COMMAND, "loss", "", plan))
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


def test_curves_that_coincide_are_all_seen(tmp_path):
    """Layouts of one model have the same losses to the last bit: none hides the others."""
    from titanlike.sweeps.picture import COLOURS

    jobs = [Job(i, str(i), [f"pp={2**i}"], []) for i in range(4)]
    write_plan(tmp_path, Plan(COMMAND, "loss", "", jobs))
    for i in range(4):
        log(tmp_path / str(i), steps(40, val_every=0))
        done(tmp_path / str(i))
    image = imread(draw(read_table(tmp_path)))[:, :, :3]
    curves = image[image.shape[0] // 3 :, : int(image.shape[1] * 0.4)]  # not the legend
    for colour in COLOURS[:4]:
        assert (abs(curves - to_rgb(colour)) < 0.1).all(axis=2).sum() > 100, colour


def test_a_picture_that_is_made_again_replaces_the_old_one(tmp_path):
    """While a sweep runs, it is looked at again and again."""
    every_status(tmp_path)
    draw(read_table(tmp_path))
    before = (tmp_path / "sweep.png").read_bytes()
    shutil.rmtree(tmp_path / "0")
    draw(read_table(tmp_path))
    assert (tmp_path / "sweep.png").read_bytes() != before
