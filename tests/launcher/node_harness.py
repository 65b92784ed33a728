"""The launcher of a node whose ranks are stand-ins: `node_harness.py '<JSON>'`, see `Node` in test_leader.py for what is in it."""

import json
import os
import sys
from pathlib import Path

from penstock.launcher import follower, leader
from penstock.launcher.console import Console
from penstock.launcher.node_messages import Hello, Orders
from penstock.launcher.parts import Command
from penstock.launcher.roll_call import RollCall
from penstock.launcher.supervisor import Supervisor
from penstock.proto import link
from penstock.proto.certificates import Certificates

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

told = json.loads(sys.argv[1])
certificates = Certificates(*told["certificates"]) if told["certificates"] else None
console = Console(json_output=False)


def command(name: str, behaviour: str) -> Command:
    arguments = [sys.executable, "-S", STAND_IN, name.replace(" ", "-"), str(told["health"]), *behaviour.split("+")]
    return Command(name, arguments)


shard = command(f"shard {told['node']}", told["behaviour"])


class Ranks:
    def hello(self, address: str) -> Hello:
        return Hello(node=told["node"], start=str(os.getpid()), address=address, ports=(7,), terms=told["terms"])

    def commands(self, orders: Orders, hello: Hello) -> list[Command]:
        console.say(f"meets at {orders.relay_address} {orders.token} {orders.store}")
        return [shard]


def lead() -> int:
    meeting = leader.Meeting(
        listening=link.listen("127.0.0.1", told["port"]),
        certificates=certificates,
        silence=2.0,
        timeout=told["timeout"],
        orders=Orders(epoch=0, relay_address="127.0.0.1:1", token="token", store=2),
        addresses=Path(told["folder"]),
        console=console,
    )
    group = leader.Leader("the shards", [shard], told["restarts"], [], meeting, RollCall(told["nodes"], told["terms"]))
    return Supervisor(
        router=command("router", told["router"]),
        groups={"0": group},
        environment=dict(os.environ),
        console=console,
        health=("127.0.0.1", told["health"]),
        ready=lambda: console.say("ready"),
        grace=5.0,
        max_restarts=told["restarts"],
    ).run()


def follow() -> int:
    zero = follower.NodeZero(
        address="127.0.0.1", port=told["port"], certificates=certificates, silence=2.0, timeout=told["timeout"]
    )
    return follower.Follower(leader=zero, ranks=Ranks(), environment=dict(os.environ), console=console, grace=5.0).run()


sys.exit(follow() if told["node"] else lead())
