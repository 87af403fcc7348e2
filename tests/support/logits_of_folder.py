"""Computes the logits of folders by the transformers of this interpreter, whatever its version."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

for folder in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        torch.save(model.eval()(torch.load(folder / "ids.pt")).logits, folder / "logits.pt")
