"""Data parallelism: the replicas, rank groups of one model, each with a batcher of its own, behind one entry point. Knows batchers
and names.

    submit           to the replica that `placement` chooses; where there is only one, straight to it
    lost, found      a replica's shards are lost: its streams go on on the others at once. It has shards again: it takes part again,
                     and takes the streams of those that still have none
    join, retire,    what an operator requests while the server runs (see `api/admin.py`)
    remove

A stream that moves gets the tokens that it would have had, since they depend on nothing but the request: that is why all replicas
have to serve the same model in the same number format. Streams that may have killed the shards (see `recovery`) stay where they
are.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from .adapters import Adapters
from .admission import admits
from .batcher import GONE, Batcher, PeerReplicas
from .config import Misconfigured, RouterConfig
from .metrics import Metrics
from .placement import Placement
from .replica import Conflict, Replica, Unknown
from .request import Broken, Item, Limits, NoModel, NotReady, Overloaded, Request, Sink
from .scheduler import load_of
from .shards import Shards
from .streams import Stream, Tokenizer, read

RETRY = 0.5  # seconds until a replica that failed to start is tried again
# Fields of InfoReply that tokens depend on, besides the request.
ALIKE = ("model", "dtype", "quantize", "kv_cache_dtype", "batch_invariant", "vocabulary", "max_positions")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """A replica and its state in the fleet."""

    addresses: tuple[str, ...]
    batcher: Batcher
    up: bool = False  # it has shards
    leaving: bool = False  # it drains: it gets no more requests
    trouble: str = ""  # why it has no shards
    failed: bool = False  # it is not tried again
    life: "asyncio.Task[None] | None" = None

    @property
    def takes(self) -> bool:
        """Whether it takes requests."""
        return self.up and not self.leaving

    @property
    def state(self) -> str:
        """Its state in one word."""
        if self.failed:
            return "failed"
        if self.leaving:
            return "draining" if self.batcher.readers else "drained"
        return "ready" if self.up else "starting" if self.batcher.limits is None else "recovering"


def work_of(request: Request) -> int:
    """Tokens that a request counts in its replica's load."""
    return load_of(len(request.prompt), request.max_new_tokens, request.sequences)


