"""Stand-ins: `Model` is a shard in integers, `FakeShards` puts it behind the port of `router/shards.py`; a byte tokenizer.

Shards are strict: whatever a shard could not do, or a router should not ask, fails an assertion.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.proto import shard_pb2
from penstock.router.request import Broken

LETTERS = 32  # the fake vocabulary: bytes, of which generated ones are printable from here on ...
END = 0  # ... and this one ends a text


@dataclass(slots=True)
class Progress:
    """A group of the fake: how far it is."""

    uid: int
    prompt: int
    most: int  # generated tokens
    ends_at: int  # generated tokens after which it ends by itself; 0: never
    computed: int = 0
    generated: int = 0

    @property
    def decodable(self) -> bool:
        return self.computed >= self.prompt


@dataclass(frozen=True, slots=True)
class Row:
    """A new token: the `position`-th generated one of its group, from 0."""

    uid: int
    position: int
    finish: int


class Model:
    """Pages and progress of the groups on a shard. Raises AssertionError for what can't be done."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.groups: dict[int, Progress] = {}
        self.ended: set[int] = set()
        self.steps = 0
        self.largest = 0  # query tokens of a step

    def held(self, uid: int) -> int:
        return -(-self.groups[uid].computed // self.page_size)

    def grow(self, uid: int) -> int:
        return -(-(self.groups[uid].computed + 1) // self.page_size) - self.held(uid)

    @property
    def free(self) -> int:
        return self.pages - sum(self.held(uid) for uid in self.groups)

    def add(self, group: Progress) -> None:
        assert group.uid not in self.groups, "a group joins twice"
        assert group.uid not in self.ended, "a group joins again"
        assert group.prompt > 0
        assert group.most > 0
        self.groups[group.uid] = group

    def step(self, chunks: Sequence[tuple[int, int]], decode: bool) -> list[Row]:
        """Computes chunks and, with `decode`, one token of every group that was decodable before."""
        assert len({uid for uid, _ in chunks}) == len(chunks), "two chunks of a group in a step"
        decoding = [group for group in self.groups.values() if group.decodable] if decode else []
        assert chunks or decoding, "an empty step"
        self.steps += 1
        self.largest = max(self.largest, len(decoding) + sum(length for _, length in chunks))
        completed = []
        for uid, length in chunks:
            group = self.groups[uid]
            assert 0 < length <= group.prompt - group.computed, "a chunk beyond its prompt"
            group.computed += length
            if group.decodable:
                completed.append(group)
        for group in decoding:
            group.computed += 1
        assert self.free >= 0, "pages overcommitted"
        return [self._token(group) for group in decoding + completed]

    def filter(self, drop: Sequence[int]) -> None:
        assert drop, "an empty filter"
        assert len(set(drop)) == len(drop), "a group is dropped twice"
        for uid in drop:
            assert uid in self.groups or uid in self.ended, "a filter of a group that never was here"
            self.groups.pop(uid, None)
            self.ended.add(uid)

    def _token(self, group: Progress) -> Row:
        position = group.generated
        group.generated += 1
        finish = 1 if group.generated == group.ends_at else 2 if group.generated == group.most else 0
        if finish:
            del self.groups[group.uid]
            self.ended.add(group.uid)
        return Row(group.uid, position, finish)


def letter(prompt: Sequence[int], position: int) -> int:
    """The fake's answer: a printable byte that depends on the whole prompt and the position."""
    return LETTERS + (sum(prompt) * 7 + position * 11) % 95


class FakeShards:
    """A shard in this process. A group with the end id `END` ends by itself after `ends_at(prompt)` tokens."""

    def __init__(
        self,
        pages: int = 64,
        page_size: int = 4,
        *,
        ends_at: Callable[[Sequence[int]], int] = lambda prompt: 0,
        seconds: float = 0.0,
        answer: Callable[[Sequence[int], int], int] = letter,
        max_positions: int = 4096,
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
        )
        self.model = Model(pages, page_size)
        self.commands: list[shard_pb2.Command] = []  # all that were executed
        self.warmup: shard_pb2.WarmupRequest | None = None
        self.closed = False
        self.break_at = 0  # the step that kills the shard
        self.fail: dict[int, str] = {}  # groups that fail in their next step, and why
        self.gate = asyncio.Event()  # cleared: commands wait
        self.gate.set()
        self._ends_at = ends_at
        self._answer = answer
        self._seconds = seconds
        self._groups: dict[int, shard_pb2.Group] = {}
        self._steps = 0
        self._last: asyncio.Task[shard_pb2.Reply] | None = None

    async def connect(self) -> None:
        self.stage = "connected"

    async def warm_up(self, request: shard_pb2.WarmupRequest) -> shard_pb2.WarmupReply:
        self.warmup = request
        self.stage = "ready"
        return shard_pb2.WarmupReply(pages=self.model.pages, page_size=self.model.page_size)

    def execute(self, command: shard_pb2.Command) -> asyncio.Future[shard_pb2.Reply]:
        self._last = asyncio.ensure_future(self._execute(command, self._last))
        return self._last

    async def close(self) -> None:
        self.closed = True

    async def _execute(self, command: shard_pb2.Command, earlier: asyncio.Task[shard_pb2.Reply] | None) -> shard_pb2.Reply:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        await self.gate.wait()
        await asyncio.sleep(self._seconds)
        self._steps += 1
        if self.break_at and self._steps >= self.break_at:
            raise Broken("shard rank 0 has ended")
        self.commands.append(command)
        match command.WhichOneof("kind"):
            case "prefill":
                return self._prefill(command.prefill)
            case "decode":
                assert list(command.decode.batches) == [1]
                return self._reply(self.model.step((), decode=True))
            case "filter":
                self.model.filter(command.filter.drop)
                return shard_pb2.Reply(filter=shard_pb2.FilterReply(step=self._steps, free=self.model.free))
        raise AssertionError(f"unexpected command {command}")

    def _prefill(self, request: shard_pb2.PrefillRequest) -> shard_pb2.Reply:
        assert request.batch == 1
        assert list(request.decode_batches) in ([], [1])
        for group in request.groups:
            assert group.prompt_length == len(group.tokens)
            ends_at = self._ends_at(group.tokens) if END in group.end_ids else 0
            self.model.add(Progress(group.uid, len(group.tokens), group.max_new_tokens, ends_at))
            self._groups[group.uid] = group
        chunks = list(zip(request.chunk_uids, request.chunk_lengths, strict=True))
        return self._reply(self.model.step(chunks, decode=bool(request.decode_batches)))

    def _reply(self, rows: list[Row]) -> shard_pb2.Reply:
        reply = shard_pb2.StepReply(step=self._steps, seconds=self._seconds)
        for row in rows:
            group = self._groups[row.uid]
            if row.uid in self.fail:
                self.model.groups.pop(row.uid, None)
                reply.failed_uids.append(row.uid)
                reply.failed_messages.append(self.fail.pop(row.uid))
                continue
            reply.uids.append(row.uid)
            reply.choices.append(0)
            reply.tokens.append(END if row.finish == 1 else self._answer(group.tokens, row.position))
            reply.logprobs.append(-1.0)
            reply.finishes.append(row.finish)
            if group.top_n:
                reply.top_ids.extend(range(LETTERS, LETTERS + group.top_n))
                reply.top_logprobs.extend(-float(rank) for rank in range(group.top_n))
            reply.top_counts.append(group.top_n)
            if row.position == 0 and group.prompt_logprobs:
                reply.prompt_uids.append(row.uid)
                reply.prompt_counts.append(len(group.tokens) - 1)
                reply.prompt_logprobs.extend(-float(token) for token in group.tokens[1:])
        for uid in self.model.groups:
            reply.held_uids.append(uid)
            reply.held.append(self.model.held(uid))
            reply.grow.append(self.model.grow(uid))
        reply.free = self.model.free
        return shard_pb2.Reply(step=reply)


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    delta: str
    stopped: bool


class ByteText:
    """The text of a stream of bytes, with stop strings found where they end. Nothing is held back."""

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
                return Piece("<end>" if id == END else chr(id), added, True)
        return Piece("<end>" if id == END else chr(id), added, False)

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

    def stream(self, prompt: Sequence[int], stop: tuple[str, ...], include_stop: bool, skip_special_tokens: bool) -> ByteText:
        return ByteText(stop, include_stop)
