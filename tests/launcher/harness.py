"""A launcher whose children are stand-ins: `harness.py PORT GRACE RESTARTS PIPE ROUTER-BEHAVIOUR
SHARD-BEHAVIOUR...`, words joined by +."""

import os
import sys
from pathlib import Path

from penstock.launcher import serve
from penstock.launcher.console import Console

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

port, grace, restarts, pipe, router, *shards = sys.argv[1:]
serve.GRACE = 1.0
console = Console(json_output=False)


def command(name: str, behaviour: str) -> serve.Command:
    return serve.Command(name, [sys.executable, "-S", STAND_IN, name.replace(" ", "-"), port, *behaviour.split("+")])


server = serve.Server(
    router=command("router", router),
    shards=[command(f"shard {rank}", behaviour) for rank, behaviour in enumerate(shards)],
    environment=dict(os.environ),
    console=console,
    health=("127.0.0.1", int(port)),
    ready=lambda: console.say("ready"),
    grace=float(grace),
    max_restarts=int(restarts),
    complaints=Path(pipe) if pipe else None,
)
sys.exit(server.run())
