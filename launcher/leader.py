"""Node 0's side of a rank group over several machines: a part of its server some of whose processes run on other nodes.

No ranks are started before all nodes are there and their settings match; when anything of the group is lost, on any machine or
between two of them, all of it is ended, and all nodes meet again. The launchers' messages: `node_messages.py`.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..proto import link
from ..proto.certificates import Certificates
from ..proto.link import Link, Unauthenticated
from . import node_messages
from .console import Console
from .membership import Membership, named
from .node_messages import Gone, Hello, Message, Orders, Said, listen, tell
from .parts import GRACE, Command, Event, Failed, Outcome, Part, RemoteEvent, StartNow, StopRequested

GREETING = 1 << 16  # most bytes of a hello message
PAUSE = 0.2  # seconds until connections are accepted again after an error
STRANGERS = 16  # unidentified connections that are listened to at once; more have to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and how the nodes of a group meet."""

    listening: socket.socket
    certificates: Certificates | None
    silence: float  # seconds without a response after which a node is lost
    timeout: float  # seconds that nodes may be missing
    orders: Orders  # without the epoch
    addresses: Path  # folder with a file for each rank of other nodes, `address-RANK`, in which the router finds its address
    console: Console


@dataclass(frozen=True, slots=True)
class Came:
    peer: Link
    hello: Hello


@dataclass(frozen=True, slots=True)
class Late:
    epoch: int


