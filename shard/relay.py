"""Relays commands from rank 0 to the other ranks as bytes, in order. A rank whose peer is gone learns it at once.

Ranks of this machine connect by a unix socket, those of others by TCP; each sends its rank and the group's token, since anybody can
connect to a port: ranks of an earlier group, and strangers.
"""

import hmac
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from ..proto import certificates, link
from ..proto.link import Link, Unauthenticated
from .config import ShardConfig

log = logging.getLogger(__name__)

LONGEST_GREETING = 1000  # bytes
READY = b"ready"  # the first message: every rank is loaded


class Sender:
    """Rank 0's end. Constructing it listens and accepts connections; `connect` waits for all ranks. On other ranks it does
    nothing."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._expected: list[tuple[socket.socket, range]] = []  # listening sockets, and the ranks expected at each
        self._peers: list[Link] = []
        self._arrivals: list[Future[None]] = []  # one per socket: done when all its ranks have connected
        if config.rank:
            return
        if config.neighbours > 1:
            self._expected.append((_listen(config.relay), range(1, config.neighbours)))
        if config.ranks > config.neighbours:
            self._expected.append((link.listen(*link.split(config.relay_address)), range(config.neighbours, config.ranks)))
        # Each on a thread of its own, from now on: a rank that loads faster than this one, or than others, and speaks TLS, gives up
        # a handshake that is not answered.
        for listening, ranks in self._expected:
            self._arrivals.append(Future())
            arguments = (listening, set(ranks), self._arrivals[-1])
            threading.Thread(target=self._take_in, args=arguments, name="arrivals", daemon=True).start()

    def connect(self) -> None:
        """Returns when every other rank is connected."""
        for arrival in self._arrivals:
            arrival.result()

    def _take_in(self, listening: socket.socket, lacking: set[int], arrival: "Future[None]") -> None:
        try:
            while lacking:
                self._peers.append(self._arrival(listening, lacking))
            listening.close()
        except Exception as error:
            arrival.set_exception(error)
        else:
            arrival.set_result(None)

    def send(self, message: bytes) -> None:
        """Sends to all ranks. Raises OSError if a rank is gone."""
        for peer in self._peers:
            peer.send(message)

    def close(self) -> None:
        """Closes all connections: the other ranks end."""
        for peer in self._peers:
            peer.close()
        for listening, _ in self._expected:
            link.stop_listening(listening)

    def _arrival(self, listening: socket.socket, lacking: set[int]) -> Link:
        """Accepts the next peer that knows the token and is one of `lacking`, and removes it from that. Others, and duplicates, are
        refused."""
        local = listening.family == socket.AF_UNIX
        certified = None if local else certificates.of(self._config)
        while True:
            try:
                peer, address = link.accept(listening, certified, self._config.link_timeout)
                rank = _greeted(peer, self._config.token)
            except Unauthenticated as stranger:
                log.warning(str(stranger))
                continue
            if rank in lacking:
                lacking.remove(rank)
                return peer
            why = "no rank of this group" if rank is None else f"rank {rank} is there already, or does not belong here"
            log.warning(f"{address} was refused: {why}")
            peer.close()


class Receiver:
    """Another rank's end. To be constructed after rank 0 listens, as it does before the rendezvous of the ranks."""

    def __init__(self, config: ShardConfig) -> None:
        """Raises EOFError if rank 0 is gone."""
        with _lost():
            if config.relay:
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(config.relay)
                self._link = Link(connection)
            else:
                address, port = link.split(config.relay_address)
                self._link = link.connect(address, port, certificates.of(config), config.link_timeout)
            self._link.send(f"{config.token} {config.rank}".encode())

    def receive(self) -> bytes:
        """The next command. Raises EOFError when rank 0 is gone."""
        with _lost():
            return self._link.receive()

    def close(self) -> None:
        """Closes the connection: rank 0 notices with the next command."""
        self._link.close()


@contextmanager
def _lost() -> Iterator[None]:
    """Turns every error that means that rank 0 is gone into EOFError."""
    try:
        yield
    except OSError as error:
        raise EOFError(link.reason(error)) from None


def _listen(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen()
    return listening


def _greeted(peer: Link, token: str) -> int | None:
    """The rank of a peer that knows the token."""
    with suppress(OSError, EOFError, ValueError):
        told, _, rank = peer.receive(link.HANDSHAKE, LONGEST_GREETING).decode().rpartition(" ")
        if hmac.compare_digest(told.encode(), token.encode()):
            return int(rank)
    return None
