"""Assembles a rank group over several machines: from options and ranks to node 0's `Leader`, or another node's `Follower`."""

import dataclasses
import errno
import importlib.metadata
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..proto import certificates, link, settings
from ..proto.certificates import Certificates
from ..proto.images import DESCRIPTIONS
from ..shard.config import ShardConfig
from . import children, machine, membership, rundir, vision
from .console import Console
from .errors import UsageError
from .follower import Follower, NodeZero
from .leader import Leader, Meeting
from .membership import Membership
from .node_messages import Hello, Orders
from .options import Options
from .parts import Command

NAMES = 30.0  # seconds in which a node's own name may become known: an orchestrator creates it when the machine is there


@dataclass(frozen=True, slots=True)
class Node:
    """This node's ranks, and how their processes are started."""

    asked: Options
    shards: Sequence[ShardConfig]
    digest: str  # of the model's files
    folder: Path  # this server's private folder
    environment: Mapping[str, str]
    console: Console
    beside: Mapping[str, str] = field(default_factory=dict)  # environment variables for its shards only

    @property
    def silence(self) -> float:
        """Seconds without a response after which another node counts as lost."""
        return min(link.SILENCE, self.asked.step_timeout)

    @property
    def terms(self) -> dict[str, str]:
        """All that must be the same on every node."""
        # The digest covers the draft model and adapters, whose folders may differ between nodes.
        first = self.shards[0]
        named = ("penstock", "torch", "transformers") if first.image_pixels else ("penstock", "torch")
        versions = {name: importlib.metadata.version(name) for name in named}
        if first.image_pixels:
            versions[DESCRIPTIONS[0]] = vision.digest(Path(first.folder))
        speculate = re.sub(r"draft=[^,]*", "draft", first.speculate)
        shard = dataclasses.replace(first, speculate=speculate, adapters=tuple((name, "") for name, _ in first.adapters))
        return membership.terms(shard, self.asked.nnodes, self.digest, versions)

    def start(self, shard: ShardConfig, orders: Orders, master: str, own: str) -> Command:
        """The process of a rank, which meets the others as ordered. master, own: addresses of node 0 and of this node."""
        asked = self.asked
        placed = dataclasses.replace(
            shard,
            relay_address=orders.relay_address,
            token=orders.token,
            link_timeout=self.silence,
            tls_cert=asked.tls_cert,
            tls_key=asked.tls_key,
            tls_ca=asked.tls_ca,
            master_addr=master,
            master_port=orders.store,
        )
        file = self.folder / f"rank-{shard.rank}.json"  # `ps` would show the token
        with rundir.writing(str(self.folder)):
            file.write_text(settings.dump(placed), encoding="utf-8")
        found = machine.interface(own)
        # NCCL takes all interfaces whose names begin so, unless there is a = before the name.
        names = {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": f"={found}"} if found else {}
        chosen = {name: value for name, value in names.items() if not self.environment.get(name)}
        return Command(f"shard {shard.rank}", children.command("penstock.shard", f"@{file}"), {**chosen, **self.beside})


class Ranks:
    """See `follower.Ranks`."""

    def __init__(self, own: Node) -> None:
        self._own = own
        self._start = secrets.token_hex(8)
        self._ports: dict[str, tuple[int, ...]] = {}  # by address

    def hello(self, address: str) -> Hello:
        asked = self._own.asked
        if asked.node_addr:
            address = _resolved(asked.node_addr)
        if address not in self._ports:
            self._ports[address] = tuple(machine.free_ports(address, len(self._own.shards)))
        node, ports = asked.node_rank or 0, self._ports[address]
        return Hello(node=node, start=self._start, address=address, ports=ports, terms=self._own.terms)

    def commands(self, orders: Orders, hello: Hello) -> Sequence[Command]:
        master, _ = link.split(orders.relay_address)
        places = [link.joined(hello.address, port) for port in hello.ports]
        shards = [
            dataclasses.replace(shard, socket="", relay="", listen=place)
            for shard, place in zip(self._own.shards, places, strict=True)
        ]
        return [self._own.start(shard, orders, master, hello.address) for shard in shards]


def lead(own: Node) -> tuple[Leader, list[str]]:
    """The group as node 0 starts it, and where the router finds the ranks. Listens from now on. Raises UsageError."""
    asked = own.asked
    certified = checked(asked)
    address = _own_address(own)
    try:
        listening = link.listen(address, asked.master_port)
        relay, store = machine.free_ports(address, 2)
    except OSError as error:
        place = link.joined(address, asked.master_port)
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"--master-addr {asked.master_addr} is no address of this machine, which is node 0: name its own"
            ) from None
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"{place} is in use: choose another --master-port, on all nodes") from None
        raise UsageError(f"can't listen at {place}, where the nodes meet: {error.strerror}") from None
    orders = Orders(epoch=0, relay_address=link.joined(address, relay), token=secrets.token_hex(16), store=store)
    meeting = Meeting(
        listening=listening,
        certificates=certified,
        silence=own.silence,
        timeout=asked.node_timeout,
        orders=orders,
        addresses=own.folder,
        console=own.console,
    )
    commands = [own.start(shard, orders, address, address) for shard in own.shards]
    left = [Path(path) for shard in own.shards for path in {shard.socket, shard.relay} if path]
    group = Leader("the shards", commands, asked.max_restarts, left, meeting, Membership(asked.nnodes, own.terms))
    others = range(len(own.shards), own.shards[0].ranks)
    return group, [*(f"unix:{shard.socket}" for shard in own.shards), *(f"file:{group.place(rank)}" for rank in others)]


