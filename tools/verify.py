"""Prove a layout: `python tools/verify.py pp=2 dp=2 schedule=zbvzerobubble` takes train.py's overrides.

It trains one step in that layout and one in a single process of plain torch, and compares loss,
gradients and updated parameters by name. Exit code 1 if they differ.
"""

from titanlike.cli import main

if __name__ == "__main__":
    main("titanlike.verification:verify")
