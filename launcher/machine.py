"""Inspects this machine: cores, memory, GPUs, free ports. Reads /proc and /sys; imports no torch, knows no model."""

import errno
import fcntl
import ipaddress
import os
import resource
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..proto import process
from ..proto.process import available_memory, control_groups, lines_of
from . import amd, nvidia
from .errors import UsageError
from .gpus import Gpus

FIRST_PORT = 10240  # lowest port that is chosen; well-known services have lower ones
SIOCGIFADDR = 0x8915  # linux/sockios.h
FILES = 128  # open files beside connections: the router's may be 100; eight shards' pipes and sockets take some in the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of this machine, in bytes."""

    cores: int  # physical cores that this process may use
    memory: int  # that can be taken without swapping
    fast_bfloat16: bool  # the CPU multiplies bfloat16 in hardware
    packs_bfloat16: bool = False  # oneDNN multiplies bfloat16 by AVX-512, for which it repacks matrices, too
    gpus: Gpus = field(default_factory=Gpus)

    def share(self, parts: int, gpus: int) -> "Machine":
        """The resources of each of `parts` equal parts at least, with `gpus` GPUs each, in their order."""
        taken = self.gpus.memory[: parts * gpus]
        least = tuple(min(taken[place::gpus]) for place in range(gpus)) if taken else ()
        own = replace(self.gpus, memory=least)
        return replace(self, cores=max(1, self.cores // parts), memory=self.memory // parts, gpus=own)


def inspect() -> Machine:
    flags = _cpu_flags()
    of_amd = amd.find(os.environ)
    gpus = of_amd if of_amd.memory else nvidia.find(os.environ)
    return Machine(
        cores=cores(),
        memory=available_memory(),
        fast_bfloat16=not flags.isdisjoint({"avx512_bf16", "amx_bf16"}),
        packs_bfloat16=flags >= {"avx512vl", "avx512bw", "avx512dq"},
        gpus=gpus if gpus.memory or not of_amd.obstacle else of_amd,
    )


def cores() -> int:
    """Physical cores in our affinity mask, up to the container's quota. Two hardware threads of a core multiply no faster than
    one."""
    usable = os.sched_getaffinity(0)
    physical = set()
    for cpu in usable:
        siblings = process.SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        physical.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, min([len(physical), *_cpu_quotas()]))


def _cpu_quotas() -> list[int]:
    """Whole CPUs that each control group above us allows on average. With one thread more, all are throttled."""
    quotas = []
    for folder in control_groups("cpu"):
        quota, _, period = "".join(lines_of(folder / "cpu.max")).strip().partition(" ")
        if not quota:
            quota = "".join(lines_of(folder / "cpu.cfs_quota_us")).strip()
            period = "".join(lines_of(folder / "cpu.cfs_period_us")).strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) // int(period))
    return quotas


def _cpu_flags() -> set[str]:
    return next((set(line.split()) for line in lines_of(process.PROC / "cpuinfo") if line.startswith("flags")), set())


def take_files() -> None:
    """Raises the limit of open files to what a server needs beside its connections, for us and our children. Raises UsageError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < FILES:  # below is "no limit"
        raise UsageError(
            f"only {hard} open files are allowed here, and a server has up to {FILES} besides its connections: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
        )
    if 0 <= soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))


def check_port(hostname: str, port: int, host_flag: str = "--hostname", port_flag: str = "--port") -> None:
    """Raises UsageError, which names the holder and a flag, unless `hostname`:`port` can be listened on."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the router does: lingering connections are no obstacle
        try:
            probe.bind((hostname, port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                by = _holder(port)
                raise UsageError(f"port {port} is in use{by}: choose another with {port_flag}") from None
            if error.errno == errno.EACCES:
                raise UsageError(f"port {port} needs privileges: choose one from 1024 with {port_flag}") from None
            raise UsageError(
                f"can't listen on {hostname}: {error.strerror}; {host_flag} takes an address of this machine, or 0.0.0.0 for all"
            ) from None


def _holder(port: int) -> str:
    """ " by process 12 (command)", as far as we may look into other processes; else ""."""
    inodes = {
        f"socket:[{fields[9]}]"
        for table in ("tcp", "tcp6")
        for fields in (line.split() for line in lines_of(process.PROC / "net" / table)[1:])
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port  # 0A: listening
    }
    for holder in process.PROC.iterdir():
        if holder.name.isdigit() and not inodes.isdisjoint(_descriptors(holder)):
            command = " ".join("".join(lines_of(holder / "cmdline")).split("\0")).strip()
            return f" by process {holder.name} ({command[:80]})"
    return ""


def _descriptors(holder: Path) -> Iterator[str]:
    """The targets of a process's descriptors, as far as we may look: none of another user's, none that is closed meanwhile."""
    try:
        for descriptor in (holder / "fd").iterdir():
            with suppress(FileNotFoundError):
                yield os.readlink(descriptor)
    except OSError:
        return


def free_port() -> int:
    """A free port of this machine only, see `free_ports`."""
    [port] = free_ports("127.0.0.1", 1)
    return port


def free_ports(address: str, count: int) -> list[int]:
    """Ports of `address` at which nobody listens, and that the kernel will not give to outgoing connections before they are used.
    Raises OSError if the address is not this machine's."""
    [given, *_] = lines_of(process.PROC / "sys/net/ipv4/ip_local_port_range") or ["32768"]
    settled = range(FIRST_PORT, int(given.split()[0]))
    # 0: any port, where no others are to be had
    sought = secrets.SystemRandom().sample(settled, min(len(settled), 100)) + [0] * count
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            try:
                probe = stack.enter_context(socket.create_server((address, sought.pop(0)), family=family))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not sought:
                    raise
            else:
                ports.append(int(probe.getsockname()[1]))
    return ports


def interface(address: str) -> str:
    """The name of the network interface that has this address; "" if that is unknown."""
    sought = ipaddress.ip_address(address)
    if sought.version == 6:
        rows = [line.split() for line in lines_of(process.PROC / "net/if_inet6")]
        return next((row[5] for row in rows if int(row[0], 16) == int(sought)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()))
                there = ipaddress.ip_address(found[20:24])
                if there == sought or (there.is_loopback and sought.is_loopback):
                    return name
    return ""