def follow(own: Node) -> int:
    """Serves as a node other than 0. Returns the exit code. Raises UsageError."""
    asked = own.asked
    if asked.node_addr:
        try:
            machine.free_ports(_awaited("--node-addr", asked.node_addr, own), 1)
        except OSError:
            raise UsageError(
                f"--node-addr {asked.node_addr} is no address of this machine: name one at which the others reach it"
            ) from None
    leader = NodeZero(
        address=asked.master_addr,
        port=asked.master_port,
        certificates=checked(asked),
        silence=own.silence,
        timeout=asked.node_timeout,
    )
    return Follower(
        leader=leader,
        ranks=Ranks(own),
        environment=own.environment,
        console=own.console,
        grace=asked.graceful_termination_timeout,
    ).run()


def checked(asked: Options, address: str = "") -> Certificates | None:
    """The TLS certificates by which processes of several machines trust each other. Raises UsageError if they are invalid, or if
    without them anybody could reach the ranks at `address` and the operator has not allowed that."""
    named = [path for path in (asked.tls_cert, asked.tls_key, asked.tls_ca) if path]
    if len(named) not in (0, 3):
        raise UsageError("--tls-cert, --tls-key and --tls-ca belong together: name all three, or none")
    found = certificates.of(asked)
    if found is not None:
        try:
            found.check()
        except OSError as error:
            why = link.reason(error)
            raise UsageError(
                f"--tls-cert {asked.tls_cert} with --tls-key {asked.tls_key} would be refused by other nodes: {why}. It needs the "
                f"name {certificates.NAME} (subjectAltName), --tls-ca as its authority, and use as client and as server"
            ) from None
    elif address and not asked.insecure_nodes and not link.is_loopback(address.strip("[]")):
        raise UsageError(
            f"ranks would obey anybody who reaches {address}: name certificates with --tls-cert, --tls-key and --tls-ca, or say "
            "--insecure-nodes where nobody else is in the network"
        )
    return found


def _own_address(own: Node) -> str:
    """Node 0's address. Raises UsageError."""
    asked = own.asked
    address = _awaited("--master-addr", asked.master_addr, own)
    if link.is_loopback(address) and not link.is_loopback(asked.master_addr):
        raise UsageError(
            f"--master-addr {asked.master_addr} is {address} here (/etc/hosts says so), where no other node comes: name an address "
            "at which the others reach this machine"
        )
    return address


def _awaited(flag: str, name: str, own: Node) -> str:
    """The address of this node's own name, which may become known later than this process starts. Raises UsageError."""
    deadline, announced = time.monotonic() + min(NAMES, own.asked.node_timeout), False
    while True:
        try:
            return _resolved(name)
        except OSError:
            if time.monotonic() > deadline:
                raise UsageError(f"{flag} {name} has no address: is its name known here?") from None
        if not announced:
            own.console.info(f"the name {name} is not known yet")
            announced = True
        time.sleep(1)


def _resolved(name: str) -> str:
    """The first address of a name. Raises OSError."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
