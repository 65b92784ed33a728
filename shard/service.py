"""Protobuf to engine and back: the only file of the shard that knows the wire.

When a command is executed, and on which thread, is the business of `steps`. A fault that is no group's own ends the process: what
is left of the shard's state can't be trusted then, and the launcher knows what to do.
"""

import logging
import threading
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import grpc

from ..kernels.choose import triton_on
from ..proto import shard_pb2 as wire
from . import invariance
from .checks import check_warmup, checked
from .config import ShardConfig
from .decoding.budget import Allowance, Linear
from .decoding.hypotheses import Hypothesis, Path, Search, Stop
from .decoding.strategy import Grown
from .engine import Engine
from .forward import Extent
from .graphs import Recorder
from .memory import size_pool
from .models.shape import Unsupported
from .outcome import Outcome
from .relay import Sender
from .rooms import decodes, mixed, parse
from .sequence import Group, Sampling, sequences
from .steps import LAND, Answer, Executor, Failed, Refused

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks whether somebody waits yet
COMPILED = 64  # tokens of the largest step that is made ready before the first request; larger ones take long by themselves
FAILED = "the shard failed and ends; its log says why"


class Service:
    """The Shard service of one rank. It answers Info and Health before the engine is there."""

    def __init__(self, config: ShardConfig, end: Callable[[int], None]) -> None:
        self._config = config
        self._end = end  # tells the main thread to end the process with an exit code
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._engine: Engine | None = None
        self._executor: Executor | None = None
        self._warmup: wire.WarmupReply | None = None
        self.stage = "starting"

    @property
    def engine(self) -> Engine:
        """There once `start` was called."""
        assert self._engine is not None
        return self._engine

    def start(self, engine: Engine, relay: Sender) -> None:
        """The model is loaded: commands can come. `relay` leads to the other ranks, if this is rank 0."""
        self._engine = engine
        self._executor = Executor(self, relay.send if self._config.ranks > 1 else None, self._end)
        self.stage = "loaded"
        self._loaded.set()

    def Info(self, request: wire.InfoRequest, context: grpc.ServicerContext) -> wire.InfoReply:  # noqa: N802
        """See shard.proto."""
        config = self._config
        reply = wire.InfoReply(rank=config.rank, ranks=config.ranks, model=config.model, dtype=config.dtype, stage=self.stage)
        reply.page_size, reply.loaded, reply.device = config.page_size, self._loaded.is_set(), config.device
        reply.adapters.extend(name for name, _ in config.adapters)
        reply.quantize, reply.kv_cache_dtype, reply.batch_invariant = config.quantize, config.kv_cache_dtype, config.batch_invariant
        if self._engine is not None:
            shape = self._engine.decoder.shape
            reply.overlaps = self._engine.overlaps
            reply.vocabulary, reply.max_positions, reply.device = shape.vocabulary, shape.max_positions, str(self._engine.device)
        return reply

    def Health(self, request: wire.HealthRequest, context: grpc.ServicerContext) -> wire.HealthReply:  # noqa: N802
        """See shard.proto."""
        return wire.HealthReply()

    def Warmup(self, request: wire.WarmupRequest, context: grpc.ServicerContext) -> wire.WarmupReply:  # noqa: N802
        """See shard.proto. A repeated call answers what the first one found."""
        try:
            check_warmup(request)
        except Refused as refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        while not self._loaded.wait(LOOK) and context.is_active():
            pass  # nobody waits for an answer that nobody wants: Info and Health need the threads
        if self._executor is None:
            context.abort(grpc.StatusCode.CANCELLED, "the router has gone")
        assert self._executor is not None
        with self._lock:
            if self._warmup is None:
                try:
                    self._warmup = self._executor.call(partial(self._measure, request))
                except Unsupported as error:
                    log.error(str(error))
                    self._end(2)
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                except Exception:
                    log.exception("the shard failed")
                    self._end(1)
                    context.abort(grpc.StatusCode.INTERNAL, FAILED)
                self.stage = "ready"
            return self._warmup

    def _measure(self, request: wire.WarmupRequest) -> wire.WarmupReply:
        engine, config = self.engine, self._config
        shape, ranks = engine.decoder.shape, engine.decoder.ranks
        total = min(request.max_total_tokens or shape.max_positions, shape.max_positions)
        tokens, rows = request.max_step_tokens, request.max_step_rows
        sequences = request.max_sequences or rows
        graphs = engine.device.type == "cuda" and triton_on(engine.device)  # the plain operations wait for the device on the way
        chosen = parse(config.cuda_graphs) if graphs else ()
        drafts = engine.guesses.most > 0
        sizes = [*decodes(chosen, rows), *mixed(chosen, tokens, drafts)]
        recorded = sizes * 2 if engine.guesses.drafter else sizes  # the draft model's own
        self.stage = "compiling products"
        engine.compile(min(tokens, COMPILED))
        if config.batch_invariant:
            self.stage = "checking that answers don't depend on batches"
            invariance.check(engine, config.page_size)
        self.stage = "measuring memory"
        pages, sample = size_pool(
            engine, config.page_size, config.kv_pages, config.memory_fraction, tokens, rows, sequences, total, recorded
        )
        engine.resize(ranks.least(pages), config.page_size)
        if sizes:
            extent = Extent(tokens, rows, total, engine.pool.pages, chosen, drafts, engine.guesses.trees)
            engine.record(Recorder(), extent, lambda stage: setattr(self, "stage", stage))
        return wire.WarmupReply(
            pages=engine.pool.pages,
            page_size=config.page_size,
            bytes_per_page=engine.token_bytes * config.page_size,
            weight_bytes=engine.decoder.weight_bytes,
            sample_tokens=sample.tokens,
            sample_seconds=sample.seconds,
        )

    def Prefill(self, request: wire.PrefillRequest, context: grpc.ServicerContext) -> wire.StepReply:  # noqa: N802
        """See shard.proto."""
        return self._once(wire.Command(prefill=request), context).step

    def Decode(self, request: wire.DecodeRequest, context: grpc.ServicerContext) -> wire.StepReply:  # noqa: N802
        """See shard.proto."""
        return self._once(wire.Command(decode=request), context).step

    def Filter(self, request: wire.FilterRequest, context: grpc.ServicerContext) -> wire.FilterReply:  # noqa: N802
        """See shard.proto."""
        return self._once(wire.Command(filter=request), context).filter

    def Concat(self, request: wire.ConcatRequest, context: grpc.ServicerContext) -> wire.ConcatReply:  # noqa: N802
        """See shard.proto."""
        return self._once(wire.Command(concat=request), context).concat

    def ClearCache(  # noqa: N802
        self, request: wire.ClearCacheRequest, context: grpc.ServicerContext
    ) -> wire.ClearCacheReply:
        """See shard.proto."""
        return self._once(wire.Command(clear_cache=request), context).clear_cache

    def Steps(self, commands: Iterator[wire.Command], context: grpc.ServicerContext) -> Iterator[wire.Reply]:  # noqa: N802
        """See shard.proto. When the stream ends the router is gone, and what it ran is dropped."""
        with self._told(context) as executor:
            yield from executor.stream(map(checked, commands))

    def follow(self, message: bytes) -> None:
        """Executes a command that rank 0 passed on, or ends a step as rank 0 did."""
        with self._lock:
            if message == LAND:
                self.land()
            else:
                self.execute(wire.Command.FromString(message), lambda answer: None)

    def _once(self, command: wire.Command, context: grpc.ServicerContext) -> wire.Reply:
        with self._told(context) as executor:
            return executor.once(checked(command))

    @contextmanager
    def _told(self, context: grpc.ServicerContext) -> Iterator[Executor]:
        """What takes commands, if they can be taken; whoever calls is told of what is wrong with them."""
        if self._config.rank:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "send commands to rank 0, which passes them on to the others")
        if self._warmup is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "call Warmup first: the pool has no size yet")
        assert self._executor is not None
        try:
            yield self._executor
        except Refused as refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        except Failed:
            context.abort(grpc.StatusCode.INTERNAL, FAILED)

    def enter(self) -> None:
        """See `steps.Machine`."""
        self.engine.enter()

    def execute(self, command: wire.Command, reply: Callable[[Answer], None]) -> None:
        """See `steps.Machine`."""
        kind = command.WhichOneof("kind")
        getattr(self, f"_{kind}")(getattr(command, kind), reply)

    @property
    def underway(self) -> Callable[[], None] | None:
        """See `steps.Machine`."""
        return self.engine.underway

    def land(self) -> None:
        """See `steps.Machine`."""
        self.engine.land()

    def _prefill(self, request: wire.PrefillRequest, reply: Callable[[Answer], None]) -> None:
        groups = [group_from(message) for message in request.groups]
        chunks = list(zip(request.chunk_uids, request.chunk_lengths, strict=True))
        allowed = allowance_from(request)
        landed = self.engine.begin_prefill(request.batch, groups, chunks, request.prompt_tokens, request.decode_batches, allowed)
        _reply_when(landed, request.step, reply)

    def _decode(self, request: wire.DecodeRequest, reply: Callable[[Answer], None]) -> None:
        _reply_when(self.engine.begin_decode(request.batches, allowance_from(request)), request.step, reply)

    def _filter(self, request: wire.FilterRequest, reply: Callable[[Answer], None]) -> None:
        engine, pool = self.engine, self.engine.pool
        engine.filter(request.drop)
        engine.end(zip(request.end_uids, request.end_choices, strict=True))
        paused = [paused_to(group, pool.page_size) for group in engine.pause(request.pause)]
        told = wire.Reply(filter=wire.FilterReply(step=request.step, free=pool.free, paused=paused, cached=pool.cached))
        reply(lambda: told)

    def _concat(self, request: wire.ConcatRequest, reply: Callable[[Answer], None]) -> None:
        self.engine.concat(request.into, request.batches)
        told = wire.Reply(concat=wire.ConcatReply(step=request.step))
        reply(lambda: told)

    def _clear_cache(self, request: wire.ClearCacheRequest, reply: Callable[[Answer], None]) -> None:
        self.engine.clear()
        told = wire.Reply(clear_cache=wire.ClearCacheReply(step=request.step, free=self.engine.pool.free))
        reply(lambda: told)


