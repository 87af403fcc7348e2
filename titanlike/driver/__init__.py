"""From a command line to its jobs: overrides checked and composed by Hydra, one job run, or a sweep of them.

The only room, besides `config`, that knows Hydra. Imports every other room.
"""
