"""The hardware that a plan is made for: what the config names, what was measured, what is likely."""

from __future__ import annotations

import functools

import torch
import yaml

from titanlike.config.errors import ConfigError, Problem
from titanlike.config.hardware import Hardware, RunHardware
from titanlike.config.parse import parse
from titanlike.config.program import conf_dir
from titanlike.config.schema import Config
from titanlike.costs.auto_split import run_timeline
from titanlike.costs.unit_costs import CostError
from titanlike.device import accelerator
from titanlike.device.choose import first_device

# Words of a device's name -> the choice that stands for it; the first that is in it
_CHOICES = {
    "H100 PCIe": "h100_pcie",
    "H100": "h100_sxm",
    "H200": "h200",
    "B200": "b200",
    "A100-SXM4-40GB": "a100_40g",
    "A100-PCIE-40GB": "a100_40g",
    "A100": "a100_80g",
    "MI300X": "mi300x",
}


def planned_hardware(config: Config, ranks: int | None = None) -> Hardware:
    """What a plan is made for; ranks: of the layouts, where not as many as of this config. Raises
    ConfigError where none is named."""
    if isinstance(config.hardware, Hardware):
        return config.hardware
    if isinstance(config.hardware, RunHardware):
        return likely_hardware(_of_run(config.hardware))
    if config.hardware.name == "measure":
        from titanlike.costs.measured import measured_hardware

        return measured_hardware(config, ranks or config.world_size)
    reason = "a plan is made for a device"
    fix = "hardware=h100_sxm, or hardware=measure for this machine"
    raise ConfigError([Problem("hardware", config.hardware.name, reason, fix)])


def _of_run(settings: RunHardware) -> Config:
    """The config of the run. Raises ConfigError where it has no timeline."""
    try:
        return parse(run_timeline(settings.path).config)[0]
    except CostError as error:
        problem = Problem("hardware", settings.path, str(error), "hardware=measure")
        raise ConfigError([problem]) from None


def likely_hardware(config: Config) -> Hardware:
    """The config's, or that of the shipped choices which is nearest to this machine's devices."""
    if isinstance(config.hardware, Hardware):
        return config.hardware
    return shipped(_choice(first_device(config.device)))


def _choice(device: torch.device) -> str:
    if not accelerator.is_accelerator(device):
        return "cpu"
    name = accelerator.name(device) if accelerator.started() else ""
    return next((choice for words, choice in _CHOICES.items() if words in name), "h100_sxm")


@functools.cache
def shipped(choice: str) -> Hardware:
    """A choice of conf/hardware."""
    text = (conf_dir() / "hardware" / f"{choice}.yaml").read_text(encoding="utf-8")
    hardware = parse({"hardware": yaml.safe_load(text)})[0].hardware
    assert isinstance(hardware, Hardware)
    return hardware
