"""`GrpcShards` against a real gRPC server on a unix socket, with a servicer that only counts."""

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
from penstock.router.request import Broken, Refused
from penstock.router.shards import GrpcShards

WARMUP = shard_pb2.WarmupRequest(max_step_tokens=8, max_step_rows=4)


class Servicer:
    """A rank that does nothing, in order."""

    def __init__(self, rank: int, ranks: int, warm: asyncio.Barrier) -> None:
        self.rank = rank
        self.ranks = ranks
        self.warm = warm
        self.steps: list[tuple[str, int]] = []
        self.warmups = 0
        self.stages: Iterator[str] = iter(["loading weights 40 %"])
        self.dies_at = 0
        self.lies_at = 0
        self.mumbles_at = 0
        self.silent_until = 0
        self.ends_at = 0
        self.seconds = 0.0  # of a step
        self.image_seconds = 0.0
        self.refusal: tuple[grpc.StatusCode, str] | None = None  # of adapters
        self.reading = asyncio.Event()  # cleared: they are not read yet
        self.reading.set()
        self.loaded: list[str] = []
        self.digest = "same"
        self.hangs = False  # it answers no Info any more

    async def Info(self, request: Any, context: Any) -> shard_pb2.InfoReply:  # noqa: N802
        if self.hangs:
            await asyncio.Event().wait()
        stage = next(self.stages, "ready")
        return shard_pb2.InfoReply(rank=self.rank, ranks=self.ranks, stage=stage, loaded=stage == "ready")

    async def Health(self, request: Any, context: Any) -> shard_pb2.HealthReply:  # noqa: N802
        return shard_pb2.HealthReply()

    async def Warmup(self, request: shard_pb2.WarmupRequest, context: Any) -> shard_pb2.WarmupReply:  # noqa: N802
        assert request == WARMUP
        await self.warm.wait()  # as ranks of tensor parallelism do
        self.warmups += 1
        return shard_pb2.WarmupReply(pages=10, page_size=4, image_seconds=self.image_seconds)

    async def Steps(self, commands: AsyncIterator[shard_pb2.Command], context: Any) -> AsyncIterator[shard_pb2.Reply]:  # noqa: N802
        replies: list[shard_pb2.Reply] = []
        async for command in commands:
            kind = command.WhichOneof("kind")
            step = getattr(command, kind).step
            self.steps.append((kind, step))
            if step == self.ends_at:
                return
            if step == self.dies_at:
                await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
            reply = shard_pb2.Reply()
            getattr(reply, {"prefill": "step", "decode": "step"}.get(kind, kind)).step = 99 if step == self.lies_at else step
            if kind in ("prefill", "decode"):
                reply.step.seconds = self.seconds
            replies.append(shard_pb2.Reply() if step == self.mumbles_at else reply)
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
    """Runs `test` with a client and `ranks` servers that begin to listen `late` seconds later. settings: of the client."""

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


def test_commands_leave_before_those_ahead_of_them_are_answered(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].silent_until = 4
        futures = [shards.execute(command) for command in (decode(), drop(7), decode())]
        assert [reply.WhichOneof("kind") for reply in await asyncio.gather(*futures)] == ["step", "filter", "step"]

    serve(tmp_path, 1, test)


def test_all_ranks_warm_up_together_and_rank_0_takes_the_commands(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        await shards.execute(decode())
        assert [servicer.warmups for servicer in servicers] == [1, 1, 1]
        assert [len(servicer.steps) for servicer in servicers] == [2, 0, 0]

    serve(tmp_path, 3, test)


def test_the_answer_to_a_command_for_which_nobody_waits_any_more_disturbs_nobody(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards.execute(decode()).cancel()
        assert (await shards.execute(decode())).step.step == 3

    serve(tmp_path, 1, test)


@pytest.mark.parametrize("stale", [False, True])
def test_a_shard_that_starts_later_is_found_at_once(tmp_path: Path, stale: bool) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        assert shards.stage == "waiting for the shards to start"
        begin = asyncio.get_running_loop().time()
        await shards.connect()
        assert 0.3 <= asyncio.get_running_loop().time() - begin < 1.5

    if stale:  # a socket file whose server is gone
        import socket

        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "0"))
    serve(tmp_path, 1, test, late=0.3)


