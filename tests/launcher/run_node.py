"""Runs the launcher of one node of several, with a fake process (`fake_child.py`) as its rank.

Usage: `run_node.py '<JSON>'`. `Node` in test_leader.py lists the settings that the JSON object has.
"""

import json
import os
import sys
from pathlib import Path

from penstock.launcher import follower, leader
from penstock.launcher.console import Console
from penstock.launcher.membership import Membership
from penstock.launcher.node_messages import Hello, Orders
from penstock.launcher.parts import Command, Part
from penstock.launcher.supervisor import Supervisor
from penstock.proto import link
from penstock.proto.certificates import Certificates

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))

settings = json.loads(sys.argv[1])
certificates = Certificates(*settings["certificates"]) if settings["certificates"] else None
console = Console(json_output=False)


def command(name: str, behaviour: str) -> Command:
    arguments = [sys.executable, "-S", FAKE_CHILD, name.replace(" ", "-"), str(settings["health"]), *behaviour.split("+")]
    return Command(name, arguments)


shard = command(f"shard {settings['node']}", settings["behaviour"])


class Ranks:
    def hello(self, address: str) -> Hello:
        return Hello(node=settings["node"], start=str(os.getpid()), address=address, ports=(7,), terms=settings["terms"])

    def commands(self, orders: Orders, hello: Hello) -> list[Command]:
        console.info(f"meets at {orders.relay_address} {orders.token} {orders.store}")
        return [shard]


def lead() -> int:
    meeting = leader.Meeting(
        listening=link.listen("127.0.0.1", settings["port"]),
        certificates=certificates,
        silence=2.0,
        timeout=settings["timeout"],
        orders=Orders(epoch=0, relay_address="127.0.0.1:1", token="token", store=2),
        addresses=Path(settings["folder"]),
        console=console,
    )
    group = leader.Leader(
        "the shards", [shard], settings["restarts"], [], meeting, Membership(settings["nodes"], settings["terms"])
    )
    return Supervisor(
        router=Part("the router", [command("router", settings["router"])], settings["restarts"]),
        groups={"0": group},
        environment=dict(os.environ),
        console=console,
        health=("127.0.0.1", settings["health"]),
        ready=lambda: console.info("ready"),
        grace=5.0,
    ).run()


def follow() -> int:
    zero = follower.NodeZero(
        address="127.0.0.1", port=settings["port"], certificates=certificates, silence=2.0, timeout=settings["timeout"]
    )
    return follower.Follower(leader=zero, ranks=Ranks(), environment=dict(os.environ), console=console, grace=5.0).run()


sys.exit(follow() if settings["node"] else lead())
