"""`--help`: the commands, then every key with its default and meaning. No torch, no Hydra."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from titanlike.core.config.errors import override_text
from titanlike.core.config.groups.user_code import Model
from titanlike.core.config.parse import to_plain
from titanlike.core.config.program import conf_dir, train_program
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config

_FLAGS = [
    ("--help WORD", "the keys that have WORD in name, value or documentation"),
    ("-m", "sweep over comma-separated values"),
    ("--check", "find every error, start nothing; with -m in each job"),
    ("--cfg job", "print the composed config, start nothing"),
    ("--config-dir DIR", "a folder of your own choices, laid out like conf/"),
    ("--version", "of titanlike, torch, CUDA, NCCL, Hydra and Python, and the commit"),
    ("--hydra-help", "Hydra's other flags"),
]


def help_text(
    words: list[str], commands: Mapping[str, Mapping[str, str]], width: int | None = None
) -> str:
    """Return the help of training.

    words: how the program was started, `python train.py`. commands: for each title a line per
    subcommand; empty without subcommands. width: columns; None = the terminal's.
    """
    width = min(width or shutil.get_terminal_size().columns, 160)
    program, command = shlex.join(words), "[COMMAND] " if commands else ""
    lines = [f"usage: {program} {command}[key=value ...] [group=choice ...]", ""]
    if commands:
        lines.append("commands (--help after one describes it)")
        longest = max(len(name) for group in commands.values() for name in group)
        for title, group in commands.items():
            rows = [(name.ljust(longest), line) for name, line in group.items()]
            lines += ["", f"  {title}", *(f"  {row}" for row in _rows(rows, width - 2))]
        lines.append("")
    completion = f'tab completion: eval "$({program} -sc install=bash)"'
    flags = [*_FLAGS, ("-sc install=bash", completion)]
    lines += ["examples", *_rows(_examples(words), width), "", "flags", *_rows(flags, width), ""]
    return "\n".join([*lines, *_keys_and_groups(width)]).rstrip()


def help_on(words: Sequence[str], program: Sequence[str]) -> str:
    """Return the keys and choices that have all the words in their name, value or documentation; of
    a section of this name, all."""
    asked, width = [word.lower() for word in words], min(shutil.get_terminal_size().columns, 160)
    entries: list[str] = []
    for line in filter(None, _keys_and_groups(width)):
        if line.startswith("   "):
            entries[-1] += f"\n{line}"
        else:
            entries.append(line)
    found: list[str] = []
    titles: list[str] = []  # of the section, and of its keys, until an entry is found
    whole = False
    for entry in entries:
        text = " ".join(entry.lower().split())
        if not entry.startswith(" "):
            titles, whole = [entry], [re.split("[=:]", text)[0]] == asked
        elif re.match("  keys.*:$", entry):
            titles = [*(title for title in titles if not title.startswith(" ")), entry]
        elif whole or all(word in text for word in asked):
            found += [*titles, entry]
            titles = []
    nothing = f"no key has {' '.join(words)}: {shlex.join(program)} --help lists all"
    return "\n".join(found) or nothing


def command_help(words: list[str], description: str) -> str:
    """Return the help of a command that takes training's overrides."""
    usage = f"usage: {shlex.join(words)} [key=value ...] [group=choice ...]"
    keys = f"Takes the overrides of training: {shlex.join(train_program())} --help lists them."
    width = min(shutil.get_terminal_size().columns, 100)
    return "\n\n".join([usage, *(textwrap.fill(text, width) for text in (description, keys))])


def _examples(words: list[str]) -> list[tuple[str, str]]:
    program = shlex.join(words)
    # torchrun adds `python` to SCRIPT or -m MODULE itself
    script = shlex.join(words[1:]) if words[0] == "python" else "-m titanlike"
    return [
        (program, "one process, shipped defaults"),
        (f"{program} pp=2 dp=2", "launches its 4 workers itself"),
        (f"torchrun --nproc-per-node 4 {script} pp=2 dp=2", "workers launched by torchrun"),
        (f"{program} -m schedule=gpipe,1f1b pp=2", "a sweep: a run for each combination"),
        (f"{program} experiment=llama3_8b --cfg job", "print the config, start nothing"),
        (f"{program} --config-path RUN_DIR steps=600", "launch a run again, changed"),
    ]


