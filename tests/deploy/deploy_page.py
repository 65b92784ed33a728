"""The commands in docs/deploy.md. A block of commands begins with ```sh and tags:

sh serve           the command that starts the server to which the other blocks send requests
sh run TOOL...     a test runs it if these tools are installed
sh starts TOOL...  each line starts a server, or one node of a server; a test starts and stops them
sh                 not run: needs a cluster, a container engine, a GPU or root
"""

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    tags: tuple[str, ...]
    text: str


def blocks(language: str = "sh") -> list[Block]:
    found = [Block(match[1], tuple(match[2].split()), match[3].strip()) for match in BLOCK.finditer(PAGE.read_text())]
    return [block for block in found if block.language == language]


def path() -> str:
    """PATH as the page requires it: with the virtual environment in which the tests run."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def find(tool: str) -> str | None:
    """The path of a program in that environment or on the system, or None."""
    return shutil.which(tool, path=path())
