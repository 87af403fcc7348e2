"""One job, from its parsed config to result.json: checks, elastic layout, the run on all ranks.

Imports every room below it (`training`, `checkpoint`, `launch` ...), and no Hydra.
"""
