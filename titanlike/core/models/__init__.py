"""Models: a file for each family; `registry.py` finds, builds and checks them by name.

llama.py and gpt2.py import torch alone; the registry imports data and config.
"""
