"""Multi-node groups: node 0's register of the nodes (in this process), then whole launchers of nodes that register, start, restart
and stop together (`run_node.py`, with fake processes as ranks)."""

import dataclasses
import io
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import leader, machine, membership, node_messages
from penstock.launcher.console import Console
from penstock.launcher.membership import Membership
from penstock.launcher.node_messages import Hello
from penstock.proto import link
from penstock.proto.certificates import Certificates
from penstock.shard.config import ShardConfig
from penstock.tests.certificates import Authority, authorities
from penstock.tests.launcher.monitored_process import MonitoredProcess
from penstock.tests.launcher.test_supervisor import all_ended

RUN_NODE = str(Path(__file__).with_name("run_node.py"))
TERMS = {"penstock": "1", "weights": "abc", "nodes": "3", "dtype": "float32"}


def hello(node: int, start: str = "a", **terms: str) -> Hello:
    return Hello(node=node, start=start, address=f"10.0.0.{node}", ports=(1, 2), terms={**TERMS, **terms})


# The register of nodes


def test_membership_is_complete_when_all_nodes_are_present_and_idle() -> None:
    roll = Membership(3, TERMS)
    assert roll.missing() == "node 1 and node 2 of 3"
    roll.enter(hello(2))
    assert (roll.complete, roll.missing()) == (False, "node 1 of 3")
    roll.enter(hello(1))
    assert roll.complete
    roll.started()
    assert not roll.complete
    roll.halted(1)
    assert roll.missing() == "node 2 (10.0.0.2) of 3"
    roll.leave(2)
    roll.halted(2)  # a late message, from before the node was lost
    assert roll.missing() == "node 2 of 3"
    roll.enter(hello(2))
    assert roll.complete


def test_late_nodes_are_named_with_the_timeout() -> None:
    roll = Membership(3, TERMS)
    assert roll.late(60).startswith("node 1 and node 2 of 3 have not come within 60 s (--node-timeout): ")
    roll.enter(hello(1))
    assert roll.late(1.5).startswith("node 2 of 3 has not come within 1.5 s (--node-timeout): ")


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (hello(1), ""),
        (hello(0), "node 0 (10.0.0.0) is none of the nodes 1 to 2: --nnodes is 3 on node 0, look at --node-rank"),
        (hello(3), "node 3 (10.0.0.3) is none of the nodes 1 to 2"),
        (hello(1, dtype="bfloat16"), "differs from node 0: dtype is bfloat16 there and float32 on node 0 (say --dtype on both)"),
        (hello(1, nodes="2"), "nodes is 2 there and 3 on node 0 (say --nnodes on both)"),
        (hello(1, penstock="2"), "penstock is 2 there and 1 on node 0 (install the same)"),
        (hello(1, transformers="5"), "transformers is 5 there and unknown on node 0 (install the same)"),
        (
            hello(1, image_pixels="0"),
            "image_pixels is 0 there and unknown on node 0 (say --max-images and --max-image-pixels on both)",
        ),
        (
            hello(1, weights="x"),
            "the model's config.json, or names and sizes of its weights, are others there: copy the same files",
        ),
        (hello(1, weights="x", dtype="float16"), "to both; dtype is float16 there"),
        (hello(1, later="yes"), "later is yes there and unknown on node 0"),
    ],
)
def test_membership_objects_to_a_node_with_other_terms(candidate: Hello, expected: str) -> None:
    objection = Membership(3, TERMS).objection(candidate)
    assert expected in objection
    assert bool(expected) == bool(objection)


def test_second_launcher_of_a_present_node_is_a_rival() -> None:
    roll = Membership(3, TERMS)
    roll.enter(hello(1))
    assert roll.rival(hello(1)) == ""  # the same launcher, which has lost its connection and comes again
    assert roll.rival(hello(1, "b")).startswith("node 1 is there already, from 10.0.0.1")
    roll.leave(1)
    assert roll.rival(hello(1, "b")) == ""