class Leader(Part):
    """A rank group of several nodes. Local ranks are started when the other nodes are there; until then it has no children."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Command],
        limit: int,
        leftovers: Sequence[Path],
        meeting: Meeting,
        membership: Membership,
    ) -> None:
        super().__init__(name, commands, limit, leftovers)
        self._meeting = meeting
        self._membership = membership
        self._links: dict[int, Link] = {}
        self._readers: list[threading.Thread] = []
        self._epoch = 0
        self._waiting = False  # for nodes, to start
        self._running = False
        self._ending = False
        self._found: set[Path] = set()  # address files that were written
        self._objection = ""  # to the last node that was refused
        self._put: Callable[[Event], None] = lambda event: None

    def attend(self, put: Callable[[Event], None]) -> None:
        """See Part."""
        self._put = put
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, environment: Mapping[str, str]) -> None:
        """Starts the group if all nodes are there. Otherwise `hear` returns StartNow when they are."""
        if not self._membership.complete:
            self.due, self._waiting = None, True
            self._meeting.console.info(f"waiting for {self._membership.missing()}, up to {self._meeting.timeout:g} s")
            self._expect()
            return
        self._epoch += 1
        self._waiting, self._running = False, True
        self._tell_all({**self._meeting.orders.message(), "epoch": self._epoch})
        for path, address in self._places():
            self._found.add(path)
            path.write_text(address, encoding="utf-8")
        self._membership.started()
        super().start(environment)

    def kill(self) -> bool:
        """Kills the local ranks; other nodes kill their own, and report when that is done."""
        self._running = False
        for path in self._found:
            path.unlink(missing_ok=True)
        self._tell_all({"kind": "halt", "epoch": self._epoch})
        return super().kill()

    def terminate(self) -> None:
        """See Part."""
        self._running, self._ending = False, True
        self._tell_all({"kind": "stop"})
        super().terminate()

    def close(self, exit_code: int) -> None:
        """Returns when the other nodes have ended as well, or do not respond."""
        link.stop_listening(self._meeting.listening)
        text = f"node 0 ends with exit code {exit_code}: its log says why" if exit_code else "node 0 has stopped as it was asked to"
        self._tell_all({"kind": "end", "code": exit_code, "text": text})
        deadline = time.monotonic() + GRACE
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def hear(self, what: object) -> Outcome:
        """See Part."""
        match what:
            case Came(peer, hello):
                return self._came(peer, hello)
            case Said(peer, message):
                node = self._node(peer)
                return None if node is None else self._said(node, message)
            case Gone(peer, why):
                node = self._node(peer)
                return None if node is None else self._gone(node, why)
            case Late(epoch) if self._waiting and epoch == self._epoch and not self._membership.complete:
                text = self._membership.late(self._meeting.timeout)
                unfit = f"; the last that came: {self._objection}" if self._objection else ""
                return Failed(text + unfit, 2 if unfit else 1, in_vain=True)
        return None

    def _came(self, peer: Link, hello: Hello) -> Outcome:
        name, console = named(hello.node, hello.address), self._meeting.console
        if text := self._membership.objection(hello):
            self._objection = text
            console.error(f"{name} was refused: {text}")
            tell(peer, {"kind": "refused", "text": text})
            return None
        if text := self._membership.rival(hello):
            tell(peer, {"kind": "wait", "text": text})
            return None
        lost = self._running  # it has lost this node, and ended its ranks, before this node noticed
        if hello.node in self._links:
            self._links[hello.node].close()
        self._links[hello.node] = peer
        self._membership.enter(hello)
        tell(peer, {"kind": "welcome"})
        console.info(f"{name} is there")
        return Failed(f"{name} has lost this node, and comes anew") if lost else self._again()

    def _said(self, node: int, message: Message) -> Outcome:
        name = self._name(node)
        match message:
            case {"kind": "died", "epoch": epoch, "text": text, "code": int(code)} if epoch == self._epoch and self._running:
                return Failed(f"{name}: {text}", code)
            case {"kind": "halted", "epoch": epoch} if epoch == self._epoch:
                self._membership.halted(node)
                return self._again()
            case {"kind": "leave", "text": text}:
                return StopRequested(f"{name}: {text}")
        return None

    def _gone(self, node: int, why: str) -> Outcome:
        text = f"{self._name(node)} is lost: {why}"
        del self._links[node]
        self._membership.leave(node)
        if self._running:
            return Failed(text)
        if not self._ending:
            self._meeting.console.error(text)
        return None

    def _again(self) -> Outcome:
        return StartNow() if self._waiting and self._membership.complete else None

    def _node(self, peer: Link) -> int | None:
        """The node at the other end of a link, unless it has another link by now."""
        return next((node for node, known in self._links.items() if known is peer), None)

    def _name(self, node: int) -> str:
        return named(node, self._membership.present[node].address)

    def place(self, rank: int) -> Path:
        """The file in which the router finds the address of a rank of another node."""
        return self._meeting.addresses / f"address-{rank}"

    def _places(self) -> list[tuple[Path, str]]:
        """The address file of each rank of other nodes, and its content."""
        return [
            (self.place(hello.node * len(hello.ports) + number), link.joined(hello.address, port))
            for hello in self._membership.present.values()
            for number, port in enumerate(hello.ports)
        ]

    def _tell_all(self, message: Message) -> None:
        for peer in self._links.values():
            tell(peer, message)

    def _expect(self) -> None:
        timer = threading.Timer(self._meeting.timeout, self._put_here, [Late(self._epoch)])
        timer.daemon = True
        timer.start()

    def _put_here(self, what: object) -> None:
        self._put(RemoteEvent(self, what))

    def _receive(self) -> None:
        """Accepts connections until the socket is closed."""
        room = threading.Semaphore(STRANGERS)
        while True:
            room.acquire()
            try:
                connection, (address, *_) = self._meeting.listening.accept()
            except OSError:
                if self._meeting.listening.fileno() < 0:
                    return
                room.release()  # an error of that connection (accept(2)), or no descriptor is free
                time.sleep(PAUSE)
                continue
            reader = threading.Thread(target=self._converse, args=(connection, str(address), room.release), daemon=True)
            self._readers = [*filter(threading.Thread.is_alive, self._readers), reader]
            reader.start()

    def _converse(self, connection: socket.socket, address: str, known: Callable[[], object]) -> None:
        try:
            peer = link.secure(connection, address, self._meeting.certificates, self._meeting.silence)
            hello = node_messages.hello(node_messages.read(peer.receive(link.HANDSHAKE, GREETING)))
        except Unauthenticated as stranger:
            self._meeting.console.error(str(stranger))
            return
        except link.Encrypted as stranger:
            self._meeting.console.error(f"{address} was refused: {stranger}, and this node has no --tls-cert")
            peer.close()
            return
        except (OSError, EOFError, ValueError) as error:
            self._meeting.console.error(f"{address} was refused: it is no node ({str(error) or 'it has left'})")
            peer.close()
            return
        finally:
            known()
        self._put_here(Came(peer, hello))
        listen(peer, self._put_here, _reason, GREETING)


def _reason(error: Exception) -> str:
    """Why a node is gone."""
    if isinstance(error, ValueError):
        return f"it talks nonsense: {error}"
    return link.reason(error) if isinstance(error, OSError) else "its launcher has closed the connection"
