"""Why an override is refused, with the nearest one that works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from titanlike.config.errors import Problem, nearest
from titanlike.config.schema import OPEN_GROUPS, VARIANTS


def syntax_error(text: str) -> Problem:
    """An override that Hydra's parser does not accept."""
    key, _, value = text.partition("=")
    reason = "not of the form key=value; a value with spaces or , : { } needs quotes"
    return Problem(key, value, reason, f"\"{key}='{value}'\"")


def values_without_m(override: Override) -> Problem:
    """Several values without -m."""
    key, value = override.key_or_group, override.get_value_string()
    fix = f"-m {key}={value} (or {key}=[{value}])"
    return Problem(key, value, "several values are a sweep, which needs -m", fix)


def unknown_choice(group: str, choice: Any, options: list[str]) -> Problem:
    """A choice that the group does not have."""
    near = nearest(str(choice), options)
    fix = f"{group}={near}" if near else ""
    for parent, variants in VARIANTS.items() if not isinstance(choice, str) else ():
        if any(group in variant.__dataclass_fields__ for variant in variants.values()):
            fix = f"{parent}.{group}={choice}"  # for lr=3e-4
    reason = f"no such choice; choices: {', '.join(sorted(options))}"
    return Problem(group, choice, reason, fix)


def rejected_key(
    override: Override, composed: DictConfig, known: list[str], error: Exception
) -> Problem:
    """Why Hydra does not apply an override to `composed`, a config with the keys `known`."""
    key = override.key_or_group
    value = "" if override.is_delete() else override.get_value_string()
    if key in known:
        if override.is_add():
            return Problem(f"+{key}", value, "the key exists already", f"{key}={value}")
        return Problem(key, value, one_line(error))
    group, _, rest = key.partition(".")
    chosen = OmegaConf.select(composed, f"{group}.name")
    others = [
        name
        for name, variant in VARIANTS.get(group, {}).items()
        if rest in variant.__dataclass_fields__ and name != chosen
    ]
    if others:
        reason = f"{group}={chosen} has no such key; {group}={', '.join(others)} has"
        return Problem(key, value, reason, f"{group}={others[0]} {key}={value}")
    # any key may be an argument of the user's own function or class
    custom = group in OPEN_GROUPS and bool(rest) and "." in str(chosen)
    near = _nearest_argument(group, rest, known) if custom else _nearest_key(key, known)
    reason = "unknown key"
    if near is None and (custom or group == "model"):
        reason, near = f"not among the keys of this {group}'s file", f"+{key}"
    return Problem(key, value, reason, f"{near}={value}" if near else "")


def one_line(error: Exception) -> str:
    """Hydra's message in one line."""
    cause = error.__cause__ if not str(error).strip() and error.__cause__ else error
    return " ".join(str(cause).split())


def _nearest_key(key: str, known: list[str]) -> str | None:
    group, _, rest = key.partition(".")
    leaves = [name for name in known if name.rpartition(".")[2] == key]
    near = leaves[0] if leaves else nearest(key, known)
    if near is None and rest:
        near = nearest(key, [name for name in known if name.startswith(f"{group}.")])
    return near


def _nearest_argument(group: str, rest: str, known: list[str]) -> str | None:
    inside = [name.partition(".")[2] for name in known if name.startswith(f"{group}.")]
    near = nearest(rest, [name for name in inside if name != "name"])
    return f"{group}.{near}" if near else None


def flat_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config."""
    for name in node:
        yield f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from flat_keys(child, f"{prefix}{name}.")