def test_when_the_stream_fails_the_reason_is_told_from_then_on(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].dies_at = 2
        for _ in range(2):
            with pytest.raises(Broken, match="rank 0: out of memory"):
                await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_when_the_stream_fails_nothing_waits_for_a_command_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group that is lost would leave a task of gRPC's that never ends."""
    commands, ended = GrpcShards._commands, asyncio.Event()

    async def watched(shards: GrpcShards, outgoing: Any) -> AsyncIterator[shard_pb2.Command]:
        async for command in commands(shards, outgoing):
            yield command
        ended.set()

    monkeypatch.setattr(GrpcShards, "_commands", watched)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].dies_at = 2
        with pytest.raises(Broken):
            await shards.execute(decode())
        await asyncio.wait_for(ended.wait(), 5)

    serve(tmp_path, 1, test)


def test_when_the_stream_fails_everybody_who_waits_is_told(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].dies_at = 3
        first, *others = [shards.execute(decode()) for _ in range(4)]
        assert (await first).step.step == 2
        for future in others:
            with pytest.raises(Broken):  # gRPC has its own reason for a command that was still to be written
                await future

    serve(tmp_path, 1, test)


def test_the_first_reason_stays_and_nothing_more_is_sent(tmp_path: Path) -> None:
    """What is under way counts as not answered: somebody would be told that a group hangs which is gone."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].dies_at = 2
        with pytest.raises(Broken):
            await shards.execute(decode())
        await shards.close()
        with pytest.raises(Broken, match="rank 0: out of memory"):
            await shards.execute(decode())
        assert not shards._expected

    serve(tmp_path, 1, test)


def test_a_stream_that_ends_is_a_loss(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].ends_at = 2
        with pytest.raises(Broken, match="rank 0 has ended its stream"):
            await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_who_waits_when_the_connection_is_closed_is_told(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].silent_until = 99
        waiting = shards.execute(decode())
        await shards.close()
        with pytest.raises(Broken, match="was closed"):
            await asyncio.wait_for(waiting, 5)

    serve(tmp_path, 1, test)


def test_the_longest_step_is_remembered(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        for servicers[0].seconds in (2.0, 7.0, 3.0):
            await shards.execute(decode())
        assert shards._longest == 7.0

    serve(tmp_path, 1, test)


def test_what_is_told_of_loading_is_what_the_first_rank_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_shards, "STAGE_POLL", 0.01)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        for servicer in servicers:
            servicer.stages = itertools.repeat(f"loads {servicer.rank}")
            servicer.warm = asyncio.Barrier(9)
        await shards.connect()
        warming = asyncio.create_task(shards.warm_up(WARMUP))
        for _ in range(40):
            await asyncio.sleep(0.005)
            assert shards.stage == "loads 0"
        warming.cancel()
        await asyncio.wait([warming])

    serve(tmp_path, 2, test)


def test_a_socket_at_which_nobody_listens_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes until somebody does."""
    monkeypatch.setattr(router_shards, "LOADING", 0.1)
    reach, looks, now = GrpcShards._reach, 0, 1.0
    monkeypatch.setattr(router_shards, "monotonic", lambda: now)

    async def refused(shards: GrpcShards, rank: int, target: str) -> Any:
        nonlocal looks, now
        looks += 1
        if looks < 5:
            now += 0.05
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "refused")
        return await reach(shards, rank, target)

    monkeypatch.setattr(GrpcShards, "_reach", refused)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        assert looks == 5

    serve(tmp_path, 1, test, step_timeout=0.1)


def test_an_answer_to_another_question_breaks_the_connection(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].lies_at = 2
        with pytest.raises(Broken, match="answered step 99 instead of 2"):
            await shards.execute(decode())

    serve(tmp_path, 1, test)


