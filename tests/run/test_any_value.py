"""Every key with values that nobody means: an error in one printable line, with a fix that ends it."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from support.command_lines import problems_of, proposals, with_fix
from titanlike.core.config.overrides import key_of
from titanlike.core.config.schema import VARIANTS, Config

WORDS = """
    null true -1 0 -0.0 1 3 nan -inf 1e400 1e-400 1_000 0x10 010 1e3 10k .5 999999999F0
    [] [1] [1,2] [nan] [null] [[1]] {} {a:1} {a:{b:1}} {}a a äß😀 1,2 range(3) '???'
    ../.. / /dev/zero fifo folder ~ - os.system no_such.mod.Cls %s{0}%(x)s
    http://127.0.0.1:9/x file:///etc/passwd s3://b/c ${x} ${oc.env:NOPE} ${SELF} ${
"""
VALUES = [*WORDS.split(), "", "'a b'", "'a\nb'", "'\a'", "'\x1b[31mred'", "'\u202eab'"]
VALUES += [str(2**63), "1" + "0" * 400, "x" * 3000]
KEYS: list[tuple[str, list[str]]] = []  # a key, and the choices that have it
HINTS = typing.get_type_hints(Config)
for field in dataclasses.fields(Config):
    kinds = {kind: choice for choice, kind in reversed(VARIANTS.get(field.name, {}).items())}
    KEYS.append((field.name, []))
    for kind, choice in kinds.items():
        names = [inner.name for inner in dataclasses.fields(kind)]
        KEYS += [(f"{field.name}.{name}", [f"{field.name}={choice}"]) for name in names]
    if dataclasses.is_dataclass(hint := HINTS[field.name]) and not kinds:
        KEYS += [(f"{field.name}.{inner.name}", []) for inner in dataclasses.fields(hint)]


@pytest.mark.grid
@pytest.mark.parametrize("key, choices", KEYS, ids=[f"{key} {''.join(c)}" for key, c in KEYS])
def test_a_nonsense_value_is_an_error_with_a_fix(
    key: str, choices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for value in VALUES:
        words = [*choices, f"{key}={value}".replace("SELF", key)]
        problems = problems_of(words)
        for problem in problems:
            assert str(problem).isprintable(), words
            for fix in proposals(problem.fix)[:1]:
                left = problems_of(with_fix(words, problem, fix))
                same = [p for p in left if (p.key, p.reason) == (problem.key, problem.reason)]
                assert not same or {*map(key_of, fix)} - {problem.key}, f"{words}: {fix}"
