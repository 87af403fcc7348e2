"""`--help`: complete, readable on narrow and wide terminals, and quick."""

from __future__ import annotations

import dataclasses

from titanlike.config.help import help_text
from titanlike.config.parse import to_plain
from titanlike.config.program import conf_dir
from titanlike.config.schema import VARIANTS, Config


def all_keys() -> set[str]:
    keys = set()
    for name, value in to_plain(Config()).items():
        if name in VARIANTS:
            for variant in VARIANTS[name].values():
                keys |= {f"{name}.{f.name}=" for f in dataclasses.fields(variant)} - {
                    f"{name}.name="
                }
        elif isinstance(value, dict):
            keys |= {f"{name}.{key}=" for key in value if name != "model"}
        else:
            keys.add(f"{name}=")
    return keys


def test_help_lists_every_key_and_every_choice_within_the_terminal() -> None:
    for width in (80, 160):
        text = help_text([conf_dir()], ["python", "train.py"], {}, width)
        words = text.split()
        missing = {key for key in all_keys() if not any(word.startswith(key) for word in words)}
        assert missing == set()
        assert {path.stem for path in conf_dir().glob("*/*.yaml")} <= set(words)
        assert max(map(len, text.splitlines())) <= width
