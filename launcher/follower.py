"""The launcher of a node other than 0: it offers its ranks to node 0, and follows node 0's messages.

Without node 0 none of its ranks run: it ends them and looks for node 0, for as long as nodes may be missing. It ends when node 0
does, with its exit code. The launchers' messages: `node_messages.py`.
"""

import queue
import signal
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from ..proto import link
from ..proto.certificates import Certificates
from ..proto.link import Link
from . import node_messages, processes
from .console import Console
from .event_sources import ECHO, signals, watch_signals
from .node_messages import Gone, Hello, Message, Orders, Said, listen, tell
from .parts import GRACE, Command, Part, Signal
from .processes import Child

FIRST_RETRY, LAST_RETRY = 0.25, 3.0  # seconds between two attempts to reach node 0, doubled each time
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # OpenSSL's words for an answer in plain text
NO_LAUNCHER = "it accepts connections, but is no penstock launcher: look at --master-port"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeZero:
    """Where node 0 is, and how long it is waited for."""

    address: str
    port: int
    certificates: Certificates | None
    silence: float
    timeout: float

    def __str__(self) -> str:
        return f"node 0 ({link.joined(self.address, self.port)})"


class Ranks(Protocol):
    """This node's ranks, and how they are announced and started."""

    def hello(self, address: str) -> Hello:
        """The announcement to node 0. address: this node's, on the way to node 0."""
        ...

    def commands(self, orders: Orders, hello: Hello) -> Sequence[Command]:
        """The ranks' processes."""
        ...


@dataclass(frozen=True, slots=True)
class Reached:
    peer: Link
    hello: Hello  # that was sent
    answer: Message


@dataclass(frozen=True, slots=True)
class Unreached:
    why: str
    somebody: bool  # whether something answered at all


Event = Signal | Child | Reached | Unreached | Said | Gone


