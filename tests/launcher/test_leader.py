"""Several nodes that meet before anything is loaded: the roll, and whole launchers whose ranks are stand-ins."""

import dataclasses
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

from penstock.launcher import machine, node_messages, roll_call
from penstock.launcher.node_messages import Hello
from penstock.launcher.roll_call import RollCall
from penstock.proto import link
from penstock.proto.certificates import Certificates
from penstock.shard.config import ShardConfig
from penstock.tests.certificates import Authority, authorities
from penstock.tests.launcher.reading import Reading
from penstock.tests.launcher.test_supervisor import gone

HARNESS = str(Path(__file__).with_name("node_harness.py"))
TERMS = {"penstock": "1", "weights": "abc", "nodes": "3", "dtype": "float32"}


def hello(node: int, start: str = "a", **terms: str) -> Hello:
    return Hello(node=node, start=start, address=f"10.0.0.{node}", ports=(1, 2), terms={**TERMS, **terms})


# The roll


def test_the_roll_is_complete_when_all_are_there_and_nothing_runs() -> None:
    roll = RollCall(3, TERMS)
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
    roll.halted(2)  # what it said before it was lost
    assert roll.missing() == "node 2 of 3"
    roll.enter(hello(2))
    assert roll.complete


def test_who_is_late_is_named_with_the_time() -> None:
    roll = RollCall(3, TERMS)
    assert roll.late(60).startswith("node 1 and node 2 of 3 have not come within 60 s (--node-timeout): ")
    roll.enter(hello(1))
    assert roll.late(1.5).startswith("node 2 of 3 has not come within 1.5 s (--node-timeout): ")


@pytest.mark.parametrize(
    ("came", "words"),
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
def test_what_does_not_fit_is_named(came: Hello, words: str) -> None:
    objection = RollCall(3, TERMS).objection(came)
    assert words in objection
    assert bool(words) == bool(objection)


def test_one_node_is_there_once() -> None:
    roll = RollCall(3, TERMS)
    roll.enter(hello(1))
    assert roll.rival(hello(1)) == ""  # it has lost us, and comes again
    assert roll.rival(hello(1, "b")).startswith("node 1 is there already, from 10.0.0.1")
    roll.leave(1)
    assert roll.rival(hello(1, "b")) == ""


def test_every_setting_of_a_rank_is_compared_unless_it_is_its_own() -> None:
    """One that is added later is, too."""
    names = {field.name for field in dataclasses.fields(ShardConfig)}
    assert names >= roll_call.OWN
    shard = ShardConfig(folder="/here", model="m", page_size=4)
    found = roll_call.terms(shard, 2, "abc", {"penstock": "1"})
    assert set(found) == names - roll_call.OWN | {"penstock", "weights", "nodes"}
    assert found["page_size"] == "4"
    assert roll_call.terms(dataclasses.replace(shard, folder="/there", rank=1), 2, "abc", {"penstock": "1"}) == found


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
        json.dumps({**hello(1).message(), "terms": {"a\nb": "c"}}).encode(),
        json.dumps({**hello(1).message(), "terms": None}).encode(),
        b"[" * 100_000,
    ],
)
def test_what_is_no_hello_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"^no (hello|message of a launcher)$"):
        node_messages.hello(node_messages.read(message))
    assert node_messages.hello(node_messages.read(node_messages.written(hello(1).message()))) == hello(1)


# Whole launchers


class Node(Reading):
    """A launcher with a stand-in for its rank, and what it has written so far."""

    def __init__(self, node: int, **settings: Any) -> None:
        told = {
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
        super().__init__([sys.executable, HARNESS, json.dumps(told)])

    def says(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)

    def pids(self, name: str = "shard") -> list[int]:
        return [int(line.rpartition(" ")[2]) for line in self.lines if f"{name}" in line and "has pid" in line]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Node]


def up(leader: Node, *followers: Node) -> None:
    """Returns when all ranks run, and the server is ready, in whatever order."""
    while not (leader.says("^penstock: ready$") and leader.says("shard-0 has pid")):
        leader.until("ready$|has pid")
    for follower in followers:
        follower.until("has pid")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Node] = []
    places = {"port": machine.free_port(), "health": machine.free_port(), "folder": str(tmp_path)}

    def begin(node: int, **settings: Any) -> Node:
        started.append(Node(node, **places, **settings))
        return started[-1]

    begin.port = places["port"]  # type: ignore[attr-defined]
    yield begin
    for node in started:
        node.kill()
        assert node.process.stdout is not None
        node.process.stdout.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Ours, and somebody else's."""
    return authorities(tmp_path_factory.mktemp("certificates"))


