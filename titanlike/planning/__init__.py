"""Predict the cost of a config before launching anything: memory, step time, traffic; and search
layouts and schedules of least cost.

May import training and the packages below it.
"""
