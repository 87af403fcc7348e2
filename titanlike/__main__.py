"""`python -m titanlike`: the same as train.py."""

from titanlike.cli import main

if __name__ == "__main__":
    main()
