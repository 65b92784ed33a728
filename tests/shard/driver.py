"""Drives a shard as a router would, at random: requests arrive while others run, prompts come in chunks, groups are paused,
resumed and cancelled, batches joined. Every decision follows from a seed and from the shard's answers, so ranks can't diverge.

It looks ahead by one command: what it decides on is what the answer to the command before the last one said. What the groups may
still take is never more than what is free.
"""

import queue
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Protocol

import grpc

from penstock.proto import rpc
from penstock.proto import shard_pb2 as wire
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.decoding.sampler import Pick
from penstock.shard.decoding.strategy import Emitted, Finish
from penstock.shard.engine import Engine
from penstock.shard.messages import group_from, paused_to
from penstock.shard.outcome import Outcome
from penstock.shard.pictures import PromptImage
from penstock.shard.sequence import Group, Sampling, Thinking

UNLIMITED = 1 << 20


class Pool(Protocol):
    """What is known of a shard's pages."""

    pages: int
    page_size: int

    @property
    def free(self) -> int: ...


class Shard(Protocol):
    """An engine, near or far."""

    @property
    def pool(self) -> Pool: ...

    def prefill(
        self, batch: int, groups: Sequence[Group], chunks: Sequence[tuple[int, int]], prompt_tokens: int, decode: Sequence[int]
    ) -> "Outcome | Future[Outcome]": ...

    def decode(self, batches: Sequence[int]) -> "Outcome | Future[Outcome]": ...

    def filter(self, drop: Iterable[int]) -> object: ...

    def end(self, ends: Iterable[tuple[int, int]]) -> None: ...

    def pause(self, uids: Iterable[int]) -> Sequence[Group | wire.Paused]: ...

    def concat(self, into: int, batches: Sequence[int]) -> None: ...

    def land(self) -> None: ...


@dataclass
class World:
    """What happened."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by uid and choice
    logprobs: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # of these
    finishes: dict[tuple[int, int], Finish] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)  # of beam searches that have ended
    failed: dict[int, str] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    ended: set[tuple[int, int]] = field(default_factory=set)  # choices
    pauses: Counter[int] = field(default_factory=Counter)
    drafted: int = 0  # drafts, and ...
    accepted: int = 0  # ... those that were right
    mixed: int = 0  # steps with chunks and decodes
    cached: int = 0  # tokens that were found
    restored: int = 0  # tokens

    @property
    def answers(self) -> dict[int, list[int]]:
        """Of everybody's first choice."""
        return {uid: tokens for (uid, choice), tokens in self.tokens.items() if not choice}


@dataclass(frozen=True)
class Habits:
    """How the driver behaves; fractions are chances per step."""

    chunk: int = UNLIMITED  # most tokens of a prompt in a step
    pause: float = 0.0
    pauses: int = 0  # that everybody suffers
    cancel: float = 0.0
    end: float = 0.0  # of a single choice
    join: float = 0.2
    arrivals: int = 6  # most that come before a step
    careful: bool = True  # admits only what has room


def drive(shard: Shard, groups: Sequence[Group], habits: Habits, seed: int = 0) -> World:
    """Runs `groups` to their ends."""
    return Driver(shard, [message(group) for group in groups], habits, seed).run()


class Flying:
    """An engine whose steps may be under way when it returns, as a service uses it."""

    def __init__(self, engine: Engine, chance: random.Random) -> None:
        self.engine = engine
        self.ahead = 0  # steps that were begun on top of others
        self._chance = chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def prefill(self, *arguments: Any) -> "Future[Outcome]":
        return self._begin(self.engine.begin_prefill, *arguments)

    def decode(self, *arguments: Any) -> "Future[Outcome]":
        return self._begin(self.engine.begin_decode, *arguments)

    def _begin(self, begin: Any, *arguments: Any) -> "Future[Outcome]":
        if self._chance.random() < 0.2:
            self.engine.land()  # the command comes late
        self.ahead += self.engine.underway is not None
        landed: Future[Outcome] = begin(*arguments)
        return landed


