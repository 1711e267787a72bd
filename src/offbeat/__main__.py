"""``python -m offbeat``, the same as ``offbeat``."""

from offbeat.cli import run

if __name__ == "__main__":
    run()
