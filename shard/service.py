"""Protobuf to engine and back: the only file of the shard that knows the wire.

Commands run one at a time, in order, on whatever thread brings them. A fault that is no group's own ends the process: what is
left of the shard's state can't be trusted then, and the launcher knows what to do.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import grpc

from ..proto import shard_pb2 as wire
from .config import ShardConfig
from .engine import Engine, Outcome
from .memory import size_pool
from .models.families import Unsupported
from .relay import Sender
from .sequence import Group, Sampling, Sequence

log = logging.getLogger(__name__)


class Service:
    """The Shard service of one rank. It answers Info and Health before the engine is there."""

    def __init__(self, config: ShardConfig, end: Callable[[int], None]) -> None:
        self._config = config
        self._end = end  # tells the main thread to end the process with an exit code
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._engine: Engine | None = None
        self._relay: Sender | None = None
        self._warmup: wire.WarmupReply | None = None
        self._last: tuple[int, wire.Reply] = (0, wire.Reply())
        self._speaker: object = None  # the call that brought the last command
        self.stage = "starting"

    @property
    def engine(self) -> Engine:
        """There once `start` was called."""
        assert self._engine is not None
        return self._engine

    def start(self, engine: Engine, relay: Sender) -> None:
        """The model is loaded: commands can come. `relay` leads to the other ranks, if this is rank 0."""
        self._engine, self._relay = engine, relay
        self.stage = "loaded"
        self._loaded.set()

    def Info(self, request: wire.InfoRequest, context: grpc.ServicerContext) -> wire.InfoReply:  # noqa: N802
        """See shard.proto."""
        config = self._config
        reply = wire.InfoReply(rank=config.rank, ranks=config.ranks, model=config.model, dtype=config.dtype, stage=self.stage)
        reply.page_size, reply.loaded, reply.device = config.page_size, self._loaded.is_set(), config.device
        if self._engine is not None:
            shape = self._engine.decoder.shape
            reply.vocabulary, reply.max_positions, reply.device = shape.vocabulary, shape.max_positions, str(self._engine.device)
        return reply

    def Health(self, request: wire.HealthRequest, context: grpc.ServicerContext) -> wire.HealthReply:  # noqa: N802
        """See shard.proto."""
        return wire.HealthReply()

    def Warmup(self, request: wire.WarmupRequest, context: grpc.ServicerContext) -> wire.WarmupReply:  # noqa: N802
        """See shard.proto. A repeated call answers what the first one found."""
        self._loaded.wait()
        with self._lock:
            if self._warmup is None:
                self.stage = "measuring memory"
                try:
                    self._warmup = self._measure(request)
                except Unsupported as error:
                    log.error(str(error))
                    self._end(2)
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                except Exception:
                    self._fail(context)
                self.stage = "ready"
            return self._warmup

    def _measure(self, request: wire.WarmupRequest) -> wire.WarmupReply:
        engine, config = self.engine, self._config
        shape, ranks = engine.decoder.shape, engine.decoder.ranks
        total = min(request.max_total_tokens or shape.max_positions, shape.max_positions)
        pages = size_pool(
            engine, config.page_size, config.kv_pages, config.memory_fraction, request.max_step_tokens, request.max_step_rows, total
        )
        engine.resize(ranks.least(pages), config.page_size)
        size = shape.kv_elements(ranks.size) * engine.decoder.embedding.element_size()
        return wire.WarmupReply(
            pages=engine.pool.pages,
            page_size=config.page_size,
            bytes_per_page=size * config.page_size,
            weight_bytes=engine.decoder.weight_bytes,
        )

    def Prefill(self, request: wire.PrefillRequest, context: grpc.ServicerContext) -> wire.StepReply:  # noqa: N802
        """See shard.proto."""
        return self._execute(wire.Command(prefill=request), context).step

    def Decode(self, request: wire.DecodeRequest, context: grpc.ServicerContext) -> wire.StepReply:  # noqa: N802
        """See shard.proto."""
        return self._execute(wire.Command(decode=request), context).step

    def Filter(self, request: wire.FilterRequest, context: grpc.ServicerContext) -> wire.FilterReply:  # noqa: N802
        """See shard.proto."""
        return self._execute(wire.Command(filter=request), context).filter

    def Concat(self, request: wire.ConcatRequest, context: grpc.ServicerContext) -> wire.ConcatReply:  # noqa: N802
        """See shard.proto."""
        return self._execute(wire.Command(concat=request), context).concat

    def ClearCache(  # noqa: N802
        self, request: wire.ClearCacheRequest, context: grpc.ServicerContext
    ) -> wire.ClearCacheReply:
        """See shard.proto."""
        return self._execute(wire.Command(clear_cache=request), context).clear_cache

    def Steps(self, commands: Iterator[wire.Command], context: grpc.ServicerContext) -> Iterator[wire.Reply]:  # noqa: N802
        """See shard.proto. When the stream ends the router is gone, and what it ran is dropped."""
        try:
            for command in commands:
                yield self._execute(command, context)
        finally:
            self._abandon(context)

    def follow(self, message: bytes) -> None:
        """Executes a command that rank 0 passed on."""
        with self._lock:
            self._dispatch(wire.Command.FromString(message))

    def _execute(self, command: wire.Command, context: grpc.ServicerContext) -> wire.Reply:
        if self._config.rank:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "send commands to rank 0, which passes them on to the others")
        if self._warmup is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "call Warmup first: the pool has no size yet")
        step = getattr(command, command.WhichOneof("kind")).step
        with self._lock:
            last, reply = self._last
            if command.WhichOneof("kind") != "clear_cache":
                if not step:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a command needs a step, counted from 1")
                if step == last:
                    return reply
                if step < last:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"step {step} is older than the last one, {last}")
            try:
                self._speaker = context
                self._relay_to_peers(command)
                reply = self._dispatch(command)
            except Exception:
                self._fail(context)
            self._last = (step, reply)
            return reply

    def _fail(self, context: grpc.ServicerContext) -> NoReturn:
        log.exception("the shard failed")
        self._end(1)
        context.abort(grpc.StatusCode.INTERNAL, "the shard failed and ends; its log says why")

    def _relay_to_peers(self, command: wire.Command) -> None:
        if self._relay is not None and self._config.ranks > 1:
            self._relay.send(command.SerializeToString())

    def _abandon(self, stream: object) -> None:
        with self._lock:
            if self._speaker is not stream:
                return  # another router came before this stream's end was noticed: all that runs is its own
            command = wire.Command(clear_cache=wire.ClearCacheRequest(step=self._last[0] + 1))
            try:
                self._relay_to_peers(command)
            except OSError as error:
                log.error(f"another rank is gone: {error}")
                self._end(1)
            self._dispatch(command)
            self._last = (command.clear_cache.step, wire.Reply())

    def _dispatch(self, command: wire.Command) -> wire.Reply:
        kind = command.WhichOneof("kind")
        return getattr(self, f"_{kind}")(getattr(command, kind))  # type: ignore[no-any-return]

    def _prefill(self, request: wire.PrefillRequest) -> wire.Reply:
        groups = [group_from(message) for message in request.groups]
        chunks = list(zip(request.chunk_uids, request.chunk_lengths, strict=True))
        return self._reply(request.step, self.engine.prefill(request.batch, groups, chunks, request.decode_batches))

    def _decode(self, request: wire.DecodeRequest) -> wire.Reply:
        return self._reply(request.step, self.engine.decode(request.batches))

    def _filter(self, request: wire.FilterRequest) -> wire.Reply:
        self.engine.filter(request.drop)
        paused = [group_to(group) for group in self.engine.pause(request.pause)]
        return wire.Reply(filter=wire.FilterReply(step=request.step, free=self.engine.pool.free, paused=paused))

    def _concat(self, request: wire.ConcatRequest) -> wire.Reply:
        self.engine.concat(request.into, request.batches)
        return wire.Reply(concat=wire.ConcatReply(step=request.step))

    def _clear_cache(self, request: wire.ClearCacheRequest) -> wire.Reply:
        self.engine.clear()
        return wire.Reply(clear_cache=wire.ClearCacheReply(step=request.step, free=self.engine.pool.free))

    def _reply(self, step: int, outcome: Outcome) -> wire.Reply:
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
            held_uids=[uid for uid, _, _ in outcome.standing],
            held=[held for _, held, _ in outcome.standing],
            grow=[grow for _, _, grow in outcome.standing],
            free=self.engine.pool.free,
            failed_uids=[uid for uid, _ in outcome.failed],
            failed_messages=[message for _, message in outcome.failed],
            seconds=outcome.seconds,
        )
        return wire.Reply(step=reply)


def group_from(message: wire.Group) -> Group:
    """A group as it arrives: one sequence that has its prompt and what it generated before."""
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
    return Group(
        uid=message.uid,
        sequences=[Sequence(list(message.tokens), message.prompt_length)],
        sampling=sampling,
        max_new_tokens=message.max_new_tokens,
        end_ids=frozenset(message.end_ids),
        top_n=message.top_n,
        prompt_logprobs=message.prompt_logprobs,
    )


def group_to(group: Group) -> wire.Group:
    """The inverse of `group_from`."""
    sequence, sampling = group.sequences[0], group.sampling
    return wire.Group(
        uid=group.uid,
        tokens=sequence.tokens,
        prompt_length=sequence.prompt_length,
        max_new_tokens=group.max_new_tokens,
        end_ids=sorted(group.end_ids),
        sampling=wire.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            bias_ids=[token for token, _ in sampling.bias],
            bias_values=[value for _, value in sampling.bias],
            final_logprobs=sampling.final_logprobs,
        ),
        top_n=group.top_n,
        prompt_logprobs=group.prompt_logprobs,
    )
