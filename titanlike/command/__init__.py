"""From a command line to jobs; the only room, besides `config`, that knows Hydra.

Imports every other room.
"""
