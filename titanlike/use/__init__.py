"""A trained model in use: generate, evaluate, sample, and the checkpoint tool.

Imports the rooms below it.
"""
