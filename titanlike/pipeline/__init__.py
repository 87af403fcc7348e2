"""Pipeline schedules as data (an Order), and torch's pipeline runtime over this rank's stages.

order, schedules and from_config import no torch, except where torch generates a schedule. Imports
optim, graph, parallel and the rooms below them.
"""
