"""`python -m mla`, the same as the console script `mla`."""

from mla.cli import app

if __name__ == "__main__":
    app(prog_name="mla")