class Fleet(PeerReplicas):
    """All replicas. `start` it, then `submit`; `wait` returns when it ends."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        connect: Callable[[str, Sequence[str]], Shards],
        metrics: Metrics,
    ) -> None:
        """connect: creates the client of a replica's rank group, by its name and the addresses of its ranks."""
        self.limits: Limits | None = None  # limits that hold on every replica; None until one has started
        self._config = config
        self._tokenizer = tokenizer
        self._connect = connect
        self._metrics = metrics
        self.adapters = Adapters(config.model, config.adapters, config.max_loras, self._equipped)
        self._uids = itertools.count(1)
        self._numbers = itertools.count()  # generates names of replicas
        self._members: dict[str, Member] = {}
        self._only: Batcher | None = None  # its batcher, if there is one replica
        self._placement: Placement | None = None  # while there are several replicas
        self._most = 0  # requests that may be in flight
        self._last_call = math.inf  # monotonic time from which on new requests are refused
        self._served = False  # a replica was ready at some time
        self._endings: set[asyncio.Task[None]] = set()  # tasks that close removed members
        self._settled = asyncio.Event()  # set when one replica is ready, or none will be
        self._over: asyncio.Future[None] | None = None
        if most := max(config.max_loras, len(config.adapters)):
            metrics.watch_adapters(most, self._asked_for)
        for addresses in config.groups:
            self._add(tuple(addresses), "")

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self._draining and any(member.takes and member.batcher.ready for member in self._members.values())

    @property
    def _draining(self) -> bool:
        return self._last_call < math.inf

    @property
    def stage(self) -> str:
        """Human-readable state."""
        if self._draining:
            return "shutting down"
        if self.ready:
            return "ready"
        members = [member for member in self._members.values() if not (member.failed or member.leaving)]
        return members[0].batcher.stage if members else next((one.trouble for one in self._members.values()), "no replica")

    @property
    def together(self) -> int:
        """Requests of full length that fit at once."""
        return sum(member.batcher.together for member in self._members.values() if member.takes)

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, as operators see them."""
        return [self._described(name) for name in self._members]

    def serves(self, name: str) -> bool:
        """Whether a replica takes requests. Raises Unknown."""
        member = self._member(name)
        return not self._draining and member.takes and member.batcher.ready

    # Life cycle

    async def start(self) -> None:
        """Connects to all replicas and warms them up. Returns when the first is ready; the others join as they become ready. Raises
        Broken or Misconfigured."""
        self._over = asyncio.get_running_loop().create_future()
        for member in self._members.values():
            member.life = member.life or asyncio.create_task(self._live(member))
        self._over.add_done_callback(lambda over: self._settled.set())
        await self._settled.wait()
        if self._over.done():
            self._over.result()

    async def wait(self) -> None:
        """Returns after `close`; raises what has ended the last replica, or an internal error, after its streams have received
        it."""
        assert self._over is not None
        await asyncio.wait([self._over])
        self._over.result()

    async def drain(self, seconds: float, answered: asyncio.Event | None = None) -> None:
        """See `Batcher.drain`."""
        self._last_call = monotonic()
        await asyncio.gather(*(member.batcher.drain(seconds, answered) for member in self._members.values()))
        self._last_call = 0.0

    async def close(self) -> None:
        """Ends everything at once."""
        self._last_call = 0.0
        await asyncio.gather(*self._endings, *(self._end(member) for member in self._members.values()))
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    # Requests

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        """See `Batcher.submit`."""
        if self._only is not None:
            return self._only.submit(request, sink)
        self._metrics.arrived()
        self._admissible(request)
        return read(partial(self._open, request, sink))

    def _open(self, request: Request, sink: Sink | None) -> Stream:
        self._admissible(request)  # again: others may have come between `submit` and the first item
        return (self._place(request, self._metrics.placed) or self._waiting_room(request)).open(request, sink)

    def _admissible(self, request: Request) -> None:
        """Raises if the request can't be taken now."""
        if not self.adapters.knows(request.adapter):
            raise self._metrics.ended(NoModel(GONE))
        if self.limits is None or (request.arrived or monotonic()) >= self._last_call:
            raise self._metrics.ended(NotReady(f"not ready: {self.stage}"))
        readers: Counter[str] = Counter()
        for member in self._members.values():
            readers.update(member.batcher.readers)
        if not admits(readers, self._most, request.tenant):
            message = f"{readers.total()} requests are in flight, as many as the server takes at once"
            now = monotonic()
            room = min(member.batcher.seconds_to_room(now) for member in self._members.values())
            raise self._metrics.ended(Overloaded(message, room))

    def _place(self, request: Request, tell: Callable[[str, str, int], None] | None = None) -> Batcher | None:
        """The batcher that takes a request. None: nobody can."""
        if self._placement is None:
            return None

        def fits(name: str) -> bool:
            return self._members[name].batcher.fits(request)

        def fits_now(name: str) -> bool:
            return fits(name) and not self._members[name].batcher.trying

        place = partial(self._placement.place, request.prompt, work_of(request), key=request.cache_key, session=request.session)
        placed = place(fits=fits_now) or place(fits=fits)
        if placed is None:
            return None
        if tell is not None:
            tell(placed.name, placed.reason, placed.hit)
        return self._members[placed.name].batcher

    def _waiting_room(self, request: Request) -> Batcher:
        """A batcher in whose queue a request waits that fits no replica now: mostly, none has shards. Raises NotReady if none ever
        had, or will have."""
        known = [member for member in self._members.values() if member.batcher.limits is not None and not member.failed]
        if not known or self._draining:  # those that were ready have left, and no others will come
            raise self._metrics.ended(NotReady(f"not ready: {self.stage}"))

        def cost(member: Member) -> tuple[bool, bool, int]:
            # one that has shards does not wait for an adapter that they lack; others load it before anything is queued
            lacks = member.up and request.adapter not in ("", *member.batcher.adapters)
            return lacks or member.batcher.refuses(request), member.leaving, len(member.batcher.streams)

        chosen = min(known, key=cost).batcher
        if self._placement is not None:
            self._placement.assign(chosen.name, work_of(request))  # until `ended`
        return chosen

    # Called by batchers: see `batcher.PeerReplicas`

    def lost(self, batcher: Batcher) -> None:
        """The batcher's shards are lost, with what they had cached."""
        member = self._known(batcher)
        if member is None:
            return
        member.up = False
        if self._placement is not None:
            self._placement.leave(batcher.name)

    def found(self, batcher: Batcher) -> None:
        """The batcher has shards, and takes requests from now on. Raises Misconfigured if they differ from the others'."""
        member = self._known(batcher)
        if member is None:
            return
        self._compare(batcher)
        member.up, member.trouble = True, ""
        self._arrange()
        if self._placement is not None:
            logger.info("replica %s is ready", batcher.name)
            for other in self._members.values():
                if not other.up:
                    other.batcher.evacuate()
        self._served = True
        self._settled.set()

    def ended(self, batcher: Batcher, stream: Stream) -> None:
        """The load of the stream's replica falls."""
        if self._placement is not None and self._known(batcher) is not None:
            self._placement.release(batcher.name, work_of(stream.request))

    def refuge(self, stream: Stream) -> Batcher | None:
        """Another replica; none while the server shuts down."""
        return None if self._draining else self._place(stream.request)

    # Requests of operators

    def join(self, addresses: Sequence[str], name: str = "") -> Replica:
        """A replica that somebody else has started takes part as soon as it is ready. Raises Conflict."""
        if name in self._members:
            raise Conflict(f"there is a replica {name} already: choose another name")
        for other, member in self._members.items():
            if not set(addresses).isdisjoint(member.addresses):
                raise Conflict(f"{', '.join(addresses)} is replica {other} already: remove that first")
        member = self._add(tuple(addresses), name)
        self._arrange()
        member.life = asyncio.create_task(self._live(member))
        logger.info("replica %s joins: %s", member.batcher.name, ", ".join(addresses))
        return self._described(member.batcher.name)

    def retire(self, name: str, move: bool = False) -> Replica:
        """Drains a replica: it gets no more requests; those it has end there, or with `move` go on on others. Raises Unknown or
        Conflict."""
        member = self._member(name)
        self._spare(member)
        member.leaving = True
        self._arrange()
        moved = member.batcher.evacuate() if move else 0
        logger.info("replica %s takes no more requests: %d go on on others, %d here", name, moved, len(member.batcher.streams))
        return self._described(name)

    async def remove(self, name: str) -> None:
        """Removes a replica at once: its requests go on on others. Raises Unknown or Conflict."""
        member = self._member(name)
        self._spare(member)
        member.leaving = True
        self._arrange()
        moved = member.batcher.evacuate(suspects=True)  # there will be no other trial
        logger.info("replica %s leaves: requests that go on on others: %d", name, moved)
        del self._members[name]
        if member.life is not None:
            member.life.cancel()  # now: its shards may have become ready this very moment, and must not join any more
        self._metrics.left(name)
        self._arrange()
        ending = asyncio.create_task(self._end(member))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)  # the caller may disconnect

    def _spare(self, member: Member) -> None:
        """Raises Conflict unless the server can do without the replica."""
        others = [other for other in self._members.values() if other is not member]
        needed = member.takes or member.batcher.streams
        if not others or (needed and not any(other.takes for other in others)):
            raise Conflict(f"no other replica takes requests: replica {member.batcher.name} can't be spared until one does")

    # Members

    def _add(self, addresses: tuple[str, ...], name: str) -> Member:
        name = name or next(number for each in self._numbers if (number := str(each)) not in self._members)
        shards = self._connect(name, addresses)
        batcher = Batcher(
            self._config, self._tokenizer, shards, self._metrics, name=name, uids=self._uids, others=self, adapters=self.adapters
        )
        member = self._members[name] = Member(addresses, batcher)
        self._metrics.watch("penstock_replicas_ready", lambda: member.takes and batcher.ready, replica=name)
        self._arrange()
        return member

    def _asked_for(self) -> tuple[list[str], list[str]]:
        """Names of the LoRA adapters of running requests, and of waiting ones."""
        streams = [stream for member in self._members.values() for stream in member.batcher.streams if stream.request.adapter]
        running, waiting = ([one for one in streams if bool(one.started) is begun] for begun in (True, False))
        name = self.adapters.name
        return [name(one.request.adapter) for one in running], [name(one.request.adapter) for one in waiting]

    def _equipped(self) -> list[Batcher]:
        """Batchers that have shards."""
        return [member.batcher for member in self._members.values() if member.up]

    def _known(self, batcher: Batcher) -> Member | None:
        """The batcher's member; None: it was removed, and another may have its name."""
        member = self._members.get(batcher.name)
        return member if member is not None and member.batcher is batcher else None

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise Unknown(f"there is no replica {name}; there are: {', '.join(self._members)}")
        return self._members[name]

    def _described(self, name: str) -> Replica:
        member = self._member(name)
        batcher = member.batcher
        return Replica(
            name=name,
            addresses=member.addresses,
            state=member.state,
            stage=member.trouble or (member.state if member.leaving else batcher.stage),
            requests=len(batcher.streams),
            load=sum(work_of(stream.request) for stream in batcher.streams),
            pages=batcher.limits.pages if batcher.limits is not None else 0,
        )

    async def _live(self, member: Member) -> None:
        """Runs a member from start to end. One that can't serve is left out, unless it is the last."""
        try:
            await self._start(member)
            await member.batcher.wait()
        except (Broken, Misconfigured) as error:
            member.up, member.failed, member.trouble = False, True, str(error)
            if not self._needed(member) and not all(other.failed for other in self._members.values()):
                logger.error("replica %s is left out: %s", member.batcher.name, error)
                self._arrange()
            else:
                self._fail(error)
        except Exception as error:
            self._fail(error)

    async def _start(self, member: Member) -> None:
        """Starts a member, retrying once the server serves: whoever starts the shards retries, too."""
        while True:
            try:
                await member.batcher.start()
                return
            except Broken as error:
                if self._needed(member):
                    raise
                if member.trouble != str(error):
                    logger.warning("replica %s does not start: %s", member.batcher.name, error)
                member.trouble = str(error)
                await member.batcher.forget()
                await asyncio.sleep(RETRY)

    def _needed(self, member: Member) -> bool:
        """Whether the server ends if the member can't start: an initial one, before any was ready."""
        return not self._served and member.addresses in self._config.groups

    def _fail(self, error: Exception) -> None:
        """Ends the server with an error."""
        assert self._over is not None
        if not self._over.done():
            self._over.set_exception(error)

    async def _end(self, member: Member) -> None:
        if member.life is not None:
            member.life.cancel()
            await asyncio.wait([member.life])
        await member.batcher.close()

    def _compare(self, batcher: Batcher) -> None:
        """Raises Misconfigured if a stream could not go on there with the same tokens."""
        for member in self._members.values():
            other = member.batcher
            if other is not batcher and not member.failed and other.info is not None and batcher.info is not None:
                for what in (*ALIKE, "ranks") if batcher.info.batch_invariant else ALIKE:
                    here, there = getattr(batcher.info, what), getattr(other.info, what)
                    if here != there:
                        raise Misconfigured(
                            f"replica {batcher.name} has {what} {here or 'none'}, replica {other.name} has {there or 'none'}: "
                            "replicas are of one model and one number format"
                        )

    def _arrange(self) -> None:
        """Updates limits and placement after a member has come or gone."""
        members = self._members
        self._only = next(iter(members.values())).batcher if len(members) == 1 else None
        counted = [member for member in members.values() if not member.failed and not member.leaving]
        self._most = self._config.max_concurrent_requests * max(1, len(counted))
        known = [limits for member in members.values() if not member.failed and (limits := member.batcher.limits) is not None]
        if len({limits.images for limits in known}) > 1 and (self.limits is None or self.limits.images):
            logger.warning("text alone is served: some replicas see images, and some don't")
        self.limits = _least(known) if known else self.limits
        if self._only is not None or not known:
            self._placement = None
            return
        if self._placement is None:
            self._placement = Placement(known[0].page_size)
        for name, member in members.items():
            if not member.takes:
                self._placement.leave(name)
            elif name not in self._placement:
                self._placement.join(name, sum(work_of(stream.request) for stream in member.batcher.streams))


def _least(known: Sequence[Limits]) -> Limits:
    """The limits that hold wherever a request goes."""
    return replace(
        min(known, key=lambda limits: limits.pages * limits.page_size),
        sequences=min(limits.sequences for limits in known),
        max_input_tokens=min(limits.max_input_tokens for limits in known),
        max_total_tokens=min(limits.max_total_tokens for limits in known),
        images=all(limits.images for limits in known),
    )
