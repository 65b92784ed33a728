"""Main serving loop of one replica: connects clock, scheduler and shards. `submit(request)` is the only entry point.

It knows requests and streams, and what becomes of them when shards are lost; not HTTP, not what a step costs, not how shards are
called and reached (`steps`, `shards`). One iteration of the loop:

    shortly before the step in flight ends, ask the scheduler for the next and send it
    wait for the reply -> report it to the scheduler -> detokenize, and push to the streams

So the shards go from step to step without waiting for the router, and compute while tokens become text and leave as HTTP. A stop
string found in that text, a client that has left, a new request: they take effect one step late, or where steps overlap two, or
three if these are short. What was computed by then for a choice that nobody wants any more is thrown away.

When the shards are lost no stream is. Streams move to other replicas that compute the same, if there are any (see `PeerReplicas`),
or wait in the queue of a new scheduler, as new ones do, until shards are restarted. They resume from the tokens that were received:
those that follow are the same on any shard.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic

from ..proto import shard_pb2
from .adapters import Adapters, RuntimeAdapter
from .admission import admits
from .bounds import bounds_of, scheduler_of, step_tokens
from .config import Misconfigured, RouterConfig
from .delivery import Delivery
from .metrics import Metrics
from .policies import largest_step
from .prefix_keys import PrefixKeys
from .record import begin
from .recovery import Inquest
from .request import Broken, Expired, Failure, Item, Limits, NoModel, NotReady, Overloaded, Refused, Request, Sink, Superseded
from .scheduler import DELAYS, Bounds, Job, Scheduler
from .shards import Shards
from .steps import Steps
from .streams import Choice, Readers, Stream, Tokenizer, read

RETRY = 0.2  # seconds between attempts to reach new shards that were lost at once
# Seconds for which another router may keep the shards that it has taken. In a rolling update this one is to end by then. If neither
# ends, as by mistake, both get something done.
AWAY = 10.0
SOON = 0.02  # seconds within which shards learn that a request has ended
GONE = "the adapter was unloaded"
READY = "ready"  # the `stage` of a server, or of shards, that take requests
STRIDES = 16  # prompt prefixes that may be shared get a key every 1/16 of their length

logger = logging.getLogger(__name__)


class PeerReplicas:
    """Interface to the other replicas, as one batcher sees them. This default has none; see `fleet.Fleet`."""

    def lost(self, batcher: "Batcher", /) -> None:
        """The batcher's shards are lost."""

    def found(self, batcher: "Batcher", /) -> None:
        """The batcher has shards, its first ones or new ones, and starts computing. Raises Misconfigured if they don't match the
        others."""

    def ended(self, batcher: "Batcher", stream: Stream, /) -> None:
        """One of the batcher's streams needs nothing more of the shards."""

    def refuge(self, stream: Stream, /) -> "Batcher | None":
        """A batcher that takes over a stream that can't stay where it is; None: there is none."""
        return None


