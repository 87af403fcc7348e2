"""run_dir/config.yaml: the whole config of a run, from which it can be launched again."""

from __future__ import annotations

from pathlib import Path

from titanlike.config.folder import conf_dir
from titanlike.config.parse import to_plain
from titanlike.config.schema import Config


def write_config(config: Config, run_dir: Path) -> None:
    """Leave run_dir/config.yaml, from which the run can be launched again."""
    import yaml
    from omegaconf import OmegaConf

    own = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    overrides = [item for item in own["defaults"] if str(item).startswith("{'override")]
    settings = yaml.safe_dump({"defaults": ["_self_", *overrides], "hydra": own["hydra"]})
    text = (
        "# The whole config of this run. Launch it again, with any key=value after it:\n"
        f"#   python train.py --config-path '{run_dir}'\n"
        f"{settings}\n{OmegaConf.to_yaml(to_plain(config))}"
    )
    unfinished = run_dir / "config.yaml.tmp"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(run_dir / "config.yaml")
