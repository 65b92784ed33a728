"""Connections between processes, and the ranks' relay over them: in order, whole, and for nobody else."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from penstock.proto import certificates, link
from penstock.proto.certificates import Certificates
from penstock.proto.link import Link, Unauthenticated
from penstock.shard.config import ShardConfig
from penstock.shard.relay import Receiver, Sender
from penstock.tests.certificates import Authority, authorities, make

LARGE = bytes(range(256)) * 20_000  # more than a socket holds, and than a record of TLS


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Ours, and somebody else's."""
    return authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def certified(request: pytest.FixtureRequest, known: tuple[Authority, Authority]) -> Certificates | None:
    return None if request.param == "plain" else Certificates(*known[0].files)


@pytest.fixture
def pair(certified: Certificates | None) -> Iterator[tuple[Link, Link]]:
    with link.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(link.accept, listening, certified)
        near = link.connect("127.0.0.1", listening.getsockname()[1], certified)
        far, address = accepted.result(10)
    assert address == near.address == "127.0.0.1"
    with closing(near), closing(far):
        yield near, far


def test_messages_are_whole_and_in_order_while_others_go_the_other_way(pair: tuple[Link, Link]) -> None:
    near, far = pair
    messages = [b"", b"a", LARGE, b"b", LARGE + b"c"]

    def exchange(here: Link) -> list[bytes]:
        sender = threading.Thread(target=lambda: [here.send(message) for message in messages])
        sender.start()
        found = [here.receive(20) for _ in messages]
        sender.join()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(exchange, pair)) == [messages, messages]
    far.close()
    with pytest.raises(EOFError):
        near.receive(5)
    with pytest.raises((OSError, EOFError)):
        near.receive(5)


def test_who_waits_learns_that_its_own_end_was_closed(pair: tuple[Link, Link]) -> None:
    near, _ = pair
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(near.receive)
        time.sleep(0.1)
        near.close()
        with pytest.raises((OSError, EOFError)):
            waiting.result(5)


def test_a_message_may_be_late_or_too_large(pair: tuple[Link, Link]) -> None:
    near, far = pair
    with pytest.raises(TimeoutError):
        near.receive(0.05)
    far.send(b"x" * 11)
    with pytest.raises(ConnectionError, match="a message of 11 bytes"):
        near.receive(5, largest=10)


def test_the_kernel_is_told_to_watch_a_silent_peer() -> None:
    with socket.socket() as one:
        link.watch(one, 6.0)
        found = [
            one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        ]
        assert found[0] + found[1] * found[2] == 6
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000


@pytest.mark.parametrize("place", [("10.0.0.1", 5), ("fd00::1", 29500), ("name", 1)])
def test_places_as_text(place: tuple[str, int]) -> None:
    assert link.split(link.joined(*place)) == place
    for wrong in ("10.0.0.1", "10.0.0.1:", "a:b"):
        with pytest.raises(ValueError, match="an address and a port"):
            link.split(wrong)


# Certificates


