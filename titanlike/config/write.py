"""run_dir/config.yaml: the complete config of a run, from which it can be launched again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from titanlike.config.files import atomic_write_text
from titanlike.config.parse import to_plain
from titanlike.config.program import conf_dir, train_program
from titanlike.config.schema import Config


def write_config(config: Config, run_dir: Path) -> None:
    """Write run_dir/config.yaml, the complete config, from which the run can be launched again."""
    import yaml
    from omegaconf import OmegaConf

    settings = yaml.safe_dump(hydra_sections())
    plain = to_plain(config)
    plain["data"].pop("changed", None)  # for one start
    text = (
        "# The complete config of this run. Launch it again, with any key=value after it:\n"
        f"#   {shlex.join([*train_program(), '--config-path', str(run_dir)])}\n"
        f"{settings}\n{OmegaConf.to_yaml(plain)}"
    )
    atomic_write_text(run_dir / "config.yaml", text)


def hydra_sections() -> dict[str, Any]:
    """What Hydra reads of config.yaml for itself."""
    import yaml

    shipped = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    overrides = [item for item in shipped["defaults"] if str(item).startswith("{'override")]
    return {"defaults": ["_self_", *overrides], "hydra": shipped["hydra"]}
