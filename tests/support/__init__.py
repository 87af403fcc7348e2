"""Helpers of the tests: real ranks, tiny models and data, programs that are started."""
