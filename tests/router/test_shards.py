"""`GrpcShards` against a real gRPC server on a unix socket, with a servicer that only records commands."""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.proto import shard_pb2
from penstock.proto.rpc import handler
from penstock.router import shards as router_shards
from penstock.router.request import Broken, Refused, Superseded
from penstock.router.shards import GrpcShards

WARMUP = shard_pb2.WarmupRequest(max_step_tokens=8, max_step_rows=4)


class Servicer:
    """A rank that answers commands in order and computes nothing. Steps named by `..._at` go wrong."""

    def __init__(self, rank: int, ranks: int, warmup_barrier: asyncio.Barrier) -> None:
        self.rank = rank
        self.ranks = ranks
        self.warmup_barrier = warmup_barrier
        self.steps: list[tuple[str, int]] = []
        self.warmups = 0
        self.stages: Iterator[str] = iter(["loading weights 40 %"])
        self.fails_at = 0
        self.failure = (grpc.StatusCode.INTERNAL, "out of memory")
        self.wrong_step_at = 0
        self.unreadable_reply_at = 0
        self.silent_until = 0
        self.ends_stream_at = 0
        self.seconds = 0.0  # of a step
        self.image_seconds = 0.0
        self.refusal: tuple[grpc.StatusCode, str] | None = None  # of adapters
        self.reading = asyncio.Event()  # cleared: reading adapters waits
        self.reading.set()
        self.loaded: list[str] = []
        self.digest = "same"
        self.hangs = False  # calls of Info are not answered any more

    async def Info(self, request: Any, context: Any) -> shard_pb2.InfoReply:  # noqa: N802
        if self.hangs:
            await asyncio.Event().wait()
        stage = next(self.stages, "ready")
        return shard_pb2.InfoReply(rank=self.rank, ranks=self.ranks, stage=stage, loaded=stage == "ready")

    async def Health(self, request: Any, context: Any) -> shard_pb2.HealthReply:  # noqa: N802
        return shard_pb2.HealthReply()

    async def Warmup(self, request: shard_pb2.WarmupRequest, context: Any) -> shard_pb2.WarmupReply:  # noqa: N802
        assert request == WARMUP
        await self.warmup_barrier.wait()  # as tensor-parallel ranks do, which warm up together
        self.warmups += 1
        return shard_pb2.WarmupReply(pages=10, page_size=4, image_seconds=self.image_seconds)

    async def Steps(self, commands: AsyncIterator[shard_pb2.Command], context: Any) -> AsyncIterator[shard_pb2.Reply]:  # noqa: N802
        replies: list[shard_pb2.Reply] = []
        async for command in commands:
            kind = command.WhichOneof("kind")
            step = getattr(command, kind).step
            self.steps.append((kind, step))
            if step == self.ends_stream_at:
                return
            if step == self.fails_at:
                await context.abort(*self.failure)
            reply = shard_pb2.Reply()
            getattr(reply, {"prefill": "step", "decode": "step"}.get(kind, kind)).step = 99 if step == self.wrong_step_at else step
            if kind in ("prefill", "decode"):
                reply.step.seconds = self.seconds
            replies.append(shard_pb2.Reply() if step == self.unreadable_reply_at else reply)
            while replies and step >= self.silent_until:
                yield replies.pop(0)

    async def refuse(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not here")

    async def LoadAdapter(self, request: Any, context: Any) -> shard_pb2.LoadAdapterReply:  # noqa: N802
        if self.refusal:
            await context.abort(*self.refusal)
        await self.reading.wait()
        self.loaded.append(request.adapter.name)
        return shard_pb2.LoadAdapterReply(folder=f"/{self.rank}", digest=self.digest)

    Prefill = Decode = Filter = Concat = ClearCache = Adapt = refuse


Test = Callable[[GrpcShards, list[Servicer]], Awaitable[None]]


def serve(folder: Path, ranks: int, test: Test, late: float = 0.0, **settings: Any) -> None:
    """Runs `test` with a client and `ranks` servers that listen after `late` seconds. settings: of the client."""

    async def main() -> None:
        barrier = asyncio.Barrier(ranks)
        servicers = [Servicer(rank, ranks, barrier) for rank in range(ranks)]
        servers = []
        sockets = [str(folder / f"{rank}") for rank in range(ranks)]

        async def start() -> None:
            await asyncio.sleep(late)
            for socket, servicer in zip(sockets, servicers, strict=True):
                server = grpc.aio.server()
                server.add_generic_rpc_handlers((handler(servicer),))
                server.add_insecure_port(f"unix:{socket}")
                await server.start()
                servers.append(server)

        starting = asyncio.create_task(start())
        shards = GrpcShards(sockets, **settings)
        try:
            async with asyncio.timeout(20):
                await test(shards, servicers)
                await starting
        finally:
            await shards.close()
            await asyncio.gather(*(server.stop(None) for server in servers))

    asyncio.run(main())


def decode() -> shard_pb2.Command:
    return shard_pb2.Command(decode=shard_pb2.DecodeRequest(batches=[1]))


def drop(uid: int) -> shard_pb2.Command:
    return shard_pb2.Command(filter=shard_pb2.FilterRequest(drop=[uid]))


def test_commands_are_numbered_and_answered_in_order(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        assert shards.stage == "loading weights 40 %"
        assert (await shards.warm_up(WARMUP)).pages == 10
        assert shards.stage == "ready"
        assert shards.info.loaded
        futures = [shards.execute(command) for command in (decode(), drop(7), decode())]
        replies = await asyncio.gather(*futures)
        assert [reply.WhichOneof("kind") for reply in replies] == ["step", "filter", "step"]
        assert servicers[0].steps == [("clear_cache", 1), ("decode", 2), ("filter", 3), ("decode", 4)]

    serve(tmp_path, 1, test)


def test_commands_are_sent_before_earlier_ones_are_answered(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].silent_until = 4
        futures = [shards.execute(command) for command in (decode(), drop(7), decode())]
        assert [reply.WhichOneof("kind") for reply in await asyncio.gather(*futures)] == ["step", "filter", "step"]

    serve(tmp_path, 1, test)


def test_all_ranks_warm_up_together_and_rank_0_gets_the_commands(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        await shards.execute(decode())
        assert [servicer.warmups for servicer in servicers] == [1, 1, 1]
        assert [len(servicer.steps) for servicer in servicers] == [2, 0, 0]

    serve(tmp_path, 3, test)


def test_reply_to_a_cancelled_command_is_skipped(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards.execute(decode()).cancel()
        assert (await shards.execute(decode())).step.step == 3

    serve(tmp_path, 1, test)


@pytest.mark.parametrize("stale", [False, True])
def test_connect_finds_a_shard_soon_after_it_starts(tmp_path: Path, stale: bool) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        assert shards.stage == "waiting for the shards to start"
        begin = asyncio.get_running_loop().time()
        await shards.connect()
        assert 0.3 <= asyncio.get_running_loop().time() - begin < 1.5

    if stale:  # a socket file whose server is gone
        import socket

        with socket.socket(socket.AF_UNIX) as stale_socket:
            stale_socket.bind(str(tmp_path / "0"))
    serve(tmp_path, 1, test, late=0.3)


def test_commands_raise_the_streams_error_after_it_failed(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at = 2
        for _ in range(2):
            with pytest.raises(Broken, match="rank 0: out of memory"):
                await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_shards_that_another_router_has_taken_are_superseded(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at, servicers[0].failure = 2, (grpc.StatusCode.ABORTED, "not heard any more")
        with pytest.raises(Superseded, match="stop the other"):
            await shards.execute(decode())
        with pytest.raises(Superseded):
            await shards.lost

    serve(tmp_path, 1, test)


def test_command_iterator_ends_when_the_stream_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each lost rank group would leave a task of gRPC's that never ends."""
    commands, ended = GrpcShards._commands, asyncio.Event()

    async def commands_until_end(shards: GrpcShards, outgoing: Any) -> AsyncIterator[shard_pb2.Command]:
        async for command in commands(shards, outgoing):
            yield command
        ended.set()

    monkeypatch.setattr(GrpcShards, "_commands", commands_until_end)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at = 2
        with pytest.raises(Broken):
            await shards.execute(decode())
        await asyncio.wait_for(ended.wait(), 5)

    serve(tmp_path, 1, test)


def test_all_commands_in_flight_raise_when_the_stream_fails(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at = 3
        first, *others = [shards.execute(decode()) for _ in range(4)]
        assert (await first).step.step == 2
        for future in others:
            with pytest.raises(Broken):  # gRPC has its own error for a command that was not written yet
                await future

    serve(tmp_path, 1, test)


def test_after_the_first_error_commands_raise_it_and_are_not_sent(tmp_path: Path) -> None:
    """Commands in flight count as unanswered: the launcher would be notified of a hang of a rank group that is gone."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at = 2
        with pytest.raises(Broken):
            await shards.execute(decode())
        await shards.close()
        with pytest.raises(Broken, match="rank 0: out of memory"):
            await shards.execute(decode())
        assert not shards._expected

    serve(tmp_path, 1, test)


def test_end_of_the_stream_counts_as_a_loss(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].ends_stream_at = 2
        with pytest.raises(Broken, match="rank 0 has ended its stream"):
            await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_command_in_flight_raises_when_the_connection_is_closed(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].silent_until = 99
        waiting = shards.execute(decode())
        await shards.close()
        with pytest.raises(Broken, match="was closed"):
            await asyncio.wait_for(waiting, 5)

    serve(tmp_path, 1, test)


def test_longest_step_time_is_kept(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        for servicers[0].seconds in (2.0, 7.0, 3.0):
            await shards.execute(decode())
        assert shards._longest == 7.0

    serve(tmp_path, 1, test)


def test_stage_while_loading_is_that_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_shards, "STAGE_POLL", 0.01)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        for servicer in servicers:
            servicer.stages = itertools.repeat(f"loads {servicer.rank}")
            servicer.warmup_barrier = asyncio.Barrier(9)
        await shards.connect()
        warming_up = asyncio.create_task(shards.warm_up(WARMUP))
        for _ in range(40):
            await asyncio.sleep(0.005)
            assert shards.stage == "loads 0"
        warming_up.cancel()
        await asyncio.wait([warming_up])

    serve(tmp_path, 2, test)


def test_connection_attempts_refused_at_once_do_not_count_as_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes until a rank listens there."""
    monkeypatch.setattr(router_shards, "LOADING", 0.1)
    reach, attempts, now = GrpcShards._reach, 0, 1.0
    monkeypatch.setattr(router_shards, "monotonic", lambda: now)

    async def refused(shards: GrpcShards, rank: int, target: str) -> Any:
        nonlocal attempts, now
        attempts += 1
        if attempts < 5:
            now += 0.05
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "refused")
        return await reach(shards, rank, target)

    monkeypatch.setattr(GrpcShards, "_reach", refused)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        assert attempts == 5

    serve(tmp_path, 1, test, step_timeout=0.1)


def test_reply_with_the_wrong_step_number_breaks_the_connection(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].wrong_step_at = 2
        with pytest.raises(Broken, match="answered step 99 instead of 2"):
            await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_unreadable_reply_breaks_the_connection(tmp_path: Path) -> None:
    """At once, and not only when the step timeout expires."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].unreadable_reply_at = 3
        futures = [shards.execute(decode()) for _ in range(3)]
        await futures[0]
        for future in futures[1:]:
            with pytest.raises(Broken, match="rank 0 has answered what cannot be read"):
                await future
        with pytest.raises(Broken, match="cannot be read"):
            await shards.lost

    serve(tmp_path, 1, test)


def test_connect_refuses_the_socket_of_another_rank_group(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        servicers[1].ranks = 4
        with pytest.raises(Broken, match=r"^address 2 of 2 leads to rank 1 of 4, rank 1 of 2 was expected"):
            await shards.connect()

    serve(tmp_path, 2, test)


def test_hanging_rank_counts_as_lost_and_is_reported_to_the_launcher(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        before = time.monotonic()
        await shards.connect()
        await shards.warm_up(WARMUP)
        after = time.monotonic()
        await asyncio.sleep(0.5)
        assert not shards.lost.done(), "nothing is asked"
        servicers[0].silent_until = 99
        with pytest.raises(Broken, match=r"rank 0 has not answered for 0.3 s"):
            await shards.execute(decode())
        with pytest.raises(Broken):
            await shards.lost
        replica, connected, text = os.read(reader, 1000).decode().split(" ", 2)
        assert replica == "0"
        os.close(reader)
        assert before <= float(connected) <= after
        assert text == "shard rank 0 has not answered for 0.3 s\n"

    serve(tmp_path, 1, test, step_timeout=0.3, hang_reports=str(pipe))


@pytest.mark.parametrize("pipe", [False, True])
def test_hang_is_logged_if_the_launcher_does_not_read_the_pipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pipe: bool
) -> None:
    """The launcher may have ended, and its pipe may be gone or not."""
    if pipe:
        os.mkfifo(tmp_path / "pipe")
    shards = GrpcShards(["h:1"], hang_reports=str(tmp_path / "pipe"))
    assert str(shards._hung(0, 2.0)) == "shard rank 0 has not answered for 2 s"
    assert "nobody hears that shard rank 0 has not answered" in caplog.text


@pytest.mark.parametrize(("longest", "image_seconds"), [(1.0, 0.0), (0.0, 1.0)])
def test_slow_steps_do_not_count_as_a_hang(tmp_path: Path, longest: float, image_seconds: float) -> None:
    """That includes steps that may encode an image."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        servicers[0].image_seconds = image_seconds
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards._longest = longest or shards._longest  # seconds, as reported by an earlier step
        servicers[0].silent_until = 3
        first = shards.execute(decode())
        await asyncio.sleep(1.0)
        await shards.execute(decode())
        assert (await first).step.step == 2

    serve(tmp_path, 1, test, step_timeout=0.2)


def test_reply_resets_the_count_of_checks_for_a_hang(tmp_path: Path) -> None:
    """Even if a command is in flight at every check, as it is with a busy rank group."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards._looks = router_shards.LOOKS - 1
        await shards.execute(decode())
        assert shards._looks == 0

    serve(tmp_path, 1, test)


def test_rank_that_hangs_while_loading_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_shards, "LOADING", 0.2)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        servicers[1].hangs = True
        servicers[1].warmup_barrier = asyncio.Barrier(9)
        with pytest.raises(Broken, match=r"rank 1 has not answered for 0.2 s"):
            await shards.warm_up(WARMUP)

    serve(tmp_path, 2, test, step_timeout=0.1)


def test_loss_is_noticed_at_once_and_a_new_rank_group_can_be_connected(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].fails_at = 3
        await shards.execute(decode())
        with pytest.raises(Broken):
            await shards.execute(decode())
        with pytest.raises(Broken):
            await shards.lost
        servicers[0].fails_at = 0
        for _ in range(2):
            await shards.forget()
            await shards.connect()
            await shards.warm_up(WARMUP)
            assert not shards.lost.done()
            assert (await shards.execute(decode())).step.step == 2
        assert servicers[0].steps[-2:] == [("clear_cache", 1), ("decode", 2)]

    serve(tmp_path, 1, test)


# Adapters

ADAPTER = shard_pb2.LoadAdapterRequest(adapter=shard_pb2.LoadedAdapter(key="k", name="one", folder="/one"))


def test_all_ranks_load_an_adapter_which_must_have_the_same_digest(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        assert (await shards.load_adapter(ADAPTER)).folder == "/0"
        assert [servicer.loaded for servicer in servicers] == [["one"]] * 3
        servicers[1].digest = "other"
        with pytest.raises(Refused, match="adapter one is not the same on all machines"):
            await shards.load_adapter(ADAPTER)

    serve(tmp_path, 3, test)


@pytest.mark.parametrize(
    ("rank", "code", "kind", "words"),
    [
        (0, grpc.StatusCode.INVALID_ARGUMENT, Refused, "^adapter one is odd$"),
        (1, grpc.StatusCode.INVALID_ARGUMENT, Refused, r"^adapter one is odd \(shard rank 1\)$"),
        (1, grpc.StatusCode.UNKNOWN, Refused, "is odd"),  # whatever the error is, other requests can be served
        (1, grpc.StatusCode.UNAVAILABLE, Broken, "shard rank 1 is lost"),
    ],
)
def test_load_adapter_raises_if_one_rank_cannot_read_it(
    tmp_path: Path, rank: int, code: grpc.StatusCode, kind: type[Exception], words: str
) -> None:
    """The other ranks are waited for: otherwise they might finish reading an adapter that the router does not know of."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[rank].refusal = (code, "adapter one is odd")
        servicers[2].reading.clear()
        loading = asyncio.create_task(shards.load_adapter(ADAPTER))
        await asyncio.sleep(0.05)
        assert not loading.done()
        servicers[2].reading.set()
        with pytest.raises(kind, match=words):
            await loading
        assert servicers[2].loaded == ["one"]

    serve(tmp_path, 3, test)


def test_forget_while_an_adapter_is_loaded_raises_broken(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].reading.clear()
        loading = asyncio.create_task(shards.load_adapter(ADAPTER))
        await asyncio.sleep(0.05)
        await shards.forget()
        with pytest.raises(Broken, match="it was to read an adapter"):
            await loading

    serve(tmp_path, 1, test)
