"""A rank group on two machines: the same text as on one machine, also when the link between them is cut, and refusal of foreign
peers.

The machines are network namespaces. The messages between nodes, and what ends when: tests/launcher/test_leader.py.
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
from penstock.tests.network_namespaces import Host, two_hosts
from penstock.tests.serving import Server, scratch, serve

Json = dict[str, Any]

FLAGS = ("demo-draft", "--page-size", "4", "--kv-pages", "2048", "--max-batch-prefill-tokens", "32")
PORT = 3000
LENGTH = 50  # tokens
STEP_TIMEOUT = 2  # seconds until an unreachable machine counts as lost


# Calls Info of a shard, with all certificate files, with the authority's only, or with none. In a separate process: gRPC once
# refused correct certificates in a process that had used other authorities before.
INFO_SCRIPT = f"""
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
    """One request of each kind, for OpenAI's completions."""
    full_length = {"max_tokens": LENGTH, "ignore_eos": True, "stream": True}
    return [
        {"prompt": "Once upon a time", "temperature": 0, **full_length},
        {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **full_length},
        {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, **full_length},
        {"prompt": "Once there was a", "num_beams": 3, "n": 2, **full_length},
    ]


def answer_texts(port: int, body: Json, started: Any = None) -> dict[int, str]:
    """The text of each choice. `started` gets its result with the first text."""
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
                if started is not None and not started.done():
                    started.set_result(None)
    finally:
        connection.close()
    return texts


class Node(Server):
    """A launcher on a host (a network namespace)."""

    def __init__(self, folder: Path, host: Host, number: int, *flags: str) -> None:
        folder.mkdir()
        self.host = host
        super().__init__(folder, *flags, "--node-rank", str(number), prefix=host.prefix, port=PORT)

    def health(self) -> int:
        return self.host.run(super().health).result(20)

    def settings(self, rank: int) -> Json:
        """The settings that a rank was given."""
        [file] = self.run_folder.glob(f"*/rank-{rank}.json")
        return json.loads(file.read_text())  # type: ignore[no-any-return]

    def until_logged(self, text: str, count: int = 1, seconds: float = 30) -> None:
        """Returns when its log contains `text` `count` times; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.log.count(text) < count:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


@pytest.fixture(scope="module")
def two_authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def two_nodes(hosts: tuple[Host, Host], two_authorities: tuple[Authority, Authority]) -> Iterator[tuple[Node, Node]]:
    flags = (
        *FLAGS,
        "--nnodes",
        "2",
        "--master-addr",
        hosts[0].address,
        "--step-timeout",
        str(STEP_TIMEOUT),
        *two_authorities[0].flags,
    )
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
    """The answers of a server on one machine."""
    with serve("--num-shard", "2", *FLAGS) as server, ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda body: answer_texts(server.port, body), requests()))


def test_two_nodes_give_the_same_answers_as_one_machine(two_nodes: tuple[Node, Node], expected: list[dict[int, str]]) -> None:
    host = two_nodes[0].host
    answers = [host.run(answer_texts, PORT, body) for body in requests()]
    assert [answer.result(60) for answer in answers] == expected
    assert len(expected[2]) == 2
    assert f"node 0 of 2, node 0 is at {host.address}:29500 (nodes: --nnodes, rank: --node-rank" in two_nodes[0].log
    assert f"penstock: node 1 ({two_nodes[1].host.address}) is there" in two_nodes[0].log
    assert f"node 0 ({host.address}:29500) starts the group" in two_nodes[1].log


def test_cut_link_is_reported_by_both_nodes_and_streams_continue_when_it_is_back(
    two_nodes: tuple[Node, Node], expected: list[dict[int, str]]
) -> None:
    first, second = two_nodes
    started: list[Future[None]] = [Future() for _ in requests()]
    answers = [first.host.run(answer_texts, PORT, body, future) for body, future in zip(requests(), started, strict=True)]
    wait(started[:3], 30)
    cut_at = time.monotonic()
    second.host.set_link(False)
    lost_message = "is lost: it does not answer: its machine is off, or the network between is cut"
    first.until_logged(f"penstock: node 1 ({second.host.address}) {lost_message}", seconds=15)
    second.until_logged(f"node 0 ({first.host.address}:29500) {lost_message}", seconds=15)
    assert time.monotonic() - cut_at < 10
    second.until_logged("without node 0 the shards are ended")
    first.until_logged("waiting for node 1 of 2")
    assert first.health() == 200
    assert not any(answer.done() for answer in answers)
    second.host.set_link(True)
    assert [answer.result(60) for answer in answers] == expected
    first.until_logged("ready again after")
    second.until_logged("starts the group again")


def test_nodes_listen_on_their_own_addresses_only(two_nodes: tuple[Node, Node]) -> None:
    for node in two_nodes:
        tables = [Path(f"/proc/{node.process.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        listening = {tuple(fields[1].split(":")) for table in tables for fields in map(str.split, table) if fields[3] == "0A"}
        addresses = {address[-8:] for address, _ in listening}  # gRPC listens on an IPv6 address that contains the IPv4 address
        own = {socket.inet_aton(address)[::-1].hex().upper() for address in (node.host.address, "127.0.0.1")}
        assert addresses <= own, addresses
        assert socket.inet_aton(node.host.address)[::-1].hex().upper() in addresses


def test_peers_without_our_certificate_are_refused_by_node_0_and_by_shards(
    two_nodes: tuple[Node, Node], two_authorities: tuple[Authority, Authority]
) -> None:
    first, second = two_nodes
    ours, others = two_authorities
    forged = Certificates(others.files[0], others.files[1], ours.files[2])
    shard = second.settings(1)["listen"]
    assert shard.startswith(f"{second.host.address}:")

    def connect_to_node_0(certificates: Certificates | None) -> bytes:
        with closing(link.connect(first.host.address, 29500, certificates)) as connection:
            connection.send(b"{}")
            return connection.receive(5)

    def ask_shard(*files: str) -> str:
        command = [*first.host.prefix, sys.executable, "-c", INFO_SCRIPT, shard, *files]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    for certificates in (forged, None):
        with pytest.raises((OSError, EOFError)):
            second.host.run(connect_to_node_0, certificates).result(20)
    first.until_logged(f"penstock: {second.host.address} was refused: ", count=2)
    for files in ((*others.files[:2], ours.files[2]), (ours.files[2],), ()):
        assert ask_shard(*files) == "refused\n"
    assert ask_shard(*ours.files) == "rank 1\n"
    assert second.settings(1)["token"] not in "".join([*first.children().values(), *second.children().values()])


def test_all_nodes_stop_when_node_0_stops(two_nodes: tuple[Node, Node]) -> None:
    first, second = two_nodes
    started: Future[None] = Future()
    running = first.host.run(answer_texts, PORT, {**requests()[0], "max_tokens": 60}, started)
    started.result(30)
    second.children()
    first.stop(signal.SIGTERM)
    assert running.result(1)
    second.check_end(0)
    assert "node 0 has stopped as it was asked to" in second.log
