"""Starts the ranks of a job, here or under torchrun and srun; signals, restarts, the watchdog.

Imports only `config`, `device` and `torch_private`.
"""
