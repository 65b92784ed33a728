"""What the launchers of several nodes say to each other, over a link: one message of JSON after the other.

node k    hello      it comes              node 0    welcome     you are on the roll
          died       a rank has ended                wait        not now: come again
          halted     nothing of it runs              refused     what differs
          leave      it is asked to stop             start       load, and meet there
                                                     halt        end your ranks, others were lost
                                                     stop        let your ranks end, it will be over
                                                     end         it is over, with that exit code
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
    """A node comes."""

    node: int
    start: str  # tells this start of its launcher from others
    address: str  # at which the others reach it
    ports: tuple[int, ...]  # of its ranks
    terms: Mapping[str, str]

    def message(self) -> Message:
        return {"kind": "hello", **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Where the ranks meet."""

    epoch: int  # counts the starts of the group
    relay_address: str  # address:port of rank 0, for commands
    token: str
    store: int  # port of torch's rendezvous, at node 0's address

    def message(self) -> Message:
        return {"kind": "start", **dataclasses.asdict(self)}


def hello(message: Message) -> Hello:
    """As a node has sent it. Raises ValueError: whatever it says may be shown."""
    try:
        found = Hello(
            node=int(message["node"]),
            start=str(message["start"]),
            address=str(ipaddress.ip_address(message["address"])),
            ports=tuple(int(port) for port in message["ports"]),
            terms={str(key): str(value) for key, value in message["terms"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError("no hello") from None
    if message["kind"] != "hello" or not all(text.isprintable() for pair in found.terms.items() for text in pair):
        raise ValueError("no hello")
    return found


def orders(message: Message) -> Orders:
    """As node 0 has sent it."""
    return Orders(**{field.name: message[field.name] for field in dataclasses.fields(Orders)})


def written(message: Message) -> bytes:
    return json.dumps(message).encode()


def read(message: bytes) -> Message:
    """Raises ValueError."""
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
    """If it is there. Else it is gone, which who listens to it will say."""
    with suppress(OSError, EOFError):
        peer.send(written(message))


def listen(peer: Link, put: Callable[[Said | Gone], None], why: Callable[[Exception], str], largest: int = LARGEST) -> None:
    """Puts all that it says, until it is gone. why: names what has ended it; largest: bytes of a message."""
    try:
        while True:
            put(Said(peer, read(peer.receive(None, largest))))
    except (EOFError, OSError, ValueError) as error:
        put(Gone(peer, why(error)))