def _keys_and_groups(width: int) -> list[str]:
    """Return every key of the config, then every group with its choices and their keys."""
    hints, config = typing.get_type_hints(Config), to_plain(Config())
    fields = dataclasses.fields(Config)
    groups = [f for f in fields if f.name in VARIANTS or hints[f.name] is Model]
    nested = [f for f in fields if f not in groups and dataclasses.is_dataclass(hints[f.name])]
    scalars = [f for f in fields if f not in (*groups, *nested)]
    lines = ["keys (= default)", *_rows([_row(f, "", hints, config) for f in scalars], width), ""]
    for field in nested:
        rows = _keys(hints[field.name], f"{field.name}.", width)
        lines += [f"{field.name}: {field.metadata['doc']}", *rows, ""]
    lines += ["groups (group=choice; a choice is a file in conf/ with its own keys)", ""]
    for field in groups:
        lines += [f"{field.name}=  {field.metadata['doc']}", *_group(field.name, width), ""]
    lines += ["experiment=  a file that sets many keys at once"]
    return lines + _choices("experiment", width)


def _group(group: str, width: int) -> list[str]:
    """Return a group's choices, then their keys; choices with the same keys share an entry."""

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")

    lines = _choices(group, width)
    if group in OPEN_GROUPS:
        own = "package.module.attribute"
        lines += wrapped(f"or your own: {group}.name={own}, with its arguments")
    variants: dict[type, list[str]] = {}
    for name, variant in VARIANTS.get(group, {}).items():
        variants.setdefault(variant, []).append(name)
    for variant, names in variants.items():
        if keys := _keys(variant, f"{group}.", width):
            title = f"keys of {', '.join(names)}:" if len(variants) > 1 else "keys:"
            lines += [*wrapped(title), *keys]
    if group == "model":
        title = "keys: arguments of the model's constructor; for llama, with llama_tiny's values:"
        lines += wrapped(title)
        rows = []
        text = (conf_dir() / "model" / "llama_tiny.yaml").read_text(encoding="utf-8")
        for line in text.splitlines():
            if not line.startswith(("#", "name:")):
                setting, _, comment = line.partition(" # ")
                rows.append((f"model.{setting.replace(': ', '=')}", comment))
        lines += _rows(rows, width)
    return lines


def _choices(group: str, width: int) -> list[str]:
    """Return each choice with the first comment of its file."""
    rows = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        comment = re.search(r"^# (?!@)(.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        rows.append((path.stem, comment[1] if comment else ""))
    return _rows(rows, width)


def _keys(variant: type, prefix: str, width: int) -> list[str]:
    hints, fields = typing.get_type_hints(variant), dataclasses.fields(variant)
    return _rows([_row(f, prefix, hints, {}) for f in fields if f.name != "name"], width)


def _row(
    field: dataclasses.Field[Any], prefix: str, hints: dict[str, Any], values: dict[str, Any]
) -> tuple[str, str]:
    """Return `key=default` and its meaning, with the allowed values if they are few."""
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    elif default is dataclasses.MISSING:
        default = "..."  # required
    doc = field.metadata["doc"]
    if typing.get_origin(hints[field.name]) is Literal:
        allowed = "|".join(override_text(value) for value in typing.get_args(hints[field.name]))
        doc = f"{allowed}: {doc}"
    return f"{prefix}{field.name}={override_text(values.get(field.name, default))}", doc


def _rows(rows: list[tuple[str, str]], width: int) -> list[str]:
    """Format two columns; a left entry that is too wide has its own line."""
    column = min(max((len(left) for left, _ in rows), default=0) + 4, width // 2)
    lines = []
    for left, right in rows:
        first = f"  {left}".ljust(column)
        if len(left) + 4 > column:
            lines.append("  ")
            for part in re.split(r"(?<=,)", left):  # a list may be wider than the terminal
                if len(lines[-1] + part) > width:
                    lines.append("    ")
                lines[-1] += part
            first = " " * column
        filled = textwrap.wrap(right, max(width - column, 20)) or [""]
        lines.append((first + filled[0]).rstrip())
        lines += [" " * column + rest for rest in filled[1:]]
    return lines
