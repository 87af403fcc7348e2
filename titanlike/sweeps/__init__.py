"""A sweep: its jobs, how they are run, its table and pictures.

Imports job, planning and the rooms below them.
"""
