"""What a config may ask to be done to a stage: tp, cp, ep, recomputation, compiled blocks, norms, balance."""
