"""Layouts and what they cost, before anything starts: memory, time of a step, what a machine has.

Imports training and the rooms below it.
"""
