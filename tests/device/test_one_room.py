"""Nothing outside the room `device` asks whether it runs on CUDA: what is meant is an
accelerator."""

from __future__ import annotations

import re

from support.paths import ROOT

ASKS = re.compile(
    r"""torch\.(cuda|xpu|mps)\b|\btype\s*[!=]=\s*["'](?!cpu|meta)\w+["']|["']cuda["']"""
)
# what is about CUDA alone
MAY = {
    "titanlike/core/models/document_attention.py": [
        "torch.cuda.get_device_capability"
    ],  # its kernels are CUDA's
    "titanlike/techniques/mixture/experts.py": ["torch.cuda.get_device_capability"],  # likewise
    "titanlike/core/config/schema.py": ['"cuda"'],  # a choice of `device`
}


def test_only_the_device_package_knows_device_types() -> None:
    found = []
    for folder in ("titanlike", "hydra_plugins", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith("titanlike/core/device/"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for allowed in MAY.get(name, []):
                    line = line.replace(allowed, "")
                if ASKS.search(line.partition("#")[0]):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
