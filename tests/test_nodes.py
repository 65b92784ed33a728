"""A rank group on two machines: the same tokens as on one, over a cable that is cut, and nothing for who does not belong to it.

The machines are network namespaces. Who says what to whom, and what ends when: tests/launcher/test_leader.py.
"""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.proto import link
from penstock.proto.certificates import NAME, Certificates
from penstock.tests.certificates import Authority, authorities
from penstock.tests.hosts import Host, two
from penstock.tests.serving import Server, scratch, serve

Json = dict[str, Any]

FLAGS = ("demo-draft", "--page-size", "4", "--kv-pages", "2048", "--max-batch-prefill-tokens", "32")
PORT = 3000
LENGTH = 50  # tokens
SILENCE = 2  # seconds until a machine that is cut off is lost


# Asks a shard, with all files, the authority's alone, or none. In a process of its own: gRPC once refused the right ones in one
# that had used other authorities before.
ASK = f"""
import sys, grpc
from pathlib import Path
from penstock.proto import rpc, shard_pb2
from penstock.proto.certificates import Certificates
shard, *files = sys.argv[1:]
if files:
    authority_only = grpc.ssl_channel_credentials(Path(files[-1]).read_bytes())
    credentials = rpc.channel_credentials(Certificates(*files)) if files[1:] else authority_only
    channel = grpc.secure_channel(shard, credentials, [("grpc.ssl_target_name_override", {NAME!r})])
else:
    channel = grpc.insecure_channel(shard)
try:
    print("rank", rpc.Stub(channel).Info(shard_pb2.InfoRequest(), timeout=5).rank)
except grpc.RpcError:
    print("refused")
"""


def requests() -> list[Json]:
    """One of each kind, of OpenAI's completions."""
    endless = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    return [
        {"prompt": "Once upon a time", "temperature": 0, **endless},
        {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **endless},
        {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, **endless},
        {"prompt": "Once there was a", "num_beams": 3, "n": 2, **endless},
    ]


def told(port: int, body: Json, gone: Any = None) -> dict[int, str]:
    """The text of each choice. gone: is told once something has come."""
    texts: dict[int, str] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if gone is not None and not gone.done():
                    gone.set_result(None)
    finally:
        connection.close()
    return texts


class Node(Server):
    """A launcher on a host."""

    def __init__(self, folder: Path, host: Host, number: int, *flags: str) -> None:
        folder.mkdir()
        self.host = host
        super().__init__(folder, *flags, "--node-rank", str(number), prefix=host.prefix, port=PORT)

    def health(self) -> int:
        return self.host.run(super().health).result(20)

    def settings(self, rank: int) -> Json:
        """What a rank was told."""
        [file] = self.runs.glob(f"*/rank-{rank}.json")
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def until(self, text: str, count: int = 1, seconds: float = 30) -> None:
        """Returns when it has said so."""
        deadline = time.monotonic() + seconds
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two() as found:
        yield found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def group(hosts: tuple[Host, Host], authority: tuple[Authority, Authority]) -> Iterator[tuple[Node, Node]]:
    flags = (*FLAGS, "--nnodes", "2", "--master-addr", hosts[0].address, "--step-timeout", str(SILENCE), *authority[0].flags)
    with scratch() as folder:
        nodes = [Node(folder / str(number), host, number, *flags) for number, host in enumerate(hosts)]
        try:
            nodes[0].wait_until_ready()
            yield nodes[0], nodes[1]
        finally:
            for node in nodes:
                node.kill()


@pytest.fixture(scope="module")
def expected() -> list[dict[int, str]]:
    """What one machine answers."""
    with serve("--num-shard", "2", *FLAGS) as server, ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda body: told(server.port, body), requests()))


def test_two_machines_answer_as_one_does(group: tuple[Node, Node], expected: list[dict[int, str]]) -> None:
    host = group[0].host
    answers = [host.run(told, PORT, body) for body in requests()]
    assert [answer.result(60) for answer in answers] == expected
    assert len(expected[2]) == 2
    assert f"node 0 of 2, node 0 is at {host.address}:29500 (nodes: --nnodes, rank: --node-rank" in group[0].log
    assert f"penstock: node 1 ({group[1].host.address}) is there" in group[0].log
    assert f"node 0 ({host.address}:29500) starts the group" in group[1].log


def test_a_cut_cable_is_noticed_and_named_and_streams_go_on(group: tuple[Node, Node], expected: list[dict[int, str]]) -> None:
    first, second = group
    began: list[Future[None]] = [Future() for _ in requests()]
    answers = [first.host.run(told, PORT, body, future) for body, future in zip(requests(), began, strict=True)]
    wait(began[:3], 30)
    cut = time.monotonic()
    second.host.cable(False)
    lost = "is lost: it does not answer: its machine is off, or the network between is cut"
    first.until(f"penstock: node 1 ({second.host.address}) {lost}", seconds=15)
    second.until(f"node 0 ({first.host.address}:29500) {lost}", seconds=15)
    assert time.monotonic() - cut < 10
    second.until("without node 0 the shards are ended")
    first.until("waiting for node 1 of 2")
    assert first.health() == 200
    assert not any(answer.done() for answer in answers)
    second.host.cable(True)
    assert [answer.result(60) for answer in answers] == expected
    first.until("ready again after")
    second.until("starts the group again")


def test_it_listens_at_its_own_addresses_only(group: tuple[Node, Node]) -> None:
    for node in group:
        tables = [Path(f"/proc/{node.process.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        found = {tuple(fields[1].split(":")) for table in tables for fields in map(str.split, table) if fields[3] == "0A"}
        addresses = {address[-8:] for address, _ in found}  # gRPC's is of version 6, which contains the one of version 4
        own = {socket.inet_aton(address)[::-1].hex().upper() for address in (node.host.address, "127.0.0.1")}
        assert addresses <= own, addresses
        assert socket.inet_aton(node.host.address)[::-1].hex().upper() in addresses


def test_a_stranger_is_refused_everywhere(group: tuple[Node, Node], authority: tuple[Authority, Authority]) -> None:
    first, second = group
    ours, others = authority
    forged = Certificates(others.files[0], others.files[1], ours.files[2])
    shard = second.settings(1)["listen"]
    assert shard.startswith(f"{second.host.address}:")

    def knock(certificates: Certificates | None) -> bytes:
        with closing(link.connect(first.host.address, 29500, certificates)) as stranger:
            stranger.send(b"{}")
            return stranger.receive(5)

    def ask(*files: str) -> str:
        command = [*first.host.prefix, sys.executable, "-c", ASK, shard, *files]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    for certificates in (forged, None):
        with pytest.raises((OSError, EOFError)):
            second.host.run(knock, certificates).result(20)
    first.until(f"penstock: {second.host.address} was refused: ", count=2)
    for files in ((*others.files[:2], ours.files[2]), (ours.files[2],), ()):
        assert ask(*files) == "refused\n"
    assert ask(*ours.files) == "rank 1\n"
    assert second.settings(1)["token"] not in "".join([*first.children().values(), *second.children().values()])


def test_when_node_0_stops_all_do(group: tuple[Node, Node]) -> None:
    first, second = group
    began: Future[None] = Future()
    running = first.host.run(told, PORT, {**requests()[0], "max_tokens": 60}, began)
    began.result(30)
    second.children()
    first.stop(signal.SIGTERM)
    assert running.result(1)
    second.check_end(0)
    assert "node 0 has stopped as it was asked to" in second.log
