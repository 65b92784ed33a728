"""The port to the shards: commands go in, replies come out, in order. Hides how many ranks there are and how to reach them.

It numbers the commands and knows nothing of what they mean. `Shards` is all that the batcher sees.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio

from ..proto import shard_pb2
from ..proto.rpc import OPTIONS, Stub
from .grammar import written
from .request import Broken, Request

POLL = 0.02  # seconds between looks for a rank that does not answer yet; part of the time from start to ready
STAGE_POLL = 0.1  # seconds between looks at what a loading rank does; nobody waits for it
INFO_TIMEOUT = 5.0  # seconds; a rank that listens answers at once, even while it loads

CHANNEL_OPTIONS = [
    *OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class Shards(Protocol):
    """A rank group."""

    @property
    def stage(self) -> str:
        """What the first rank does now, for people."""
        ...

    @property
    def info(self) -> shard_pb2.InfoReply:
        """What the first rank is. Valid after `warm_up`."""
        ...

    async def connect(self) -> None:
        """Returns when every rank has answered, loaded or not."""
        ...

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        """Returns when every rank has loaded, warmed up and forgotten what an earlier router may have asked. Raises Broken."""
        ...

    def execute(self, command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
        """Sends a command, whose `step` is set here. Commands are executed in the order of the calls; several may be under
        way. The future raises Broken when the ranks are lost, and so do all later ones."""
        ...

    async def close(self) -> None:
        """Ends the connection, not the ranks."""
        ...


def group(uid: int, request: Request, continuations: Iterable[shard_pb2.Continuation] = (), trace: str = "") -> shard_pb2.Group:
    """A request in the words of the wire. Neutral values stay absent. `continuations`: where it goes on after a pause.
    `trace`: how others know it."""
    resumes = tuple(continuations)
    sampling = request.sampling
    return shard_pb2.Group(
        uid=uid,
        tokens=request.prompt,
        choices=request.choices if request.choices > 1 else 0,
        max_new_tokens=request.max_new_tokens,
        end_ids=request.end_ids,
        sampling=shard_pb2.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=_unless(1.0, sampling.top_p),
            min_p=sampling.min_p,
            typical_p=_unless(1.0, sampling.typical_p),
            repetition_penalty=_unless(1.0, sampling.repetition_penalty),
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            bias_ids=[id for id, _ in sampling.logit_bias],
            bias_values=[value for _, value in sampling.logit_bias],
            final_logprobs=sampling.final_logprobs,
        ),
        top_n=request.top_n,
        prompt_logprobs=request.prompt_logprobs and not resumes,
        prompt_top_n=request.prompt_top_n,
        min_new_tokens=request.min_new_tokens,
        grammar=written(request.grammar) if request.grammar else "",
        continuations=resumes,
        trace=trace,
    )


def _unless(neutral: float, value: float) -> float | None:
    return None if value == neutral else value


class GrpcShards:
    """`Shards` over gRPC on unix sockets: all ranks answer Info and Warmup, rank 0 takes the commands on one stream."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = tuple(sockets)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Stub] = []
        self._stage = "waiting for the shards to start"
        self._info: shard_pb2.InfoReply | None = None
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[shard_pb2.Command] = asyncio.Queue()
        self._expected: deque[tuple[int, asyncio.Future[shard_pb2.Reply]]] = deque()  # step and who waits for it
        self._step = 0
        self._broken: Broken | None = None

    @property
    def stage(self) -> str:
        return self._stage

    @property
    def info(self) -> shard_pb2.InfoReply:
        assert self._info is not None
        return self._info

    async def connect(self) -> None:
        for socket in self._sockets:
            channel = grpc.aio.insecure_channel(f"unix:{socket}", options=CHANNEL_OPTIONS)
            self._channels.append(channel)
            self._stubs.append(Stub(channel))
        infos = await asyncio.gather(*(self._first_answer(rank) for rank in range(len(self._sockets))))
        for rank, info in enumerate(infos):
            if (info.rank, info.ranks) != (rank, len(infos)):
                raise Broken(
                    f"the shard at {self._sockets[rank]} is rank {info.rank} of {info.ranks}, rank {rank} of {len(infos)} was "
                    "expected: give the router the sockets of one rank group, rank 0 first"
                )
        self._learn(infos[0])

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        watch = asyncio.create_task(self._watch())
        warmups = [asyncio.create_task(self._ask(rank, "Warmup", request)) for rank in range(len(self._stubs))]
        try:
            replies = await asyncio.gather(*warmups)
        finally:
            for task in (watch, *warmups):
                task.cancel()
            await asyncio.gather(watch, *warmups, return_exceptions=True)
        self._learn(await self._ask(0, "Info", shard_pb2.InfoRequest()))
        self._call = self._stubs[0].Steps(self._commands())
        self._reader = asyncio.create_task(self._read())
        await self.execute(shard_pb2.Command(clear_cache=shard_pb2.ClearCacheRequest()))
        reply: shard_pb2.WarmupReply = replies[0]
        return reply

    def execute(self, command: shard_pb2.Command) -> asyncio.Future[shard_pb2.Reply]:
        future: asyncio.Future[shard_pb2.Reply] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            _refuse(future, self._broken)
            return future
        self._step += 1
        getattr(command, command.WhichOneof("kind") or "").step = self._step
        self._expected.append((self._step, future))
        self._outgoing.put_nowait(command)
        return future

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(Broken("the connection to the shards was closed"))
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def _first_answer(self, rank: int) -> shard_pb2.InfoReply:
        while True:
            # Looked for first: a refused connection is tried again only after gRPC's back-off, a missing file at once.
            if _exists(self._sockets[rank]):
                try:
                    reply: shard_pb2.InfoReply = await self._stubs[rank].Info(shard_pb2.InfoRequest(), timeout=INFO_TIMEOUT)
                    return reply
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        raise _broken(rank, error) from None
            await asyncio.sleep(POLL)

    async def _ask(self, rank: int, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stubs[rank], method)(request)
        except grpc.aio.AioRpcError as error:
            raise _broken(rank, error) from None

    async def _watch(self) -> None:
        """Keeps `stage` up to date until it is cancelled, or rank 0 is lost, which others notice."""
        while True:
            self._learn(await self._ask(0, "Info", shard_pb2.InfoRequest()))
            await asyncio.sleep(STAGE_POLL)

    def _learn(self, info: shard_pb2.InfoReply) -> None:
        self._info = info
        self._stage = info.stage

    async def _commands(self) -> AsyncIterator[shard_pb2.Command]:
        while True:
            yield await self._outgoing.get()

    async def _read(self) -> None:
        """Gives each reply to the one who waits for it, until the stream ends; then tells everybody."""
        try:
            async for reply in self._call:
                answered = getattr(reply, reply.WhichOneof("kind") or "").step
                step = self._expected[0][0] if self._expected else None
                if answered != step:
                    self._fail(Broken(f"shard rank 0 answered step {answered} instead of {step}"))
                    return
                _, future = self._expected.popleft()
                if not future.done():  # cancelled: nobody waits any more
                    future.set_result(reply)
            self._fail(Broken("shard rank 0 has ended its stream"))
        except grpc.aio.AioRpcError as error:
            self._fail(_broken(0, error))

    def _fail(self, error: Broken) -> None:
        self._broken = self._broken or error
        while self._expected:
            _, future = self._expected.popleft()
            _refuse(future, error)


def _refuse(future: "asyncio.Future[shard_pb2.Reply]", error: Broken) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # asyncio shall not complain about those that nobody comes back for


def _exists(socket: str) -> bool:
    return os.path.exists(socket)


def _broken(rank: int, error: grpc.aio.AioRpcError) -> Broken:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return Broken(f"shard rank {rank} is lost: {error.details()}")
    return Broken(f"shard rank {rank}: {error.details()} ({error.code().name})")