def _reply_when(landed: "Future[Outcome]", step: int, reply: Callable[[Answer], None]) -> None:
    landed.add_done_callback(lambda over: reply(partial(step_reply, step, over.result())))


def step_reply(step: int, outcome: Outcome) -> wire.Reply:
    """The columns of a step. The next one may have begun: nothing that it changes is looked at here."""
    emitted = outcome.emitted
    tops = [pair for _, row in emitted for pair in row.pick.top]
    reply = wire.StepReply(
        step=step,
        uids=[uid for uid, _ in emitted],
        choices=[row.choice for _, row in emitted],
        tokens=[row.pick.token for _, row in emitted],
        logprobs=[row.pick.logprob for _, row in emitted],
        finishes=[row.finish for _, row in emitted],
        top_counts=[len(row.pick.top) for _, row in emitted] if tops else [],
        top_ids=[token for token, _ in tops],
        top_logprobs=[logprob for _, logprob in tops],
        prompt_uids=[uid for uid, _ in outcome.prompts],
        prompt_counts=[len(scores) for _, scores in outcome.prompts],
        prompt_logprobs=[score for _, scores in outcome.prompts for score in scores],
        prompt_tops=[len(of) // max(len(scores), 1) for (_, scores), of in zip(outcome.prompts, outcome.tops, strict=True)],
        prompt_top_ids=[token for of in outcome.tops for token, _ in of],
        prompt_top_logprobs=[logprob for of in outcome.tops for _, logprob in of],
        held_uids=[uid for uid, _, _, _ in outcome.standing],
        held=[held for _, held, _, _ in outcome.standing],
        grow=[grow for _, _, grow, _ in outcome.standing],
        lacking=[lacking for _, _, _, lacking in outcome.standing],
        free=outcome.free,
        cached=outcome.cached,
        failed_uids=[uid for uid, _ in outcome.failed],
        failed_messages=[message for _, message in outcome.failed],
        seconds=outcome.seconds,
        mask_seconds=outcome.mask_seconds,
        mask_wait_seconds=outcome.mask_wait_seconds,
        prompt_tokens=outcome.prompt_tokens,
        restored_tokens=outcome.restored_tokens,
        cached_tokens=outcome.cached_tokens,
        found_uids=[uid for uid, _ in outcome.found],
        found_tokens=[tokens for _, tokens in outcome.found],
        decode_tokens=outcome.decode_tokens,
        prompt_keys=outcome.prompt_keys,
        decode_keys=outcome.decode_keys,
        drafted_tokens=outcome.drafted,
        accepted_tokens=outcome.accepted,
        guessed_uids=[uid for uid, _, _ in outcome.guessed],
        guessed_drafted=[drafted for _, drafted, _ in outcome.guessed],
        guessed_accepted=[accepted for _, _, accepted in outcome.guessed],
        tried_by_depth=outcome.tried,
        kept_by_depth=outcome.kept,
        draft_seconds=outcome.draft_seconds,
        rounds=outcome.rounds,
        later_seconds=outcome.later_seconds,
        exhausted=outcome.exhausted,
        ahead=outcome.ahead,
        scored_uids=[uid for uid, _ in outcome.scored],
        scored_counts=[len(scores) for _, scores in outcome.scored],
        scores=[score for _, scores in outcome.scored for score in scores],
        grown=[grown_to(uid, grown) for uid, grown in outcome.grown],
        searched_uids=[uid for uid, _ in outcome.searched],
        searched_tokens=[tokens for _, tokens in outcome.searched],
    )
    return wire.Reply(step=reply)


def allowance_from(request: wire.PrefillRequest | wire.DecodeRequest) -> Allowance | None:
    """What the step's drafts may cost, if the router says."""
    if not request.HasField("allowance"):
        return None
    told = request.allowance
    cost = Linear(told.step_seconds, told.draft_seconds, told.round_seconds, told.first_seconds)
    return Allowance(cost, told.most, dict(zip(told.needed_uids, told.needed, strict=True)))


def group_from(message: wire.Group) -> Group:
    """A group as it arrives: fresh, or with what it generated before."""
    asked: Any = message.sampling
    sampling = Sampling(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        min_p=asked.min_p,
        typical_p=asked.typical_p if asked.HasField("typical_p") else 1.0,
        repetition_penalty=asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        bias=tuple(zip(asked.bias_ids, asked.bias_values, strict=True)),
        seed=asked.seed,
        final_logprobs=asked.final_logprobs,
    )
    search = search_from(message) if message.HasField("beams") else None
    live = [part for part in message.continuations if not part.complete]
    continuations = [(part.choice, part.tokens) for part in live]
    begun, waiting = sequences(message.tokens, 1 if search else message.choices or 1, continuations, message.cache_key)
    if search is not None:
        for sequence, part in zip(begun, live or [wire.Continuation()], strict=True):
            sequence.path = path_from(part)
    return Group(
        uid=message.uid,
        sequences=begun,
        waiting=waiting,
        sampling=sampling,
        max_new_tokens=message.max_new_tokens,
        end_ids=frozenset(message.end_ids),
        top_n=message.top_n,
        prompt_logprobs=message.prompt_logprobs and not continuations,  # they were reported with the first token
        prompt_top_n=message.prompt_top_n,
        min_new_tokens=message.min_new_tokens,
        grammar=message.grammar,
        search=search,
        drafts=0 if search else message.drafts,
        stops=tuple(message.stops),
        adapter=message.adapter,
        trace=message.trace,
    )


def search_from(message: wire.Group) -> Search:
    """Beam search as it arrives, with what it had kept before it was paused."""
    asked = message.beams
    kept = [Hypothesis(array("I", part.tokens), path_from(part), part.score) for part in message.continuations if part.complete]
    wanted = message.choices or 1
    return Search(asked.width, wanted, asked.length_penalty, Stop(asked.stop), asked.told, asked.watched, kept)


def path_from(part: wire.Continuation) -> Path:
    """How a beam came about."""
    pairs = zip(part.top_ids, part.top_logprobs, strict=True)
    return Path(part.score, array("f", part.logprobs), [tuple(islice(pairs, count)) for count in part.top_counts])


def paused_to(group: Group, page_size: int) -> wire.Paused:
    """What resumes a group that has given its pages back."""
    begun = [] if group.waiting else group.sequences
    continuations = [continuation_to(s.choice, s.tokens[s.prompt_length :], s.path) for s in begun]
    if group.search is not None:
        for rank, kept in enumerate(group.search.kept):
            part = continuation_to(rank, kept.tokens, kept.path)
            part.score, part.complete = kept.score, True
            continuations.append(part)
    return wire.Paused(uid=group.uid, continuations=continuations, grow=group.worst(page_size), lacking=group.lacking)


def continuation_to(choice: int, tokens: Listing[int], path: Path | None) -> wire.Continuation:
    """What one sequence has generated."""
    if path is None:
        return wire.Continuation(choice=choice, tokens=tokens)
    return wire.Continuation(
        choice=choice,
        tokens=tokens,
        score=path.score,
        logprobs=path.logprobs,
        top_counts=[len(top) for top in path.tops],
        top_ids=[token for top in path.tops for token, _ in top],
        top_logprobs=[logprob for top in path.tops for _, logprob in top],
    )


def grown_to(uid: int, grown: Grown) -> wire.Grown:
    """For who watches."""
    return wire.Grown(
        uid=uid,
        parents=[parent for parent, _, _ in grown.live],
        tokens=[token for _, token, _ in grown.live],
        scores=[score for _, _, score in grown.live],
        complete_parents=[parent for parent, _, _ in grown.complete],
        complete_tokens=[token for _, token, _ in grown.complete],
        complete_scores=[score for _, _, score in grown.complete],
        length=grown.length,
    )
