"""What shows a run to people: W&B, TensorBoard, the report page, profiles, timelines, stragglers.

Imports core.
"""
