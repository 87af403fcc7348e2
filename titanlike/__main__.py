"""`python -m titanlike [COMMAND] ...`: the same as `titanlike`."""

from titanlike.cli import run

if __name__ == "__main__":
    run()
