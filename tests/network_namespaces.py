"""Two network namespaces that act as two machines connected by a network link (a veth pair)."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

CLONE_NEWNET = 0x40000000  # linux/sched.h
Result = TypeVar("Result")


class Host:
    """A network namespace with the loopback interface and one other, named `cable`."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)  # for commands that run in the namespace
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        self._threads = ThreadPoolExecutor(16, initializer=self._enter)

    def run(self, function: Callable[..., Result], *arguments: object) -> "Future[Result]":
        """Calls a function on a thread whose sockets belong to this namespace."""
        return self._threads.submit(function, *arguments)

    def set_link(self, plugged: bool) -> None:
        """Sets the other interface up or down, as if its cable was plugged in or pulled."""
        ip("-n", self.name, "link", "set", "cable", "up" if plugged else "down")

    def close(self) -> None:
        self._threads.shutdown()
        ip("netns", "delete", self.name)

    def _enter(self) -> None:
        with Path("/run/netns", self.name).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns on {threading.current_thread().name}")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two connected hosts. Skips the test if this machine can't create network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the ip command (iproute2)")
    names = [f"penstock-{os.getpid()}-{number}" for number in range(2)]
    hosts: list[Host] = []
    try:
        try:
            for number, name in enumerate(names):
                hosts.append(Host(name, f"10.213.0.{number + 1}"))
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
            host.set_link(True)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.close()