def test_terms_include_every_shard_setting_except_a_ranks_own() -> None:
    """Settings that are added later are compared too, unless they are listed as a rank's own."""
    names = {field.name for field in dataclasses.fields(ShardConfig)}
    assert names >= membership.OWN
    shard = ShardConfig(folder="/here", model="m", page_size=4)
    collected = membership.terms(shard, 2, "abc", {"penstock": "1"})
    assert set(collected) == names - membership.OWN | {"penstock", "weights", "nodes"}
    assert collected["page_size"] == "4"
    assert membership.terms(dataclasses.replace(shard, folder="/there", rank=1), 2, "abc", {"penstock": "1"}) == collected


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]",
        b"{}",
        b'{"kind": "hello"}',
        json.dumps({**hello(1).message(), "kind": "welcome"}).encode(),
        json.dumps({**hello(1).message(), "address": "10.0.0.1\nnode 2"}).encode(),
        json.dumps({**hello(1).message(), "ports": "x"}).encode(),
        json.dumps({**hello(1).message(), "node": float("inf")}).encode(),
        json.dumps({**hello(1).message(), "terms": {"a\nb": "c"}}).encode(),
        json.dumps({**hello(1).message(), "terms": None}).encode(),
        b"[" * 100_000,
    ],
)
def test_malformed_hello_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"^no (hello|message of a launcher)$"):
        node_messages.hello(node_messages.read(message))
    assert node_messages.hello(node_messages.read(node_messages.written(hello(1).message()))) == hello(1)


def test_connections_are_accepted_after_one_that_failed(tmp_path: Path) -> None:
    """As accept(2) says: Linux passes on errors of the new connection."""
    listening, lines = FailingOnce(), io.StringIO()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    orders = node_messages.Orders(epoch=0, relay_address="127.0.0.1:1", token="", store=1)
    meeting = leader.Meeting(
        listening=listening,
        certificates=None,
        silence=1.0,
        timeout=1.0,
        orders=orders,
        addresses=tmp_path,
        console=Console(False, lines, lines),
    )
    group = leader.Leader("the shards", [], 0, [], meeting, Membership(2, TERMS))
    group.attend(lambda event: None)
    with socket.create_connection(listening.getsockname()) as stranger:
        stranger.sendall(b"\0\0\0\2{}")
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
    group.close(0)
    assert "127.0.0.1 was refused: it is no node" in lines.getvalue()


class FailingOnce(socket.socket):
    """A listening socket whose first connection has been aborted."""

    aborted = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self.aborted:
            return super().accept()
        self.aborted = True
        raise ConnectionAbortedError


# Whole launchers


class Node(MonitoredProcess):
    """The launcher of one node, with a fake process as its rank, and the lines that it has written so far."""

    def __init__(self, node: int, **settings: Any) -> None:
        all_settings = {
            "node": node,
            "nodes": 2,
            "terms": TERMS,
            "timeout": 20.0,
            "restarts": 5,
            "behaviour": "runs",
            "certificates": None,
            "router": "serves+drains",
            **settings,
        }
        super().__init__([sys.executable, RUN_NODE, json.dumps(all_settings)])

    def has_line(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)

    def pids(self, name: str = "shard") -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.lines if f"{name}" in line and "has pid" in line]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Node]


def wait_until_up(leader: Node, *followers: Node) -> None:
    """Returns when all ranks run and the server is ready, in either order."""
    while not (leader.has_line("^penstock: ready$") and leader.has_line("shard-0 has pid")):
        leader.read_until("ready$|has pid")
    for follower in followers:
        follower.read_until("has pid")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes_started: list[Node] = []
    addresses = {"port": machine.free_port(), "health": machine.free_port(), "folder": str(tmp_path)}

    def start_node(node: int, **settings: Any) -> Node:
        nodes_started.append(Node(node, **addresses, **settings))
        return nodes_started[-1]

    start_node.port = addresses["port"]  # type: ignore[attr-defined]
    yield start_node
    for node in nodes_started:
        node.kill()
        assert node.process.stdout is not None
        node.process.stdout.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The group's certificate authority, and a foreign one."""
    return authorities(tmp_path_factory.mktemp("certificates"))


def test_ranks_start_only_when_all_nodes_are_present_and_stop_together(start: Start, tmp_path: Path) -> None:
    leader, first = start(0, nodes=3), start(1, nodes=3)
    leader.read_until(r"^penstock: waiting for node 1 and node 2 of 3, up to 20 s$")
    leader.read_until(r"^penstock: node 1 \(127.0.0.1\) is there$")
    time.sleep(0.3)
    assert leader.pids() == []
    second = start(2, nodes=3)
    wait_until_up(leader, first, second)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"address-{rank}": "127.0.0.1:7" for rank in (1, 2)}
    assert first.has_line("^penstock: meets at 127.0.0.1:1 token 2$")
    leader.process.send_signal(signal.SIGTERM)
    assert [node.wait_for_exit() for node in (leader, first, second)] == [0, 0, 0]
    assert all_ended([pid for node in (leader, first, second) for pid in node.pids()], 0)
    assert first.has_line("^penstock: node 0 has stopped as it was asked to$")
    assert not leader.has_line("is lost")
    assert list(tmp_path.iterdir()) == []


