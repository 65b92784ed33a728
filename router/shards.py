"""Client of the shards: sends commands and receives replies, in order. Hides how many ranks there are and how to reach them.

It numbers the commands and knows nothing of what they mean. `Shards` is all that the batcher sees.

A rank group that is lost, because a process has ended or nothing is answered any more, is not restarted here: whoever has started
it does that. Where no process has ended, the launcher is notified that there is something to restart.
"""

import asyncio
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import grpc
import grpc.aio

from ..proto import shard_pb2
from ..proto.certificates import Certificates
from ..proto.rpc import FAR_CHANNEL_OPTIONS, OPTIONS, Stub, channel_credentials
from .request import Broken, Refused, Superseded

POLL = 0.02  # seconds between attempts to reach a rank that does not answer yet; part of the time from start to ready
STAGE_POLL = 0.1  # seconds between polls of a loading rank's stage; nobody waits for it
INFO_TIMEOUT = 5.0  # seconds; a rank that listens answers at once, even while it loads
READING = 600.0  # timeout in seconds for reading, or downloading, an adapter
LOADING = 30.0  # seconds, at least, that a loading rank may be too busy to answer
UNREACHED = 15.0  # seconds after which an unreachable rank of another machine is logged, since nobody else may notice
SOON = 0.5  # seconds within which a connection to a socket without a listener fails
LOOKS = 10  # checks that find a command unanswered, before the ranks count as lost
PATIENCE = 10  # a command may always take this many times the longest step so far

GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # what a call to a rank that ends, or has ended, returns
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]


logger = logging.getLogger(__name__)


class Shards(Protocol):
    """Interface to a rank group."""

    @property
    def stage(self) -> str:
        """What the first rank is doing now, for display."""
        ...

    @property
    def info(self) -> shard_pb2.InfoReply:
        """InfoReply of the first rank. Valid after `warm_up`."""
        ...

    async def connect(self) -> None:
        """Returns when every rank has answered, loaded or not."""
        ...

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        """Returns when every rank has loaded, warmed up and dropped an earlier router's groups. Raises Broken."""
        ...

    async def load_adapter(self, request: shard_pb2.LoadAdapterRequest) -> shard_pb2.LoadAdapterReply:
        """Every rank reads the LoRA adapter, beside its steps. Raises Refused if one can't, and Broken."""
        ...

    @property
    def lost(self) -> "asyncio.Future[None]":
        """Raises Broken as soon as the ranks are lost, also while no command is in flight. Valid after `warm_up`."""
        ...

    def execute(self, command: shard_pb2.Command) -> "asyncio.Future[shard_pb2.Reply]":
        """Sends a command, whose `step` is set here. Commands are executed in the order of the calls; several may be in flight. The
        future raises Broken when the ranks are lost, and so do all later ones."""
        ...

    async def forget(self) -> None:
        """Resets after Broken: `connect` and `warm_up` may be called again, for the group that takes the lost one's place."""
        ...

    async def close(self) -> None:
        """Closes the connection; the ranks go on."""
        ...


