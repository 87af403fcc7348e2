"""The core: trains pp x dp with FSDP, saves and resumes, in one process or many. Imports no other room.

A technique, a format or a sink that a config asks for is imported by its row (the contract in
pyproject.toml lists the rows).
"""
