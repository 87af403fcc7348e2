"""Launches the ranks of a job, locally or under torchrun and srun; signals, restarts, the watchdog.

May import only `config`, `device` and `torch_private`.
"""
