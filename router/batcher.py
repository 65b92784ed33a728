"""The one loop where clock, scheduler and shards meet. `submit(request)` is the only door to it.

It knows requests and streams; not HTTP, not what a step costs, not how shards are reached. One turn of the loop:

    shortly before the step under way ends, ask the scheduler for the next and send it
    wait for the reply -> report it to the scheduler -> turn its tokens into text, for the streams

So the shards go from step to step without waiting for the router, and compute while tokens become text and leave as HTTP. A stop
string found in that text, a client that has left, a new request: they act one step late. What was computed by then of a choice
that nobody wants any more is thrown away.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from ..proto import shard_pb2
from .config import Misconfigured, RouterConfig
from .cost import Cost
from .metrics import Metrics
from .policies import Mixed, Pause, Policy, largest_step
from .record import Run, begin
from .request import (
    Alternative,
    Broken,
    Expired,
    Finish,
    Limits,
    NotReady,
    Overloaded,
    Priority,
    Prompt,
    Request,
    Token,
)
from .scheduler import BATCH, Action, Bounds, Decode, Filter, Job, Prefill, Report, Scheduler
from .shards import Shards, group

STEP_TOKENS, CPU_STEP_TOKENS = 4096, 512  # of a step, unless the operator says: see `_step_tokens`
REASONS = {1: "eos_token", 2: "length"}  # by StepReply.finishes
LEAD = 0.01  # seconds before the expected end of a step when the next is sent: late enough for new requests to be in it
# Seconds that a request counts as arrived later than it did. An interactive one passes a batch one that came up to a minute
# before it, and nobody waits for ever.
DELAYS = {Priority.INTERACTIVE: 0.0, Priority.NORMAL: 5.0, Priority.BATCH: 60.0}

MOST_ITEMS = 256  # that are taken at once, so that what is made of them is bounded, too

Item = Prompt | Token | Finish
# Takes items as soon as a step gives them; False: it can't now, and they wait for the stream's reader.
Sink = Callable[[list[Item]], bool]


class Piece(Protocol):
    """What a token adds to a text."""

    @property
    def text(self) -> str: ...
    @property
    def delta(self) -> str: ...
    @property
    def stopped(self) -> bool: ...


class Text(Protocol):
    """The text of one stream; see `text.TextStream`."""

    @property
    def text(self) -> str: ...
    def push(self, id: int, /) -> Piece: ...
    def end(self) -> str: ...


class Tokenizer(Protocol):
    """What the batcher needs of `text.Tokenizer`."""

    def is_special(self, id: int, /) -> bool: ...
    def token_text(self, id: int, /) -> str: ...
    def stream(
        self,
        prompt: Sequence[int],
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        shown: Collection[int],
        /,
    ) -> Text: ...


def bounds_of(config: RouterConfig, info: shard_pb2.InfoReply, warm: shard_pb2.WarmupReply) -> tuple[Limits, Bounds]:
    """What a request may ask and what may run at once, from settings, model and memory. Raises Misconfigured."""
    capacity = warm.pages * warm.page_size
    pool = f"the pool's capacity of {capacity} ({warm.pages} pages of {warm.page_size})"
    more = "or give the pool more memory (--kv-pages, --cuda-memory-fraction, more shards)"
    total = config.max_total_tokens or min(capacity, info.max_positions)
    if total > info.max_positions:
        raise Misconfigured(f"--max-total-tokens {total} is more than the model's {info.max_positions} positions: lower it")
    if total > capacity:
        raise Misconfigured(f"--max-total-tokens {total} is more than {pool}: lower it, {more}")
    if total < 2:
        raise Misconfigured(f"no request fits: a prompt and an answer have {total} tokens at most; raise --max-total-tokens {more}")
    prompt = config.max_input_tokens or total - 1
    if prompt >= total:
        raise Misconfigured(
            f"--max-input-tokens {prompt} leaves no room for an answer within {total} tokens in total: lower it to at most "
            f"{total - 1}, or raise --max-total-tokens"
        )
    limits = Limits(
        max_input_tokens=prompt, max_total_tokens=total, vocabulary=info.vocabulary, pages=warm.pages, page_size=warm.page_size
    )
    bounds = Bounds(
        pages=warm.pages, page_size=warm.page_size, step_tokens=_step_tokens(config, info), sequences=_sequences(config)
    )
    return limits, bounds


def policy_of(config: RouterConfig, bounds: Bounds, warm: shard_pb2.WarmupReply) -> Policy:
    """What the operator chose."""
    if config.prefill_policy == "pause":
        return Pause(bounds.step_tokens, config.waiting_served_ratio, config.max_waiting_tokens)
    return Mixed(bounds.step_tokens, Cost(warm.sample_tokens, warm.sample_seconds), config.itl_target)


def _step_tokens(config: RouterConfig, info: shard_pb2.InfoReply) -> int:
    """Most query tokens in a step. A CPU computes a few hundred a second, and streams wait while a step runs."""
    return config.max_batch_prefill_tokens or (CPU_STEP_TOKENS if info.device == "cpu" else STEP_TOKENS)


def _sequences(config: RouterConfig) -> int:
    """Most sequences that run at once."""
    return config.max_batch_size or max(config.max_concurrent_requests, config.max_best_of)


@dataclass(slots=True)
class Choice:
    """One of a request's answers."""

    index: int
    text: Text
    generated: int = 0
    last: float = 0.0  # its last token
    running: bool = True  # on the shards, as far as is known
    done: bool = False  # its Finish is among the items


