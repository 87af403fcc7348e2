"""What can be declared, checked and shown: plain data, without torch.

Imports no other room.
"""