class Driver:
    """One run."""

    def __init__(self, shard: Shard, asked: Sequence[wire.Group], habits: Habits, seed: int) -> None:
        self.shard = shard
        self.habits = habits
        self.chance = random.Random(seed)
        self.world = World({(one.uid, choice): [] for one in asked for choice in range(one.choices or 1)})
        self.asked = {one.uid: one for one in asked}
        self.waiting = list(asked)
        self.grow: dict[int, int] = {}  # of all that are admitted
        self.lacking: dict[int, int] = {}
        self.due = {one.uid: self._due(one.max_new_tokens) for one in asked}  # generated tokens at which it is paused
        self.free = shard.pool.pages
        self.unheard: deque[Outcome | Future[Outcome]] = deque()
        self.batches: list[int] = []
        self.number = 0

    def run(self) -> World:
        turns = 0
        while self.waiting or self.grow or self.unheard:
            turns += 1
            assert turns < 20_000, "it never ends"
            self._step()
            self._hear(1)
            self._concat()
            self._cancel()
            self._end()
            self._pause()
        assert not self.unheard
        return self.world

    def _due(self, most: int) -> list[int]:
        return sorted(self.chance.sample(range(max(self.habits.pauses, most - 3)), self.habits.pauses))

    def _step(self) -> None:
        chance, habits = self.chance, self.habits
        fresh = self._admit(chance.randint(0, habits.arrivals))
        chunks = [
            (uid, min(lacking, habits.chunk))
            for uid, lacking in self.lacking.items()
            if lacking and (habits.chunk < 8 or chance.random() < 0.7)
        ]
        decode = [batch for batch in self.batches if chance.random() < 0.9]
        if fresh or chunks:
            self.number += 1
            self.world.mixed += bool(chunks and decode and not all(self.lacking.values()))
            budget = sum(most for _, most in chunks)
            self.unheard.append(self.shard.prefill(self.number, fresh, chunks, budget, decode))
            self.batches.append(self.number)
        else:
            self.unheard.append(self.shard.decode(decode))

    def _admit(self, count: int) -> list[Group]:
        size = self.shard.pool.page_size
        admitted: list[Group] = []
        while self.waiting and len(admitted) < count:
            group = group_from(self.waiting[0])
            if self.habits.careful and sum(self.grow.values()) + group.worst(size) > self.free:
                break
            del self.waiting[0]
            self.grow[group.uid], self.lacking[group.uid] = group.worst(size), group.lacking
            admitted.append(group)
        return admitted

    def _hear(self, left: int) -> None:
        while len(self.unheard) > left or (self.unheard and not self.grow):
            outcome = self._landed(self.unheard.popleft())
            self.free = outcome.free
            self.world.cached += outcome.cached_tokens
            self.world.restored += outcome.restored_tokens
            self.world.drafted += outcome.drafted
            self.world.accepted += outcome.accepted
            for uid, emitted in outcome.emitted:
                if uid in self.grow:
                    self._take(uid, emitted)
            for uid, scores in outcome.scored:
                if uid in self.grow:  # what was wanted may be more than there is
                    self.world.scores[uid] = list(scores)
                    self._forget(uid)
            for uid, message in outcome.failed:
                self.world.failed[uid] = message
                self._forget(uid)
            for uid, _, grow, lacking in outcome.standing:
                if uid in self.grow:
                    self.grow[uid], self.lacking[uid] = grow, lacking

    def _landed(self, outcome: "Outcome | Future[Outcome]") -> Outcome:
        if isinstance(outcome, Outcome):
            return outcome
        if not outcome.done():
            self.shard.land()
        return outcome.result()

    def _take(self, uid: int, emitted: Emitted) -> None:
        key = uid, emitted.choice
        assert key not in self.world.finishes
        if key in self.world.ended:
            return
        self.world.tokens[key].append(emitted.pick.token)
        self.world.logprobs.setdefault(key, []).append(emitted.pick.logprob)
        if emitted.finish:
            self.world.finishes[key] = emitted.finish
            if not self._live(uid) and not self.asked[uid].HasField("beams"):
                self._forget(uid)

    def _live(self, uid: int) -> list[int]:
        keys = [(uid, choice) for choice in range(self.asked[uid].choices or 1)]
        return [key[1] for key in keys if key not in self.world.finishes and key not in self.world.ended]

    def _forget(self, uid: int) -> None:
        self.grow.pop(uid, None)
        self.lacking.pop(uid, None)

    def _concat(self) -> None:
        if self.chance.random() < self.habits.join and len(self.batches) > 1:
            into, *others = self.chance.sample(self.batches, 2)
            self.shard.concat(into, others)
            self.batches.remove(others[0])

    def _cancel(self) -> None:
        if self.grow and self.chance.random() < self.habits.cancel:
            gone = self.chance.choice(sorted(self.grow))
            self.shard.filter([gone])
            self.world.cancelled.add(gone)
            self._forget(gone)

    def _end(self) -> None:
        """Of a group that goes on with its other choices, and is known to have begun."""
        uids = [uid for uid in sorted(self.grow) if not self.asked[uid].HasField("beams")]
        keys = [(uid, choice) for uid in uids for choice in self._live(uid)]
        able = [key for key in keys if len(self._live(key[0])) > 1 and self.world.tokens[key]]
        if able and self.chance.random() < self.habits.end:
            gone = self.chance.choice(able)
            self.shard.end([gone])
            self.world.ended.add(gone)

    def _pause(self) -> None:
        alive = sorted(self.grow)
        if alive and self.chance.random() < self.habits.pause:
            self._take_back(self.chance.sample(alive, self.chance.randint(1, len(alive))))
        tired = [uid for uid in sorted(self.grow) if self.due[uid] and self._generated(uid) >= self.due[uid][0]]
        for uid in tired:
            if self.chance.random() < 0.7 or self._generated(uid) > self.due[uid][0]:
                self.due[uid].pop(0)
                self._take_back([uid])
        while self.habits.careful and sum(self.grow.values()) > self.free:
            self._hear(0)
            self.free = self.shard.pool.free  # after a Filter, too
            if sum(self.grow.values()) > self.free:
                assert len(self.grow) > 1, "not even one has room"
                self._take_back([list(self.grow)[-1]])

    def _generated(self, uid: int) -> int:
        return max(len(self.world.tokens[uid, choice]) for choice in range(self.asked[uid].choices or 1))

    def _take_back(self, uids: list[int]) -> None:
        paused = self.shard.pause(uids)
        self._hear(0)
        size = self.shard.pool.page_size
        for one in paused:
            told = one if isinstance(one, wire.Paused) else paused_to(one, size)
            if told.uid not in self.grow:
                continue  # it has just ended, or was cancelled
            self.world.pauses[told.uid] += 1
            again = wire.Group()
            again.CopyFrom(self.asked[told.uid])
            again.continuations.extend(told.continuations)
            again.beams.streamed = len(self.world.tokens[told.uid, 0])
            if not self.asked[told.uid].HasField("beams"):
                again.ClearField("beams")
            for part in () if again.HasField("beams") else told.continuations:
                assert list(part.tokens) == self.world.tokens[told.uid, part.choice]
            group = group_from(again)
            assert (told.grow, told.lacking) == (group.worst(size), group.lacking)
            self._forget(told.uid)
            self.waiting.append(again)
        self.free = self.shard.pool.free