class GrpcShards:
    """`Shards` over gRPC: all ranks answer Info and Warmup, rank 0 takes the commands on one stream."""

    def __init__(
        self,
        addresses: Sequence[str],
        step_timeout: float = 60.0,
        hang_reports: str = "",
        certificates: Certificates | None = None,
        name: str = "0",
    ) -> None:
        """addresses: of each rank the path of its unix socket, with unix: before it or without, address:port, or file:PATH, where
        PATH is a file that contains address:port while the rank is there; certificates: for ranks of other machines; name: the
        group's in reports of hangs. See `RouterConfig` for the other settings."""
        self._name = name
        self._addresses = tuple(addresses)
        self._certificates = certificates
        self._step_timeout = step_timeout
        self._load_timeout = max(step_timeout, LOADING)
        self._hang_reports = hang_reports
        self._targets: dict[int, str] = {}  # by rank: where it was found
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._stubs: dict[int, Stub] = {}
        self._stage = "waiting for the shards to start"
        self._info: shard_pb2.InfoReply | None = None
        self._own = ""  # identifies this router to the shards
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._outgoing: asyncio.Queue[shard_pb2.Command | None] = asyncio.Queue()  # None: no more
        self._expected: deque[tuple[int, asyncio.Future[shard_pb2.Reply]]] = deque()  # step number and its future
        self._step = 0
        self._broken: Broken | None = None
        self._lost: asyncio.Future[None] | None = None
        self._met = 0.0  # when this group was first called and answered, or should have answered
        self._guard: asyncio.Task[None] | None = None
        self._longest = 0.0  # seconds of the longest step so far
        self._looks = 0  # checks of the oldest command, since the last reply

    @property
    def stage(self) -> str:
        return self._stage

    @property
    def info(self) -> shard_pb2.InfoReply:
        assert self._info is not None
        return self._info

    @property
    def lost(self) -> "asyncio.Future[None]":
        assert self._lost is not None
        return self._lost

    async def connect(self) -> None:
        infos = await _together([self._first_answer(rank) for rank in range(len(self._addresses))])
        for rank, info in enumerate(infos):
            if (info.rank, info.ranks) != (rank, len(infos)):
                raise Broken(
                    f"address {rank + 1} of {len(infos)} leads to rank {info.rank} of {info.ranks}, rank {rank} of {len(infos)} "
                    "was expected: give the router the addresses of one rank group, rank 0 first"
                )
        self._learn(infos[0])

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        ranks = range(len(self._addresses))
        warmups = [self._ask(rank, "Warmup", request) for rank in ranks]
        replies = await _together(warmups, [self._watch(rank) for rank in ranks])
        self._learn(await self._ask(0, "Info", shard_pb2.InfoRequest()))
        self._call = self._stubs[0].Steps(self._commands(self._outgoing))
        self._reader = asyncio.create_task(self._read())
        reply: shard_pb2.WarmupReply = replies[0]
        self._longest = reply.sample_seconds + reply.image_seconds
        self._lost = asyncio.get_running_loop().create_future()
        self._guard = asyncio.create_task(self._watch_steps())
        self._own = secrets.token_hex(8)
        await self.execute(shard_pb2.Command(clear_cache=shard_pb2.ClearCacheRequest(router=self._own)))
        return reply

    async def load_adapter(self, request: shard_pb2.LoadAdapterRequest) -> shard_pb2.LoadAdapterReply:
        request.router = self._own
        calls = [self._stubs[rank].LoadAdapter(request, timeout=READING) for rank in range(len(self._addresses))]
        # Wait for all: a call given up would still load the adapter later, when it is not wanted any more.
        answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        for rank, answer in enumerate(answers):
            if isinstance(answer, grpc.aio.AioRpcError) and answer.code() not in GONE:
                raise Refused(f"{answer.details()} (shard rank {rank})" if rank else answer.details() or "")
            if isinstance(answer, BaseException):  # a call that is given up is cancelled
                raise Broken(f"shard rank {rank} is lost: it was to read an adapter")
        if len({answer.digest for answer in answers}) > 1:
            raise Refused(f"adapter {request.adapter.name} is not the same on all machines: copy its files from one of them")
        found: shard_pb2.LoadAdapterReply = answers[0]
        return found

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

    async def forget(self) -> None:
        await self.close()
        self._targets, self._channels, self._stubs = {}, {}, {}
        self._call, self._reader, self._guard = None, None, None
        self._outgoing, self._step, self._broken, self._looks = asyncio.Queue(), 0, None, 0
        self._stage = "waiting for the shards to start"

    async def close(self) -> None:
        tasks = [task for task in (self._reader, self._guard) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(Broken("the connection to the shards was closed"))
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def _first_answer(self, rank: int) -> shard_pb2.InfoReply:
        silent = 0.0  # seconds that it has listened without answering
        began, logged = 0.0, None
        while silent < self._load_timeout:
            # Check the address first: a refused connection is retried only after gRPC's back-off, a missing file at once.
            if target := _target(self._addresses[rank]):
                asked = monotonic()
                began = began or asked
                self._met = self._met if silent else asked
                try:
                    stub = await self._reach(rank, target)
                    reply: shard_pb2.InfoReply = await stub.Info(shard_pb2.InfoRequest(), timeout=INFO_TIMEOUT)
                    return reply
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (*GONE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        raise _broken(rank, error) from None
                    took = monotonic() - asked
                    silent = silent + took if took > SOON else 0.0
                    if not target.startswith("unix:"):
                        self._stage = f"waiting for shard rank {rank}, which can't be reached: the log says why"  # and where
                        if monotonic() > began + UNREACHED and error.details() != logged:
                            logged = error.details()
                            logger.warning("shard rank %d at %s can't be reached: %s", rank, target, logged)
            await asyncio.sleep(POLL)
        raise self._hung(rank, silent)

    async def _reach(self, rank: int, target: str) -> Stub:
        """The stub of a rank, for its current address."""
        if self._targets.get(rank) != target:
            if rank in self._channels:
                await self._channels[rank].close(None)
            channel = self._channel(target)
            self._targets[rank], self._channels[rank], self._stubs[rank] = target, channel, Stub(channel)
        return self._stubs[rank]

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target.startswith("unix:"):
            return grpc.aio.insecure_channel(target, options=[*OPTIONS, *CHANNEL_OPTIONS])
        options = [*FAR_CHANNEL_OPTIONS, *CHANNEL_OPTIONS]
        if self._certificates is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, channel_credentials(self._certificates), options=options)

    async def _ask(self, rank: int, method: str, request: Any, within: float | None = None) -> Any:
        try:
            return await getattr(self._stubs[rank], method)(request, timeout=within)
        except grpc.aio.AioRpcError as error:
            if within and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._hung(rank, within) from None
            raise _broken(rank, error) from None

    async def _watch(self, rank: int) -> None:
        """Polls a rank, to notice its loss and to update `stage`, until it is cancelled. Raises Broken."""
        while True:
            info = await self._ask(rank, "Info", shard_pb2.InfoRequest(), self._load_timeout)
            if rank == 0:
                self._learn(info)
            await asyncio.sleep(STAGE_POLL)

    async def _watch_steps(self) -> None:
        """Declares the ranks lost when a command is not answered for too long. Checks are counted, not seconds, so that a router
        that was itself suspended for a while does not blame the ranks."""
        while self._looks < LOOKS:
            patience = max(self._step_timeout, PATIENCE * self._longest)
            await asyncio.sleep(patience / LOOKS)
            self._looks = self._looks + 1 if self._expected else 0
        self._fail(self._hung(0, patience))

    def _hung(self, rank: int, seconds: float) -> Broken:
        """The error for ranks that don't answer, though none has ended. Also notifies the launcher, so that it restarts them."""
        error = Broken(f"shard rank {rank} has not answered for {seconds:g} s")
        if self._hang_reports:
            try:
                pipe = os.open(self._hang_reports, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as why:
                logger.error("nobody hears that %s: %s", error, why.strerror)
                return error
            with open(pipe, "w", encoding="utf-8") as file, suppress(OSError):
                file.write(f"{self._name} {self._met:.6f} {error}\n")
        return error

    def _learn(self, info: shard_pb2.InfoReply) -> None:
        self._info = info
        self._stage = info.stage

    async def _commands(self, outgoing: "asyncio.Queue[shard_pb2.Command | None]") -> AsyncIterator[shard_pb2.Command]:
        while (command := await outgoing.get()) is not None:
            yield command

    async def _read(self) -> None:
        """Resolves the future of each reply, until the stream ends; then fails all others."""
        try:
            async for reply in self._call:
                answered = getattr(reply, reply.WhichOneof("kind") or "").step
                step = self._expected[0][0] if self._expected else None
                if answered != step:
                    self._fail(Broken(f"shard rank 0 answered step {answered} instead of {step}"))
                    return
                _, future = self._expected.popleft()
                self._looks, self._longest = 0, max(self._longest, reply.step.seconds)
                if not future.done():  # cancelled: nobody waits any more
                    future.set_result(reply)
            self._fail(Broken("shard rank 0 has ended its stream"))
        except grpc.aio.AioRpcError as error:
            self._fail(_broken(0, error))
        except Exception as error:  # undecodable, or of no kind: nobody watches this task, and all would wait for `_watch_steps`
            logger.exception("shard rank 0 has answered what cannot be read")
            self._fail(Broken(f"shard rank 0 has answered what cannot be read: {error!r}"))

    def _fail(self, error: Broken) -> None:
        self._broken = self._broken or error
        self._outgoing.put_nowait(None)  # gRPC's task that waits for the next command would never end
        if self._lost is not None:
            _refuse(self._lost, error)
        while self._expected:
            _, future = self._expected.popleft()
            _refuse(future, error)


async def _together(wanted: Iterable[Coroutine[Any, Any, Any]], endless: Iterable[Coroutine[Any, Any, None]] = ()) -> list[Any]:
    """The results of `wanted`. What one of them raises, or one of `endless`, which never end by themselves, is raised at once. None
    is left running."""
    tasks = [asyncio.create_task(one) for one in wanted]
    others = [asyncio.create_task(one) for one in endless]
    pending = {*tasks, *others}
    try:
        while not pending.isdisjoint(tasks):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
    return [task.result() for task in tasks]


def _refuse(future: "asyncio.Future[Any]", error: Broken) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # keeps asyncio from logging exceptions that are never retrieved


def _target(address: str) -> str:
    """The address in gRPC's syntax; "" while there is nobody."""
    kind, colon, path = address.partition(":")
    if kind == "file":
        try:
            return Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
    if colon and kind != "unix" and not address.startswith("/"):
        return address
    socket = path if kind == "unix" else address
    return f"unix:{socket}" if os.path.exists(socket) else ""


def _broken(rank: int, error: grpc.aio.AioRpcError) -> Broken:
    if error.code() in GONE:
        logger.warning("shard rank %d is lost: %s", rank, error.details())  # not for clients: it may name addresses
        return Broken(f"shard rank {rank} is lost")
    if error.code() is grpc.StatusCode.ABORTED:
        return Superseded("another router has taken the shards, which serve one router: stop the other, or give it its own")
    return Broken(f"shard rank {rank}: {error.details()} ({error.code().name})")
