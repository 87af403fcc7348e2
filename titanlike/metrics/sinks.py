"""Where metrics are written. A record is a dict of one step, its floats in full precision:

step loss grad_norm lr tokens time tokens_per_second step_seconds memory_bytes, and where known
memory_reserved_bytes, mfu, val_loss; data_seconds; busy_seconds (mean of the ranks), busiest_rank busiest_seconds
of several ranks; busiest_expert idlest_expert dropped of models with experts. `time`: seconds since
the epoch, after the step. `tokens` counts from the start of the run, batch_size x seq_len a step,
padding included; of data without tokens it is samples, samples_per_second. microbatch_losses is a list, where it is asked for; TensorBoard, W&B and the
report have name/index, or name/key of a dict.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlike.config import files
from titanlike.config.errors import ConfigError, Problem
from titanlike.metrics.run_files import AppendedFile
from titanlike.metrics.summary import flat_record, is_number, parse_records


class Sink:
    """Takes every record of a run; a method does nothing where there is no place for what it
    takes."""

    location = ""  # where the records can be seen, for the user

    def log(self, record: dict[str, Any]) -> None:
        """Take the record of one step; steps rise."""

    def note(self, name: str, text: str) -> None:
        """Take a text on the whole run."""

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Take a table of a step."""

    def flush(self) -> None:
        """Make the records durable, where a resumed run continues the file."""

    def rewind(self, step: int) -> None:
        """The run rolls back: the records after `step` will be logged again."""

    def close(self, status: str) -> None:
        """End with the run's status: completed, failed or interrupted."""


class JsonlSink(Sink):
    """metrics.jsonl: a JSON object a line, each in the file before the next step begins.

    start_step: the step that the run resumes from. Records of later steps, which will be repeated,
    and a last line truncated by a crash are dropped from an existing file first.
    Raises OSError, which names the file, where it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        start_step: int = 0,
        redone: Callable[[int, float], object] = lambda *_: None,
    ) -> None:
        """redone: called with the number of dropped records, and the seconds of their steps."""
        self.location = str(path)
        self._path, self._redone = path, redone
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open_after(start_step)

    def log(self, record: dict[str, Any]) -> None:
        self._file.write(files.dumps(record))

    def flush(self) -> None:
        self._file.sync()

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open_after(step)

    def close(self, status: str) -> None:
        self._file.close()

    def _open_after(self, step: int) -> None:
        for unfinished in self._path.parent.glob(f".{self._path.name}.*"):
            unfinished.unlink(missing_ok=True)  # of a process that was killed while rewriting it
        records = []
        if self._path.exists():
            every = read_jsonl(self._path)
            records = [record for record in every if record["step"] <= step]
            if later := [record for record in every if record["step"] > step]:
                seconds = (r["step_seconds"] for r in later if is_number(r, "step_seconds"))
                self._redone(len(later), sum(seconds))
            files.atomic_write_text(self._path, "".join(files.dumps(r) + "\n" for r in records))
        self.lost = lost_steps(records, step)
        self._file = AppendedFile(self._path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; truncated lines are skipped."""
    with files.open_regular(path) as file:
        return list(parse_records(file.read().splitlines()))


def lost_steps(records: list[dict[str, Any]], step: int) -> str:
    """Steps up to `step`, which a run resumes from, that its records lack: "4 to 6", "" = none. A
    run that began at the checkpoint of another one has no earlier records."""
    kept = {record["step"] for record in records}
    missing = [n for n in range(min(kept, default=1), step + 1) if n not in kept]
    if len(missing) < 2:
        return "".join(map(str, missing))
    return f"{missing[0]} to {missing[-1]}"


def tensorboard_problem() -> Problem | None:
    """Why `logger=tensorboard` cannot work here, or None. Imports nothing."""
    if importlib.util.find_spec("tensorboard") is not None:
        return None
    fix = "logger=none, or install it first: pip install 'titanlike[tensorboard]'"
    return Problem("logger", "tensorboard", "the package tensorboard is missing", fix)


class TensorBoardSink(Sink):
    """Event files in run_dir/tensorboard: a scalar for every number of a record, over steps.

    Points of an earlier attempt beyond `start_step` are hidden by TensorBoard.
    Raises ConfigError where the package is missing.
    """

    def __init__(self, run_dir: Path, start_step: int) -> None:
        if problem := tensorboard_problem():
            raise ConfigError([problem])
        from torch.utils.tensorboard import SummaryWriter  # late: torch, for this sink alone

        folder = Path(run_dir) / "tensorboard"
        self.location = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        for name, value in with_prefixes(record).items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, global_step=record["step"])

    def note(self, name: str, text: str) -> None:
        self._writer.add_text(name, text)

    def table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        texts = ("".join(text for text in row.values() if isinstance(text, str)) for row in rows)
        cells = ("\n".join(f"    {line}" for line in text.splitlines()) for text in texts)
        self._writer.add_text(name, "\n\n".join(cells), global_step=step)

    def close(self, status: str) -> None:
        self._writer.close()


def with_prefixes(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the names that W&B and TensorBoard group by: train/loss, val/loss."""
    return {
        f"val/{name[4:]}" if name.startswith("val_") else f"train/{name}": value
        for name, value in flat_record(record).items()
        if name not in ("step", "time")  # which both have themselves
    }
