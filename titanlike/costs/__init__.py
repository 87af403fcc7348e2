"""What a model's modules cost, and what follows for a rank: bytes, FLOPs, the simulated times of an
order, and stages of equal cost.

A plan of a run asks it; it knows no plan.
"""
