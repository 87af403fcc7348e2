"""Context parallelism: a sequence over the ranks of the axis cp."""
