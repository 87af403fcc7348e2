"""Converts plain data (from YAML and the command line) to the dataclasses of `schema`, and back.

1. `parse` walks the fields of `Config`. A group (`VARIANTS`) is read by the dataclass that its
   `name` chooses; a name with a dot in an open group is an import path and becomes `Custom`.
2. Each value is converted by its annotation, strictly: 2.0 is not an integer, true not a number.
3. A wrong value is a problem and its default is used, so that the rest can still be checked: all
   problems of a config are found at once.

`write_config` writes run_dir/config.yaml: the complete config of a run, from which it can be
launched again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Union

from titanlike.core.config.errors import Problem, abbreviates, as_override, nearest, override_text
from titanlike.core.config.files import atomic_write_text, same_folder
from titanlike.core.config.groups.pipeline import CustomSchedule
from titanlike.core.config.groups.user_code import Custom, CustomOptimizer, Model
from titanlike.core.config.keys import Batches, Bytes, Paths, Seconds, field_problems
from titanlike.core.config.program import conf_dir, train_program
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS, Config

MISSING = "???"  # marks a value in YAML that the user must give
_NO_DEFAULT = dataclasses.MISSING
_NULL = ("none", "nil", "off", "no", "false", "disabled", "")  # other spellings of null


def parse(plain: dict[str, Any]) -> tuple[Config, list[Problem]]:
    """Return the config, and every unknown key and wrong type in `plain`.

    With problems, the config has defaults in place of wrong values: enough for further checks.
    """
    problems: list[Problem] = []
    return _dataclass(Config, plain, "", problems), problems


def to_plain(config: Any) -> Any:
    """Invert `parse`: return dicts, lists and scalars only."""
    if isinstance(config, Custom):
        values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        args = values.pop("args")
        return to_plain({**values, **args})
    if dataclasses.is_dataclass(config):
        return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {key: to_plain(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_plain(item) for item in config]
    return config


def _dataclass(cls: type, plain: dict[str, Any], prefix: str, problems: list[Problem]) -> Any:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in plain.items():
        if key not in fields:
            short = [name for name in fields if abbreviates(str(key), name)]  # wd, mb
            near = nearest(str(key), fields) or (short[0] if len(short) == 1 else None)
            wrong: list[Problem] = []
            convert(hints[near], value, near, wrong) if near else None
            group, _, pattern = prefix[:-1].partition(".groups.")
            fix = as_override(f"{prefix}{near}", value) if near and not wrong else ""
            if fix and pattern:  # a whole entry, which is merged into the mapping
                entry = {near if k == key else k: item for k, item in plain.items()}
                fix = as_override(f"{group}.groups", {pattern: entry})
            reason = "unknown key" if near else f"unknown key; known: {', '.join(fields)}"
            problems.append(Problem(f"{prefix}{key}", value, reason, fix))
    values = {}
    for name, field in fields.items():
        key = f"{prefix}{name}"
        if name not in plain and _default(field) is not _NO_DEFAULT:
            continue
        if plain.get(name, MISSING) == MISSING:
            reason, group = f"required: {field.metadata['doc']}", prefix[:-1]
            fix = f"{key}=256" if hints[name] is int else ""  # vocab_size
            if group in VARIANTS and not fix:
                fix = f"give {key} its value, or write {group}={next(iter(VARIANTS[group]))}"
            problems.append(Problem(key, MISSING, reason, "" if "[" in key else fix))
            continue
        before = len(problems)
        if cls is Config and (name in VARIANTS or name in OPEN_GROUPS):
            value = _group(name, plain[name], problems)
        else:
            value = convert(hints[name], plain[name], key, problems, _default(field))
        if len(problems) == before and not dataclasses.is_dataclass(value):
            problems += field_problems(field, value, key)
        elif problems[before:]:
            number = _number(problems[-1].fix.removeprefix(f"{key}="))  # None of a sentence
            for beyond in field_problems(field, number, key):  # 1e12, an integer beyond its bound
                problems[-1] = replace(problems[-1], fix=beyond.fix)
        if len(problems) == before or dataclasses.is_dataclass(value):
            values[name] = value
    for name, field in fields.items():
        if name not in values and _default(field) is _NO_DEFAULT:
            values[name] = {int: 1}.get(hints[name], "")  # a placeholder; the problem is recorded
    return cls(**values)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is _NO_DEFAULT else field.default_factory


def _group(group: str, plain: Any, problems: list[Problem]) -> Any:
    """Convert a group's choice; None, and a problem, if there is none."""
    variants = VARIANTS.get(group, {})
    if not isinstance(plain, dict) or not isinstance(plain.get("name"), str):
        example = next(iter(variants), "llama_tiny")
        has_name = isinstance(plain, dict)
        key, value = (f"{group}.name", plain.get("name")) if has_name else (group, plain)
        problems.append(Problem(key, value, "a choice must be given", f"{group}={example}"))
        return None
    name = plain["name"]
    if name == MISSING and group in OPEN_GROUPS:  # GROUP=own
        fix = f"{group}.name=my_package.my_module.attribute"
        problems.append(Problem(f"{group}.name", name, "required: where your own code is", fix))
        return Model(name) if group not in VARIANTS else None
    if group in OPEN_GROUPS and (group not in VARIANTS or "." in name):
        kinds_of_own = {"model": Model, "optimizer": CustomOptimizer, "schedule": CustomSchedule}
        kind = kinds_of_own.get(group, Custom)
        fields = {field.name for field in dataclasses.fields(kind)} - {"args"}
        known = {key: value for key, value in plain.items() if key in fields}
        made = _dataclass(kind, known, f"{group}.", problems)
        args = {key: value for key, value in plain.items() if key not in fields}
        wrong = [*field_problems(Custom.__dataclass_fields__["args"], args, group)]
        problems += wrong
        keys = {problem.key.partition("[")[0].split(".")[1] for problem in wrong}
        made.args = {key: value for key, value in args.items() if key not in keys}
        return made
    if name not in variants:
        near = nearest(name, variants)
        fix = f"{group}={near or next(iter(variants))}"
        if group == "logger" and near is None and name != MISSING:  # probably meant as a run's name
            fix = f"{fix} logger.run_name={name}"
        reason = f"no such choice; choices: {', '.join(variants)}"
        if group in OPEN_GROUPS:
            reason += ", or an import path such as my_package.my_module.attribute"
        problems.append(Problem(f"{group}.name", name, reason, fix))
        return None
    return _dataclass(variants[name], plain, f"{group}.", problems)