class Batcher:
    """Runs requests on one replica's shards by continuous batching. `start` it, then `submit`; `wait` returns when it ends."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        shards: Shards,
        metrics: Metrics,
        *,
        name: str = "0",
        uids: Iterator[int] | None = None,
        others: PeerReplicas | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """name: of the replica, in metrics; uids: source of streams' uids, and adapters: those known, both shared by all replicas
        between which streams may move."""
        self.name = name
        self._config = config
        self._tokenizer = tokenizer
        self._delivery = Delivery(tokenizer, metrics)
        self._shards = shards
        self._metrics = metrics
        self._uids = uids or itertools.count(1)
        self._others = others or PeerReplicas()
        self._adapters = adapters or Adapters(config.model, config.adapters)
        # Known once it has started, and refreshed by new shards
        self.limits: Limits | None = None
        self.info: shard_pb2.InfoReply | None = None  # what the shards report of themselves: dtype, device, ...
        self.together = 0  # requests of full length that fit at once
        self._warm = shard_pb2.WarmupReply()
        self.adapters: set[str] = set()  # keys of the LoRA adapters that the shards have loaded ...
        self._failed: set[str] = set()  # ... and of those that could not be loaded
        self._scheduler: Scheduler | None = None
        # Streams
        self._streams: dict[int, Stream] = {}  # that still need something of the shards, by uid
        self._inquest = Inquest()
        self._prefix_keys: PrefixKeys | None = None  # keys of prompt prefixes, where the shards cache prefixes
        self._held: set[int] = set()  # uids of streams that the inquest holds back: the scheduler does not know them
        self._readers = Readers()
        # State of the loop
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()  # set when the scheduler may have something to do
        self._answered: shard_pb2.StepReply | None = None  # a reply that was reported to the scheduler and not delivered yet
        self._last_call = math.inf  # monotonic time from which on new requests are refused
        self._recovering = ""  # the reason, while there are no shards
        self._broken = ""  # the reason, after it has ended by a fault

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None and not self._draining and not self._broken and not self._recovering

    @property
    def _draining(self) -> bool:
        return self._last_call < math.inf

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler. There is one from the first start on."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def trying(self) -> bool:
        """Whether most requests are held back until it is known which of the suspects has killed the shards."""
        return self._inquest.open

    @property
    def streams(self) -> Collection[Stream]:
        """Streams that still need something of the shards."""
        return self._streams.values()

    @property
    def readers(self) -> Mapping[str, int]:
        """Number of streams being read, finished ones included, by tenant."""
        return self._readers.counts

    def seconds_to_room(self, now: float) -> float:
        """Estimated seconds until a request ends and leaves room for another."""
        return self._readers.completion_rate.seconds(now)

    @property
    def stage(self) -> str:
        """Human-readable state, as in `/health`."""
        if self._broken:
            return self._broken
        if self._draining:
            return "shutting down"
        if self._recovering:
            found = self._shards.stage
            return f"recovering: {found if found != READY else self._recovering}"
        if self._loop is not None:
            return READY
        found = self._shards.stage
        return found if found != READY else "taking over shards that are ready"  # left ready by an earlier router

    # Life cycle

    async def start(self) -> None:
        """Connects to the shards and warms them up; then requests are taken. Raises Broken or Misconfigured."""
        await self._equip()
        self._show()
        self._loop = asyncio.create_task(self._serve())

    async def forget(self) -> None:
        """Drops the connection after `start` has raised Broken, so that `start` may be called again."""
        await self._shards.forget()

    async def _equip(self) -> None:
        """Waits for shards. Once they are warmed up, all existing streams join the queue of a new scheduler. Raises Broken or
        Misconfigured."""
        config = self._config
        await self._shards.connect()
        tokens = largest_step(step_tokens(config, self._shards.info), config.sequences)
        rows = min(config.sequences * (1 + config.speculate), tokens)  # drafts get what others leave of a step
        request = shard_pb2.WarmupRequest(
            max_step_tokens=tokens,
            max_step_rows=rows,
            max_total_tokens=config.max_total_tokens,
            max_sequences=config.sequences,
        )
        warm = await self._shards.warm_up(request)
        info = self._shards.info
        limits, bounds = bounds_of(config, info, warm)
        await self._adapt(info)
        self._adapters.begin()
        self.info, self.limits = info, limits
        self._shards.lost.add_done_callback(lambda lost: self._wake.set())
        self._prefix_keys = PrefixKeys(bounds.page_size, STRIDES) if info.prefix_caching else None
        self.together = bounds.together(limits.max_total_tokens)
        self._warm = warm
        self._queue_all(bounds)
        self._others.found(self)

    async def _adapt(self, info: shard_pb2.InfoReply) -> None:
        """Makes the shards' LoRA adapters match the registry: loads missing ones, drops unknown ones other than those they started
        with. Adapters that an earlier router left are adopted. Raises Broken."""
        first, later = set(info.adapters), [*info.later]
        for loaded in later:
            self._adapters.adopt(loaded)
        self.adapters, self._failed = first | {loaded.key for loaded in later}, set()
        retired = {loaded.key for loaded in later if loaded.retired}
        while True:  # adapters come and go meanwhile; after the last check nothing is awaited
            if gone := next((key for key in self.adapters - first if not self._adapters.knows(key)), ""):
                await self.drop(gone)
            elif untold := next((key for key in self._adapters.retired(self.adapters) if key not in retired), ""):
                retired.add(untold)
                await self.retire(untold)
            elif lacking := self._adapters.lacking(self.adapters | self._failed):
                try:
                    await self.load(lacking[0])
                except Refused as error:
                    logger.error("requests that go by adapter %s fail: it can't be loaded again: %s", lacking[0].name, error)
            else:
                break

    async def load(self, adapter: RuntimeAdapter) -> None:
        """Loads a LoRA adapter, which requests may use from now on. Raises Refused, or Broken."""
        self._check_shards()
        try:
            found = await self._shards.load_adapter(shard_pb2.LoadAdapterRequest(adapter=adapter.message))
            if problem := await self._change(shard_pb2.AdaptRequest(add=adapter.key)):
                raise Refused(problem)
        except Refused:
            self._failed.add(adapter.key)
            await self.drop(adapter.key)  # some ranks may have read it
            raise
        adapter.folder, adapter.digest = found.folder, found.digest
        self.adapters.add(adapter.key)

    def _check_shards(self) -> None:
        """Raises Broken if the shards are lost: their successors know no adapters yet."""
        if self._shards.lost.done():
            raise Broken("the shards are lost")

    async def retire(self, key: str) -> None:
        """Tells the shards that no new request uses the adapter. Raises Broken."""
        await self._change(shard_pb2.AdaptRequest(retire=key))

    async def drop(self, key: str) -> None:
        """Unloads an adapter from the shards: no request uses it any more, although they may still hold one that has ended. Raises
        Broken."""
        self.adapters.discard(key)
        while problem := await self._change(shard_pb2.AdaptRequest(drop=key)):
            logger.debug("%s yet", problem)
            await asyncio.sleep(SOON)

    async def _change(self, request: shard_pb2.AdaptRequest) -> str:
        """Returns why nothing was changed; "" on success."""
        self._check_shards()
        reply = await self._shards.execute(shard_pb2.Command(adapt=request))
        return reply.adapt.problem

    def _queue_all(self, bounds: Bounds) -> None:
        """Queues all streams with a new scheduler."""
        self._scheduler = scheduler_of(self._config, bounds, self._warm)
        self._held.clear()
        for stream in tuple(self._streams.values()):
            self._arrive(stream)

    def _show(self) -> None:
        """Registers the gauges of the scheduler's state."""
        watch = partial(self._metrics.watch, replica=self.name)
        watch("tgi_queue_size", lambda: self.scheduler.waiting)
        watch("tgi_batch_current_size", lambda: self.scheduler.running)
        watch("tgi_batch_current_max_tokens", lambda: self.scheduler.held * self.scheduler.bounds.page_size)
        watch("tgi_batch_max_total_tokens", lambda: self.scheduler.bounds.pages * self.scheduler.bounds.page_size)
        watch("penstock_waiting", lambda: self.scheduler.waiting)
        watch("penstock_running", lambda: self.scheduler.running)
        watch("penstock_paused", lambda: self.scheduler.paused_jobs)
        watch("penstock_pages_total", lambda: self.scheduler.bounds.pages)
        watch("penstock_pages_free", lambda: self.scheduler.free)
        watch("penstock_pages_cached", lambda: self.scheduler.cached)
        watch("penstock_pages_held", lambda: self.scheduler.held)
        watch("penstock_prompt_budget", lambda: self.scheduler.room)

    async def wait(self) -> None:
        """Returns after `close`; raises the error that has ended the loop, after every stream has received it."""
        assert self._loop is not None
        await asyncio.wait([self._loop])
        if not self._loop.cancelled():
            self._loop.result()

    async def drain(self, seconds: float, answered: asyncio.Event | None = None) -> None:
        """Graceful shutdown: refuses new requests, except those that arrived before the call; `answered` is set when none of these
        will be submitted any more. Returns when all streams have been read to their end; those that last longer than `seconds` are
        cut. When the shards are lost all are cut: nobody restarts shards while the server shuts down."""
        self._last_call = monotonic()
        if self._recovering:
            self._give_up(self._recovering)
        try:
            async with asyncio.timeout(seconds):
                if answered is not None:
                    await answered.wait()
                await self._readers.none.wait()
        except TimeoutError:
            self._cut(NotReady("the server shut down before the answer was complete"))
        self._last_call = 0.0

    async def close(self) -> None:
        """Ends everything at once."""
        self._last_call = 0.0
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        self._cut(NotReady("the server shut down before the answer was complete"))
        await self._shards.close()

    # Requests arrive

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        """A stream of items: Prompt, then of each choice its Tokens (an end token included) and its Finish. Closing it cancels the
        request.

        They come in lists: all that has come since the last one. A Finish is in the same list as the Token before it. The sink is
        offered items before they come here, and what it takes does not come; to keep them in order it has to refuse while its
        reader has a list in hand. What it raises ends its stream, and is raised here.

        Raises Overloaded, NotReady or Broken, here or at the first item; Broken, Expired or, where the server shuts down, NotReady
        at any later one.
        """
        self._metrics.arrived()
        self._admissible(request)
        return read(partial(self._begin, request, sink))

    def _begin(self, request: Request, sink: Sink | None) -> Stream:
        self._admissible(request)  # again: others may have come between `submit` and the first item
        return self.open(request, sink)

    def _admissible(self, request: Request) -> None:
        """Raises if the request can't be taken now."""
        if not self._adapters.knows(request.adapter):
            raise self._metrics.ended(NoModel(GONE))
        if self._broken and not self._draining:
            raise self._metrics.ended(Broken(self._broken))
        late = (request.arrived or monotonic()) >= self._last_call
        if self._loop is None or late or (self._draining and (self._recovering or self._broken)):
            raise self._metrics.ended(NotReady(f"not ready: {self.stage}"))
        if not admits(self.readers, self._config.max_concurrent_requests, request.tenant):
            message = f"{self._readers.counts.total()} requests are in flight, as many as the server takes at once"
            raise self._metrics.ended(Overloaded(message, self.seconds_to_room(monotonic())))

    def fits(self, request: Request) -> bool:
        """Whether a request can run here now: there are shards, as far as is known, it is not too large for them, they see images
        if it has any, and they have its adapter."""
        scheduler, limits = self._scheduler, self.limits
        if scheduler is None or limits is None or self._shards.lost.done() or (request.images and not limits.images):
            return False
        if request.adapter and request.adapter not in self.adapters:
            return False
        return scheduler.admissible(len(request.prompt), request.max_new_tokens, request.sequences)

    def refuses(self, request: Request) -> bool:
        """Whether these shards can't serve the request, even later: its adapter failed to load."""
        return request.adapter in self._failed

    def open(self, request: Request, sink: Sink | None) -> Stream:
        """Opens a stream for a request, whether or not it is admissible."""
        now = monotonic()
        make = self._tokenizer.stream
        texts = (
            make(request.prompt, request.stop, request.include_stop, request.skip_special_tokens, request.shown)
            for _ in range(request.choices)
        )
        choices = [Choice(index, text) for index, text in enumerate(texts)]
        run = begin(request, now)
        stream = Stream(next(self._uids), request, choices, now, left=len(choices), run=run, owner=self, sink=sink)
        delay = DELAYS[request.priority]
        if request.timeout:
            left = max(0.0, (request.arrived or now) + request.timeout - now)
            delay = min(delay, left / 2)
            stream.alarm = asyncio.get_running_loop().call_later(left, lambda: stream.owner.expire(stream))
        stream.rank = now + delay
        self._enter(stream)
        return stream

    def _enter(self, stream: Stream) -> None:
        self._streams[stream.uid] = stream
        self._readers.add(stream.request.tenant)
        self._adapters.enter(stream.request.adapter)
        self._arrive(stream)
        self._wake.set()

    def _arrive(self, stream: Stream) -> None:
        """The stream joins the scheduler's queue, to begin or to resume, unless the inquest holds it back."""
        request = stream.request
        job = Job(
            uid=stream.uid,
            prompt_tokens=len(request.prompt),
            max_new_tokens=request.max_new_tokens,
            choices=request.sequences,
            rank=stream.rank,
            tenant=request.tenant,
            drafts=request.drafts,
            attached=sum(len(image.pixels) for image in request.images),
            prefix_keys=self._prefix_keys_of(request),
        )
        if not self.scheduler.admissible(job.prompt_tokens, job.max_new_tokens, job.choices):
            message = "the shards were lost, and those that took their place have too little memory for this request"
            self._fail(stream.uid, Broken(message))
        elif self.refuses(request):
            self._fail(stream.uid, Broken("the adapter by which it goes could not be loaded again"))
        elif not self._inquest.admits(stream.uid):
            self._held.add(stream.uid)
        else:
            self.scheduler.arrive(job, [len(one.tokens) for one in stream.continuations])
            self._wake.set()

    def _prefix_keys_of(self, request: Request) -> Sequence[tuple[int, int]]:
        """Keys of the prompt's prefixes, by which the scheduler finds pages that running requests share."""
        if self._prefix_keys is None or request.prompt_logprobs:  # all of the prompt is computed for these
            return ()
        return self._prefix_keys.of(request.prompt, request.cache_key)

    # Requests end

    def close_stream(self, stream: Stream) -> None:
        """The reader has closed the stream."""
        self._readers.completion_rate.ended(monotonic())
        self._readers.remove(stream.request.tenant)
        if stream.alarm is not None:
            stream.alarm.cancel()
        if stream.uid in self._streams:
            self._forget(stream)
            self._cancel(stream.uid)
            self._metrics.failed("dropped")
            stream.run.fail("dropped", stream.generated)

    def expire(self, stream: Stream) -> None:
        """The request's own timeout is over."""
        self._fail(stream.uid, Expired.after(stream.request.timeout, stream.generated))

    def _leave(self, stream: Stream, now: float) -> None:
        """All choices of the stream are done."""
        self._forget(stream)
        stream.run.ended, stream.run.generated = now, stream.generated
        assert stream.finish is not None
        validation = stream.arrived - (stream.request.arrived or stream.arrived)
        self._metrics.done(stream.request, stream.finish, stream.run.generated, validation, stream.run.first - stream.started)

    def _fail(self, uid: int, failure: Exception) -> None:
        """Ends one stream with an error."""
        stream = self._streams.get(uid)
        if stream is not None:
            self._forget(stream)
            self._cancel(uid)
            counted = self._metrics.ended(failure if isinstance(failure, Failure) else Broken())  # else a fault of ours
            stream.run.fail(counted.kind, stream.generated)
            stream.failure = failure
            stream.wake()

    def _cut(self, failure: Failure) -> None:
        """Ends all streams with an error."""
        for uid in tuple(self._streams):
            self._fail(uid, failure)

    def _give_up(self, lost: str) -> None:
        """The shards are lost during shutdown and don't come back: all streams are cut, as at the timeout; another server has to
        answer them."""
        self._cut(NotReady(f"the server shuts down, and {lost}"))

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.uid]
        self._adapters.leave(stream.request.adapter)
        self._others.ended(self, stream)

    def _cancel(self, uid: int) -> None:
        """Cancels a job; no effect if the scheduler knows already that it has ended."""
        self.scheduler.cancel(uid)
        self._wake.set()

    # The loop

    async def _serve(self) -> None:
        """The loop, on one rank group after the other. It ends by being cancelled, or by an error, which every stream receives
        first."""
        try:
            while True:
                try:
                    await self._run(Steps(self.scheduler, self._shards, self._streams, self._metrics, self._fail))
                except Broken as lost:
                    if self._draining:
                        self._give_up(str(lost))
                        raise
                    await self._recover(lost)
        except Exception as error:
            # an internal error's text may name paths, which are not for clients
            ours = not isinstance(error, Failure | Misconfigured)
            self._broken = f"the server failed ({type(error).__name__}): its log says why" if ours else str(error)
            self._cut(Broken(self._broken))
            raise

    async def _run(self, steps: Steps) -> None:
        """Serves until the shards are lost."""
        while True:
            self._wake.clear()
            if self._inquest.hear(self._place):
                self._admit_held()
            steps.send(1)
            if not steps.underway:
                await self._woken()
                continue
            self._answered = await steps.answer()
            if self._answered is not None:
                steps.send_due()
                await asyncio.sleep(0)  # lets the command leave first
                self._catch_up()

    async def _woken(self) -> None:
        """Returns when there may be something to do. Raises Broken when the shards are lost."""
        if not self._shards.lost.done():
            await self._wake.wait()
        if self._shards.lost.done():
            self._shards.lost.result()

    def _catch_up(self) -> None:
        """Delivers what the scheduler has been told already: until then streams lag behind its view of them."""
        answered, self._answered = self._answered, None
        if answered is not None:
            self._deliver(answered)

    def _deliver(self, reply: shard_pb2.StepReply) -> None:
        """Delivers a reply's tokens to their streams; complete ones leave."""
        now = monotonic()
        delivered = self._delivery.deliver(reply, self._streams, now)
        for stream, choice in delivered.stopped:
            self._stop(stream, choice)
        for stream in delivered.complete:
            self._leave(stream, now)
        for stream in delivered.touched:
            try:
                stream.push()
            except Exception as error:  # a sink is external code: its fault must not affect other streams
                self._fail(stream.uid, error)
        for uid, message in zip(reply.failed_uids, reply.failed_messages, strict=True):
            self._fail(uid, Broken(message))

    def _stop(self, stream: Stream, choice: Choice) -> None:
        """Ends a choice at a stop string, which the shards don't know."""
        if stream.request.beams is None:
            self.scheduler.end(stream.uid, choice.index)
        elif not stream.left:  # beams end together
            self.scheduler.cancel(stream.uid)

    # Lost shards: streams stay or move

    async def _recover(self, lost: Broken) -> None:
        """Waits for new shards, for all streams that have found no other replica. Raises Misconfigured."""
        began, superseded = monotonic(), isinstance(lost, Superseded)
        self._recovering = str(lost)
        if not superseded:
            self._accuse()
        replays = sum(stream.started > 0 for stream in self._streams.values())
        self._others.lost(self)
        moved = self.evacuate()
        for stream in self._streams.values():
            stream.restart()
        self._queue_all(self.scheduler.bounds)
        logger.warning("%s: requests that wait for new ones: %d, that go on elsewhere: %d", lost, len(self._streams), moved)
        if superseded:
            await asyncio.sleep(AWAY)
        while True:
            try:
                await self._shards.forget()
                await self._equip()
                break
            except Broken as again:
                logger.warning("the new shards are lost as well: %s", again)
                await asyncio.sleep(RETRY)
        self._recovering = ""
        self._metrics.recovered(monotonic() - began, replays)
        logger.info("recovered after %.1f s: requests that go on: %d", monotonic() - began, len(self._streams))

    def _accuse(self) -> None:
        """Fails the one request, if there is one, that has killed the shards repeatedly."""
        places = {uid: self._place(uid) for uid in self.scheduler.in_hand}
        guilty = self._inquest.died({uid: place for uid, place in places.items() if place is not None})
        if guilty is not None:
            logger.error("request %s fails: the shards died again while it alone was computed", self._streams[guilty].run.name)
            self._fail(guilty, Broken("the shards died again and again while they computed this request"))

    def _place(self, uid: int) -> int | None:
        """How far a request has come, in steps; None if it is not here any more."""
        stream = self._streams.get(uid)
        return None if stream is None else stream.place(self.scheduler.lacking(uid), self.scheduler.bounds.step_tokens)

    def _admit_held(self) -> None:
        """Queues the streams that the inquest no longer holds back."""
        held, self._held = sorted(self._held), set()
        for uid in held:
            if uid in self._streams:
                self._arrive(self._streams[uid])

    def evacuate(self, suspects: bool = False) -> int:
        """Moves all streams for which another replica has room; suspects of having killed the shards only if `suspects`. Returns
        how many moved."""
        gone = 0
        self._catch_up()
        for stream in tuple(self._streams.values()):
            if self._inquest.suspects(stream.uid) and not suspects:
                continue
            other = self._others.refuge(stream)
            if other is not None:
                self._let_go(stream)
                other._adopt(stream, self._inquest.release(stream.uid))
                gone += 1
        self._metrics.moved(gone)
        return gone

    def _let_go(self, stream: Stream) -> None:
        """Removes a stream that another replica takes over. What was computed for it here is thrown away."""
        self._forget(stream)
        self._cancel(stream.uid)
        self._readers.remove(stream.request.tenant)

    def _adopt(self, stream: Stream, known: tuple[float, int] | None) -> None:
        """Takes over a stream. known: what the inquest of its last replica knows of it."""
        self._inquest.adopt(stream.uid, known)
        stream.owner = self
        stream.restart()
        self._enter(stream)
