"""Predict the cost of a config before launching anything: memory, step time, traffic; and search
layouts and schedules of least cost.

Imports core, techniques, hf and watch.
"""