def test_nothing_starts_before_all_are_there_and_all_end_together(start: Start, tmp_path: Path) -> None:
    leader, first = start(0, nodes=3), start(1, nodes=3)
    leader.until(r"^penstock: waiting for node 1 and node 2 of 3, up to 20 s$")
    leader.until(r"^penstock: node 1 \(127.0.0.1\) is there$")
    time.sleep(0.3)
    assert leader.pids() == []
    second = start(2, nodes=3)
    up(leader, first, second)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"address-{rank}": "127.0.0.1:7" for rank in (1, 2)}
    assert first.says("^penstock: meets at 127.0.0.1:1 token 2$")
    leader.process.send_signal(signal.SIGTERM)
    assert [node.end() for node in (leader, first, second)] == [0, 0, 0]
    assert gone([pid for node in (leader, first, second) for pid in node.pids()], 0)
    assert first.says("^penstock: node 0 has stopped as it was asked to$")
    assert not leader.says("is lost")
    assert list(tmp_path.iterdir()) == []


def test_late_nodes_are_named_on_both_sides(start: Start) -> None:
    lonely = start(1, timeout=1.0)
    assert lonely.end() == 1
    assert lonely.says(r"node 0 \(127.0.0.1:\d+\) is not there yet: Connection refused; it was waited for 1 s \(--node-timeout\)")
    leader, first = start(0, nodes=3, timeout=1.5), start(1, nodes=3)
    assert leader.end() == 1
    assert leader.says(r"^penstock: node 2 of 3 has not come within 1.5 s \(--node-timeout\)")
    assert first.end() == 1
    assert first.says("node 0 ends with exit code 1: its log says why")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\2hi"])
@pytest.mark.parametrize("secure", [False, True])
def test_who_accepts_and_is_no_launcher_is_named_in_time(
    start: Start, answer: bytes, secure: bool, authority: tuple[Authority, Authority]
) -> None:
    """A listener that says nothing, one that speaks HTTP, one that says nonsense."""
    files = authority[0].files if secure else None
    with link.listen("127.0.0.1", start.port) as listening, ThreadPoolExecutor(1) as threads:  # type: ignore[attr-defined]
        lonely = start(1, timeout=1.5, certificates=files)

        def attend() -> None:
            accepted = []  # and kept open
            with suppress(OSError):
                while True:
                    accepted.append(listening.accept()[0])
                    accepted[-1].sendall(answer)
            for connection in accepted:
                connection.close()

        attending = threads.submit(attend)
        assert lonely.end() == 1
        link.stop_listening(listening)
        attending.result()
    why = r"is not there yet: it accepts connections, but is no penstock launcher: look at --master-port"
    assert lonely.says(why + r"; it was waited for 1.5 s \(--node-timeout\)")


def test_a_node_that_does_not_fit_is_told_and_the_others_wait_for_a_better_one(start: Start) -> None:
    leader, misfit = start(0), start(1, terms={**TERMS, "dtype": "bfloat16"})
    assert misfit.end() == 2
    difference = "differs from node 0: dtype is bfloat16 there and float32 on node 0"
    assert misfit.says(f"node 0 .* refuses this node: node 1 .* {difference}")
    leader.until(f"node 1 .* was refused: .*{difference}")
    up(leader, start(1))


def test_if_none_fits_in_time_it_is_the_operators_fault(start: Start) -> None:
    leader, misfit = start(0, timeout=1.5), start(1, terms={**TERMS, "weights": "other"})
    assert (misfit.end(), leader.end()) == (2, 2)
    assert leader.says("node 1 of 2 has not come within 1.5 s .*; the last that came: .* config.json")


def test_when_a_rank_dies_elsewhere_the_whole_group_meets_anew(start: Start) -> None:
    leader, follower = start(0), start(1)
    up(leader, follower)
    os.kill(follower.pids()[0], signal.SIGKILL)
    leader.until(r"^penstock: node 1 \(127.0.0.1\): shard 1 was killed by SIGKILL")
    leader.until("^penstock: ready again after")
    follower.until("starts the group again")
    follower.until("has pid")
    while len(leader.pids()) < 2:
        leader.until("has pid")
    assert [len(node.pids()) for node in (leader, follower)] == [2, 2]
    assert gone([node.pids()[0] for node in (leader, follower)], 0)
    assert len(leader.pids("router")) == 1
    # and the other way round
    os.kill(leader.pids()[-1], signal.SIGKILL)
    follower.until("has lost some of the group: this node's shards end, to be started again")
    follower.until("has pid")
    leader.until("^penstock: ready again after")


