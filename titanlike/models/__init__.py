"""Models: a file for each family; `registry.py` finds, builds and checks them by name.

A family's file imports torch alone; the registry imports optim and the rooms below it.
"""
