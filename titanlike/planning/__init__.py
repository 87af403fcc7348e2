"""What a command line will cost before anything is launched: memory, times of a step, traffic, and the
layouts and orders that cost the least.

Imports training and the packages below it.
"""
