"""What the launchers of several nodes say to each other, over a link. Knows no node; the words are in `muster.py`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..proto.link import LARGEST, Link
from . import muster
from .muster import Message


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
        peer.send(muster.written(message))


def listen(peer: Link, put: Callable[[Said | Gone], None], why: Callable[[Exception], str], largest: int = LARGEST) -> None:
    """Puts all that it says, until it is gone. why: names what has ended it; largest: bytes of a message."""
    try:
        while True:
            put(Said(peer, muster.read(peer.receive(None, largest))))
    except (EOFError, OSError, ValueError) as error:
        put(Gone(peer, why(error)))
