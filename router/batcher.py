"""The one loop where clock, scheduler and shards meet. `submit(request)` is the only door to it.

It knows requests and streams, and what becomes of them when shards are lost; not HTTP, not what a step costs, not how shards are
asked and reached (`steps`, `shards`). One turn of the loop:

    shortly before the step under way ends, ask the scheduler for the next and send it
    wait for the reply -> report it to the scheduler -> turn its tokens into text, for the streams

So the shards go from step to step without waiting for the router, and compute while tokens become text and leave as HTTP. A stop
string found in that text, a client that has left, a new request: they act one step late, or two where steps overlap. What was
computed by then of a choice that nobody wants any more is thrown away.

When the shards are lost no stream is. Streams go on elsewhere, if there are others that compute the same (see `Others`), or wait in
the queue of a scheduler of their own, new ones too, for shards that somebody starts. They go on from the tokens that were received:
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
from .adapters import Adapters, Later
from .admission import admits
from .bounds import bounds_of, drafting_of, policy_of, step_tokens
from .config import Misconfigured, RouterConfig
from .delivery import Delivery
from .metrics import Metrics
from .policies import largest_step
from .prefix_keys import PrefixKeys
from .record import begin
from .recovery import Inquest
from .request import Broken, Expired, Failure, Item, Limits, NoModel, NotReady, Overloaded, Refused, Request, Sink
from .scheduler import DELAYS, Bounds, Job, Scheduler
from .shards import Shards
from .steps import Steps
from .streams import Choice, Readers, Stream, Tokenizer, read

RETRY = 0.2  # seconds until new shards that were lost at once are looked for again
SOON = 0.02  # seconds in which shards hear of a request that has ended
GONE = "the adapter was unloaded"
READY = "ready"  # the stage of who takes requests, be it a server or its shards
STRIDES = 16  # beginnings of prompts that may be shared are looked at in strides of this part of their length

logger = logging.getLogger(__name__)


class Others:
    """Those that compute the same on other shards, as one of them sees them. Here there are none; see `fleet.Fleet`."""

    def lost(self, batcher: "Batcher", /) -> None:
        """Its shards are gone."""

    def found(self, batcher: "Batcher", /) -> None:
        """It has shards, its first ones or others, and computes at once. Raises Misconfigured if that may not be."""

    def ended(self, batcher: "Batcher", stream: Stream, /) -> None:
        """A stream of it needs nothing more."""

    def refuge(self, stream: Stream, /) -> "Batcher | None":
        """Who takes a stream that can't stay where it is; None: nobody."""
        return None


