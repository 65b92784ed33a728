"""The protocol between the launchers of several nodes: JSON messages, one after the other, over a link.

node k    hello      announces itself      node 0    welcome     the node is registered
          died       a rank has ended                wait        not now: come again
          halted     none of its ranks runs          refused     what differs
          leave      it is asked to stop             start       load, and meet there
                                                     halt        end your ranks, others were lost
                                                     stop        terminate your ranks, the server ends
                                                     end         the server has ended, with that exit code
"""

import dataclasses
import ipaddress
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..proto.link import LARGEST, Link

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A node's announcement to node 0."""

    node: int
    start: str  # identifies this start of its launcher
    address: str  # at which the others reach it
    ports: tuple[int, ...]  # of its ranks
    terms: Mapping[str, str]

    def message(self) -> Message:
        return {"kind": "hello", **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Node 0's instruction to start ranks: where they meet."""

    epoch: int  # counts the starts of the group
    relay_address: str  # address:port of rank 0, for relayed commands
    token: str
    store: int  # port of torch's rendezvous store, at node 0's address

    def message(self) -> Message:
        return {"kind": "start", **dataclasses.asdict(self)}


def hello(message: Message) -> Hello:
    """A Hello from a node's message, validated so that it may be shown. Raises ValueError."""
    try:
        found = Hello(
            node=int(message["node"]),
            start=str(message["start"]),
            address=str(ipaddress.ip_address(message["address"])),
            ports=tuple(int(port) for port in message["ports"]),
            terms={str(key): str(value) for key, value in message["terms"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        raise ValueError("no hello") from None
    if message["kind"] != "hello" or not all(text.isprintable() for pair in found.terms.items() for text in pair):
        raise ValueError("no hello")
    return found


def orders(message: Message) -> Orders:
    """The Orders from node 0's message."""
    return Orders(**{field.name: message[field.name] for field in dataclasses.fields(Orders)})


def written(message: Message) -> bytes:
    return json.dumps(message).encode()


def read(message: bytes) -> Message:
    """A decoded message. Raises ValueError."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise ValueError("no message of a launcher")
    return found


@dataclass(frozen=True, slots=True)
class Said:
    peer: Link
    message: Message


@dataclass(frozen=True, slots=True)
class Gone:
    peer: Link
    why: str


def tell(peer: Link, message: Message) -> None:
    """Sends a message if the peer is there. If it is gone, whoever listens to it will report that."""
    with suppress(OSError, EOFError):
        peer.send(written(message))


def listen(peer: Link, put: Callable[[Said | Gone], None], why: Callable[[Exception], str], largest: int = LARGEST) -> None:
    """Puts every message of a peer, until it is gone. why: describes the error that ended it; largest: most bytes of a message."""
    try:
        while True:
            put(Said(peer, read(peer.receive(None, largest))))
    except (EOFError, OSError, ValueError) as error:
        put(Gone(peer, why(error)))
