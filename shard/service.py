"""gRPC service of a shard: executes the router's commands on the engine and replies with the outcome.

When a command is executed, and on which thread, is decided by `commands`. A fault that is not confined to one group ends the
process: the rest of the shard's state can't be trusted then, and the launcher restarts it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import grpc

from ..kernels.dispatch import triton_on
from ..proto import shard_pb2 as wire
from . import invariance
from .adapter_loading import AdapterLoader
from .checks import check_warmup, checked
from .commands import LAND, Answer, Executor, Failed, Refused, Superseded
from .config import ShardConfig
from .engine import Engine
from .forward import GraphExtent
from .graph_sizes import parse, recorded
from .graphs import Recorder
from .memory import size_copies, size_pool
from .messages import allowance_from, group_from, paused_to, step_reply
from .models.shape import Unsupported
from .out_of_memory import log_failure
from .outcome import Outcome
from .relay import Sender

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between checks whether the caller still waits
COMPILED = 64  # tokens of the largest step that is compiled before the first request; larger ones take long anyway
MOST_SAID = 1000  # characters of an error message, which may quote files: gRPC carries few thousand
COLD = "call Warmup first: the pool has no size yet"
FAILED = "the shard failed and ends; its log says why"


class Service:
    """The gRPC Shard service of one rank. It answers Info and Health before the engine is loaded."""

    def __init__(self, config: ShardConfig, end: Callable[[int], None]) -> None:
        self._config = config
        self._end = end  # has the main thread end the process with an exit code
        self._settle: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._engine: Engine | None = None
        self._executor: Executor | None = None
        self._warmup: wire.WarmupReply | None = None
        self._adapter_loader: AdapterLoader | None = None
        self.stage = "starting"

    @property
    def engine(self) -> Engine:
        """The engine; set by `start`."""
        assert self._engine is not None
        return self._engine

    @property
    def adapter_loader(self) -> AdapterLoader:
        """The loader of LoRA adapters; set by `start`."""
        assert self._adapter_loader is not None
        return self._adapter_loader

    def start(self, engine: Engine, relay: Sender, settle: Callable[[], None] = lambda: None) -> None:
        """The model is loaded: commands can come. `relay` sends them to the other ranks, if this is rank 0. settle: called at the
        end of warm-up."""
        self._engine, self._settle = engine, settle
        self._adapter_loader = AdapterLoader(engine, self._config.hub_cache)
        self._executor = Executor(self, relay.send if self._config.ranks > 1 else None, self._end)
        self.stage = "loaded"
        self._loaded.set()

    def Info(self, request: wire.InfoRequest, context: grpc.ServicerContext) -> wire.InfoReply:  # noqa: N802
        """See shard.proto."""
        config = self._config
        reply = wire.InfoReply(rank=config.rank, ranks=config.ranks, model=config.model, dtype=config.dtype, stage=self.stage)
        reply.page_size, reply.loaded, reply.device = config.page_size, self._loaded.is_set(), config.device
        reply.adapters.extend(name for name, _ in config.adapters)
        if self._adapter_loader is not None:
            reply.later.extend(self._adapter_loader.there.values())
        reply.max_loras = config.max_loras
        reply.quantize, reply.kv_cache_dtype, reply.batch_invariant = config.quantize, config.kv_cache_dtype, config.batch_invariant
        if self._engine is not None:
            shape = self._engine.decoder.shape
            reply.overlaps = self._engine.overlaps
            reply.prefix_caching = config.prefix_caching and shape.recurrent is None  # else the cache finds only some prefixes
            reply.vocabulary, reply.max_positions, reply.device = shape.vocabulary, shape.max_positions, str(self._engine.device)
        return reply

    def Health(self, request: wire.HealthRequest, context: grpc.ServicerContext) -> wire.HealthReply:  # noqa: N802
        """See shard.proto."""
        return wire.HealthReply()

    def Warmup(self, request: wire.WarmupRequest, context: grpc.ServicerContext) -> wire.WarmupReply:  # noqa: N802
        """See shard.proto. A repeated call gets the first one's reply."""
        try:
            check_warmup(request)
        except Refused as refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        while not self._loaded.wait(LOOK) and context.is_active():
            pass  # frees the thread if the caller is gone: Info and Health need the threads
        if self._executor is None:
            context.abort(grpc.StatusCode.CANCELLED, "the router has gone")
        assert self._executor is not None
        with self._lock:
            if self._warmup is None:
                try:
                    self._warmup = self._executor.call(partial(self._measure, request))
                    self._settle()
                except Unsupported as error:
                    log.error(str(error))
                    self._end(2)
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                except Exception as error:
                    log_failure(error)
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
        # without Triton, the operations synchronize with the device
        graphs = engine.device.type == "cuda" and triton_on(engine.device)
        chosen = parse(config.cuda_graphs) if graphs and shape.replayed else ()
        drafts = engine.speculator.most > 0
        remembers = [shape.recurrent is not None]
        remembers += [False] if engine.speculator.drafter and engine.speculator.drafter.recorded else []
        sizes = recorded(chosen, rows, tokens, drafts, remembers, config.batch_invariant)
        self.stage = "compiling products"
        engine.compile(min(tokens, COMPILED))
        if config.batch_invariant:
            self.stage = "checking that answers don't depend on batches"
            invariance.check(engine)
        if not ranks.minimum(engine.decoder.vision is not None):  # all ranks have a vision encoder, or none
            engine.decoder.vision = None
        self.stage = "measuring memory"
        # With recurrent states, accepted drafts are computed a second time; the router does not count these tokens in a step's
        # budget.
        most = tokens + (sequences * engine.speculator.most if shape.recurrent is not None else 0)
        most += engine.decoder.vision.whole if engine.decoder.vision is not None else 0
        copies, reserved = size_copies(engine, config.kv_offload_gib)
        pages, sequences, sample = size_pool(
            engine, config.kv_pages, config.memory_fraction, most, rows, sequences, total, sizes, reserved
        )
        sequences = ranks.minimum(sequences)
        engine.resize(ranks.minimum(pages), sequences, copies=ranks.minimum(copies))
        if sizes:
            extent = GraphExtent(tokens, rows, total, engine.pool.pages, chosen, drafts, engine.speculator.trees)
            engine.record(Recorder(), extent, lambda stage: setattr(self, "stage", stage))
        return wire.WarmupReply(
            pages=engine.pool.pages,
            page_size=config.page_size,
            bytes_per_page=engine.token_bytes * config.page_size,
            weight_bytes=engine.decoder.weight_bytes,
            sample_tokens=sample.tokens,
            sample_seconds=sample.seconds,
            sequences=sequences,
            images=engine.decoder.vision is not None,
            image_seconds=sample.image_seconds,
        )

    def LoadAdapter(  # noqa: N802
        self, request: wire.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> wire.LoadAdapterReply:
        """See shard.proto. Steps go on meanwhile: the files are read to host memory."""
        if self._warmup is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, COLD)
        if not self._config.max_loras:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is no room for other adapters: see --max-loras")
        asked = request.adapter
        try:
            reply = self.adapter_loader.read(asked, request.router, context.is_active)
        except Unsupported as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MOST_SAID])
        except Exception as error:  # whatever may be wrong with the adapter's files: the shard is not at fault
            log.exception(f"adapter {asked.name} can't be loaded")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"adapter {asked.name} can't be loaded: {error!r:.200}")
        return reply

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

    def Adapt(self, request: wire.AdaptRequest, context: grpc.ServicerContext) -> wire.AdaptReply:  # noqa: N802
        """See shard.proto."""
        return self._once(wire.Command(adapt=request), context).adapt

    def ClearCache(  # noqa: N802
        self, request: wire.ClearCacheRequest, context: grpc.ServicerContext
    ) -> wire.ClearCacheReply:
        """See shard.proto."""
        return self._once(wire.Command(clear_cache=request), context).clear_cache

    def Steps(self, commands: Iterator[wire.Command], context: grpc.ServicerContext) -> Iterator[wire.Reply]:  # noqa: N802
        """See shard.proto. When the stream ends the router is gone, and its groups are dropped."""
        with self._commanded(context) as executor:
            yield from executor.stream(map(checked, commands))

    def follow(self, message: bytes) -> None:
        """Executes a command that rank 0 relayed, or lands the step in flight when rank 0 did."""
        with self._lock:
            if message == LAND:
                self.land()
            else:
                self.execute(wire.Command.FromString(message), lambda answer: None)

    def _once(self, command: wire.Command, context: grpc.ServicerContext) -> wire.Reply:
        with self._commanded(context) as executor:
            return executor.once(checked(command))

    @contextmanager
    def _commanded(self, context: grpc.ServicerContext) -> Iterator[Executor]:
        """The executor, if commands can be taken; errors become gRPC statuses for the caller."""
        if self._config.rank:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "send commands to rank 0, which passes them on to the others")
        if self._warmup is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, COLD)
        assert self._executor is not None
        try:
            yield self._executor
        except Superseded as superseded:
            context.abort(grpc.StatusCode.ABORTED, str(superseded))
        except Refused as refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(refused))
        except Failed:
            context.abort(grpc.StatusCode.INTERNAL, FAILED)

    def enter(self) -> None:
        """See `commands.CommandHandler`."""
        self.engine.enter()

    def execute(self, command: wire.Command, reply: Callable[[Answer], None]) -> None:
        """See `commands.CommandHandler`."""
        kind = command.WhichOneof("kind")
        request = getattr(command, kind)
        step, answer = request.step, getattr(self, f"_{kind}")(request)
        if isinstance(answer, Future):  # a step, which may be in flight
            answer.add_done_callback(lambda over: reply(partial(step_reply, step, over.result())))
        else:
            reply(lambda: answer)

    @property
    def underway(self) -> Callable[[], None] | None:
        """See `commands.CommandHandler`."""
        return self.engine.underway

    def land(self) -> None:
        """See `commands.CommandHandler`."""
        self.engine.land()

    def _prefill(self, request: wire.PrefillRequest) -> "Future[Outcome]":
        groups = [group_from(message) for message in request.groups]
        chunks = list(zip(request.chunk_uids, request.chunk_lengths, strict=True))
        allowed = allowance_from(request)
        return self.engine.begin_prefill(request.batch, groups, chunks, request.prompt_tokens, request.decode_batches, allowed)

    def _decode(self, request: wire.DecodeRequest) -> "Future[Outcome]":
        return self.engine.begin_decode(request.batches, allowance_from(request))

    def _filter(self, request: wire.FilterRequest) -> wire.Reply:
        engine, pool = self.engine, self.engine.pool
        engine.filter(request.drop)
        engine.end(zip(request.end_uids, request.end_choices, strict=True))
        paused = [paused_to(group, pool.page_size) for group in engine.pause(request.pause)]
        return wire.Reply(filter=wire.FilterReply(step=request.step, free=pool.free, paused=paused, cached=pool.cached))

    def _concat(self, request: wire.ConcatRequest) -> wire.Reply:
        self.engine.concat(request.into, request.batches)
        return wire.Reply(concat=wire.ConcatReply(step=request.step))

    def _adapt(self, request: wire.AdaptRequest) -> wire.Reply:
        return wire.Reply(adapt=wire.AdaptReply(step=request.step, problem=self.adapter_loader.adapt(request)))

    def _clear_cache(self, request: wire.ClearCacheRequest) -> wire.Reply:
        self.engine.clear()
        self.adapter_loader.welcome(request.router)
        return wire.Reply(clear_cache=wire.ClearCacheReply(step=request.step, free=self.engine.pool.free))
