"""`GrpcShards` and ranks of other machines, at an address or at the address that a file names, over TLS."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from penstock.proto.certificates import Certificates
from penstock.proto.rpc import FAR_OPTIONS, handler, server_credentials
from penstock.router import shards as shards_module
from penstock.router.request import Broken
from penstock.router.shards import GrpcShards
from penstock.tests.certificates import Authority, authorities
from penstock.tests.router.test_shards import WARMUP, Servicer, decode


@pytest.fixture(scope="module")
def both_authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return authorities(tmp_path_factory.mktemp("certificates"))


async def listen(certificates: Certificates | None) -> tuple[grpc.aio.Server, str, Servicer]:
    """A rank group of one rank, and its address."""
    servicer = Servicer(0, 1, asyncio.Barrier(1))
    server = grpc.aio.server(options=FAR_OPTIONS)
    server.add_generic_rpc_handlers((handler(servicer),))
    if certificates is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(certificates))
    await server.start()
    return server, f"127.0.0.1:{port}", servicer


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(limited())


@pytest.mark.parametrize("tls", [False, True])
def test_commands_reach_a_rank_at_a_tcp_address_with_and_without_tls(
    tls: bool, both_authorities: tuple[Authority, Authority]
) -> None:
    certificates = Certificates(*both_authorities[0].files) if tls else None

    async def work() -> None:
        server, address, servicer = await listen(certificates)
        shards = GrpcShards([address], certificates=certificates)
        await shards.connect()
        await shards.warm_up(WARMUP)
        assert (await shards.execute(decode())).step.step == 2
        assert servicer.steps == [("clear_cache", 1), ("decode", 2)]
        await shards.close()
        await server.stop(None)

    run(work)


def test_address_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "address"

    async def work() -> None:
        shards = GrpcShards([f"file:{file}"])
        for _ in range(2):
            connecting = asyncio.create_task(shards.connect())
            await asyncio.sleep(0.1)
            assert not connecting.done()  # the file does not exist yet
            server, address, servicer = await listen(None)
            file.write_text(address)
            await connecting
            await shards.warm_up(WARMUP)
            assert servicer.warmups == 1
            file.unlink()
            await server.stop(None)
            with pytest.raises(Broken):
                await shards.lost
            await shards.forget()
        await shards.close()

    run(work)


def test_changed_address_file_is_followed_while_connecting(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("127.0.0.1:1")  # no server listens there

    async def work() -> None:
        shards = GrpcShards([f"file:{file}"])
        connecting = asyncio.create_task(shards.connect())
        await asyncio.sleep(0.3)
        server, address, _ = await listen(None)
        file.write_text(address)
        await connecting
        await shards.close()
        await server.stop(None)

    run(work)


@pytest.mark.parametrize("stranger", ["router", "rank"])
def test_peer_with_a_certificate_of_another_authority_is_not_connected(
    stranger: str, both_authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards_module, "UNREACHED", 0.3)
    trusted, foreign = both_authorities
    forged = Certificates(foreign.files[0], foreign.files[1], trusted.files[2])
    valid = Certificates(*trusted.files)

    async def work() -> None:
        server, address, servicer = await listen(forged if stranger == "rank" else valid)
        shards = GrpcShards([address], certificates=forged if stranger == "router" else valid)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shards.connect(), 1.0)
        assert next(servicer.stages) == "loading weights 40 %"  # no call has reached it
        assert [line for line in caplog.messages if f"shard rank 0 at {address} can't be reached: " in line]
        assert shards.stage == "waiting for shard rank 0, which can't be reached: the log says why"  # anybody may read it
        await shards.close()
        await server.stop(None)

    run(work)


def test_loss_of_a_rank_names_its_address_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Clients are told what is lost, and so is whoever asks for the server's health."""

    async def work() -> None:
        server, address, _ = await listen(None)
        shards = GrpcShards([address])
        await shards.connect()
        await server.stop(None)
        with pytest.raises(Broken) as lost:
            await shards.warm_up(WARMUP)
        assert str(lost.value) == "shard rank 0 is lost"
        assert [line for line in caplog.messages if line.startswith("shard rank 0 is lost: ") and address.split(":")[-1] in line]
        await shards.close()

    run(work)
