"""The one loop where clock, scheduler and shards meet. `submit(request)` is the only door to it.

It knows requests and streams; not HTTP, not what a step costs, not how shards are reached. One turn of the loop:

    ask the scheduler -> send the command -> turn the tokens of the last reply into text, for the streams
                      -> wait for the reply -> report it to the scheduler

So the shards compute while tokens become text and leave as HTTP. A stop string found in that text, or a client that has
left, acts one step late: by then the group may have one more token, which is thrown away.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from ..proto import shard_pb2
from .config import RouterConfig
from .metrics import Metrics
from .request import Alternative, Broken, Finish, Limits, NotReady, Overloaded, Prompt, Request, Token
from .scheduler import BATCH, Action, Bounds, Decode, Filter, Job, Prefill, Scheduler, largest_step
from .shards import Shards, group

STEP_TOKENS, CPU_STEP_TOKENS = 4096, 512  # of a step, unless the operator says: see `_step_tokens`
REASONS = {1: "eos_token", 2: "length"}  # by StepReply.finishes

Item = Prompt | Token | Finish


class Misconfigured(Exception):
    """The operator's settings contradict the model, the memory or each other. One line that says what would do."""


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
    def stream(self, prompt: Sequence[int], stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool, /) -> Text: ...


def bounds_of(config: RouterConfig, info: shard_pb2.InfoReply, warm: shard_pb2.WarmupReply) -> tuple[Limits, Bounds]:
    """What a request may ask and what may run at once, from settings, model and memory. Raises Misconfigured."""
    capacity = warm.pages * warm.page_size
    pool = f"the pool's capacity of {capacity} ({warm.pages} pages of {warm.page_size})"
    more = "or give the pool more memory (--kv-pages, --cuda-memory-fraction, more shards)"
    batch = config.max_batch_total_tokens or capacity
    if batch > capacity:
        raise Misconfigured(f"--max-batch-total-tokens {batch} is more than {pool}: lower it, {more}")
    total = config.max_total_tokens or min(batch, info.max_positions)
    if total > info.max_positions:
        raise Misconfigured(f"--max-total-tokens {total} is more than the model's {info.max_positions} positions: lower it")
    if total > capacity:
        raise Misconfigured(f"--max-total-tokens {total} is more than {pool}: lower it, {more}")
    if total > batch:
        raise Misconfigured(f"--max-total-tokens {total} is more than --max-batch-total-tokens {batch}: lower it or raise that")
    if total < 2:
        raise Misconfigured(f"no request fits: a prompt and an answer have {total} tokens at most; raise --max-total-tokens {more}")
    prompt = config.max_input_tokens or total - 1
    if prompt >= total:
        raise Misconfigured(
            f"--max-input-tokens {prompt} leaves no room for an answer within {total} tokens in total: lower it to at most "
            f"{total - 1}, or raise --max-total-tokens"
        )
    limits = Limits(max_input_tokens=prompt, max_total_tokens=total, vocabulary=info.vocabulary)
    bounds = Bounds(
        pages=warm.pages,
        page_size=warm.page_size,
        step_tokens=_step_tokens(config, info),
        total_tokens=batch,
        groups=_groups(config),
        waiting_tokens=config.max_waiting_tokens,
        waiting_served_ratio=config.waiting_served_ratio,
    )
    return limits, bounds


def _step_tokens(config: RouterConfig, info: shard_pb2.InfoReply) -> int:
    """Most query tokens in a step. A CPU computes a few hundred a second, and streams wait while a step runs."""
    return config.max_batch_prefill_tokens or (CPU_STEP_TOKENS if info.device == "cpu" else STEP_TOKENS)


def _groups(config: RouterConfig) -> int:
    """Most groups that run at once."""
    return min(config.max_batch_size or config.max_concurrent_requests, config.max_concurrent_requests)


