"""Pipeline schedules as data (an Order), and torch's pipeline runtime over this rank's stages.

May import optim, graph, parallel, data, launch, metrics, config and torch_private.
"""
