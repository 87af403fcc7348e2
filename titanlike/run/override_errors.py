"""Explains why an override is refused, with the nearest one of a key that exists.

A proposal's value is one that its key can have, by the key's own check (`Advice.fitting`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from titanlike.core.config.errors import (
    Problem,
    as_override,
    as_typed,
    override_text,
    quoted,
    similar,
)
from titanlike.core.config.other_frameworks import Context, tools, translate
from titanlike.core.config.overrides import ADDED, SHORT, from_hydra, in_full, key_of, to_hydra
from titanlike.core.config.parse import parse
from titanlike.core.config.schema import OPEN_GROUPS, VARIANTS
from titanlike.run.argv import InvalidOverride, flat_keys, one_line, parse_override

_HELP = "--help lists all keys"


@dataclass(frozen=True)
class Advice:
    """Explains why an override is refused, and what to write instead."""

    composed: DictConfig  # the config with all valid overrides
    in_files: DictConfig  # the config with choices of groups only
    swept: dict[str, list[str]]  # group -> its choices in the sweep
    choices: dict[str, list[str]]  # group -> its valid choices

    def syntax_error(self, text: str) -> Problem:
        """Return the problem of an override that Hydra's parser rejects."""
        key, _, value = from_hydra(text).partition("=")
        reason = "not of the form key=value; a value with spaces or , : { } needs quotes"
        bare = value.rstrip(",;")  # as copied from a list or from code
        tried = [[f"{key}={bare}"]] if bare != value else []
        keys_alone = re.sub(r"""(['"])([^'",:{}\[\]\s]+)\1(?=\s*:)""", r"\2", value)  # as in JSON
        tried += [[f"{key}={keys_alone}"]] if keys_alone != value else []
        above = [name for name in self.known if key.startswith(f"{name}.")]  # a pattern is no key
        tried += [[f"{name}={{{key[len(name) + 1 :]}:{value}}}"] for name in above]
        tried += [text.split(), [f"{key}={quoted(value)}"]]
        fix = next(filter(None, (self.fitting(*words) for words in tried)), "")
        return Problem(key, value, reason, fix or self.default(key) or _HELP)

    def values_without_m(self, override: Override) -> Problem:
        """Return the problem of several values without -m."""
        key, value = override.key_or_group, override.get_value_string()
        fix = "-m " + as_typed([f"{key}={value}"])
        lists = f"{key}=[{value}]", f"{key}={quoted(value)}"
        typed = (as_typed([word]) for word in lists if self.fitting(word) == as_typed([word]))
        if right := next(typed, ""):
            fix += f" (or {right})"
        return Problem(key, value, "several values are a sweep, which needs -m", fix)

    def wrong_choice(self, group: str, choice: Any, options: list[str]) -> Problem:
        """Return the problem of a choice that the group does not have."""
        reason = f"no such choice; choices: {', '.join(sorted(options))}"
        if choice is None:
            fix = f"{group}=none" if "none" in options else self.default(group)
            return Problem(group, None, "a choice must be given", fix or "leave it out")
        if isinstance(choice, dict):
            words = [f"{group}.{key}={override_text(value)}" for key, value in choice.items()]
            fix = self.fitting(*words) or self.default(group)
            return Problem(group, choice, "a choice must be given, and its keys by themselves", fix)
        for parent, variants in VARIANTS.items() if not isinstance(choice, str) else ():
            has_key = any(group in variant.__dataclass_fields__ for variant in variants.values())
            if has_key and (fix := self.fitting(f"{parent}.{group}={choice}")):  # for lr=3e-4
                return Problem(group, choice, reason, fix)
        found, word = similar(str(choice), options), override_text(choice)
        fix, note = self.translated(group, word)
        # adamw_8bit: more than the choice alone; fp8: float8, although mxfp8 is more alike
        known = fix.startswith(f"{group}=") and fix != self.translated(group, "?")[0]
        begins = any(name.lower().startswith(word.lower()) for name in found)
        if known and word not in fix and found and not begins:
            return Problem(group, choice, f"{reason} ({note})" if note else reason, fix)
        a_name = group == "data" and any(name in word[1:] for name in found)  # wikitext
        if found and not a_name:
            return Problem(group, choice, reason, " or ".join(f"{group}={n}" for n in found[:3]))
        if not fix.startswith(group):
            fix, note = self.default(group) or "leave it out", note if not fix else ""
        if group == "model" and "/" not in word and re.search(r"\d", word):
            fix, note = "give its sizes: model=llama_tiny model.hidden_size=4096 and others", ""
        return Problem(group, choice, f"{reason} ({note})" if note else reason, fix)

    def one_choice(self, group: str, choices: list[Any]) -> Problem:
        """Return the problem of several choices in a group that takes one."""
        right = [c for c in map(override_text, choices) if c in self.choices[group]]
        fix = f"{'-m ' * (len(right) > 1)}{group}={','.join(right)}" if right else ""
        return Problem(group, choices, "one choice must be given", fix or self.default(group))

    def invalid_override(self, words: InvalidOverride) -> Problem:
        """Return the problem of words that do not have the form key=value: those of a choice
        (`adamw`), of a section (`optimizer 3`), of a key (`--steps 3`), or of an unknown key."""
        reason, key, value = "a setting is written key=value", words.key, words.value
        for group, choices in self.choices.items():
            if key in choices and value == "true":  # no value was given
                return Problem(words.typed, "", reason, f"{group}={key}")
        below = [name for name in self.known if name.startswith(f"{key}.")]
        if below and key not in self.choices:
            return Problem(words.typed, "", f"has keys below it: {', '.join(below)}")
        if setting := self.fitting(f"{key}={value}"):
            return Problem(words.typed, "", reason, setting)
        fix, note = self.for_unknown(key, value)
        if fix:
            return Problem(words.typed, "", note or reason, fix)
        return Problem(words.typed, "", "no such key", note or _HELP)

    def removed(self, key: str) -> Problem:
        """Return the problem of `~key`."""
        fix = f"{key}=none" if "none" in self.choices.get(key, ()) else self.default(key)
        return Problem(f"~{key}", "", "nothing can be removed", fix or "leave it out")

    def rejected_key(self, override: Override, error: Exception | None) -> Problem:
        """Return why an override cannot be applied. error: Hydra's; None = an unknown key."""
        key = override.key_or_group
        value = "" if override.is_delete() else override.get_value_string()
        if key in self.known and override.is_add():
            return Problem(f"+{key}", value, "the key exists already", f"{key}={value}")
        if key in self.known:
            below = ", ".join(name for name in self.known if name.startswith(f"{key}."))
            reason = one_line(error) if error else "cannot be set"
            reason = f"has keys below it: {below}" if below else reason
            return Problem(key, value, reason, self.default(key) or "leave it out")
        group, _, rest = key.partition(".")
        if others := self._having(key):
            chosen = OmegaConf.select(self.composed, f"{group}.name")
            reason = f"{group}={chosen} has no such key; {group}={', '.join(others)} has"
            swept = [n for n in self.swept.get(group, ()) if n in others]
            words = [f"{group}={(swept or others)[0]}", f"{key}={value}"]
            fix = self.fitting(*words) or words[0]
            if swept:
                rest = ",".join(n for n in self.swept[group] if n not in others)
                fix += f", and a sweep of its own without it for {group}={rest}"
            return Problem(key, value, reason, fix)
        fix, note = self.for_unknown(key, value)
        reason = f"unknown key; {note}" if note and fix else "unknown key"
        inside = [name for name in self.known if name.startswith(f"{group}.") and rest]
        if not fix and not note and inside:
            reason = f"unknown key; known: {', '.join(inside)}"
        return Problem(key, value, reason, fix or note or ("" if inside else _HELP))

    def fitting(self, *words: str) -> str:
        """Return these overrides, an impossible value replaced by what its key's check proposes; ""
        if one is no override of a key, or of a choice, that there is."""
        plain: Any = OmegaConf.to_container(self.composed)
        del plain["hydra"]
        given = {key_of(word): word for word in words}
        for word in words:
            override = parse_override(to_hydra(word))
            if override is None:
                return ""
            key, value = override.key_or_group, override.value()
            if override.is_sweep_override():
                each = [*override.sweep_iterator()] if override.is_discrete_sweep() else []
                exists = key in self.known or key in self.choices
                if not exists or not all(self.fitting(f"{key}={one}") for one in each):
                    return ""
                given[key] = as_typed([word])
                continue
            if key in self.choices:
                if value not in self.choices[key]:
                    return ""
                given[key] = as_typed([word])
                plain[key] = {"name": value} if value in VARIANTS.get(key, ()) else plain.get(key)
                continue
            *sections, name = key.split(".")
            section = plain
            for each in sections:
                section = section.get(each) if isinstance(section, dict) else None
            if not isinstance(section, dict) or not self._is_key(key, section):
                return ""
            section[name] = value
            given[key] = as_typed([word])
        for problem in parse(plain)[1]:
            for key in given.keys() - self.choices.keys():
                if f"{problem.key}.".startswith((f"{key}.", f"{key}[")) or key == problem.key:
                    given[key] = problem.fix
        return " ".join(given.values()) if all(given.values()) else ""

    def _is_key(self, key: str, section: dict[str, Any]) -> bool:
        """Whether a section, of the given or of another choice, has or takes a key."""
        group, _, name = key.rpartition(".")
        variant = VARIANTS.get(group, {}).get(str(section.get("name")))
        fields = () if variant is None else variant.__dataclass_fields__
        own = group in OPEN_GROUPS and "." in str(section.get("name"))
        return key in self.known or name in fields or own or f"{key}=".startswith(ADDED)

    @property
    def known(self) -> list[str]:
        return list(flat_keys(self.composed))

    def default(self, key: str) -> str:
        """Return an override that sets the key, or the group, to its current value, or ""."""
        chosen = self.composed.hydra.runtime.choices
        if key not in chosen:  # a mapping: propose its first key
            names = (name for name in flat_keys(self.in_files) if f"{name}.".startswith(f"{key}."))
            key = next((name for name in names if not isinstance(self.in_file(name), dict)), "")
        value = chosen[key] if key in chosen else self.in_file(key)
        nothing = not key or value == "???" or (value is None and key in chosen)
        return "" if nothing else as_override(key, value)

    def in_file(self, key: str) -> Any:
        """Return a key's value in the config files; None if they do not have it."""
        holder, _, name = key.rpartition(".")
        parent = OmegaConf.select(self.in_files, holder) if holder else self.in_files
        if isinstance(parent, DictConfig) and OmegaConf.is_missing(parent, name):
            return "???"
        value = OmegaConf.select(self.in_files, key, throw_on_resolution_failure=False)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    def for_unknown(self, key: str, value: str) -> tuple[str, str]:
        """Return (override, what differs) for an unknown key; "" where there is nothing to say."""
        fix, note = self.translated(key, value)
        last, group = key.rpartition(".")[2].replace("-", "_"), f"{key.partition('.')[0]}."
        inside = [name for name in self.known if name.startswith(group) and "." in key]
        own = bool(inside) or group[:-1] in tools()
        # a proposal stays in its section: the other's key would change something else
        left = (word for word in fix.split() if "." in key_of(word) and not word.startswith(group))
        held_out = fix.startswith("validation.")  # data.val_path: held-out data have one section
        if (fix or note) and (held_out or not (own and any(left))):
            return fix, note
        # of a section or tool of this program's, its own keys and those of no section
        names = [*(name for name in self.known if not name.startswith("hydra.")), *SHORT]
        names = [n for n in names if "." not in n or n in inside] if own else names
        same = [name for name in names if name.rpartition(".")[2] == last]
        if "." in key:  # the group is misspelt
            same[:0] = similar(key, same)
        plural = [name for name in inside if name == f"{key}s"]
        for near in plural or (*same, *similar(key, names), *similar(key, inside)):
            word = in_full(f"{near}={value}")
            if not near.endswith(".name") and self.fitting(word) == as_typed([word]):
                return as_typed([f"{near}={value}"]), ""
        return "", f"the key is {plural[0]}" if plural else ""

    def translated(self, key: str, value: str) -> tuple[str, str]:
        """Return (override, what differs) for a key of another framework."""
        paths = {"dp": "dp", "steps": "steps", "lr": "optimizer.lr", "batch_size": "batch_size"}
        paths |= {"pp": "pp", "microbatches": "schedule.microbatches"}
        known = partial(OmegaConf.select, self.composed, throw_on_resolution_failure=False)
        numbers = {name: known(path) for name, path in paths.items()}
        right: dict[str, Any]
        right = {k: v for k, v in numbers.items() if isinstance(v, (int, float)) and v}
        if (pp := right.pop("pp", 1)) > 1 and "microbatches" not in right:
            right |= {"microbatches": 2 * pp, "cut": f"schedule.microbatches={2 * pp}"}
        translation = translate(key, value, Context(**right))
        if translation is None:
            return "", ""
        words, note = translation
        keys = [key_of(word) for word in words]
        choices = [
            f"{k.partition('.')[0]}={others[0]}" for k in keys if (others := self._having(k))
        ]
        tried = [words, [*choices, *words], [*filter(None, map(self.default, keys))]]
        return next(filter(None, (self.fitting(*each) for each in tried)), ""), note

    def _having(self, key: str) -> list[str]:
        """Return the choices of a key's group that have the key, if the current choice does not."""
        group, _, name = key.partition(".")
        chosen = OmegaConf.select(self.composed, f"{group}.name")
        variants = VARIANTS.get(group, {})
        having = [n for n, v in variants.items() if name in v.__dataclass_fields__]
        return [] if chosen in having or key in self.known else having
