"""The commands of docs/deploy.md. A block of commands is opened by ```sh and tags:

sh serve           the line that starts the server which the other blocks talk to
sh run TOOL...     runs in a test, where these tools are there
sh starts TOOL...  each line is a server, or one node of a server, that a test starts and ends
sh                 needs a cluster, a container engine, a GPU or root
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
    """PATH as the page asks for it: with the environment in which the tests run."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def find(tool: str) -> str | None:
    """Where a program is, in that environment or on the system."""
    return shutil.which(tool, path=path())
