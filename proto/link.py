"""Message link between two processes, of one machine or of two: whole messages, in order, over TLS if there are certificates.

Knows sockets; not what the messages say. A lost peer is noticed also while nothing is sent: within `silence` seconds, if its
machine is off or the network is cut, else at once.
"""

import errno
import ipaddress
import os
import select
import socket
import ssl
import threading
from contextlib import suppress
from time import monotonic

from .certificates import NAME, Certificates

SILENCE = 20.0  # default seconds without an answer after which a peer is lost
HANDSHAKE = 5.0  # seconds for a new connection to authenticate
PROBES = 3  # keepalive probes without an answer after which a silent peer is lost
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # errors by which the kernel reports that
LENGTH = 4  # bytes of the length before each message
TLS = (b"\x16\x03", b"\x15\x03")  # first bytes of a TLS handshake, and of an alert: read as lengths they are beyond any message
LARGEST = 256 << 20  # bytes of a message, here and by gRPC


class PeerSilent(TimeoutError):
    """The peer is connected, and sends nothing."""


class NotAMessage(ConnectionError):
    """The peer is connected, and what it sends is no message."""


class Encrypted(NotAMessage):
    """The peer speaks TLS, this side does not."""


class Link:
    """A connection. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._turn = threading.Lock()  # serializes senders
        self._use = threading.Lock()  # guards the TLS state, which both directions share and OpenSSL doesn't protect

    @property
    def address(self) -> str:
        """This side's address, as the peer sees it."""
        return str(self._connection.getsockname()[0])

    def send(self, message: bytes) -> None:
        """Raises OSError if the peer is gone."""
        rest = memoryview(len(message).to_bytes(LENGTH, "big") + message)
        with self._turn:
            while rest:
                try:
                    with self._use:
                        rest = rest[self._connection.send(rest) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    _wait(self._connection, select.POLLOUT)
                except ssl.SSLWantReadError:
                    _wait(self._connection, select.POLLIN)

    def receive(self, within: float | None = None, largest: int = LARGEST) -> bytes:
        """The next message. Raises EOFError when the peer has closed, OSError when it is lost, PeerSilent when `within`
        seconds are over, NotAMessage for bytes that are none."""
        until = None if within is None else monotonic() + within
        head = self._read(LENGTH, until)
        length = int.from_bytes(head, "big")
        if length > largest:
            raise Encrypted("it speaks TLS") if head[:2] in TLS else NotAMessage(f"a message of {length} bytes")
        return self._read(length, until)

    def _read(self, count: int, until: float | None) -> bytes:
        found = bytearray()
        while len(found) < count:
            try:
                with self._use:
                    part = self._connection.recv(count - len(found))
                if not part:
                    raise EOFError
                found += part
            except (BlockingIOError, ssl.SSLWantReadError):
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    raise PeerSilent("no message came") from None
                _wait(self._connection, select.POLLIN, left)
            except ssl.SSLEOFError:
                raise EOFError from None
        return bytes(found)

    def close(self) -> None:
        """Closes the connection: the peer notices, and so does a thread here that waits for a message."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _wait(connection: socket.socket, event: int, seconds: float | None = None) -> None:
    """Returns when the event may be possible, or the time is up. Raises EOFError when another thread has closed the connection,
    OSError when it is lost."""
    poll = select.poll()
    try:
        poll.register(connection, event)
    except ValueError:  # no descriptor any more
        raise EOFError from None
    for _, found in poll.poll(None if seconds is None else seconds * 1000):
        # Checked here: TLS would report the end without its reason (Python before 3.11.9).
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if found & select.POLLERR else 0
        if code:
            raise OSError(code, os.strerror(code))


def listen(address: str, port: int) -> socket.socket:
    """Listens at this address only; port 0: a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def stop_listening(listening: socket.socket) -> None:
    """Stops listening. A thread that waits in `accept` gets an OSError."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def accept(listening: socket.socket, certificates: Certificates | None, silence: float = SILENCE) -> tuple[Link, str]:
    """The next connection, and its address. Raises Unauthenticated for a peer that can't prove its membership."""
    connection, address = listening.accept()
    if not isinstance(address, tuple):  # a unix socket, to which only our own processes have access
        return Link(connection), "this machine"
    return secure(connection, str(address[0]), certificates, silence), str(address[0])


def secure(connection: socket.socket, address: str, certificates: Certificates | None, silence: float) -> Link:
    """An accepted connection as a link. Raises Unauthenticated."""
    try:
        watch(connection, silence)
        if certificates is not None:
            connection.settimeout(HANDSHAKE)
            connection = certificates.server().wrap_socket(connection, server_side=True)
    except OSError as error:
        connection.close()
        raise Unauthenticated(f"{address} was refused: {reason(error)}") from None
    return Link(connection)


def connect(
    address: str, port: int, certificates: Certificates | None, silence: float = SILENCE, within: float = HANDSHAKE
) -> Link:
    """Connects to a listener. Raises OSError; PeerSilent if the peer doesn't answer the TLS handshake."""
    connection = socket.create_connection((address, port), timeout=within)
    try:
        watch(connection, silence)
        if certificates is not None:
            connection = certificates.client().wrap_socket(connection, server_hostname=NAME)
    except TimeoutError:
        connection.close()
        raise PeerSilent("no TLS came") from None
    except OSError:
        connection.close()
        raise
    return Link(connection)


class Unauthenticated(Exception):
    """A peer that can't prove its membership has connected."""


def watch(connection: socket.socket, silence: float) -> None:
    """Enables keepalive: from now on the kernel probes a silent peer, and gives it up after `silence` seconds without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    settings = {  # absent outside Linux
        "TCP_KEEPIDLE": max(1, int(silence / 2)),
        "TCP_KEEPINTVL": max(1, int(silence / 2 / PROBES)),
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": max(1000, int(silence * 1000)),
    }
    for name, value in settings.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reason(error: OSError) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, ssl.SSLError):
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        return f"no certificate of ours ({why.lower().replace('_', ' ')})"
    if error.errno in SILENT:
        return "it does not answer: its machine is off, or the network between is cut"
    return error.strerror or str(error) or type(error).__name__


def is_loopback(address: str) -> bool:
    """Whether the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def joined(address: str, port: int) -> str:
    """As one text: `10.0.0.1:29500`, `[fd00::1]:29500`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split(text: str) -> tuple[str, int]:
    """The inverse of `joined`. Raises ValueError."""
    address, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError("an address and a port are needed, such as 10.0.0.1:29500")
    return address.removeprefix("[").removesuffix("]"), int(port)
