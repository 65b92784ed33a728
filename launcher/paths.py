"""Paths as people write them."""

import os
from pathlib import Path


def expanded(text: str) -> Path:
    """The path with ~ expanded. Path's own expanduser raises for unknown users, which a command or a config.json may name."""
    return Path(os.path.expanduser(text))
