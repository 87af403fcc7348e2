"""Proofs of a layout: verify it against one process, measure its speed against a plain torch loop.

Imports plan and the rooms below it.
"""
