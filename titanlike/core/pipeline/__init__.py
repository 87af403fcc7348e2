"""Pipeline schedules as data (an Order), and torch's pipeline runtime over this rank's stages.

order, schedules and from_config import no torch, unless torch generates a schedule. May import
optim, graph and the packages below them.
"""
