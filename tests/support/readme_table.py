"""The README's table of everything that can be declared, made from the schema.

python tests/readme_table.py    rewrites the table in README.md
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from titanlike.config.errors import override_text  # noqa: E402
from titanlike.config.schema import VARIANTS, Config, Custom  # noqa: E402

BEGIN, END = "<!-- keys: begin (tests/readme_table.py) -->", "<!-- keys: end -->"


def table() -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]

    def row(key: str, default: str, meaning: str) -> None:
        escaped = meaning.replace("|", "\\|")
        rows.append(f"| `{key}` | {f'`{default}`' if default else ''} | {escaped} |")

    def keys(cls: type, prefix: str) -> None:
        for field in dataclasses.fields(cls):
            if field.name == "name":
                continue
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            shown = "" if default is dataclasses.MISSING else override_text(default)
            row(f"{prefix}{field.name}", shown, field.metadata["doc"])

    hints = typing.get_type_hints(Config)
    groups = []
    for field in dataclasses.fields(Config):
        if field.name in VARIANTS or hints[field.name] is Custom:
            groups.append(field)
        elif dataclasses.is_dataclass(hints[field.name]):
            keys(hints[field.name], f"{field.name}.")
        else:
            row(field.name, override_text(field.default), field.metadata["doc"])
    for field in groups:
        folder = ROOT / "conf" / field.name
        choices = ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.yaml")))
        row(f"{field.name}=", "", f"**{field.metadata['doc']}**: {choices}")
        seen: dict[type, list[str]] = {}
        for name, variant in VARIANTS.get(field.name, {}).items():
            seen.setdefault(variant, []).append(name)
        for variant, names in seen.items():
            before = len(rows)
            keys(variant, f"{field.name}.")
            if len(seen) > 1:
                rows[before:] = [r[:-2] + f" ({', '.join(names)}) |" for r in rows[before:]]
    return "\n".join(rows)


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
