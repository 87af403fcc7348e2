"""From a command line to its jobs: overrides checked and composed by Hydra, one job run, or a sweep of them.

The only room, besides `core/config`, that knows Hydra. Imports the rooms below it.
"""