@dataclass(slots=True, eq=False)
class Stream:
    """A request in flight, between the loop, which adds items, and the reader, who takes them."""

    uid: int
    request: Request
    choices: list[Choice]
    arrived: float
    left: int  # choices that are not done
    run: Run  # what is told of it when it has ended
    sink: Sink | None = None
    started: float = 0.0  # first step that was to compute something of it; 0: none yet
    continuations: Sequence[shard_pb2.Continuation] = ()  # where it goes on when it is restored
    cached: int = 0  # tokens of the prompt that were found
    items: list[Item] = field(default_factory=list)  # not taken yet
    failure: Exception | None = None  # comes after the items
    waiter: "asyncio.Future[None] | None" = None  # the reader, when there was nothing to take
    alarm: asyncio.TimerHandle | None = None  # its own deadline

    def wake(self) -> None:
        """There is something to take. The reader runs when the loop lets go, and takes all that has come till then."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def take(self) -> list[Item]:
        """The oldest items. A Finish stays with its Token."""
        end = MOST_ITEMS
        while end < len(self.items) and isinstance(self.items[end], Finish):
            end += 1
        taken, self.items = self.items[:end], self.items[end:]
        return taken


@dataclass(slots=True)
class Underway:
    """A command that the shards have not answered."""

    action: Action
    sent: float
    reply: "asyncio.Future[shard_pb2.Reply]"

    @property
    def step(self) -> bool:
        """Whether it computes something."""
        return not isinstance(self.action, Filter)


class Pace:
    """How fast requests end: when there will be room for another."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=32)

    def ended(self, now: float) -> None:
        """A request was answered, or given up."""
        self._ends.append(now)

    def seconds(self, now: float) -> float:
        """Until the next one ends, probably."""
        if not self._ends:
            return 1.0
        return min(max((now - self._ends[0]) / len(self._ends), 1.0), 60.0)


