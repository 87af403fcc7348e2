"""`python -m titanlike [COMMAND] ...`: the same as `titanlike`."""

from titanlike.cli import main

if __name__ == "__main__":
    main()
