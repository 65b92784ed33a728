"""Runs a real Supervisor whose router and shards are fake processes (`fake_child.py`).

Usage: `run_supervisor.py PORT GRACE RESTARTS PIPE REPLICAS ROUTER-BEHAVIOUR SHARD-BEHAVIOUR...`. A behaviour is one or more words
joined by +. Unless REPLICAS is empty, each shard is a replica of its own; otherwise all shards are one rank group.
"""

import os
import sys
from pathlib import Path

from penstock.launcher import parts, supervisor
from penstock.launcher.console import Console

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))

port, grace, restarts, pipe, replicas, router, *shards = sys.argv[1:]
if "stubborn" in router:
    parts.GRACE = supervisor.GRACE = 1.0  # shorter, as tests wait that long for a stubborn router
console = Console(json_output=False)


def command(name: str, behaviour: str) -> parts.Command:
    if behaviour == "absent":
        return parts.Command(name, [FAKE_CHILD + ".absent"])
    python = behaviour.removeprefix("by+") if behaviour.startswith("by+") else sys.executable  # an interpreter to be removed later
    return parts.Command(name, [python, "-S", FAKE_CHILD, name.replace(" ", "-"), port, *behaviour.split("+")])


commands = [command(f"shard {rank}", behaviour) for rank, behaviour in enumerate(shards)]
groups = {"0": parts.Part("the shards", commands, int(restarts))}
if replicas:
    groups = {str(rank): parts.Part(f"replica {rank}", [each], int(restarts)) for rank, each in enumerate(commands)}
server = supervisor.Supervisor(
    router=parts.Part("the router", [command("router", router)], int(restarts)),
    groups=groups,
    environment=dict(os.environ),
    console=console,
    health=("127.0.0.1", int(port)),
    ready=lambda: console.info("ready"),
    grace=float(grace),
    hang_reports=Path(pipe) if pipe else None,
)
sys.exit(server.run())