def test_node_timeout_is_reported_by_the_waiting_node_and_by_node_0(start: Start) -> None:
    follower = start(1, timeout=1.0)
    assert follower.wait_for_exit() == 1
    assert follower.has_line(
        r"node 0 \(127.0.0.1:\d+\) is not there yet: Connection refused; it was waited for 1 s \(--node-timeout\)"
    )
    leader, first = start(0, nodes=3, timeout=1.5), start(1, nodes=3)
    assert leader.wait_for_exit() == 1
    assert leader.has_line(r"^penstock: node 2 of 3 has not come within 1.5 s \(--node-timeout\)")
    assert first.wait_for_exit() == 1
    assert first.has_line("node 0 ends with exit code 1: its log says why")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2hi"])
@pytest.mark.parametrize("secure", [False, True])
def test_foreign_server_at_node_0s_port_is_reported_within_the_timeout(
    start: Start, answer: bytes, secure: bool, authority: tuple[Authority, Authority]
) -> None:
    """The listener at node 0's address says nothing, speaks HTTP, or sends a message that is not JSON."""
    files = authority[0].files if secure else None
    with link.listen("127.0.0.1", start.port) as listening, ThreadPoolExecutor(1) as threads:  # type: ignore[attr-defined]
        follower = start(1, timeout=1.5, certificates=files)

        def accept_and_answer() -> None:
            accepted = []  # kept open
            with suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])
                    accepted[-1].sendall(answer)
            for connection in accepted:
                connection.close()

        accepting = threads.submit(accept_and_answer)
        assert follower.wait_for_exit() == 1
        link.stop_listening(listening)
        accepting.result()
    reason = r"is not there yet: it accepts connections, but is no penstock launcher: look at --master-port"
    assert follower.has_line(reason + r"; it was waited for 1.5 s \(--node-timeout\)")


def test_node_with_other_settings_is_refused_and_a_matching_one_is_waited_for(start: Start) -> None:
    leader, mismatched = start(0), start(1, terms={**TERMS, "dtype": "bfloat16"})
    assert mismatched.wait_for_exit() == 2
    difference = "differs from node 0: dtype is bfloat16 there and float32 on node 0"
    assert mismatched.has_line(f"node 0 .* refuses this node: node 1 .* {difference}")
    leader.read_until(f"node 1 .* was refused: .*{difference}")
    wait_until_up(leader, start(1))


def test_exit_code_is_2_if_only_a_mismatched_node_came_within_the_timeout(start: Start) -> None:
    leader, mismatched = start(0, timeout=1.5), start(1, terms={**TERMS, "weights": "other"})
    assert (mismatched.wait_for_exit(), leader.wait_for_exit()) == (2, 2)
    assert leader.has_line("node 1 of 2 has not come within 1.5 s .*; the last that came: .* config.json")


def test_rank_crash_on_any_node_restarts_the_whole_rank_group(start: Start) -> None:
    leader, follower = start(0), start(1)
    wait_until_up(leader, follower)
    os.kill(follower.pids()[0], signal.SIGKILL)
    leader.read_until(r"^penstock: node 1 \(127.0.0.1\): shard 1 was killed by SIGKILL")
    leader.read_until("^penstock: ready again after")
    follower.read_until("starts the group again")
    follower.read_until("has pid")
    while len(leader.pids()) < 2:
        leader.read_until("has pid")
    assert [len(node.pids()) for node in (leader, follower)] == [2, 2]
    assert all_ended([node.pids()[0] for node in (leader, follower)], 0)
    assert len(leader.pids("router")) == 1
    # and the same with a rank of node 0
    os.kill(leader.pids()[-1], signal.SIGKILL)
    follower.read_until("has lost some of the group: this node's shards end, to be started again")
    follower.read_until("has pid")
    leader.read_until("^penstock: ready again after")


def test_rank_failure_before_readiness_ends_the_launchers_of_all_nodes(start: Start) -> None:
    leader, follower = start(0), start(1, behaviour="fails+2")
    assert (leader.wait_for_exit(), follower.wait_for_exit()) == (2, 2)
    assert leader.has_line(r"^penstock: node 1 \(127.0.0.1\): shard 1 ended with exit code 2, its last words:$")
    assert leader.has_line("ValueError: what went wrong")