def section_of(group: str, plain: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Convert a plain section as if it were the group; return it (None = invalid), and problems."""
    problems: list[Problem] = []
    return _group(group, plain, problems), problems


def convert(
    annotation: Any, value: Any, key: str, problems: list[Problem], default: Any = _NO_DEFAULT
) -> Any:
    """Convert `value` to the type `annotation`; None, and a problem, if it is not one.

    The problem proposes the probably intended number or text, else `default`.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):  # only `X | None` reaches this point
        if value is None:
            return None
        (annotation,) = (argument for argument in arguments if argument is not type(None))
        before = len(problems)
        converted = convert(annotation, value, key, problems, default)
        if str(value).lower() in _NULL:  # optimizer.clip=none
            fixed = (replace(problem, fix=f"{key}=null") for problem in problems[before:])
            problems[before:] = [*fixed]
        return converted
    example = fix = ""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        if isinstance(value, dict):
            return _dataclass(annotation, value, f"{key}.".lstrip("."), problems)
        names = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(annotation))
        problems.append(Problem(key, value, f"has keys below it: {names}"))
        return None
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        expected = "must be one of " + ", ".join(override_text(choice) for choice in arguments)
        words = [*map(str, arguments)]
        short = (word for word in words if abbreviates(word, str(value)))
        example = nearest(str(value), words) or next(short, "")
    elif annotation is Paths:
        several = isinstance(value, list) and value
        if all(isinstance(one, str) and one for one in (value if several else [value])):
            return value
        expected, example = "must be a path, or a list of paths", "[a/,b/]"
    elif origin is list:
        if isinstance(value, (list, tuple)):
            items, wrong = enumerate(value), list[Problem]()
            made = [convert(arguments[0], item, f"{key}[{i}]", wrong) for i, item in items]
            shown = default() if callable(default) else default
            whole = as_override(key, shown) if isinstance(shown, list) and shown else ""
            # the fix of an item, which no override can set, is a whole list
            problems += [replace(p, fix=whole if "]=" in p.fix else p.fix) for p in wrong]
            return made
        wrong = []
        expected = "must be a list"
        convert(arguments[0], value, key, wrong)
        fix = "" if wrong or not str(value).isprintable() else as_override(key, [value])
    elif origin is dict:
        if isinstance(value, dict) and arguments[1] is Any:
            return value
        if isinstance(value, dict):
            items = value.items()
            return {n: convert(arguments[1], item, f"{key}.{n}", problems) for n, item in items}
        expected = "must be a mapping"
    elif annotation is bool:
        if isinstance(value, bool):
            return value
        expected = "must be true or false"
        example = {"yes": "true", "on": "true", "1": "true", "no": "false"}.get(str(value), "")
    elif annotation is Batches and value == "all":
        return 0
    elif annotation in (int, Batches):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        expected, number = "must be an integer", _number(value)
        expected += ", or all" if annotation is Batches else ""
        whole = round(number) if number is not None and abs(number) < 1e15 else None
        # 0.1 is a share in other frameworks; proposing 0 would mean "never"
        example = str(whole) if whole or number == 0 else ""
    elif annotation is Seconds:
        if (seconds := _seconds(value)) is not None:
            return seconds
        short = re.sub(r"\s*([dhms])[a-z]*\s*", r"\1", str(value).strip().lower())  # 2 days
        expected = "must be a time: seconds, 90m, 11h30m or 11:30:00"
        example = short if _seconds(short) is not None else "90m"
    elif annotation is Bytes:
        if (size := bytes_of(value)) is not None:
            return size
        expected, example = "is no size", "80GiB"
    elif annotation is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _float(value)
        expected, number = "must be a number", _number(value)
        example = override_text(number) if number is not None else ""
    else:
        assert annotation is str, f"schema annotation {annotation} of {key} is not supported"
        if isinstance(value, str) and value:
            return value
        expected = "is empty" if value == "" else "must be text"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            fix = as_override(key, override_text(value))
    if isinstance(value, (list, tuple)) and value and not (example or fix):
        wrong = []
        for item in value:
            convert(annotation, item, key, wrong)
        if not wrong:  # a list of valid values, as in a sweep
            several = len(value) > 1
            fix = f"{'-m ' * several}{key}={','.join(map(override_text, value))}"
            expected += "; several are a sweep" * several
    if not example and default is not _NO_DEFAULT:
        example = override_text(default() if callable(default) else default)
    fix = fix or (f"{key}={example}" if example else "")
    problems.append(Problem(key, value, expected, fix))
    return None


