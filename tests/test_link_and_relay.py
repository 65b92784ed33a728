"""Links (TCP connections with messages, plain or TLS) and the relay of commands between ranks: messages arrive whole and in
order, and peers without our certificate or token are refused.
"""

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

LARGE = bytes(range(256)) * 20_000  # larger than a socket buffer and a TLS record


@pytest.fixture(scope="module")
def two_authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Our authority, and one that is not trusted."""
    return authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def certificates_or_none(request: pytest.FixtureRequest, two_authorities: tuple[Authority, Authority]) -> Certificates | None:
    return None if request.param == "plain" else Certificates(*two_authorities[0].files)


@pytest.fixture
def pair(certificates_or_none: Certificates | None) -> Iterator[tuple[Link, Link]]:
    with link.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(link.accept, listening, certificates_or_none)
        near = link.connect("127.0.0.1", listening.getsockname()[1], certificates_or_none)
        far, address = accepted.result(10)
    assert address == near.address == "127.0.0.1"
    with closing(near), closing(far):
        yield near, far


def test_messages_arrive_whole_and_in_order_in_both_directions_at_once(pair: tuple[Link, Link]) -> None:
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


def test_receive_fails_when_its_own_end_is_closed_meanwhile(pair: tuple[Link, Link]) -> None:
    near, _ = pair
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(near.receive)
        time.sleep(0.1)
        near.close()
        with pytest.raises((OSError, EOFError)):
            waiting.result(5)


def test_receive_raises_when_a_message_is_late_or_too_large(pair: tuple[Link, Link]) -> None:
    near, far = pair
    with pytest.raises(TimeoutError):
        near.receive(0.05)
    far.send(b"x" * 11)
    with pytest.raises(ConnectionError, match="a message of 11 bytes"):
        near.receive(5, largest=10)


def test_watch_sets_tcp_keepalive_and_user_timeout() -> None:
    with socket.socket() as one:
        link.watch(one, 6.0)
        found = [
            one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        ]
        assert found[0] + found[1] * found[2] == 6
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000


@pytest.mark.parametrize("place", [("10.0.0.1", 5), ("fd00::1", 29500), ("name", 1)])
def test_address_and_port_round_trip_as_text(place: tuple[str, int]) -> None:
    assert link.split(link.joined(*place)) == place
    for malformed in ("10.0.0.1", "10.0.0.1:", "a:b"):
        with pytest.raises(ValueError, match="an address and a port"):
            link.split(malformed)


# Certificates


def test_check_refuses_certificates_that_do_not_fit_together(two_authorities: tuple[Authority, Authority], tmp_path: Path) -> None:
    ours, others = two_authorities
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


def test_connection_to_a_server_with_a_foreign_certificate_is_refused_by_both_sides(
    two_authorities: tuple[Authority, Authority],
) -> None:
    ours, others = two_authorities
    with link.listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(link.accept, listening, Certificates(*others.files))
        with pytest.raises(OSError, match="certificate verify failed"):
            link.connect("127.0.0.1", listening.getsockname()[1], Certificates(*ours.files))
        with pytest.raises(Unauthenticated, match=r"127.0.0.1 was refused: no certificate of ours \(.*unknown ca\)"):
            accepted.result(10)


# The relay


def rank_config(number: int, folder: Path, port: int, authority: Authority | None = None, **settings: object) -> ShardConfig:
    """The settings of one of four ranks on two machines."""
    files = authority.files if authority else ("", "", "")
    relay_addresses = {"relay": str(folder / "relay") if number < 2 else "", "relay_address": f"127.0.0.1:{port}"}
    tls = dict(zip(("tls_cert", "tls_key", "tls_ca"), files, strict=True))
    rank_settings = {"rank": number, "ranks": 4, "local_ranks": 2, "token": "token", **relay_addresses, **tls, **settings}
    return ShardConfig(folder="", model="", **rank_settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("tls", [False, True])
def test_relay_reaches_local_and_remote_ranks_and_refuses_wrong_tokens_and_transports(
    tls: bool, two_authorities: tuple[Authority, Authority], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = two_authorities[0] if tls else None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank_config(0, tmp_path, port, authority))
    with (
        ThreadPoolExecutor(4) as threads,
        closing(sender),
    ):  # all receive at once: the relay sends in the order in which ranks connected
        connecting = threads.submit(sender.connect)
        near = None
        for stray in (
            rank_config(1, tmp_path, port, authority, token="of an earlier start"),
            rank_config(3, tmp_path, port, authority, token="of an earlier start"),
            rank_config(3, tmp_path, port, None if tls else two_authorities[0]),
        ):
            with pytest.raises(EOFError), closing(Receiver(stray)) as receiver:
                receiver.receive()
            near = near or Receiver(rank_config(1, tmp_path, port, authority))
        far = Receiver(rank_config(2, tmp_path, port, authority))
        assert not connecting.done()
        last = Receiver(rank_config(3, tmp_path, port, authority))
        connecting.result(10)
        assert near is not None
        for message in (b"one", LARGE):
            sending = threads.submit(sender.send, message)
            assert [*threads.map(Receiver.receive, (near, far, last))] == [message] * 3
            sending.result(10)
        with pytest.raises(OSError, match="refused"):  # the relay no longer listens
            socket.create_connection(("127.0.0.1", port))
    for peer in (near, far, last):
        with pytest.raises(EOFError):
            peer.receive()
        peer.close()
    assert len([line for line in caplog.messages if "was refused" in line]) == 3


def test_relay_refuses_duplicate_ranks_and_ranks_at_the_wrong_address(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are refused at once, and don't take the place of a rank that is still expected."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank_config(0, tmp_path, port))
    here = str(tmp_path / "relay")
    with ThreadPoolExecutor(1) as threads, closing(sender):
        connecting = threads.submit(sender.connect)

        def refused(stray: ShardConfig) -> None:
            with ThreadPoolExecutor(1) as other, closing(Receiver(stray)) as receiver, pytest.raises(EOFError):
                other.submit(receiver.receive).result(5)

        for number in (0, 2, 4, -1):
            refused(rank_config(number, tmp_path, port, relay=here))
        near = Receiver(rank_config(1, tmp_path, port))
        far = Receiver(rank_config(2, tmp_path, port))
        for number in (2, 1, 4):
            refused(rank_config(number, tmp_path, port, relay=""))
        last = Receiver(rank_config(3, tmp_path, port))
        connecting.result(10)
        sending = threads.submit(sender.send, b"one")
        assert [peer.receive() for peer in (near, far, last)] == [b"one"] * 3
        sending.result(10)
    for peer in (near, far, last):
        peer.close()
    assert [line for line in caplog.messages if "is there already, or does not belong here" in line][4:5] == [
        "127.0.0.1 was refused: rank 2 is there already, or does not belong here"
    ]


def test_relay_answers_handshakes_of_early_ranks_before_rank_0_connects(
    two_authorities: tuple[Authority, Authority], tmp_path: Path
) -> None:
    """Their TLS handshakes are answered while rank 0 and the ranks on its machine are still loading weights."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = Sender(rank_config(0, tmp_path, port, two_authorities[0]))
    with closing(sender):
        others = [Receiver(rank_config(number, tmp_path, port, two_authorities[0])) for number in (3, 2, 1)]
        sender.connect()
        sender.send(b"one")
        assert [other.receive() for other in others] == [b"one"] * 3
    for other in others:
        other.close()


def test_relay_of_a_single_rank_waits_for_nobody_and_leaves_no_socket(tmp_path: Path) -> None:
    sender = Sender(ShardConfig(folder="", model="", relay=str(tmp_path / "relay")))
    sender.connect()
    sender.send(b"x")
    sender.close()
    assert list(tmp_path.iterdir()) == []
