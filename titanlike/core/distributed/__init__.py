"""What every run needs of its ranks: mesh, collectives, FSDP, where parameters are, initial weights."""