def test_killed_launcher_of_a_node_can_rejoin_the_group(start: Start) -> None:
    leader, follower = start(0), start(1)
    wait_until_up(leader, follower)
    follower.kill()
    leader.read_until(r"^penstock: node 1 \(127.0.0.1\) is lost: its launcher has closed the connection$")
    leader.read_until("^penstock: waiting for node 1 of 2")
    follower = start(1)
    leader.read_until("^penstock: ready again after")
    follower.read_until("has pid")
    leader.kill()
    follower.read_until("^penstock: without node 0 the shards are ended$")
    follower.read_until("it is looked for, up to 20 s")
    assert all_ended(follower.pids(), 0)
    leader = start(0)
    wait_until_up(leader, follower)


def test_second_launcher_of_a_node_waits_until_the_first_ends(start: Start) -> None:
    leader, first = start(0), start(1)
    wait_until_up(leader, first)
    second = start(1)
    second.read_until("does not take this node yet: node 1 is there already, from 127.0.0.1")
    assert first.process.poll() is None
    first.kill()
    leader.read_until("^penstock: ready again after")
    second.read_until("has pid")


def test_sigterm_on_another_node_drains_node_0(start: Start) -> None:
    leader, follower = start(0), start(1)
    wait_until_up(leader, follower)
    follower.process.send_signal(signal.SIGTERM)
    assert (leader.wait_for_exit(), follower.wait_for_exit()) == (0, 0)
    assert leader.has_line(r"^penstock: node 1 \(127.0.0.1\): SIGTERM there: running streams get up to 5 s")
    router_stopped = next(number for number, line in enumerate(leader.lines) if "router stops" in line)
    assert any("shard-0 was asked to stop" in line for line in leader.lines[router_stopped:])


def test_node_lost_while_node_0_drains_is_logged(start: Start) -> None:
    leader, follower = start(0, router="serves+stubborn"), start(1)
    wait_until_up(leader, follower)
    leader.process.send_signal(signal.SIGTERM)
    leader.read_until("router was asked to stop")
    follower.kill()
    leader.read_until(r"^penstock: node 1 \(127.0.0.1\) is lost: its launcher has closed the connection$")
    assert all_ended(leader.pids(), 5)  # then the router cuts its streams
    os.kill(leader.pids("router")[0], signal.SIGKILL)
    assert leader.wait_for_exit() == 0


def test_connections_without_the_groups_certificate_are_refused_and_logged(
    start: Start, authority: tuple[Authority, Authority]
) -> None:
    own_authority, foreign_authority = authority
    port = start.port  # type: ignore[attr-defined]
    leader = start(0, certificates=own_authority.files, timeout=60.0)
    leader.read_until("waiting for node 1")
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    leader.read_until(r"127.0.0.1 was refused: no certificate of ours \(http request\)")
    with (
        pytest.raises((OSError, EOFError)),
        closing(
            link.connect(
                "127.0.0.1", port, Certificates(foreign_authority.files[0], foreign_authority.files[1], own_authority.files[2])
            )
        ) as forged_connection,
    ):
        forged_connection.receive(5.0)
    leader.read_until(r"127.0.0.1 was refused: no certificate of ours \(.*(unable to get local issuer|self-signed) certificate.*\)")
    for files in (foreign_authority.files, None):
        stranger = start(1, certificates=files, timeout=1.0)
        assert stranger.wait_for_exit() == 1
        leader.read_until("127.0.0.1 was refused: no certificate of ours")
    assert stranger.has_line(r"it has closed the connection: does node 0 want|it speaks TLS, and this node has no --tls-cert")
    # The refused connections have not harmed the group: a node with the right certificate still joins.
    wait_until_up(leader, start(1, certificates=own_authority.files))


def test_tls_on_one_side_only_is_reported_as_the_reason(start: Start, authority: tuple[Authority, Authority]) -> None:
    """The reason is still given when node 0 has gone by the time the node gives up."""
    leader = start(0)
    leader.read_until("waiting for node 1")
    secure = start(1, certificates=authority[0].files, timeout=6.0)
    reason = r"it has closed the connection: has node 0 no certificates, or others \(--tls-cert\)\?"
    secure.read_until(f"is not there yet: {reason}; it is looked for")
    leader.read_until("127.0.0.1 was refused: it speaks TLS, and this node has no --tls-cert")
    leader.kill()
    assert secure.wait_for_exit() == 1
    assert secure.has_line(f"is not there yet: Connection refused, and before that: {reason}; it was waited for 6 s")
