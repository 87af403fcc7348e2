"""Mixtures of experts: models, and their experts over the axis ep."""
