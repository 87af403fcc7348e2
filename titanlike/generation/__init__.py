"""Text from a trained model: loaded in one process, token by token, greedy or drawn at random."""