class Batcher:
    """Runs requests on the shards, many at once. `start` it, then `submit`; `wait` tells when it ends."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, shards: Shards, metrics: Metrics) -> None:
        self.limits: Limits | None = None  # until it has started
        self.info: shard_pb2.InfoReply | None = None  # dtype, device, ...; until it has started
        self.together = 0  # requests of full length that fit at once; until it has started
        self._config = config
        self._tokenizer = tokenizer
        self._shards = shards
        self._metrics = metrics
        self._scheduler: Scheduler | None = None
        self._streams: dict[int, Stream] = {}  # whose group the scheduler knows
        self._readers = 0  # streams that somebody reads, ended or not
        self._silent = asyncio.Event()  # nobody reads
        self._silent.set()
        self._pace = Pace()
        self._last: dict[str, float] = {}  # seconds of the last step, by kind: what the next is expected to take
        self._uids = itertools.count(1)
        self._wake = asyncio.Event()  # the scheduler may have something to do
        self._draining = False
        self._broken: str = ""
        self._loop: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._loop is not None and not self._draining and not self._broken

    @property
    def stage(self) -> str:
        """What is the case, for people."""
        if self._broken:
            return self._broken
        if self._draining:
            return "shutting down"
        return "ready" if self._loop is not None else self._shards.stage

    async def start(self) -> None:
        """Connects and warms the shards up; then requests are taken. Raises Broken or Misconfigured."""
        config = self._config
        sequences = _sequences(config)
        await self._shards.connect()
        warm = await self._shards.warm_up(
            shard_pb2.WarmupRequest(
                max_step_tokens=largest_step(_step_tokens(config, self._shards.info), sequences),
                max_step_rows=sequences,
                max_total_tokens=config.max_total_tokens,
            )
        )
        self.info = self._shards.info
        self.limits, bounds = bounds_of(config, self.info, warm)
        self.together = bounds.together(self.limits.max_total_tokens)
        self._scheduler = scheduler = Scheduler(bounds, policy_of(config, bounds, warm))
        self._metrics.watch("tgi_queue_size", lambda: scheduler.waiting)
        self._metrics.watch("tgi_batch_current_size", lambda: scheduler.running)
        self._metrics.watch("tgi_batch_current_max_tokens", lambda: (bounds.pages - scheduler.free) * bounds.page_size)
        self._metrics.watch("tgi_batch_max_total_tokens", lambda: bounds.pages * bounds.page_size)
        self._metrics.watch("penstock_waiting", lambda: scheduler.waiting)
        self._metrics.watch("penstock_running", lambda: scheduler.running)
        self._metrics.watch("penstock_paused", lambda: scheduler.paused_jobs)
        self._metrics.watch("penstock_pages_total", lambda: bounds.pages)
        self._metrics.watch("penstock_pages_free", lambda: scheduler.free)
        self._metrics.watch("penstock_pages_cached", lambda: scheduler.cached)
        self._metrics.watch("penstock_pages_held", lambda: bounds.pages - scheduler.free)
        self._metrics.watch("penstock_prompt_budget", lambda: scheduler.room)
        self._loop = asyncio.create_task(self._run(scheduler))

    async def wait(self) -> None:
        """Returns after `close`; raises Broken when the shards are lost, after every stream has been told."""
        assert self._loop is not None
        await asyncio.wait([self._loop])
        if not self._loop.cancelled():
            self._loop.result()

    async def drain(self, seconds: float) -> None:
        """Takes no more requests. Returns when all streams have been read to their end; those that last longer are cut."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._silent.wait()
        except TimeoutError:
            self._cut("the server shut down before the answer was complete")

    async def close(self) -> None:
        """Ends everything at once."""
        self._draining = True
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        self._cut("the server shut down before the answer was complete")
        await self._shards.close()

    def submit(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
        """A stream: Prompt, then of each choice its Tokens (an end token included) and its Finish. Closing it cancels the request.

        They come in lists: all that has come since the last one. A Finish is in the same list as the Token before it. The sink is
        offered items before they come here, and what it takes does not come; to keep them in order it has to refuse while its
        reader has a list in hand. What it raises ends its stream, and is raised here.

        Raises Overloaded, NotReady or Broken, here or at the first item; Broken or Expired at any later one.
        """
        self._metrics.arrived()
        self._admissible()
        return self._read(request, sink)

    def _admissible(self) -> None:
        """Raises if no request can be taken now."""
        if self._broken:
            self._metrics.failed("generation")
            raise Broken(self._broken)
        if not self.ready:
            self._metrics.failed("unavailable")
            raise NotReady(f"not ready: {self.stage}")
        if self._readers >= self._config.max_concurrent_requests:
            self._metrics.failed("overloaded")
            message = f"{self._readers} requests are in flight, as many as the server takes at once"
            raise Overloaded(message, self._pace.seconds(monotonic()))

    async def _read(self, request: Request, sink: Sink | None) -> AsyncGenerator[list[Item], None]:
        self._admissible()  # again: others may have come between `submit` and the first item
        stream = self._open(request, sink)
        loop = asyncio.get_running_loop()  # asked for once: that is a system call
        try:
            while True:
                if stream.items:
                    yield stream.take()
                elif stream.failure is not None:
                    raise stream.failure
                elif not stream.left:
                    return
                else:
                    stream.waiter = loop.create_future()
                    await stream.waiter
        finally:
            self._close(stream)

    def _open(self, request: Request, sink: Sink | None) -> Stream:
        assert self._scheduler is not None
        now = monotonic()
        make = self._tokenizer.stream
        texts = (
            make(request.prompt, request.stop, request.include_stop, request.skip_special_tokens, request.shown)
            for _ in range(request.choices)
        )
        choices = [Choice(index, text) for index, text in enumerate(texts)]
        stream = Stream(next(self._uids), request, choices, now, left=len(choices), run=begin(request, now), sink=sink)
        delay = DELAYS[request.priority]
        if request.timeout:
            delay = min(delay, request.timeout / 2)
            stream.alarm = asyncio.get_running_loop().call_later(request.timeout, self._expire, stream)
        self._scheduler.arrive(
            Job(stream.uid, len(request.prompt), request.max_new_tokens, request.choices, now + delay, request.tenant)
        )
        self._streams[stream.uid] = stream
        self._readers += 1
        self._silent.clear()
        self._wake.set()
        return stream

    def _close(self, stream: Stream) -> None:
        self._readers -= 1
        self._pace.ended(monotonic())
        if stream.alarm is not None:
            stream.alarm.cancel()
        if not self._readers:
            self._silent.set()
        if self._streams.pop(stream.uid, None) is not None:
            self._cancel(stream.uid)
            self._metrics.failed("dropped")
            stream.run.fail("dropped", sum(one.generated for one in stream.choices))

    def _cancel(self, uid: int) -> None:
        """Of no effect if the scheduler knows already that it has ended."""
        assert self._scheduler is not None
        self._scheduler.cancel(uid)
        self._wake.set()

    async def _run(self, scheduler: Scheduler) -> None:
        """The loop. It ends by being cancelled, or by an error, of which every stream is told first."""
        underway: deque[Underway] = deque()
        free = 0.0  # when the shards had answered the last step
        try:
            while True:
                self._wake.clear()
                self._send(scheduler, underway, 1)
                if not underway:
                    await self._wake.wait()
                    continue
                oldest = underway[0]
                began = max(oldest.sent, free)
                await self._near_end(oldest, began)
                self._send(scheduler, underway, 2)
                reply = await oldest.reply
                free = monotonic()
                underway.popleft()
                answered = self._report(scheduler, oldest.action, free - began, reply)
                if answered is not None:
                    self._send(scheduler, underway, 1)
                    await asyncio.sleep(0)  # lets the command leave first
                    self._deliver(answered)
        except Exception as error:
            self._broken = str(error) or repr(error)
            self._cut(self._broken)
            raise

    def _send(self, scheduler: Scheduler, underway: deque[Underway], steps: int) -> None:
        """Asks for what is next, until so many steps are under way."""
        while sum(one.step for one in underway) < steps:
            action = scheduler.next()
            if action is None:
                return
            now = monotonic()
            underway.append(Underway(action, now, self._shards.execute(self._command(action, now))))

    async def _near_end(self, oldest: Underway, began: float) -> None:
        """Waits until a step will end soon, if the last one of its kind tells."""
        seconds = began + self._last.get(_kind(oldest.action), 0.0) - LEAD - monotonic()
        if seconds > 0:
            await asyncio.wait([oldest.reply], timeout=seconds)

    def _command(self, action: Action, now: float) -> shard_pb2.Command:
        match action:
            case Decode(batch):
                return shard_pb2.Command(decode=shard_pb2.DecodeRequest(batches=[batch]))
            case Filter(drop, pause, end):
                uids, choices = [uid for uid, _ in end], [choice for _, choice in end]
                request = shard_pb2.FilterRequest(drop=drop, pause=pause, end_uids=uids, end_choices=choices)
                return shard_pb2.Command(filter=request)
            case Prefill(batch, new, chunks, tokens, decode):
                prefill = shard_pb2.PrefillRequest(
                    batch=batch,
                    groups=[self._group(self._streams[uid], now) for uid in new],
                    chunk_uids=[uid for uid, _ in chunks],
                    chunk_lengths=[length for _, length in chunks],
                    prompt_tokens=tokens,
                    decode_batches=[BATCH] if decode else [],
                )
                return shard_pb2.Command(prefill=prefill)

    def _group(self, stream: Stream, now: float) -> shard_pb2.Group:
        """A request that begins, or goes on where it was paused."""
        stream.started = stream.run.started = stream.started or now
        wanted = [one for one in stream.continuations if stream.choices[one.choice].running]
        return group(stream.uid, stream.request, wanted, stream.run.name)

    def _report(self, scheduler: Scheduler, action: Action, seconds: float, reply: shard_pb2.Reply) -> shard_pb2.StepReply | None:
        """Tells the scheduler what a reply says. Returns it if it has tokens to deliver."""
        if isinstance(action, Filter):
            told = reply.filter
            for paused in told.paused:
                if paused.uid in self._streams:
                    self._streams[paused.uid].continuations = tuple(paused.continuations)
            scheduler.paused(told.free, told.cached, [(paused.uid, paused.grow, paused.lacking) for paused in told.paused])
            self._metrics.paused(len(action.pause))
            self._metrics.step(action, seconds, None)
            return None
        step = reply.step
        scheduler.report(
            Report(
                free=step.free,
                cached=step.cached,
                uids=step.held_uids,
                held=step.held,
                grow=step.grow,
                lacking=step.lacking,
                finished=self._finished(step),
                failed=step.failed_uids,
                seconds=step.seconds,
                prompt_tokens=step.prompt_tokens,
                cached_tokens=step.cached_tokens,
                decode_tokens=step.decode_tokens,
                prompt_keys=step.prompt_keys,
                decode_keys=step.decode_keys,
                rows=len(step.tokens),
            )
        )
        self._last[_kind(action)] = seconds
        self._metrics.step(action, seconds, step)
        return step

    def _finished(self, step: shard_pb2.StepReply) -> list[int]:
        """The uid of each choice that has ended on the shards, unless it was given up here before."""
        finished = []
        if any(step.finishes):
            for uid, index, finish in zip(step.uids, step.choices, step.finishes, strict=True):
                stream = self._streams.get(uid)
                if finish and stream is not None and stream.choices[index].running:
                    stream.choices[index].running = False
                    finished.append(uid)
        return finished

    def _deliver(self, reply: shard_pb2.StepReply) -> None:
        """Turns the rows of a reply into items of their streams."""
        now = monotonic()
        latest: dict[float, int] = {}  # when the tokens before came, and of how many that is so
        touched: list[Stream] = []
        prompts = self._prompt_logprobs(reply) if reply.prompt_uids else {}
        for uid, found in zip(reply.found_uids, reply.found_tokens, strict=True):
            if uid in self._streams:
                self._streams[uid].cached += found
        rows = zip(reply.uids, reply.choices, reply.tokens, reply.logprobs, reply.finishes, self._tops(reply), strict=True)
        for uid, index, token, logprob, finish, top in rows:
            stream = self._streams.get(uid)
            if stream is None or (choice := stream.choices[index]).done:  # it was closed or stopped in the meantime
                continue
            if choice.generated:
                latest[choice.last] = latest.get(choice.last, 0) + 1
            elif not any(other.generated for other in stream.choices):
                self._metrics.first_token(now - stream.arrived)
                stream.run.first, stream.run.cached_tokens = now, stream.cached
                stream.items.append(Prompt(*prompts.get(uid, ((), ())), stream.cached))
            choice.last = now
            choice.generated += 1
            piece = choice.text.push(token)
            special = self._tokenizer.is_special(token)
            alternatives = self._alternatives(top) if top else ()
            stream.items.append(Token(token, piece.text, piece.delta, logprob, special, alternatives, index))
            if finish or piece.stopped:
                self._finish(stream, choice, "stop_sequence" if piece.stopped else REASONS[finish], now)
            touched.append(stream)
        self._metrics.tokens(len(reply.tokens), {now - last: count for last, count in latest.items()})
        for stream in touched:
            self._push(stream)
        for uid, message in zip(reply.failed_uids, reply.failed_messages, strict=True):
            self._fail(uid, Broken(message), "generation")

    def _push(self, stream: Stream) -> None:
        """Hands the items to the sink, or else wakes the reader; also when there will be no more."""
        if stream.sink is not None and 0 < len(stream.items) <= MOST_ITEMS:
            try:
                if stream.sink(stream.items):
                    stream.items = []
            except Exception as error:  # a sink is somebody else's: its fault is no other stream's
                stream.items, stream.sink, stream.failure = [], None, error
                self._fail(stream.uid, error, "generation")
                stream.wake()
        if stream.items or not stream.left:
            stream.wake()

    def _prompt_logprobs(
        self, reply: shard_pb2.StepReply
    ) -> dict[int, tuple[tuple[float | None, ...], tuple[tuple[int, float], ...]]]:
        """`Prompt.logprobs` and `Prompt.top` by uid, for the groups whose first token is in this reply and that asked for them."""
        values = iter(reply.prompt_logprobs)
        tops = zip(reply.prompt_top_ids, reply.prompt_top_logprobs, strict=True)
        groups = zip(reply.prompt_uids, reply.prompt_counts, reply.prompt_tops, strict=True)
        return {
            uid: ((None, *itertools.islice(values, count)), tuple(itertools.islice(tops, count * wide)))
            for uid, count, wide in groups
        }

    def _tops(self, reply: shard_pb2.StepReply) -> Iterable[Sequence[tuple[int, float]]]:
        """The alternatives of each row."""
        if not reply.top_ids:
            return itertools.repeat((), len(reply.tokens))
        pairs = zip(reply.top_ids, reply.top_logprobs, strict=True)
        return [tuple(itertools.islice(pairs, count)) for count in reply.top_counts]

    def _alternatives(self, top: Sequence[tuple[int, float]]) -> tuple[Alternative, ...]:
        tokenizer = self._tokenizer
        return tuple(Alternative(id, tokenizer.token_text(id), logprob, tokenizer.is_special(id)) for id, logprob in top)

    def _finish(self, stream: Stream, choice: Choice, reason: str, now: float) -> None:
        delta = choice.text.end()
        queued, inference = stream.started - stream.arrived, now - stream.started
        finish = Finish(reason, choice.text.text, delta, choice.generated, queued, inference, choice.index)
        stream.items.append(finish)
        stream.run.reasons.append(reason)
        choice.done = True
        stream.left -= 1
        if choice.running:  # a stop string, of which the shards know nothing
            assert self._scheduler is not None
            choice.running = False
            self._scheduler.end(stream.uid, choice.index)
            self._wake.set()
        if not stream.left:
            del self._streams[stream.uid]
            stream.run.ended, stream.run.generated = now, sum(one.generated for one in stream.choices)
            self._metrics.done(stream.request, finish, stream.run.generated, stream.run.first - stream.started)

    def _expire(self, stream: Stream) -> None:
        """Its own deadline is over."""
        generated = sum(choice.generated for choice in stream.choices)
        message = f"the answer was not complete {stream.request.timeout:g} s after the request came: {generated} tokens were there"
        self._fail(stream.uid, Expired(message), "timeout")

    def _fail(self, uid: int, failure: Exception, kind: str) -> None:
        """Ends one stream."""
        stream = self._streams.pop(uid, None)
        if stream is not None:
            self._cancel(uid)
            self._metrics.failed(kind)
            stream.run.fail(kind, sum(one.generated for one in stream.choices))
            stream.failure = failure
            stream.wake()

    def _cut(self, message: str) -> None:
        """Ends all streams."""
        for uid in tuple(self._streams):
            self._fail(uid, Broken(message), "generation")


def _kind(action: Action) -> str:
    """Of steps that take about the same time."""
    match action:
        case Decode():
            return "decode"
        case Prefill(decode=decode):
            return "mixed" if decode else "prefill"
        case Filter():
            return "filter"
