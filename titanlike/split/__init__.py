"""Which units of a model go to which stage: evenly, as the user says, or by measured costs.

Imports pipeline, models and the rooms below them.
"""
