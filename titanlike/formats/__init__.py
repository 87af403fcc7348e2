"""Data as users have it: text, token files, chats, datasets, streams and mixtures, and tokenizing.

Imports core.
"""