def test_a_rank_that_fails_before_all_were_ready_ends_all(start: Start) -> None:
    leader, follower = start(0), start(1, behaviour="fails+2")
    assert (leader.end(), follower.end()) == (2, 2)
    assert leader.says(r"^penstock: node 1 \(127.0.0.1\): shard 1 ended with exit code 2, its last words:$")
    assert leader.says("ValueError: what went wrong")


def test_a_launcher_that_is_killed_may_come_again(start: Start) -> None:
    leader, follower = start(0), start(1)
    up(leader, follower)
    follower.kill()
    leader.until(r"^penstock: node 1 \(127.0.0.1\) is lost: its launcher has closed the connection$")
    leader.until("^penstock: waiting for node 1 of 2")
    follower = start(1)
    leader.until("^penstock: ready again after")
    follower.until("has pid")
    leader.kill()
    follower.until("^penstock: without node 0 the shards are ended$")
    follower.until("it is looked for, up to 20 s")
    assert gone(follower.pids(), 0)
    leader = start(0)
    up(leader, follower)


def test_a_second_launcher_of_the_same_node_waits_for_the_end_of_the_first(start: Start) -> None:
    leader, first = start(0), start(1)
    up(leader, first)
    second = start(1)
    second.until("does not take this node yet: node 1 is there already, from 127.0.0.1")
    assert first.process.poll() is None
    first.kill()
    leader.until("^penstock: ready again after")
    second.until("has pid")


def test_a_node_that_is_asked_to_stop_asks_node_0_to_drain(start: Start) -> None:
    leader, follower = start(0), start(1)
    up(leader, follower)
    follower.process.send_signal(signal.SIGTERM)
    assert (leader.end(), follower.end()) == (0, 0)
    assert leader.says(r"^penstock: node 1 \(127.0.0.1\): SIGTERM there: running streams get up to 5 s")
    stopped = next(number for number, line in enumerate(leader.lines) if "router stops" in line)
    assert any("shard-0 was asked to stop" in line for line in leader.lines[stopped:])


def test_a_node_that_is_lost_while_node_0_drains_is_named(start: Start) -> None:
    leader, follower = start(0, router="serves+stubborn"), start(1)
    up(leader, follower)
    leader.process.send_signal(signal.SIGTERM)
    leader.until("router was asked to stop")
    follower.kill()
    leader.until(r"^penstock: node 1 \(127.0.0.1\) is lost: its launcher has closed the connection$")
    assert gone(leader.pids(), 5)  # the router cuts its streams then
    os.kill(leader.pids("router")[0], signal.SIGKILL)
    assert leader.end() == 0


def test_strangers_are_refused_and_named(start: Start, authority: tuple[Authority, Authority]) -> None:
    ours, others = authority
    port = start.port  # type: ignore[attr-defined]
    leader = start(0, certificates=ours.files, timeout=60.0)
    leader.until("waiting for node 1")
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    leader.until(r"127.0.0.1 was refused: no certificate of ours \(http request\)")
    with (
        pytest.raises((OSError, EOFError)),
        closing(link.connect("127.0.0.1", port, Certificates(others.files[0], others.files[1], ours.files[2]))) as forged,
    ):
        forged.receive(5.0)
    leader.until(r"127.0.0.1 was refused: no certificate of ours \(.*(unable to get local issuer|self-signed) certificate.*\)")
    for files in (others.files, None):
        stranger = start(1, certificates=files, timeout=1.0)
        assert stranger.end() == 1
        leader.until("127.0.0.1 was refused: no certificate of ours")
    assert stranger.says(r"it has closed the connection: does node 0 want|it speaks TLS, and this node has no --tls-cert")
    # An authority of one's own doesn't help a stranger who plays node 0, either.
    up(leader, start(1, certificates=ours.files))


def test_certificates_on_one_side_only(start: Start, authority: tuple[Authority, Authority]) -> None:
    """Also when node 0 is gone in the end."""
    leader = start(0)
    leader.until("waiting for node 1")
    secure = start(1, certificates=authority[0].files, timeout=6.0)
    why = r"it has closed the connection: has node 0 no certificates, or others \(--tls-cert\)\?"
    secure.until(f"is not there yet: {why}; it is looked for")
    leader.until("127.0.0.1 was refused: it speaks TLS, and this node has no --tls-cert")
    leader.kill()
    assert secure.end() == 1
    assert secure.says(f"is not there yet: Connection refused, and before that: {why}; it was waited for 6 s")
