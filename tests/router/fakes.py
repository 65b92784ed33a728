"""`FakeShards`: the simulator's shard of integers behind the interface of `router/shards.py`; and a byte tokenizer.

The fake is strict: a command that a shard couldn't execute, or that a router must not send, fails an assertion.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

from penstock.proto import shard_pb2
from penstock.router.request import Broken, Piece, Refused
from penstock.simulator.shard import Asked, IntegerShard, Outcome

LETTERS = 32  # the fake vocabulary is bytes; generated ones are printable, from this one on ...
END = 0  # ... and this one is EOS


def letter(prompt: Sequence[int], position: int, choice: int = 0) -> int:
    """The token that the fake generates: a printable byte that depends on the whole prompt, the position and the choice."""
    return LETTERS + (sum(prompt) * 7 + position * 11 + choice * 29) % 95


class FakeShards:
    """A shard in this process. A group whose end ids include `END` ends by itself after `ends_at(prompt)` tokens."""

    def __init__(
        self,
        pages: int = 64,
        page_size: int = 4,
        *,
        ends_at: Callable[[Sequence[int]], int] = lambda prompt: 0,
        seconds: float = 0.0,
        answer: Callable[[Sequence[int], int, int], int] = letter,
        max_positions: int = 4096,
        images: bool = False,
        max_loras: int = 0,
    ) -> None:
        self.stage = "waiting"
        self.info = shard_pb2.InfoReply(
            ranks=1,
            model="fake",
            dtype="float32",
            device="cpu",
            page_size=page_size,
            vocabulary=256,
            max_positions=max_positions,
            loaded=True,
            stage="ready",
            max_loras=max_loras,
        )
        self.model = IntegerShard(pages, page_size)
        self.pages = pages
        self.images = images  # the model accepts images
        self.commands: list[shard_pb2.Command] = []  # executed ones
        self.warmup: shard_pb2.WarmupRequest | None = None
        self.closed = False
        self.lost: asyncio.Future[None]
        self.groups_met = 0  # rank groups so far, one after another
        self.adopts = False  # there are other replicas, whose groups may continue here
        self.break_at = 0  # the step at which the shard dies; no new one starts until this is 0 again
        self.killers: set[bytes] = set()  # prompts that kill the shard when one of their tokens would be computed
        self.read: dict[str, shard_pb2.LoadedAdapter] = {}  # adapters that were loaded and may be added, by key
        self.reading = asyncio.Event()  # cleared: loading adapters waits
        self.reading.set()
        self.revision = ""  # of the adapters' files; part of their digest
        self.faulty = ""  # error of adapters loaded from now on; "die": the shard dies
        self.fail: dict[int, str] = {}  # groups that fail in their next step, with the error
        self.gate = asyncio.Event()  # cleared: commands wait
        self.gate.set()
        self._ends_at = ends_at
        self._answer = answer
        self._seconds = seconds
        self._groups: dict[int, shard_pb2.Group] = {}
        self._generated: dict[tuple[int, int], int] = {}  # tokens of each choice
        self._steps = 0
        self._last: asyncio.Task[shard_pb2.Reply] | None = None

    async def connect(self) -> None:
        self.stage = "connected"

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        while self.groups_met and self.break_at:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.lost = asyncio.get_running_loop().create_future()
        self.groups_met += 1
        self.warmup = request
        self.stage = "ready"
        return shard_pb2.WarmupReply(pages=self.pages, page_size=self.model.page_size, images=self.images)

    async def load_adapter(self, request: shard_pb2.LoadAdapterRequest) -> shard_pb2.LoadAdapterReply:
        await asyncio.sleep(self._seconds)
        await self.reading.wait()
        if self.faulty == "die":
            self.die()
        if self.lost.done():
            raise Broken("shard rank 0 has ended")
        if self.faulty:
            raise Refused(self.faulty)
        digest = f"digest of {request.adapter.folder}{self.revision}"
        if request.adapter.digest not in ("", digest):
            raise Refused("not those that were loaded first")
        known = shard_pb2.LoadedAdapter()
        known.CopyFrom(request.adapter)
        known.digest = digest
        self.read[request.adapter.key] = known
        return shard_pb2.LoadAdapterReply(folder=known.folder, digest=known.digest)

    def execute(self, command: shard_pb2.Command) -> asyncio.Future[shard_pb2.Reply]:
        self._last = asyncio.ensure_future(self._execute(command, self._last, self.lost))
        # As with real shards, the result may never be retrieved: asyncio's warning about it would disturb other tests.
        self._last.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._last

    def die(self, loss: Broken | None = None) -> None:
        """The shard and its state, pages included, are lost."""
        self.model = IntegerShard(self.pages, self.model.page_size)
        self._groups.clear()
        self._generated.clear()
        self.read.clear()
        del self.info.later[:]
        if not self.lost.done():
            self.lost.set_exception(loss or Broken("shard rank 0 has ended"))
            self.lost.exception()

    async def forget(self) -> None:
        assert self.lost.done()
        self.stage = "waiting"
        if self._last is not None:
            self._last.cancel()
            await asyncio.wait([self._last])
            self._last = None

    async def close(self) -> None:
        self.closed = True
        if self._last is not None:
            self._last.cancel()
            await asyncio.wait([self._last])

    async def _execute(
        self, command: shard_pb2.Command, earlier: asyncio.Task[shard_pb2.Reply] | None, lost: "asyncio.Future[None]"
    ) -> shard_pb2.Reply:
        try:
            if earlier is not None and not earlier.done():
                await asyncio.wait([earlier])
            await self.gate.wait()
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            if lost.done():  # by `forget`: whoever waits gets an error, as with real shards
                lost.result()
            raise
        self._steps += 1
        if not lost.done() and ((self.break_at and self._steps >= self.break_at) or self._is_killed_by(command)):
            self.die()
        if lost.done():
            lost.result()
        self.commands.append(command)
        match command.WhichOneof("kind"):
            case "prefill":
                return self._prefill(command.prefill)
            case "decode":
                assert list(command.decode.batches) == [1]
                decoding = self._decoding()
                return self._reply(decoding, self.model.decode())
            case "filter":
                return self._filter(command.filter)
            case "adapt":
                return shard_pb2.Reply(adapt=shard_pb2.AdaptReply(problem=self._adapt(command.adapt)))
        raise AssertionError(f"unexpected command {command}")

    def _adapt(self, request: shard_pb2.AdaptRequest) -> str:
        later = self.info.later
        if any(self._groups[uid].adapter == request.drop for uid in self.model.groups if request.drop):
            return "there are groups that go by it"
        if request.add:
            assert len(later) + len(self.info.adapters) < self.info.max_loras
            later.append(self.read.pop(request.add))
        for index in reversed(range(len(later))):
            if later[index].key == request.retire:
                later[index].retired = True
            if later[index].key == request.drop:
                del later[index]
        self.read.pop(request.drop, None)
        return ""

    def _is_killed_by(self, command: shard_pb2.Command) -> bool:
        kind = command.WhichOneof("kind")
        known = [self._groups[uid] for uid in self.model.groups] if kind != "filter" else []
        return any(bytes(group.tokens) in self.killers for group in [*known, *command.prefill.groups])

    def _decoding(self) -> list[tuple[int, int]]:
        return [(uid, choice) for uid, group in self.model.groups.items() if group.decodes for choice in group.tails]

    def _prefill(self, request: shard_pb2.PrefillRequest) -> shard_pb2.Reply:
        assert request.batch == 1
        assert list(request.decode_batches) in ([], [1])
        self.model.failing.update(self.fail)
        for group in request.groups:
            self._groups[group.uid] = group
            assert group.adapter in ("", *self.info.adapters, *(adapter.key for adapter in self.info.later)), "it is not there"
            for continuation in group.continuations:
                expected = [self._token(group, position, continuation.choice) for position in range(len(continuation.tokens))]
                assert list(continuation.tokens) == expected, "not what it had generated"
                self._generated[group.uid, continuation.choice] = len(continuation.tokens)
        decoding = self._decoding() if request.decode_batches else []
        chunks = list(zip(request.chunk_uids, request.chunk_lengths, strict=True))
        new = [self._new_group(group) for group in request.groups]
        for expected_group in new if self.groups_met > 1 or self.adopts else ():
            self.model.expect(expected_group.uid, expected_group.continuations)
        return self._reply(decoding, self.model.prefill(new, chunks, request.prompt_tokens, bool(request.decode_batches)))

    def _new_group(self, group: shard_pb2.Group) -> Asked:
        choices = group.choices or 1
        ends_at = self._ends_at(group.tokens) if END in group.end_ids else 0
        return Asked(
            uid=group.uid,
            prompt=len(group.tokens),
            most=group.max_new_tokens,
            choices=choices,
            ends_at=[ends_at] * choices,
            continuations=tuple((one.choice, len(one.tokens)) for one in group.continuations),
        )

    def _filter(self, request: shard_pb2.FilterRequest) -> shard_pb2.Reply:
        released = self.model.filter(request.drop, request.pause, list(zip(request.end_uids, request.end_choices, strict=True)))
        reply = shard_pb2.FilterReply(step=self._steps, free=released.free, cached=released.cached)
        for uid, grow, lacking in released.paused:
            paused = reply.paused.add(uid=uid, grow=grow, lacking=lacking)
            for choice, count in released.continuations[uid]:
                tokens = [self._token(self._groups[uid], position, choice) for position in range(count)]
                paused.continuations.add(choice=choice, tokens=tokens)
        return shard_pb2.Reply(filter=reply)

    def _token(self, group: shard_pb2.Group, position: int, choice: int) -> int:
        return self._answer(group.tokens, position, choice)

    def _reply(self, decoding: list[tuple[int, int]], outcome: Outcome) -> shard_pb2.Reply:
        reply = shard_pb2.StepReply(
            step=self._steps,
            seconds=self._seconds,
            held_uids=outcome.uids,
            held=outcome.held,
            grow=outcome.grow,
            lacking=outcome.lacking,
            free=outcome.free,
            cached=outcome.cached,
            failed_uids=outcome.failed,
            failed_messages=[self.fail.pop(uid) for uid in outcome.failed],
            prompt_tokens=outcome.prompt_tokens,
            restored_tokens=outcome.restored_tokens,
            cached_tokens=outcome.cached_tokens,
            decode_tokens=outcome.decode_tokens,
            prompt_keys=outcome.prompt_keys,
            decode_keys=outcome.decode_keys,
        )
        first = [(uid, choice) for uid in outcome.first for choice in range(self._groups[uid].choices or 1)]
        for uid, choice in decoding + first:
            if uid not in outcome.failed:
                self._add_token(reply, uid, choice, (uid, choice) in outcome.finished)
        return shard_pb2.Reply(step=reply)

    def _add_token(self, reply: shard_pb2.StepReply, uid: int, choice: int, finished: bool) -> None:
        group = self._groups[uid]
        position = self._generated.get((uid, choice), 0)
        self._generated[uid, choice] = position + 1
        by_itself = finished and position + 1 < group.max_new_tokens
        reply.uids.append(uid)
        reply.choices.append(choice)
        token = self._token(group, position, choice)
        reply.tokens.append(END if by_itself and token not in group.end_ids else token)
        reply.logprobs.append(-1.0)
        reply.finishes.append(1 if by_itself else 2 if finished else 0)
        if group.top_n:
            reply.top_ids.extend(range(LETTERS, LETTERS + group.top_n))
            reply.top_logprobs.extend(-float(rank) for rank in range(group.top_n))
        reply.top_counts.append(group.top_n)
        if position == 0 and group.prompt_logprobs:
            reply.prompt_uids.append(uid)
            reply.prompt_counts.append(len(group.tokens) - 1)
            reply.prompt_tops.append(0)
            reply.prompt_logprobs.extend(-float(token) for token in group.tokens[1:])


class ByteText:
    """The text of a stream of bytes, cut at stop strings. Nothing is held back."""

    def __init__(self, stop: tuple[str, ...], include_stop: bool) -> None:
        self.text = ""
        self._stop = stop
        self._include = include_stop

    def push(self, id: int) -> Piece:
        added = "" if id == END else chr(id)
        self.text += added
        for stop in self._stop:
            if self.text.endswith(stop):
                if not self._include:
                    self.text = self.text[: -len(stop)]
                    added = ""
                return Piece("<end>" if id == END else chr(id), added, stop)
        return Piece("<end>" if id == END else chr(id), added, "")

    def end(self) -> str:
        return ""


class ByteTokenizer:
    """A token is a byte; 0 is the end."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def is_special(self, id: int) -> bool:
        return id == END

    def token_text(self, id: int) -> str:
        return chr(id)

    def stream(
        self,
        prompt: Sequence[int],
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        shown: Collection[int],
    ) -> ByteText:
        return ByteText(stop, include_stop)
