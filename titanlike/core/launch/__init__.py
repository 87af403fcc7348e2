"""A rank's process, under any launcher: environment, signals, failures, restarts, the watchdog.

May import only `config`, `device` and `torch_private`.
"""
