"""Drives a shard as a router would, at random: requests arrive while others run, prompts come in chunks, groups are paused,
resumed and cancelled, batches joined. Every decision follows from a seed and from the shard's answers, so ranks can't diverge."""

import queue
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from penstock.proto import rpc
from penstock.proto import shard_pb2 as wire
from penstock.shard.decoding.sampler import Pick
from penstock.shard.decoding.strategy import Emitted, Finish
from penstock.shard.engine import Outcome
from penstock.shard.sequence import Group
from penstock.shard.service import group_from, group_to

UNLIMITED = 1 << 30


class Shard(Protocol):
    """An engine, near or far."""

    def prefill(self, batch: int, groups: Sequence[Group], chunks: Sequence[tuple[int, int]], decode: Sequence[int]) -> Outcome: ...

    def decode(self, batches: Sequence[int]) -> Outcome: ...

    def filter(self, drop: Iterable[int]) -> None: ...

    def pause(self, uids: Iterable[int]) -> list[Group]: ...

    def concat(self, into: int, batches: Sequence[int]) -> None: ...


@dataclass
class World:
    """What happened."""

    answers: dict[int, list[int]] = field(default_factory=dict)  # tokens by uid
    finishes: dict[int, Finish] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    mixed: int = 0  # steps with chunks and decodes
    pauses: int = 0


@dataclass(frozen=True)
class Habits:
    """How the driver behaves; the numbers are chances per step."""

    chunk: int = UNLIMITED  # most tokens of a prompt in a step
    pause: float = 0.0
    cancel: float = 0.0
    join: float = 0.2
    arrivals: int = 6  # most that come before a step


def drive(shard: Shard, groups: Sequence[Group], habits: Habits, seed: int = 0) -> World:
    """Runs `groups` to their ends."""
    chance = random.Random(seed)
    world = World({group.uid: [] for group in groups})
    waiting = list(groups)
    lacking: dict[int, int] = {}  # of prompts not yet computed: uid to tokens
    running: set[int] = set()
    batches: list[int] = []
    number = 0
    while waiting or lacking or running:
        fresh = [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(0, habits.arrivals)))]
        lacking |= {group.uid: len(group.sequences[0].tokens) for group in fresh}
        chunks = [(uid, min(count, habits.chunk)) for uid, count in lacking.items() if habits.chunk < 8 or chance.random() < 0.7]
        decode = [batch for batch in batches if chance.random() < 0.9]
        if fresh or chunks:
            number += 1
            world.mixed += bool(chunks and decode and running)
            outcome = shard.prefill(number, fresh, chunks, decode)
            batches.append(number)
        else:
            outcome = shard.decode(decode)
        for uid, count in chunks:
            lacking[uid] -= count
            if not lacking[uid]:
                del lacking[uid]
                running.add(uid)
        for uid, emitted in outcome.emitted:
            assert uid in running
            world.answers[uid].append(emitted.pick.token)
            if emitted.finish:
                world.finishes[uid] = emitted.finish
                running.discard(uid)
        for uid, message in outcome.failed:
            world.failed[uid] = message
            running.discard(uid)
            lacking.pop(uid, None)
        if chance.random() < habits.join and len(batches) > 1:
            into, *others = chance.sample(batches, 2)
            shard.concat(into, others)
            batches.remove(others[0])
        alive = sorted(running | set(lacking))
        if alive and chance.random() < habits.cancel:
            gone = chance.choice(alive)
            shard.filter([gone])
            world.cancelled.add(gone)
            running.discard(gone)
            lacking.pop(gone, None)
            alive.remove(gone)
        if alive and chance.random() < habits.pause:
            uids = chance.sample(alive, chance.randint(1, len(alive)))
            for group in shard.pause(uids):
                world.pauses += 1
                running.discard(group.uid)
                lacking.pop(group.uid, None)
                waiting.append(group_from(group_to(group)))
    return world


class Remote:
    """The shard at the other end of a channel: by unary calls, or by the stream of commands."""

    def __init__(self, channel: grpc.Channel, stream: bool) -> None:
        self.step = 0
        self._stub = rpc.Stub(channel)
        self._commands: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
        self._replies = self._stub.Steps(iter(self._commands.get, None), timeout=100) if stream else None

    def prefill(self, batch: int, groups: Sequence[Group], chunks: Sequence[tuple[int, int]], decode: Sequence[int]) -> Outcome:
        uids, lengths = [uid for uid, _ in chunks], [min(length, (1 << 32) - 1) for _, length in chunks]
        messages = [group_to(group) for group in groups]
        request = wire.PrefillRequest(batch=batch, groups=messages, chunk_uids=uids, chunk_lengths=lengths, decode_batches=decode)
        return _outcome(self.call("Prefill", prefill=request).step)

    def decode(self, batches: Sequence[int]) -> Outcome:
        return _outcome(self.call("Decode", decode=wire.DecodeRequest(batches=batches)).step)

    def filter(self, drop: Iterable[int]) -> None:
        self.call("Filter", filter=wire.FilterRequest(drop=drop))

    def pause(self, uids: Iterable[int]) -> list[Group]:
        return [group_from(message) for message in self.call("Filter", filter=wire.FilterRequest(pause=uids)).filter.paused]

    def concat(self, into: int, batches: Sequence[int]) -> None:
        self.call("Concat", concat=wire.ConcatRequest(into=into, batches=batches))

    def clear(self) -> int:
        """Pages that are free then."""
        return int(self.call("ClearCache", clear_cache=wire.ClearCacheRequest()).clear_cache.free)

    def close(self) -> None:
        """Ends the stream, if there is one."""
        self._commands.put(None)

    def call(self, method: str, **kind: Any) -> wire.Reply:
        """The reply to one command."""
        [(name, request)] = kind.items()
        self.step += 1
        request.step = self.step
        if self._replies is None:
            reply = getattr(self._stub, method)(request, timeout=60)
            return wire.Reply(**{"step" if name in ("prefill", "decode") else name: reply})
        self._commands.put(wire.Command(**kind))
        return next(self._replies)


def _outcome(reply: wire.StepReply) -> Outcome:
    rows = zip(reply.uids, reply.choices, reply.tokens, reply.logprobs, reply.finishes, strict=True)
    return Outcome(
        emitted=[(uid, Emitted(choice, Pick(token, logprob), Finish(finish))) for uid, choice, token, logprob, finish in rows],
        standing=list(zip(reply.held_uids, reply.held, reply.grow, strict=True)),
        failed=list(zip(reply.failed_uids, reply.failed_messages, strict=True)),
    )