def test_an_answer_that_cannot_be_read_breaks_the_connection(tmp_path: Path) -> None:
    """At once, and not when somebody finds that nothing else comes."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].mumbles_at = 3
        futures = [shards.execute(decode()) for _ in range(3)]
        await futures[0]
        for future in futures[1:]:
            with pytest.raises(Broken, match="rank 0 has answered what cannot be read"):
                await future
        with pytest.raises(Broken, match="cannot be read"):
            await shards.lost

    serve(tmp_path, 1, test)


def test_sockets_of_another_rank_group_are_refused(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        servicers[1].ranks = 4
        with pytest.raises(Broken, match="is rank 1 of 4, rank 1 of 2 was expected"):
            await shards.connect()

    serve(tmp_path, 2, test)


def test_who_hangs_is_lost_and_whoever_started_it_is_told(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
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
        replica, met, text = os.read(listening, 1000).decode().split(" ", 2)
        assert replica == "0"
        os.close(listening)
        assert before <= float(met) <= after
        assert text == "shard rank 0 has not answered for 0.3 s\n"

    serve(tmp_path, 1, test, step_timeout=0.3, hang_reports=str(pipe))


@pytest.mark.parametrize("pipe", [False, True])
def test_where_nobody_hears_of_a_hang_it_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, pipe: bool) -> None:
    """The launcher may have ended, with its pipe or without."""
    if pipe:
        os.mkfifo(tmp_path / "pipe")
    shards = GrpcShards(["h:1"], hang_reports=str(tmp_path / "pipe"))
    assert str(shards._hung(0, 2.0)) == "shard rank 0 has not answered for 2 s"
    assert "nobody hears that shard rank 0 has not answered" in caplog.text


@pytest.mark.parametrize(("longest", "image_seconds"), [(1.0, 0.0), (0.0, 1.0)])
def test_slow_steps_are_not_taken_for_a_hang(tmp_path: Path, longest: float, image_seconds: float) -> None:
    """Neither those that may encode an image."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        servicers[0].image_seconds = image_seconds
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards._longest = longest or shards._longest  # seconds, as the reply to a step has told
        servicers[0].silent_until = 3
        first = shards.execute(decode())
        await asyncio.sleep(1.0)
        await shards.execute(decode())
        assert (await first).step.step == 2

    serve(tmp_path, 1, test, step_timeout=0.2)


def test_an_answer_ends_the_suspicion_of_a_hang(tmp_path: Path) -> None:
    """Though something is under way whenever somebody looks, as it is with a busy group."""

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        shards._looks = router_shards.LOOKS - 1
        await shards.execute(decode())
        assert shards._looks == 0

    serve(tmp_path, 1, test)


def test_a_rank_that_hangs_while_it_loads_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_shards, "LOADING", 0.2)

    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        servicers[1].hangs = True
        servicers[1].warm = asyncio.Barrier(9)
        with pytest.raises(Broken, match=r"rank 1 has not answered for 0.2 s"):
            await shards.warm_up(WARMUP)

    serve(tmp_path, 2, test, step_timeout=0.1)


def test_what_has_ended_is_missed_at_once_and_others_take_its_place(tmp_path: Path) -> None:
    async def test(shards: GrpcShards, servicers: list[Servicer]) -> None:
        await shards.connect()
        await shards.warm_up(WARMUP)
        servicers[0].dies_at = 3
        await shards.execute(decode())
        with pytest.raises(Broken):
            await shards.execute(decode())
        with pytest.raises(Broken):
            await shards.lost
        servicers[0].dies_at = 0
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


def test_all_ranks_read_an_adapter(tmp_path: Path) -> None:
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
        (1, grpc.StatusCode.UNKNOWN, Refused, "is odd"),  # whatever it is, others can be served
        (1, grpc.StatusCode.UNAVAILABLE, Broken, "shard rank 1 is lost"),
    ],
)
def test_an_adapter_that_a_rank_can_not_read(
    tmp_path: Path, rank: int, code: grpc.StatusCode, kind: type[Exception], words: str
) -> None:
    """The others are waited for: what they have read later nobody would know of."""

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


def test_shards_that_are_given_up_while_they_read_are_lost(tmp_path: Path) -> None:
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
