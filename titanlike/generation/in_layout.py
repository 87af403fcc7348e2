"""Jobs that start in a run's own layout: `titanlike sample` and `titanlike perplexity` of its config."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from titanlike.config.imports import imports_line, named_code
from titanlike.config.overrides import aliases_problem
from titanlike.config.parse import hydra_sections
from titanlike.config.program import conf_dir


def run_in_layout(job: str, run: Path, words: list[str], trust_code: bool) -> int:
    """The exit code of the job on a run's config.yaml. Raises ValueError where that names code which
    is none of titanlike's, and the user has not said --trust-code."""
    path = run / "config.yaml"
    if not path.is_file():
        fix = "write the directory of a run, which has a config.yaml"
        raise ValueError(f"RUN={run}: is no run directory; {fix}")
    try:
        plain: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is damaged: {error}") from None
    if problem := aliases_problem(path):
        raise ValueError(f"{path}: is damaged: {problem}")
    if not isinstance(plain, dict):
        raise ValueError(f"{path}: is no config of a run")
    if not trust_code:
        _refuse_what_no_run_writes(run, plain)
    own = {word.partition("=")[0] for word in words}  # the user's, instead of the file's
    code = named_code(plain, plain.get("hydra", {}))
    named = [(key, name) for key, name in code if key not in own]
    if named and not trust_code:
        names = ", ".join(f"{key}={name}" for key, name in named)
        raise ValueError(
            f"{path} names code that is none of titanlike's and would run here: {names}; if you "
            "trust it, add --trust-code"
        )
    for key, name in named:
        print(imports_line(name, key), file=sys.stderr)
    command = [sys.executable, "-m", "titanlike", job, "--config-path", str(run)]
    return subprocess.call([*command, *words])


def _refuse_what_no_run_writes(run: Path, plain: dict[str, Any]) -> None:
    """Raises ValueError for settings of Hydra's own, which may import or read more."""
    written = hydra_sections()
    found = [f"section {key} in config.yaml" for key in written if plain.get(key) != written[key]]
    groups = ["hydra", *(path.name for path in conf_dir().iterdir() if path.is_dir())]
    found += [f"folder {name}" for name in groups if (run / name).is_dir()]
    if found:
        raise ValueError(
            f"RUN={run}: its {found[0]} is not what a run writes, and Hydra would follow it; "
            "add --trust-code if you know who wrote it"
        )
