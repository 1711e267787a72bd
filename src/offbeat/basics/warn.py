"""Warnings that point at the user's own line, from wherever in this package they come."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

OURS = f"{Path(__file__).parents[1]}{os.sep}"


def warn(words: str) -> None:
    """Warn whoever called this package, through torch or not."""
    torch = sys.modules.get("torch")
    passed = (OURS, *(f"{folder}{os.sep}" for folder in (torch.__path__ if torch is not None else ())))
    frame, level = sys._getframe(1), 2  # 1 is this function
    while frame.f_back is not None and frame.f_code.co_filename.startswith(passed):
        frame, level = frame.f_back, level + 1
    warnings.warn(words, stacklevel=level)