class Follower:
    """The main loop of such a node. `run` returns when node 0 has ended, or cannot be found, or when this node is to stop."""

    def __init__(
        self,
        *,
        leader: NodeZero,
        ranks: Ranks,
        environment: Mapping[str, str],
        console: Console,
        grace: float,  # seconds that running streams get when this node is asked to stop
    ) -> None:
        self._leader = leader
        self._ranks = ranks
        self._environment = environment
        self._console = console
        self._grace = grace
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._link: Link | None = None
        self._hello: Hello | None = None
        self._shards = Part("the shards", [], 0)
        self._epoch = 0
        self._since = time.monotonic()  # when node 0 went missing
        self._reason = ""  # logged last
        self._met = ""  # why node 0, or whoever answered, and this node rejected each other
        self._delay = FIRST_RETRY
        self._asked = 0.0  # when this node was asked to stop; 0: not

    def run(self) -> int:
        """Runs until the end. Returns the exit code: node 0's; 1 if that was lost for good, 2 if this node does not fit."""
        with signals() as inbox:
            threading.Thread(target=watch_signals, args=(inbox, self._events.put), daemon=True).start()
            self._seek()
            try:
                return self._follow()
            finally:
                self._shards.kill()
                if self._link is not None:
                    self._link.close()

    def _follow(self) -> int:
        code = None
        while code is None:
            try:
                event = self._events.get(timeout=self._patience())
            except queue.Empty:
                self._console.error("node 0 has not ended in time: this node ends")
                return 1
            match event:
                case Signal(number):
                    code = self._stop(signal.Signals(number).name)
                case Child() as child if child in self._shards.children:
                    self._died(child.verdict(), child.process.returncode)
                case Reached(peer, hello, answer):
                    self._link, self._hello = peer, hello
                    threading.Thread(target=listen, args=(peer, self._events.put, _reason), daemon=True).start()
                    code = self._said(answer)
                case Unreached(why, somebody):
                    self._met = why if somebody else self._met
                    code = self._missing(f"is not there yet: {why}")
                case Said(peer, message) if peer is self._link:
                    code = self._said(message)
                case Gone(peer, why) if peer is self._link:
                    code = self._lost(f"is lost: {why}")
        return code

    def _patience(self) -> float | None:
        """Seconds until node 0 should have ended, once this node has asked it to."""
        return max(0.0, self._asked + self._grace + 2 * GRACE - time.monotonic()) if self._asked else None

    def _said(self, message: Message) -> int | None:
        match message:
            case {"kind": "welcome"}:
                self._console.info(f"{self._leader} knows this node; its ranks start when all nodes are there")
                self._since, self._reason, self._met, self._delay = 0.0, "", "", FIRST_RETRY
            case {"kind": "wait", "text": str(text)}:
                return self._lost(f"does not take this node yet: {text}")
            case {"kind": "refused", "text": str(text)}:
                self._console.error(f"{self._leader} refuses this node: {text}")
                return 2
            case {"kind": "start"}:
                self._start(node_messages.orders(message))
            case {"kind": "halt", "epoch": int(epoch)}:
                if self._shards.children:
                    self._console.info(f"{self._leader} has lost some of the group: this node's shards end, to be started again")
                self._halt(epoch)
            case {"kind": "stop"}:
                self._end()
            case {"kind": "end", "code": int(code), "text": str(text)}:
                (self._console.error if code else self._console.info)(text)
                self._end()
                return code
        return None

    def _start(self, orders: Orders) -> None:
        assert self._hello is not None
        self._epoch = orders.epoch
        self._console.info(f"{self._leader} starts the group" + (" again" if orders.epoch > 1 else ""))
        self._shards = Part("the shards", self._ranks.commands(orders, self._hello), 0)
        try:
            self._shards.start(self._environment)
        except OSError as error:  # no memory, too many processes
            self._died(f"the shards can't be started: {error}", 1)
            return
        for child in self._shards.children:
            processes.follow(child, self._console, self._events.put)

    def _died(self, text: str, code: int) -> None:
        """Reports the death of a rank. Node 0 decides what becomes of the group."""
        self._console.error(text)
        self._shards.kill()
        self._tell({"kind": "died", "epoch": self._epoch, "text": text, "code": code})
        self._tell({"kind": "halted", "epoch": self._epoch})

    def _halt(self, epoch: int) -> None:
        if self._shards.kill():
            self._tell({"kind": "halted", "epoch": epoch})
        else:
            self._console.error("the shards can't be killed: node 0 waits for that")

    def _lost(self, why: str) -> int | None:
        """Handles the loss of node 0: no ranks run without it."""
        if self._shards.children:
            self._shards.kill()
            self._console.error("without node 0 the shards are ended")
        assert self._link is not None
        self._link.close()
        self._link = None
        self._since = self._since or time.monotonic()
        return self._missing(why)

    def _missing(self, why: str) -> int | None:
        """Looks for node 0 again, unless it has been missing for too long."""
        if self._asked:
            return 0
        timeout = self._leader.timeout
        if time.monotonic() >= self._since + timeout:
            # Node 0 gives up as well. Whoever finds nobody there any more should still learn what was the matter.
            before = f", and before that: {self._met}" if self._met and self._met not in why else ""
            self._console.error(f"{self._leader} {why}{before}; it was waited for {timeout:g} s (--node-timeout): this node ends")
            return 1
        if why != self._reason:
            self._console.error(f"{self._leader} {why}; it is looked for, up to {timeout:g} s")
            self._reason = why
        self._seek(self._delay)
        self._delay = min(2 * self._delay, LAST_RETRY)
        return None

    def _stop(self, name: str) -> int | None:
        """Handles a signal: node 0 drains first, for which it needs these ranks."""
        if self._asked:
            if time.monotonic() < self._asked + ECHO:
                return None
            self._console.error("stopped at once")
            return 1
        if self._link is None or not self._shards.children:
            return 0
        self._asked = time.monotonic()
        self._console.info(f"{name}: {self._leader} is asked to drain and stop; once more stops this node at once")
        self._tell({"kind": "leave", "text": f"{name} there"})
        return None

    def _end(self) -> None:
        """Terminates the shards, and kills them after `GRACE`."""
        children = list(self._shards.children)
        self._shards.terminate()
        deadline = time.monotonic() + GRACE
        while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._shards.kill()

    def _tell(self, message: Message) -> None:
        if self._link is not None:
            tell(self._link, message)

    def _seek(self, delay: float = 0.0) -> None:
        threading.Thread(target=self._try, args=(delay,), daemon=True).start()

    def _try(self, delay: float) -> None:
        """Tries once to reach node 0, and puts the result."""
        time.sleep(delay)
        leader = self._leader
        patience = min(link.HANDSHAKE, leader.timeout)
        with ExitStack() as stack:
            try:
                peer = link.connect(leader.address, leader.port, leader.certificates, leader.silence, patience)
                stack.callback(peer.close)
                hello = self._ranks.hello(peer.address)
                peer.send(node_messages.written(hello.message()))
                answer = node_messages.read(peer.receive(patience))
            except (OSError, EOFError, ValueError) as error:
                self._events.put(_unreached(error, leader.certificates is not None))
                return
            stack.pop_all()
        self._events.put(Reached(peer, hello, answer))


def _unreached(error: Exception, certificates: bool) -> Unreached:
    """The event for a failed attempt. certificates: whether this node has some."""
    match error:
        case socket.gaierror():
            return Unreached("its name is not known", somebody=False)
        case link.Encrypted():
            return Unreached("it speaks TLS, and this node has no --tls-cert", somebody=True)
        case ConnectionResetError() | BrokenPipeError() | EOFError() | ssl.SSLEOFError():
            asked = "has node 0 no certificates, or others" if certificates else "does node 0 want certificates"
            return Unreached(f"it has closed the connection: {asked} (--tls-cert)?", somebody=True)
        case ssl.SSLError() if error.reason not in NO_TLS:  # which may be a ValueError as well
            return Unreached(link.reason(error), somebody=True)
        case ssl.SSLError() | link.PeerSilent() | link.NotAMessage() | ValueError():
            return Unreached(NO_LAUNCHER, somebody=True)
    return Unreached(_reason(error), somebody=False)


def _reason(error: Exception) -> str:
    return link.reason(error) if isinstance(error, OSError) else str(error) or "it has closed the connection"
