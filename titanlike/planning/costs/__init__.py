"""Costs of a model's modules, and what follows for a rank: bytes, FLOPs, the simulated times of an
Order, and stages of equal cost. Knows nothing of plans, which use it."""
