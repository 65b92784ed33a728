"""Several rank groups (replicas) on one machine: each one's share of the machine, and the addresses of its ranks. Pure."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError
from .gpus import Gpus
from .machine import Machine
from .options import Options

LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank group runs: its sockets or ports, and the GPUs that it sees."""

    number: int
    alone: bool  # there are no others on this machine
    sockets: Sequence[str]  # of the ranks
    relay: str
    meeting: str
    listen: Sequence[str]  # host:port of the ranks, where they listen at ports instead of sockets; else ()
    environment: Mapping[str, str]  # of its processes, in addition to the common one

    @property
    def name(self) -> str:
        """The replica's name in the router."""
        return str(self.number)

    @property
    def title(self) -> str:
        """The group's name for people."""
        return "the shards" if self.alone else f"replica {self.number}"

    @property
    def addresses(self) -> Sequence[str]:
        """Where a router finds the ranks: as `addresses_of` reads it, which is how operators name them."""
        return self.listen or [f"unix:{path}" for path in self.sockets]

    @property
    def files(self) -> list[Path]:
        """Files that killed processes leave behind."""
        return [Path(path) for path in (*self.sockets, self.relay, self.meeting)]

    def process(self, rank: int) -> str:
        """The name of a rank's process."""
        return f"shard {rank}" if self.alone else f"replica {self.number} shard {rank}"


def share(options: Options, machine: Machine) -> Machine:
    """The machine's resources for each rank group. Raises UsageError."""
    parts, gpus = options.local_replicas, len(machine.gpus.memory)
    if parts < 2:
        return machine
    ranks = options.num_shard or (max(2, gpus // parts) if options.sharded else 1)
    if gpus and options.device != "cpu" and parts * ranks > gpus:
        raise UsageError(
            f"--replicas {parts} of {ranks} rank{'' if ranks == 1 else 's'} each need {parts * ranks} GPUs, and there are {gpus}: "
            "lower one of them"
        )
    return machine.share(parts, ranks)


def divide(options: Options, ranks: int, prefix: str, environment: Mapping[str, str], gpus: Gpus) -> list[Place]:
    """The places of all groups of so many ranks. prefix: of the paths of their files; gpus: those that they share."""
    groups = options.local_replicas
    listening = _listening(options, groups * ranks)
    places = []
    for group in range(groups):
        own = f"{prefix}-{group}" if groups > 1 else prefix
        sockets = [f"{own}-{rank}" for rank in range(ranks)]
        listen = listening[group * ranks : (group + 1) * ranks]
        devices = _devices(group, ranks, environment, gpus) if gpus.memory and (groups > 1 or gpus.names) else {}
        places.append(Place(group, groups == 1, sockets, f"{own}-relay", f"{own}-meeting", listen, devices))
    return places


def listening(places: Sequence[Place]) -> Iterator[tuple[str, int]]:
    """The addresses where ranks listen that can be tried beforehand: IP addresses only, since a name may become known later."""
    for place in places:
        for each in place.listen:
            host, _, port = each.rpartition(":")
            with suppress(ValueError):
                yield str(ipaddress.ip_address(host.strip("[]"))), int(port)


def _listening(options: Options, count: int) -> list[str]:
    if not options.shard_listen:
        return []
    host, _, port = options.shard_listen.rpartition(":")
    if int(port) + count > LAST_PORT + 1:
        raise UsageError(
            f"--shard-listen {options.shard_listen} is the first of {count} ports, and there are none above {LAST_PORT}"
        )
    return [f"{host}:{int(port) + number}" for number in range(count)]


def _devices(group: int, ranks: int, environment: Mapping[str, str], gpus: Gpus) -> dict[str, str]:
    """The variable that shows a group its GPUs: the next of those that are visible to the launcher, in their order."""
    given = [name.strip() for name in environment.get(gpus.variable, "").split(",") if name.strip()]
    names = gpus.names or given or list(map(str, range((group + 1) * ranks)))
    return {gpus.variable: ",".join(names[group * ranks : (group + 1) * ranks])}