def test_certificates_are_tried_before_anybody_is_asked(known: tuple[Authority, Authority], tmp_path: Path) -> None:
    ours, others = known
    Certificates(*ours.files).check()
    for files, reason in (
        ((others.files[0], others.files[1], ours.files[2]), "certificate"),
        ((ours.files[0], others.files[1], ours.files[2]), "key values mismatch"),
        (make(tmp_path / "name", "elsewhere").files, "certificate is not valid for 'penstock'"),
        ((ours.files[2], ours.files[1], ours.files[2]), "key values mismatch"),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            Certificates(*files).check()
        assert reason in link.reason(caught.value).lower()
    assert certificates.of(ShardConfig(folder="", model="")) is None


def test_a_server_that_has_no_certificate_of_ours_is_not_talked_to(known: tuple[Authority, Authority]) -> None:
    ours, others = known
    with link.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(link.accept, listening, Certificates(*others.files))
        with pytest.raises(OSError, match="certificate verify failed"):
            link.connect("127.0.0.1", listening.getsockname()[1], Certificates(*ours.files))
        with pytest.raises(Unauthenticated, match=r"127.0.0.1 was refused: no certificate of ours \(.*unknown ca\)"):
            accepted.result(10)


# The relay


def rank(number: int, folder: Path, port: int, authority: Authority | None = None, **settings: object) -> ShardConfig:
    """Of four on two machines."""
    files = authority.files if authority else ("", "", "")
    places = {"relay": str(folder / "relay") if number < 2 else "", "relay_address": f"127.0.0.1:{port}"}
    tls = dict(zip(("tls_cert", "tls_key", "tls_ca"), files, strict=True))
    told = {"rank": number, "ranks": 4, "local_ranks": 2, "token": "token", **places, **tls, **settings}
    return ShardConfig(folder="", model="", **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("tls", [False, True])
def test_the_relay_reaches_ranks_here_and_elsewhere_and_nobody_else(
    tls: bool, known: tuple[Authority, Authority], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = known[0] if tls else None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank(0, tmp_path, port, authority))
    with ThreadPoolExecutor(4) as threads, closing(sender):  # all listen at once: who came first is sent to first
        connecting = threads.submit(sender.connect)
        near = None
        for stray in (
            rank(1, tmp_path, port, authority, token="of an earlier start"),
            rank(3, tmp_path, port, authority, token="of an earlier start"),
            rank(3, tmp_path, port, None if tls else known[0]),
        ):
            with pytest.raises(EOFError), closing(Receiver(stray)) as receiver:
                receiver.receive()
            near = near or Receiver(rank(1, tmp_path, port, authority))
        far = Receiver(rank(2, tmp_path, port, authority))
        assert not connecting.done()
        last = Receiver(rank(3, tmp_path, port, authority))
        connecting.result(10)
        assert near is not None
        for message in (b"one", LARGE):
            sending = threads.submit(sender.send, message)
            assert [*threads.map(Receiver.receive, (near, far, last))] == [message] * 3
            sending.result(10)
        with pytest.raises(OSError, match="refused"):  # nobody else is waited for
            socket.create_connection(("127.0.0.1", port))
    for peer in (near, far, last):
        with pytest.raises(EOFError):
            peer.receive()
        peer.close()
    assert len([line for line in caplog.messages if "was refused" in line]) == 3


def test_a_rank_that_comes_twice_or_to_the_wrong_place_is_sent_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At once, and nobody is taken for one that is still to come."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank(0, tmp_path, port))
    here = str(tmp_path / "relay")
    with ThreadPoolExecutor(1) as threads, closing(sender):
        connecting = threads.submit(sender.connect)

        def refused(stray: ShardConfig) -> None:
            with ThreadPoolExecutor(1) as other, closing(Receiver(stray)) as receiver, pytest.raises(EOFError):
                other.submit(receiver.receive).result(5)

        for number in (0, 2, 4, -1):
            refused(rank(number, tmp_path, port, relay=here))
        near = Receiver(rank(1, tmp_path, port))
        far = Receiver(rank(2, tmp_path, port))
        for number in (2, 1, 4):
            refused(rank(number, tmp_path, port, relay=""))
        last = Receiver(rank(3, tmp_path, port))
        connecting.result(10)
        sending = threads.submit(sender.send, b"one")
        assert [peer.receive() for peer in (near, far, last)] == [b"one"] * 3
        sending.result(10)
    for peer in (near, far, last):
        peer.close()
    assert [line for line in caplog.messages if "is there already, or does not belong here" in line][4:5] == [
        "127.0.0.1 was refused: rank 2 is there already, or does not belong here"
    ]


def test_a_rank_that_is_sooner_ready_is_not_kept_waiting(known: tuple[Authority, Authority], tmp_path: Path) -> None:
    """Its handshake is answered while rank 0, and those of rank 0's machine, still load their weights."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank(0, tmp_path, port, known[0]))
    with closing(sender):
        others = [Receiver(rank(number, tmp_path, port, known[0])) for number in (3, 2, 1)]
        sender.connect()
        sender.send(b"one")
        assert [other.receive() for other in others] == [b"one"] * 3
    for other in others:
        other.close()


def test_one_rank_has_nobody_to_wait_for(tmp_path: Path) -> None:
    sender = Sender(ShardConfig(folder="", model="", relay=str(tmp_path / "relay")))
    sender.connect()
    sender.send(b"x")
    sender.close()
    assert list(tmp_path.iterdir()) == []
