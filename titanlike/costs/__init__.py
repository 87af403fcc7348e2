"""What a layout costs before anything starts: memory, times of a step, and the layouts, stages and orders
that cost the least.

Imports training and the rooms below it; a plan of a run reaches it where a config asks for an estimate.
"""
