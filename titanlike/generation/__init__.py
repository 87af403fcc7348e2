"""Generate text with a trained model in one process, token by token, greedily or by sampling."""