def _number(value: Any) -> float | None:
    """Parse a number, also 10k, 1.5M or 2B; None for anything else."""
    text = "" if isinstance(value, bool) else str(value).strip()
    match = re.fullmatch(r"([-+]?[\d_.]+(?:[eE][-+]?\d+)?)([kKmMbBgG]?)", text)
    try:
        scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
        number = float(match[1]) * scale[match[2].lower()] if match else math.inf
        return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of 400 digits
        return math.inf if value > 0 else -math.inf


def bytes_of(value: Any) -> int | None:
    """Parse a number of bytes, 512MiB, 75GB or 75G (powers of 1024); None for anything else."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(value), re.I)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else None


def _seconds(value: Any) -> float | None:
    """Parse a number, 45s, 90m, 11h30m, 1d or 11:30:00 as seconds; None for anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _float(value)
    text = str(value).strip().lower()
    if clock := re.fullmatch(r"(\d+):(\d\d)(?::(\d\d))?", text):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if not parts or "".join(map("".join, parts)) != text:
        return None
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in parts)


def write_config(config: Config, run_dir: Path) -> None:
    """Write run_dir/config.yaml, the complete config, from which the run can be launched again."""
    import yaml
    from omegaconf import OmegaConf

    shipped = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    overrides = [item for item in shipped["defaults"] if str(item).startswith("{'override")]
    settings = yaml.safe_dump({"defaults": ["_self_", *overrides], "hydra": shipped["hydra"]})
    plain = to_plain(config)
    plain["data"].pop("changed", None)  # applies to one launch only
    text = (
        "# The complete config of this run. Launch it again, with any key=value after it:\n"
        f"#   {shlex.join([*train_program(), '--config-path', str(run_dir)])}\n"
        f"{settings}\n{OmegaConf.to_yaml(plain)}"
    )
    atomic_write_text(run_dir / "config.yaml", text)


def in_folder(plain: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Rewrite a run's config for the folder that now holds it; also return its previous folder (""
    if unchanged). Paths inside the run (`checkpoint.folder`, data, a schedule's file) move with it.
    """
    before = plain.get("run_dir")
    if not isinstance(before, str) or not os.path.isabs(before) or same_folder(before, folder):
        return plain, ""
    beside = os.path.relpath(before)  # paths may be relative to this working directory
    roots = [before] if beside.startswith(".") else [before, beside]

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        for root in roots if isinstance(value, str) else ():
            if value == root or value.startswith(f"{root}/"):
                return f"{folder}{value[len(root) :]}"
        return value

    return moved(plain), before