@dataclass(slots=True, eq=False)
class Stream:
    """A request in flight, between the loop, which adds items, and the reader, who takes them."""

    uid: int
    request: Request
    text: Text
    arrived: float
    started: float = 0.0  # first step that computed something of it; 0: none yet
    last: float = 0.0  # its last token; 0: none yet
    generated: int = 0
    items: list[Item] = field(default_factory=list)  # not taken yet
    failure: Broken | None = None  # comes after the items
    waiter: "asyncio.Future[None] | None" = None  # the reader, when there was nothing to take

    def wake(self) -> None:
        """There is something to take. The reader runs when the loop lets go, and takes all that has come till then."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


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
        groups = _groups(config)
        await self._shards.connect()
        warm = await self._shards.warm_up(
            shard_pb2.WarmupRequest(
                max_step_tokens=largest_step(_step_tokens(config, self._shards.info), groups),
                max_step_rows=groups,
                max_total_tokens=config.max_total_tokens,
            )
        )
        self.info = self._shards.info
        self.limits, bounds = bounds_of(config, self.info, warm)
        self.together = bounds.together(self.limits.max_total_tokens)
        self._scheduler = scheduler = Scheduler(bounds)
        for name in ("tgi_queue_size", "penstock_waiting"):
            self._metrics.watch(name, lambda: scheduler.waiting)
        for name in ("tgi_batch_current_size", "penstock_running"):
            self._metrics.watch(name, lambda: scheduler.running)
        self._metrics.watch("penstock_pages_total", lambda: bounds.pages)
        self._metrics.watch("penstock_pages_free", lambda: scheduler.free)
        self._metrics.watch("penstock_pages_held", lambda: scheduler.held)
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

    def submit(self, request: Request) -> AsyncGenerator[Item, None]:
        """A stream: Prompt, then each Token (an end token included), then Finish. Closing it cancels the request at once.

        Raises Overloaded, NotReady or Broken, here or at the first item; Broken at any later one.
        """
        self._metrics.arrived()
        self._admissible()
        return self._read(request)

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
            raise Overloaded(f"{self._readers} requests are in flight, as many as the server takes at once")

    async def _read(self, request: Request) -> AsyncGenerator[Item, None]:
        self._admissible()  # again: others may have come between `submit` and the first item
        stream = self._open(request)
        try:
            while True:
                if not stream.items:
                    if stream.failure is not None:
                        raise stream.failure
                    stream.waiter = asyncio.get_running_loop().create_future()
                    await stream.waiter
                items, stream.items = stream.items, []
                for item in items:
                    yield item
                if items and isinstance(items[-1], Finish):
                    return
        finally:
            self._close(stream)

    def _open(self, request: Request) -> Stream:
        assert self._scheduler is not None
        text = self._tokenizer.stream(request.prompt, request.stop, request.include_stop, request.skip_special_tokens)
        stream = Stream(next(self._uids), request, text, monotonic())
        self._scheduler.arrive(Job(stream.uid, len(request.prompt), request.max_new_tokens))
        self._streams[stream.uid] = stream
        self._readers += 1
        self._silent.clear()
        self._wake.set()
        return stream

    def _close(self, stream: Stream) -> None:
        self._readers -= 1
        if not self._readers:
            self._silent.set()
        if self._streams.pop(stream.uid, None) is not None:
            self._cancel(stream.uid)
            self._metrics.failed("dropped")

    def _cancel(self, uid: int) -> None:
        """Of no effect if the scheduler knows already that it has ended."""
        assert self._scheduler is not None
        self._scheduler.cancel(uid)
        self._wake.set()

    async def _run(self, scheduler: Scheduler) -> None:
        """The loop. It ends by being cancelled, or by an error, of which every stream is told first."""
        try:
            answered: shard_pb2.StepReply | None = None
            while True:
                self._wake.clear()
                sent = self._send(scheduler)
                if answered is not None:
                    await asyncio.sleep(0)  # lets the command leave first
                    self._deliver(answered)
                    answered = None
                elif not sent:
                    await self._wake.wait()
                for action, since, future in sent:
                    reply = await future
                    answered = self._report(scheduler, action, monotonic() - since, reply)
        except Exception as error:
            self._broken = str(error) or repr(error)
            self._cut(self._broken)
            raise

    def _send(self, scheduler: Scheduler) -> "list[tuple[Action, float, asyncio.Future[shard_pb2.Reply]]]":
        """Asks for the next step and for the filter before it, if any; their replies come in this order."""
        sent: list[tuple[Action, float, asyncio.Future[shard_pb2.Reply]]] = []
        while (action := scheduler.next()) is not None:
            now = monotonic()
            sent.append((action, now, self._shards.execute(self._command(action, now))))
            if not isinstance(action, Filter):
                break
        return sent

    def _command(self, action: Action, now: float) -> shard_pb2.Command:
        match action:
            case Decode(batch):
                return shard_pb2.Command(decode=shard_pb2.DecodeRequest(batches=[batch]))
            case Filter(drop):
                return shard_pb2.Command(filter=shard_pb2.FilterRequest(drop=drop))
            case Prefill(batch, new, chunks, decode):
                for uid in new:
                    self._streams[uid].started = now
                prefill = shard_pb2.PrefillRequest(
                    batch=batch,
                    groups=[group(uid, self._streams[uid].request) for uid in new],
                    chunk_uids=[uid for uid, _ in chunks],
                    chunk_lengths=[length for _, length in chunks],
                    decode_batches=[BATCH] if decode else [],
                )
                return shard_pb2.Command(prefill=prefill)

    def _report(self, scheduler: Scheduler, action: Action, seconds: float, reply: shard_pb2.Reply) -> shard_pb2.StepReply | None:
        """Tells the scheduler what a reply says. Returns it if it has tokens to deliver."""
        if isinstance(action, Filter):
            scheduler.report(free=reply.filter.free)
            self._metrics.step(action, seconds, None)
            return None
        step = reply.step
        ended = [uid for uid, finish in zip(step.uids, step.finishes, strict=True) if finish]
        scheduler.report(
            free=step.free,
            uids=tuple(step.held_uids),
            held=tuple(step.held),
            grow=tuple(step.grow),
            ended=ended + list(step.failed_uids),
        )
        self._metrics.step(action, seconds, step)
        return step

    def _deliver(self, reply: shard_pb2.StepReply) -> None:
        """Turns the rows of a reply into items of their streams."""
        now = monotonic()
        intervals: list[float] = []
        prompts = self._prompt_logprobs(reply)
        rows = zip(reply.uids, reply.tokens, reply.logprobs, reply.finishes, self._tops(reply), strict=True)
        for uid, token, logprob, finish, top in rows:
            stream = self._streams.get(uid)
            if stream is None:  # it was closed or stopped in the meantime
                continue
            if stream.generated:
                intervals.append(now - stream.last)
            else:
                self._metrics.first_token(now - stream.arrived)
                stream.items.append(Prompt(prompts.get(uid, ())))
            stream.last = now
            stream.generated += 1
            piece = stream.text.push(token)
            stream.items.append(
                Token(token, piece.text, piece.delta, logprob, self._tokenizer.is_special(token), self._alternatives(top))
            )
            if finish or piece.stopped:
                self._finish(stream, "stop_sequence" if piece.stopped else REASONS[finish], now)
            stream.wake()
        self._metrics.tokens(len(reply.tokens), intervals)
        for uid, message in zip(reply.failed_uids, reply.failed_messages, strict=True):
            self._fail(uid, message)

    def _prompt_logprobs(self, reply: shard_pb2.StepReply) -> dict[int, tuple[float | None, ...]]:
        """By uid, for the groups whose first token is in this reply and that asked for them."""
        values = iter(reply.prompt_logprobs)
        pairs = zip(reply.prompt_uids, reply.prompt_counts, strict=True)
        return {uid: (None, *itertools.islice(values, count)) for uid, count in pairs}

    def _tops(self, reply: shard_pb2.StepReply) -> Iterable[Sequence[tuple[int, float]]]:
        """The alternatives of each row."""
        if not reply.top_ids:
            return itertools.repeat((), len(reply.tokens))
        pairs = zip(reply.top_ids, reply.top_logprobs, strict=True)
        return [tuple(itertools.islice(pairs, count)) for count in reply.top_counts]

    def _alternatives(self, top: Sequence[tuple[int, float]]) -> tuple[Alternative, ...]:
        if not top:
            return ()
        tokenizer = self._tokenizer
        return tuple(Alternative(id, tokenizer.token_text(id), logprob, tokenizer.is_special(id)) for id, logprob in top)

    def _finish(self, stream: Stream, reason: str, now: float) -> None:
        delta = stream.text.end()
        queued, inference = stream.started - stream.arrived, now - stream.started
        finish = Finish(reason, stream.text.text, delta, stream.generated, queued, inference)
        stream.items.append(finish)
        del self._streams[stream.uid]
        self._cancel(stream.uid)
        self._metrics.done(stream.request, finish)

    def _fail(self, uid: int, message: str) -> None:
        """Ends one stream."""
        stream = self._streams.pop(uid, None)
        if stream is not None:
            self._cancel(uid)
            self._metrics.failed("generation")
            stream.failure = Broken(message)
            stream.wake()

    def _cut(self, message: str) -> None:
        """Ends all streams."""
        for uid in tuple(self._streams):
            self._fail(uid, message)
