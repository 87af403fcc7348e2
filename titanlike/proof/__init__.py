"""Proofs of a layout: verify it against one process, measure its speed against a plain torch loop.

May import training and all packages below it.
"""
