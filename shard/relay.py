"""Passes commands from rank 0 to the other ranks as bytes, in order. A rank whose peer is gone learns it at once."""

import os
from multiprocessing.connection import Client, Connection, Listener


class Sender:
    """Rank 0's end. Constructing it listens; `connect` waits for the others."""

    def __init__(self, path: str, peers: int) -> None:
        self._listener = Listener(path, family="AF_UNIX", backlog=peers) if peers else None
        if peers:
            os.chmod(path, 0o600)
        self._peers: list[Connection] = []
        self._count = peers

    def connect(self) -> None:
        """Returns when every other rank is there."""
        if self._listener is not None:
            self._peers = [self._listener.accept() for _ in range(self._count)]

    def send(self, message: bytes) -> None:
        """Raises OSError if a rank is gone."""
        for peer in self._peers:
            peer.send_bytes(message)

    def close(self) -> None:
        """Removes the socket's file; the other ranks end."""
        for peer in self._peers:
            peer.close()
        if self._listener is not None:
            self._listener.close()


class Receiver:
    """Another rank's end. To be constructed after rank 0 listens, as it does before the rendezvous of the ranks."""

    def __init__(self, path: str) -> None:
        self._connection = Client(path, family="AF_UNIX")

    def receive(self) -> bytes:
        """The next command. Raises EOFError when rank 0 is gone."""
        return self._connection.recv_bytes()
