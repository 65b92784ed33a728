"""A launcher whose children are stand-ins: `harness.py PORT GRACE RESTARTS PIPE REPLICAS
ROUTER-BEHAVIOUR SHARD-BEHAVIOUR...`, words joined by +. REPLICAS: each shard is one, unless it is empty."""

import os
import sys
from pathlib import Path

from penstock.launcher import parts, supervisor
from penstock.launcher.console import Console

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

port, grace, restarts, pipe, replicas, router, *shards = sys.argv[1:]
if "stubborn" in router:
    parts.GRACE = supervisor.GRACE = 1.0  # else nobody waits for its end, but where the machine stands still
console = Console(json_output=False)


def command(name: str, behaviour: str) -> parts.Command:
    if behaviour == "absent":
        return parts.Command(name, [STAND_IN + ".absent"])
    return parts.Command(name, [sys.executable, "-S", STAND_IN, name.replace(" ", "-"), port, *behaviour.split("+")])


commands = [command(f"shard {rank}", behaviour) for rank, behaviour in enumerate(shards)]
groups = {"0": parts.Part("the shards", commands, int(restarts))}
if replicas:
    groups = {str(rank): parts.Part(f"replica {rank}", [each], int(restarts)) for rank, each in enumerate(commands)}
server = supervisor.Supervisor(
    router=command("router", router),
    groups=groups,
    environment=dict(os.environ),
    console=console,
    health=("127.0.0.1", int(port)),
    ready=lambda: console.say("ready"),
    grace=float(grace),
    max_restarts=int(restarts),
    complaints=Path(pipe) if pipe else None,
)
sys.exit(server.run())