def message(group: Group) -> wire.Group:
    """The inverse of `group_from`."""
    first, sampling = group.sequences[0], group.sampling
    same = {one.name: getattr(sampling, one.name) for one in fields(Sampling) if one.name != "bias"}
    begun = [] if group.waiting else group.sequences
    return wire.Group(
        uid=group.uid,
        tokens=first.tokens[: first.prompt_length],
        choices=group.search.wanted if group.search else len(group.waiting),
        beams=beams(group.search) if group.search else None,
        stops=group.stops,
        drafts=group.drafts,
        continuations=[wire.Continuation(choice=s.choice, tokens=s.tokens[s.prompt_length :]) for s in begun],
        max_new_tokens=group.max_new_tokens,
        end_ids=sorted(group.end_ids),
        sampling=wire.Sampling(
            **same, bias_ids=[pair[0] for pair in sampling.bias], bias_values=[pair[1] for pair in sampling.bias]
        ),
        top_n=group.top_n,
        prompt_logprobs=group.prompt_logprobs,
        prompt_top_n=group.prompt_top_n,
        min_new_tokens=group.min_new_tokens,
        thinking=thinking(group.thinking) if group.thinking else None,
        grammar=group.grammar,
        cache_key=first.cache_key,
        adapter=group.adapter,
        images=map(shown, group.images),
    )


def thinking(one: Thinking) -> wire.Thinking:
    """Likewise."""
    return wire.Thinking(most=one.most, end=one.end, begin=one.begin if one.begin >= 0 else None)


