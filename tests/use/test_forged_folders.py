"""1,000 run directories that somebody forged: whatever is written into whichever file, no command
runs anything, connects, reads or writes outside, takes 10 s or 1 GiB, prints a traceback, or sends
the terminal anything but text."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import forged
from support.cells import GRID, slow
from support.forged import Forge, fall_of, watched_ends
from support.saved_runs import reseal
from titanlike.core.checkpoint.storage import STATE

trained_run, outside, forge = forged.trained_run, forged.outside, forged.forge

EACH = 125  # forgeries of a seed
COMMANDS: dict[str, list[list[str]]] = {  # by the beginning of the file's path
    "checkpoints": [
        ["checkpoint", "list", "RUN"],
        ["checkpoint", "show", "RUN"],
        ["checkpoint", "verify", "RUN"],
        ["checkpoint", "digest", "RUN", "RUN"],
        ["checkpoint", "consolidate", "RUN", "RUN/../one.safetensors"],
        ["generate", "RUN", "--prompt", "def", "--tokens", "1"],
        ["export", "RUN", "RUN-out"],
    ],
    "": [
        ["report", "RUN"],
        ["timeline", "RUN"],
        ["evaluate", "RUN", "evaluate.batches=1"],
        ["checkpoint", "list", "RUN"],
    ],
}
ESCAPES = "a\x1b]0;theirs\x07\x1b[2J\u202e\x9b31m\nb"
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 7, 10**7, 10**9, 2**63, 10**18, -(10**400), 0.5, 1e308),
    *(float("nan"), float("-inf"), "", "x", "9" * 5_000, "x" * 5_000, ESCAPES, "\0", "\ud800"),
    *("../../outside/t.bin", "OUT/t.bin", "OUT", "/dev/zero", "/etc/passwd", "~root", "URL"),
    *("theirs.Model", "torch.load", "os.system", "$(touch OUT/ran)", "${oc.env:HOME}", "O", "V8"),
    *([], {}, [[]], [1] * 9, {"a": {"b": None}}, {ESCAPES: 1}, {"": ""}),
]


def node(plain: Any, draw: random.Random) -> tuple[Any, Any]:
    """A place within: (its holder, its key)."""
    holder, key = [plain], 0
    while isinstance(inner := holder[key], dict | list) and inner and draw.random() < 0.85:
        holder, key = inner, draw.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
    return holder, key


def changed(plain: Any, draw: random.Random) -> Any:
    """A copy with a change at some place."""
    root = [json.loads(json.dumps(plain))]
    holder, key = node(root[0], draw) if draw.random() < 0.95 else (root, 0)
    kind = draw.choice(("value", "value", "value", "value", "gone", "named", "many", "deep", "far"))
    if kind == "value":
        holder[key] = draw.choice(VALUES)
    elif kind == "gone":
        del holder[key]
    elif kind == "named" and isinstance(holder, dict):
        holder[draw.choice((ESCAPES, "x" * 5_000, "../a", "OUT/t.bin", "_target_"))] = holder.pop(
            key
        )
    elif kind == "many":
        copies = range(draw.choice((3, 300_000)))
        many = [holder[key]] * len(copies)
        holder[key] = {str(n): one for n, one in zip(copies, many, strict=True)}
        if draw.random() < 0.5:
            holder[key] = many
    elif kind == "deep":
        for _ in range(900):
            holder[key] = [holder[key]]
    else:
        holder[key] = {"_target_": "theirs.Model", "name": "theirs.Model", "path": "OUT"}
    return root[0]


def with_json(path: Path, draw: random.Random, fill: Callable[[Any], Any]) -> None:
    """Change a file of JSON, YAML or lines of JSON, or the header of a safetensors file."""
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.dumps(fill(changed(json.loads(data[8:end]), draw))).encode()
        size = draw.choice((len(head), len(head), end - 8, 2**40, 2**63))
        path.write_bytes(size.to_bytes(8, "little") + head + data[end:])
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("\n".join(map(json.dumps, fill(changed(lines, draw) or []))) + "\n")
    elif path.suffix == ".yaml":
        plain = fill(changed(yaml.safe_load(path.read_text()), draw))
        path.write_text(yaml.safe_dump(plain))
    else:
        plain = fill(changed(json.loads(path.read_text()), draw))
        path.write_text(json.dumps(plain))
        if (path.parent / STATE).exists() and draw.random() < 0.8:
            reseal(path.parent, lambda _: None)


def with_bytes(path: Path, draw: random.Random, fill: Callable[[Any], Any]) -> None:
    """Change some bytes, the length, or what kind of file it is."""
    data = bytearray(path.read_bytes())
    kinds = ("flip", "cut", "twice", "fifo", "folder", "zero", "sparse", "deep", "link")
    # a checkpoint's file may be a link: what it leads to must have the index's checksum
    kind = draw.choice(kinds[: -1 if "checkpoints" in path.parts else None])
    if kind in ("flip", "cut", "twice", "deep"):
        for _ in range(8 * (kind == "flip") * bool(data)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = draw.randrange(len(data) + 1)
        forms = {"cut": data[:cut], "twice": data * 2, "deep": b'{"a":[' * 200_000}
        path.write_bytes(forms.get(kind, data))
        return
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 40 << 30)
    else:
        path.symlink_to("/dev/zero" if kind == "zero" else fill("OUT/t.bin"))


def forged_run(forge: Forge, draw: random.Random) -> list[list[str]]:
    """Forge a run; some of the commands that read the changed file."""
    run = forge.run()
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    path = draw.choice([file for file in files if file.suffix not in (".html", ".svg", ".log")])
    structured = path.suffix in (".json", ".jsonl", ".yaml", ".safetensors")
    try:
        change = with_json if structured and draw.random() < 0.8 else with_bytes
        change(path, draw, lambda value: forge.filled(value, run))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        shutil.rmtree(run)  # nothing can be written so, or resealed
        return forged_run(forge, draw)
    begin = "checkpoints" if "checkpoints" in path.parts else ""
    chosen = draw.sample(COMMANDS[begin], 3)
    return [[word.replace("RUN", str(run)) for word in words] for words in chosen]


def is_text(text: str) -> bool:
    """Whether a terminal shows it and does nothing else; a progress bar returns to its line's
    begin."""
    plain = re.sub(r"[\n\r\t]", "", text)
    return not any(unicodedata.category(letter) in ("Cc", "Cf", "Cs") for letter in plain)


@pytest.mark.parametrize("seed", slow(*range(8), marks=GRID))
def test_no_command_falls_to_a_forged_run(seed: int, forge: Forge) -> None:
    draw = random.Random(seed)
    commands = [words for _ in range(EACH) for words in forged_run(forge, draw)]
    first = ["generate", str(forge.run()), "--prompt", "def", "--tokens", "1"]  # imports
    falls = [
        (fall, end)
        for end in watched_ends(forge, [first, *commands])
        if (fall := fall_of(end) or "no text" * (not is_text(end["text"])))
    ]
    assert falls == []
