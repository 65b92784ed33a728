"""Paths that people write."""

import os
from pathlib import Path


def expanded(text: str) -> Path:
    """~ is a home. Path's own expanduser raises for users that nobody knows, whom a command or a config.json may name."""
    return Path(os.path.expanduser(text))
