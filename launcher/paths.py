"""Paths as people write them."""

import os
from pathlib import Path


def expanded(text: str) -> Path:
    """The path with ~ expanded. Path's own expanduser raises for unknown users, which a command or a config.json may name."""
    return Path(os.path.expanduser(text))


def in_utf8(path: Path | str) -> bool:
    """Whether a path is UTF-8. Others work in Python alone: gRPC, protobuf and safetensors don't take them."""
    return str(path).encode(errors="ignore").decode() == str(path)