def shown(one: PromptImage) -> wire.Image:
    """Likewise."""
    pixels = one.pixels.numpy().tobytes()
    return wire.Image(start=one.start, rows=one.rows, columns=one.columns, pixels=pixels, shape=one.pixels.shape, size=one.size)


def beams(search: Search) -> wire.Beams:
    """Likewise."""
    return wire.Beams(
        width=search.width,
        length_penalty=search.length_penalty,
        stop=wire.Beams.Stop.Name(search.stop),
        streamed=search.streamed,
        watched=search.watched,
    )


class Remote:
    """The shard at the other end of a channel: by unary calls, or by the stream of commands."""

    def __init__(self, channel: grpc.Channel, stream: bool, pages: int, page_size: int) -> None:
        self.step = 0
        self.pool = SimpleNamespace(pages=pages, page_size=page_size, free=pages)
        self._stub = rpc.Stub(channel)
        self._commands: queue.SimpleQueue[wire.Command | None] = queue.SimpleQueue()
        self._replies = self._stub.Steps(iter(self._commands.get, None), timeout=100) if stream else None

    def prefill(
        self, batch: int, groups: Sequence[Group], chunks: Sequence[tuple[int, int]], prompt_tokens: int, decode: Sequence[int]
    ) -> Outcome:
        request = wire.PrefillRequest(batch=batch, groups=map(message, groups), decode_batches=decode, prompt_tokens=prompt_tokens)
        request.chunk_uids.extend(uid for uid, _ in chunks)
        request.chunk_lengths.extend(length for _, length in chunks)
        return _outcome(self.call("Prefill", prefill=request).step)

    def decode(self, batches: Sequence[int]) -> Outcome:
        return _outcome(self.call("Decode", decode=wire.DecodeRequest(batches=batches)).step)

    def filter(self, drop: Iterable[int]) -> None:
        self._filter(drop=drop)

    def end(self, ends: Iterable[tuple[int, int]]) -> None:
        uids, choices = zip(*ends, strict=True)
        self._filter(end_uids=uids, end_choices=choices)

    def pause(self, uids: Iterable[int]) -> list[wire.Paused]:
        return list(self._filter(pause=uids).paused)

    def concat(self, into: int, batches: Sequence[int]) -> None:
        self.call("Concat", concat=wire.ConcatRequest(into=into, batches=batches))

    def clear(self) -> int:
        """Pages that are free then."""
        return int(self.call("ClearCache", clear_cache=wire.ClearCacheRequest()).clear_cache.free)

    def close(self) -> None:
        """Ends the stream, if there is one."""
        self._commands.put(None)

    def _filter(self, **fields: Any) -> wire.FilterReply:
        return self.call("Filter", filter=wire.FilterRequest(**fields)).filter

    def call(self, method: str, **kind: Any) -> wire.Reply:
        """The reply to one command."""
        [(name, request)] = kind.items()
        name = "step" if name in ("prefill", "decode") else name
        self.step += 1
        request.step = self.step
        if self._replies is None:
            reply = wire.Reply(**{name: getattr(self._stub, method)(request, timeout=60)})
        else:
            self._commands.put(wire.Command(**kind))
            reply = next(self._replies)
        self.pool.free = getattr(getattr(reply, name), "free", self.pool.free)
        return reply


def _outcome(reply: wire.StepReply) -> Outcome:
    rows = zip(reply.uids, reply.choices, reply.tokens, reply.logprobs, reply.finishes, strict=True)
    scores, ended = iter(reply.scores), zip(reply.scored_uids, reply.scored_counts, strict=True)
    return Outcome(
        emitted=[(uid, Emitted(choice, Pick(token, logprob), Finish(finish))) for uid, choice, token, logprob, finish in rows],
        standing=list(zip(reply.held_uids, reply.held, reply.grow, reply.lacking, strict=True)),
        scored=[(uid, [next(scores) for _ in range(count)]) for uid, count in ended],
        failed=list(zip(reply.failed_uids, reply.failed_messages, strict=True)),
        prompt_tokens=reply.prompt_tokens,
        restored_tokens=reply.restored_tokens,
        cached_tokens=reply.cached_tokens,
        drafted=reply.drafted_tokens,
        accepted=reply.accepted_tokens,
        free=reply.free,
        cached=reply.cached,
    )