class Batcher:
    """Runs requests on the shards, many at once. `start` it, then `submit`; `wait` tells when it ends."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        shards: Shards,
        metrics: Metrics,
        *,
        name: str = "0",
        uids: Iterator[int] | None = None,
        others: Others | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """name: of the replica, in metrics; uids: where those of streams come from, adapters: that there are, the same for all that
        streams may move to."""
        self.name = name
        self._config = config
        self._tokenizer = tokenizer
        self._delivery = Delivery(tokenizer, metrics)
        self._shards = shards
        self._metrics = metrics
        self._uids = uids or itertools.count(1)
        self._others = others or Others()
        self._adapters = adapters or Adapters(config.model, config.adapters)
        # Known since it has started, and told anew by new shards
        self.limits: Limits | None = None
        self.info: shard_pb2.InfoReply | None = None  # dtype, device, ...
        self.together = 0  # requests of full length that fit at once
        self._bounds: Bounds | None = None
        self._warm = shard_pb2.WarmupReply()
        self.adapters: set[str] = set()  # keys of those that the shards have ...
        self._failed: set[str] = set()  # ... and of those that they can't have
        self._scheduler: Scheduler | None = None
        # Who is here
        self._streams: dict[int, Stream] = {}  # that need something of the shards yet, by uid
        self._inquest = Inquest()
        self._beginnings: PrefixKeys | None = None  # of prompts, where the shards cache them
        self._held: set[int] = set()  # streams that the inquest lets wait: the scheduler does not know them
        self._readers = Readers()
        # How things stand
        self._loop: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()  # the scheduler may have something to do
        self._answered: shard_pb2.StepReply | None = None  # reported, and not delivered yet
        self._last_call = math.inf  # requests that come from then on are refused
        self._recovering = ""  # why, while there are no shards
        self._broken = ""  # why, when it has ended by a fault

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None and not self._draining and not self._broken and not self._recovering

    @property
    def _draining(self) -> bool:
        return self._last_call < math.inf

    @property
    def trying(self) -> bool:
        """Whether most requests wait until it is known which of some others has killed the shards."""
        return self._inquest.open

    @property
    def streams(self) -> Collection[Stream]:
        """That need something of the shards yet."""
        return self._streams.values()

    @property
    def readers(self) -> Mapping[str, int]:
        """Of streams, also of those that have ended, by tenant."""
        return self._readers.counts

    def seconds_to_room(self, now: float) -> float:
        """Until a request ends, probably."""
        return self._readers.pace.seconds(now)

    @property
    def stage(self) -> str:
        """What is the case, for people."""
        if self._broken:
            return self._broken
        if self._draining:
            return "shutting down"
        if self._recovering:
            return f"recovering: {self._shards.stage}"
        if self._loop is not None:
            return READY
        found = self._shards.stage
        return found if found != READY else "taking over shards that are ready"  # which a router before this one has left

    # The life of the server

    async def start(self) -> None:
        """Connects and warms the shards up; then requests are taken. Raises Broken or Misconfigured."""
        await self._equip()
        self._show()
        self._loop = asyncio.create_task(self._serve())

    async def forget(self) -> None:
        """After `start` has raised Broken: it may be called again."""
        await self._shards.forget()

    async def _equip(self) -> None:
        """Waits for shards. When they are there, all streams that there are wait for them in the queue. Raises Broken or
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
        self.info, self.limits, self._bounds = info, limits, bounds
        self._shards.lost.add_done_callback(lambda lost: self._wake.set())
        self._beginnings = PrefixKeys(self._bounds.page_size, STRIDES) if self.info.prefix_caching else None
        self.together = self._bounds.together(self.limits.max_total_tokens)
        self._warm = warm
        self._queue_all()
        self._others.found(self)

    async def _adapt(self, info: shard_pb2.InfoReply) -> None:
        """The shards have all adapters that may be asked for, and no others but those of their own start. What a router before this
        one has left may be asked for, too. Raises Broken."""
        first, later = set(info.adapters), [*info.later]
        for told in later:
            self._adapters.adopt(told)
        self.adapters, self._failed = first | {told.key for told in later}, set()
        retired = {told.key for told in later if told.retired}
        while True:  # others come and go meanwhile; behind the last look nothing is waited for
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

    async def load(self, adapter: Later) -> None:
        """Requests may go by it from now on. Raises Refused, or Broken."""
        self._check_shards()
        try:
            found = await self._shards.load_adapter(shard_pb2.LoadAdapterRequest(adapter=adapter.told))
            if problem := await self._change(shard_pb2.AdaptRequest(add=adapter.key)):
                raise Refused(problem)
        except Refused:
            self._failed.add(adapter.key)
            await self.drop(adapter.key)  # ranks may have read it
            raise
        adapter.folder, adapter.digest = found.folder, found.digest
        self.adapters.add(adapter.key)

    def _check_shards(self) -> None:
        """Raises Broken where others may be met, which know nothing yet."""
        if self._shards.lost.done():
            raise Broken("the shards are lost")

    async def retire(self, key: str) -> None:
        """The shards know that no new request goes by it. Raises Broken."""
        await self._change(shard_pb2.AdaptRequest(retire=key))

    async def drop(self, key: str) -> None:
        """The shards forget it: no request goes by it any more, of which they may not have heard yet. Raises Broken."""
        self.adapters.discard(key)
        while problem := await self._change(shard_pb2.AdaptRequest(drop=key)):
            logger.debug("%s yet", problem)
            await asyncio.sleep(SOON)

    async def _change(self, request: shard_pb2.AdaptRequest) -> str:
        """Returns why nothing was done; "": it was."""
        self._check_shards()
        reply = await self._shards.execute(shard_pb2.Command(adapt=request))
        return reply.adapt.problem

    def _queue_all(self) -> None:
        """Everybody arrives at a new scheduler."""
        assert self._bounds is not None
        policy = policy_of(self._config, self._bounds, self._warm)
        self._scheduler = Scheduler(self._bounds, policy, drafting_of(self._config, self._bounds, policy))
        self._held.clear()
        for stream in tuple(self._streams.values()):
            self._arrive(stream)

    def _show(self) -> None:
        """The standing is in the metrics from now on."""

        def now() -> Scheduler:
            assert self._scheduler is not None
            return self._scheduler

        def bounds() -> Bounds:
            assert self._bounds is not None
            return self._bounds

        watch = partial(self._metrics.watch, replica=self.name)
        watch("tgi_queue_size", lambda: now().waiting)
        watch("tgi_batch_current_size", lambda: now().running)
        watch("tgi_batch_current_max_tokens", lambda: (bounds().pages - now().free) * bounds().page_size)
        watch("tgi_batch_max_total_tokens", lambda: bounds().pages * bounds().page_size)
        watch("penstock_waiting", lambda: now().waiting)
        watch("penstock_running", lambda: now().running)
        watch("penstock_paused", lambda: now().paused_jobs)
        watch("penstock_pages_total", lambda: bounds().pages)
        watch("penstock_pages_free", lambda: now().free)
        watch("penstock_pages_cached", lambda: now().cached)
        watch("penstock_pages_held", lambda: bounds().pages - now().free)
        watch("penstock_prompt_budget", lambda: now().room)

    async def wait(self) -> None:
        """Returns after `close`; raises what has ended the loop, after every stream has been told."""
        assert self._loop is not None
        await asyncio.wait([self._loop])
        if not self._loop.cancelled():
            self._loop.result()

    async def drain(self, seconds: float, answered: asyncio.Event | None = None) -> None:
        """Takes no more requests, but for those that came before: answered is set when none of these will be submitted any more.
        Returns then, when all streams have been read to their end; those that last longer are cut, and all when the shards are
        lost: whoever starts shards does not while the server shuts down."""
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

    # Requests come

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        """A stream: Prompt, then of each choice its Tokens (an end token included) and its Finish. Closing it cancels the request.

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
        """Raises if it can't be taken now."""
        if not self._adapters.knows(request.adapter):
            raise self._metrics.ended(NoModel(GONE), "validation")
        if self._broken and not self._draining:
            raise self._metrics.ended(Broken(self._broken), "generation")
        late = (request.arrived or monotonic()) >= self._last_call
        if self._loop is None or late or (self._draining and (self._recovering or self._broken)):
            raise self._metrics.ended(NotReady(f"not ready: {self.stage}"), "unavailable")
        if not admits(self.readers, self._config.max_concurrent_requests, request.tenant):
            message = f"{self._readers.counts.total()} requests are in flight, as many as the server takes at once"
            raise self._metrics.ended(Overloaded(message, self.seconds_to_room(monotonic())), "overloaded")

    def fits(self, request: Request) -> bool:
        """Whether a request can run here now: there are shards, as far as is known, it is not too large for them, and what it shows
        they see."""
        scheduler, limits = self._scheduler, self.limits
        if scheduler is None or limits is None or self._shards.lost.done() or (request.images and not limits.images):
            return False
        if request.adapter and request.adapter not in self.adapters:
            return False
        return scheduler.admissible(len(request.prompt), request.max_new_tokens, request.sequences)

    def refuses(self, request: Request) -> bool:
        """Whether it can't be answered here, by these shards: waiting is of no use."""
        return request.adapter in self._failed

    def open(self, request: Request, sink: Sink | None) -> Stream:
        """A request begins, whether or not it is admissible."""
        now = monotonic()
        make = self._tokenizer.stream
        texts = (
            make(request.prompt, request.stop, request.include_stop, request.skip_special_tokens, request.shown)
            for _ in range(request.choices)
        )
        choices = [Choice(index, text) for index, text in enumerate(texts)]
        run = begin(request, now)
        stream = Stream(next(self._uids), request, choices, now, left=len(choices), run=run, home=self, sink=sink)
        delay = DELAYS[request.priority]
        if request.timeout:
            left = max(0.0, (request.arrived or now) + request.timeout - now)
            delay = min(delay, left / 2)
            stream.alarm = asyncio.get_running_loop().call_later(left, lambda: stream.home.expire(stream))
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
        """It joins the queue, to begin or to go on where it was, unless the inquest wants it to wait."""
        assert self._scheduler is not None
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
            beginnings=self._beginnings_of(request),
        )
        if not self._scheduler.admissible(job.prompt_tokens, job.max_new_tokens, job.choices):
            message = "the shards were lost, and those that took their place have too little memory for this request"
            self._fail(stream.uid, Broken(message), "generation")
        elif self.refuses(request):
            self._fail(stream.uid, Broken("the adapter by which it goes could not be loaded again"), "generation")
        elif not self._inquest.admits(stream.uid):
            self._held.add(stream.uid)
        else:
            self._scheduler.arrive(job, [len(one.tokens) for one in stream.continuations])
            self._wake.set()

    def _beginnings_of(self, request: Request) -> Sequence[tuple[int, int]]:
        """By what the scheduler knows which pages it need not take, where any are shared."""
        if self._beginnings is None or request.prompt_logprobs:  # for these, all of the prompt is computed
            return ()
        return self._beginnings.of(request.prompt, request.cache_key)

    # ... and go

    def close_stream(self, stream: Stream) -> None:
        """Nobody reads it any more."""
        self._readers.pace.ended(monotonic())
        self._readers.remove(stream.request.tenant)
        if stream.alarm is not None:
            stream.alarm.cancel()
        if stream.uid in self._streams:
            self._forget(stream)
            self._cancel(stream.uid)
            self._metrics.failed("dropped")
            stream.run.fail("dropped", stream.generated)

    def expire(self, stream: Stream) -> None:
        """Its own deadline is over."""
        self._fail(stream.uid, Expired.after(stream.request.timeout, stream.generated), "timeout")

    def _leave(self, stream: Stream, now: float) -> None:
        """All its choices are done."""
        self._forget(stream)
        stream.run.ended, stream.run.generated = now, stream.generated
        assert stream.finish is not None
        self._metrics.done(stream.request, stream.finish, stream.run.generated, stream.run.first - stream.started)

    def _fail(self, uid: int, failure: Exception, kind: str) -> None:
        """Ends one stream."""
        stream = self._streams.get(uid)
        if stream is not None:
            self._forget(stream)
            self._cancel(uid)
            self._metrics.failed(kind)
            if isinstance(failure, Failure):
                failure.counted = True
            stream.run.fail(kind, stream.generated)
            stream.failure = failure
            stream.wake()

    def _cut(self, failure: Failure) -> None:
        """Ends all streams."""
        for uid in tuple(self._streams):
            self._fail(uid, failure, "unavailable" if isinstance(failure, NotReady) else "generation")

    def _give_up(self, lost: str) -> None:
        """The shards are lost while it drains, and come no more: like what lasts too long, somebody else has to answer it."""
        self._cut(NotReady(f"the server shuts down, and {lost}"))

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.uid]
        self._adapters.leave(stream.request.adapter)
        self._others.ended(self, stream)

    def _cancel(self, uid: int) -> None:
        """Of no effect if the scheduler knows already that it has ended."""
        assert self._scheduler is not None
        self._scheduler.cancel(uid)
        self._wake.set()

    # The loop

    async def _serve(self) -> None:
        """The loop, on one rank group after the other. It ends by being cancelled, or by an error, of which every stream is told
        first."""
        try:
            while True:
                assert self._scheduler is not None
                try:
                    await self._run(Steps(self._scheduler, self._shards, self._streams, self._metrics, self._fail))
                except Broken as lost:
                    if self._draining:
                        self._give_up(str(lost))
                        raise
                    await self._recover(lost)
        except Exception as error:
            ours = not isinstance(error, Failure | Misconfigured)  # its words may name paths, which are no client's affair
            self._broken = f"the server failed ({type(error).__name__}): its log says why" if ours else str(error)
            self._cut(Broken(self._broken))
            raise

    async def _run(self, steps: Steps) -> None:
        """Until the shards are lost."""
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
        """Delivers what the scheduler knows already: until then streams are not where it takes them to be."""
        answered, self._answered = self._answered, None
        if answered is not None:
            self._deliver(answered)

    def _deliver(self, reply: shard_pb2.StepReply) -> None:
        """A reply's tokens go to their streams; those that have all they asked for leave."""
        now = monotonic()
        delivered = self._delivery.deliver(reply, self._streams, now)
        for stream, choice in delivered.stopped:
            self._stop(stream, choice)
        for stream in delivered.complete:
            self._leave(stream, now)
        for stream in delivered.touched:
            try:
                stream.push()
            except Exception as error:  # a sink is somebody else's: its fault is no other stream's
                self._fail(stream.uid, error, "generation")
        for uid, message in zip(reply.failed_uids, reply.failed_messages, strict=True):
            self._fail(uid, Broken(message), "generation")

    def _stop(self, stream: Stream, choice: Choice) -> None:
        """A stop string has ended it, of which the shards know nothing."""
        assert self._scheduler is not None
        if stream.request.beams is None:
            self._scheduler.end(stream.uid, choice.index)
        elif not stream.left:  # beams end together
            self._scheduler.cancel(stream.uid)

    # When shards are lost: streams stay or move

    async def _recover(self, lost: Broken) -> None:
        """Waits for new shards, to which all streams go that have found no other place. Raises Misconfigured."""
        began = monotonic()
        self._recovering = str(lost)
        self._accuse()
        replays = sum(stream.started > 0 for stream in self._streams.values())
        self._others.lost(self)
        moved = self.evacuate()
        for stream in self._streams.values():
            stream.restart()
        self._queue_all()
        logger.warning("%s: requests that wait for new ones: %d, that go on elsewhere: %d", lost, len(self._streams), moved)
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
        """Ends the one request, if there is one, that has killed the shards again and again."""
        assert self._scheduler is not None
        places = {uid: self._place(uid) for uid in self._scheduler.in_hand}
        guilty = self._inquest.died({uid: place for uid, place in places.items() if place is not None})
        if guilty is not None:
            logger.error("request %s fails: the shards died again while it alone was computed", self._streams[guilty].run.name)
            self._fail(guilty, Broken("the shards died again and again while they computed this request"), "generation")

    def _place(self, uid: int) -> int | None:
        """How far a request has come, in steps; None if it is here no more."""
        assert self._scheduler is not None
        assert self._bounds is not None
        stream = self._streams.get(uid)
        return None if stream is None else stream.place(self._scheduler.lacking(uid), self._bounds.step_tokens)

    def _admit_held(self) -> None:
        """Those whom the inquest let wait so far join the queue."""
        held, self._held = sorted(self._held), set()
        for uid in held:
            if uid in self._streams:
                self._arrive(self._streams[uid])

    def evacuate(self, suspects: bool = False) -> int:
        """Streams go on elsewhere, all for which there is a place; suspects, who may have killed the shards, only if that is said.
        How many have gone."""
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
        """It is another's from now on. What is computed of it here is thrown away."""
        self._forget(stream)
        self._cancel(stream.uid)
        self._readers.remove(stream.request.tenant)

    def _adopt(self, stream: Stream, known: tuple[float, int] | None) -> None:
        """It goes on here. known: what an inquest knows of it."""
        self._inquest.adopt(stream.uid, known)
        stream.home = self
        stream.restart()
        self._enter(stream)
