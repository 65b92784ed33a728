"""Out-of-memory fallback: computes a step in smaller parts, with the same resulting tokens, when memory runs out. Knows spans, no
group.

Nothing has to be undone: keys and values that a part has written are written again by the next attempt, with the same contents.
Only with one rank: with several, the others would wait for the failed one in a collective operation that it never reaches. And only
without recurrent states: a failed attempt may have changed them in place.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .step import Span

log = logging.getLogger(__name__)

# Divided steps that succeed before twice as much is tried at once.
PATIENCE = 64
SAID = 300  # characters that are quoted of an error
# Found in messages of errors that have no type of their own.
SIGNS = ("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "ALLOC_FAILED")
REMEDY = "A lower --cuda-memory-fraction, --kv-pages or --max-batch-prefill-tokens leaves steps more"
AT_START = (
    "memory ran out before the first request. A lower --max-batch-prefill-tokens or --max-batch-size makes steps smaller, "
    "--num-shard or --quantize each rank's weights; nvidia-smi shows whether another process has taken the memory"
)
ALONE = "memory ran out even when nothing else was computed with it; a shorter prompt takes less, and so does a smaller n"

Result = TypeVar("Result")
Item = TypeVar("Item")


@dataclass(slots=True)
class Limit:
    """A limit on what is tried at once; 0: everything."""

    most: int = 0
    _well: int = 0

    def fail(self, size: int) -> None:
        """`size` was too much."""
        self.most, self._well = max(1, size // 2), 0

    def succeed(self, size: int) -> None:
        """`size` was done, in parts if it was more than the limit."""
        if 0 < self.most < size:
            self._well += 1
            if self._well == PATIENCE:
                self.most, self._well = 2 * self.most, 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A span, or a part of one."""

    span: Span
    row: int  # index of its first wanted token among those of the step

    @property
    def tokens(self) -> int:
        """Tokens of the span."""
        return len(self.span.tokens)

    @property
    def whole(self) -> bool:
        """Whether it can't be cut: nodes of a tree attend to each other, and so do tokens of an image."""
        return self.tokens == 1 or self.span.parents is not None or self.span.whole

    def cut(self, count: int) -> tuple["Piece", "Piece"]:
        """Its first `count` tokens, and the others."""
        span, rest = self.span, self.tokens - count
        first, later = max(0, span.wanted - rest), min(span.wanted, rest)
        return (
            Piece(replace(span, tokens=span.tokens[:count], wanted=first, drafts=0), self.row),
            Piece(replace(span, start=span.start + count, tokens=span.tokens[count:], wanted=later, drafts=0), self.row + first),
        )


def pieces_of(spans: Listing[Span]) -> list[Piece]:
    """Pieces in an order in which they can be computed separately: what a span builds on begins before it."""
    pieces, row = [], 0
    for span in spans:
        pieces.append(Piece(span, row))
        row += span.wanted
    return sorted(pieces, key=lambda piece: piece.span.start)


def divide(pieces: Listing[Piece], most: int) -> tuple[list[Piece], list[Piece]]:
    """The first pieces, of at most `most` tokens, or one that is larger and can't be cut; and the rest."""
    part: list[Piece] = []
    left = list(pieces)
    while left and most:
        piece = left[0]
        if piece.tokens <= most or (piece.whole and not part):
            part.append(left.pop(0))
            most -= min(most, piece.tokens)
        elif piece.whole:
            break
        else:
            first, left[0] = piece.cut(most)
            part.append(first)
            break
    return part, left


class MemoryFallback:
    """Retries the work of one engine in smaller parts when memory runs out."""

    def __init__(self, able: bool) -> None:
        """able: whether to retry; otherwise errors are raised as they come."""
        self._count = 0  # times that memory ran out ...
        self._reported = 0  # ... and of these, already reported by `take`
        self._able = able
        self._tokens = Limit()  # of a forward
        self._rows = Limit()  # that are sampled

    def take(self) -> int:
        """How often memory ran out since the last call."""
        new, self._reported = self._count - self._reported, self._count
        return new

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`; None if memory ran out: its tensors are freed then."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if not self._able:
                log.error("memory ran out. %s", REMEDY)
                raise
            reason = str(error).split("\n", 1)[0]
        # Only here the frames that held tensors are gone.
        self._count += 1
        if not self._count & (self._count - 1):  # powers of two: the log stays readable
            log.warning("memory ran out (%d so far); steps go on in smaller parts. %s: %s", self._count, REMEDY, reason)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def forward(
        self, compute: Callable[[Listing[Span]], Tensor], spans: Listing[Span], page_size: int
    ) -> tuple[Tensor | None, set[int]]:
        """Hidden states of the wanted rows, as `compute` returns them, None if there are none; and the pages that could not be
        written, since not even a part of their span fits alone: whoever holds one of them can't go on."""
        total = sum([len(span.tokens) for span in spans])
        if not 0 < self._tokens.most < total:
            hidden = self.attempt(lambda: compute(spans))
            if hidden is not None:
                return hidden, set()
            self._tokens.fail(total)
        parts = Parts(pieces_of(spans), page_size)
        self._in_parts(compute, parts)
        self._tokens.succeed(total)
        return parts.joined(sum(span.wanted for span in spans)), parts.lost

    def _in_parts(self, compute: Callable[[Listing[Span]], Tensor], parts: "Parts") -> None:
        began = self._tokens.most
        while part := parts.next(self._tokens.most):
            hidden = self.attempt(lambda part=part: compute([piece.span for piece in part]).clone())  # type: ignore[misc]
            if hidden is not None:
                parts.take(part, hidden)
            elif len(part) == 1 and part[0].whole:
                parts.give_up(part[0])
                self._tokens.most = began  # the others are not to blame
            else:
                parts.put_back(part)
                self._tokens.fail(sum(piece.tokens for piece in part))

    def whole(self, work: Callable[[], Result], rows: int) -> Result | None:
        """The result of `work`, which handles `rows` rows at once; None if memory ran out, or would have, as it did lately."""
        if 0 < self._rows.most < rows:
            return None
        found = self.attempt(work)
        if found is None:
            self._rows.fail(rows)
        return found

    def rows(
        self, work: Callable[[Listing[Item]], Listing[Result]], items: Listing[Item], sizes: Listing[int]
    ) -> list[Result | None]:
        """The results of `work` for the items, which have `sizes` rows each; None for one that is too large even alone."""
        found: list[Result | None] = []
        total, first = sum(sizes), 0
        while first < len(items):
            last = first + 1
            while last < len(items) and (not self._rows.most or sum(sizes[first : last + 1]) <= self._rows.most):
                last += 1
            part = self.attempt(lambda own=items[first:last]: work(own))  # type: ignore[misc]
            if part is None and last - first > 1:
                self._rows.fail(sum(sizes[first:last]))
                continue
            found += part if part is not None else [None]
            first = last
        self._rows.succeed(total)
        return found


class Parts:
    """The pieces of a step that are left, and the results of the others."""

    def __init__(self, pieces: list[Piece], page_size: int) -> None:
        self.lost: set[int] = set()  # pages
        self._left = pieces
        self._page_size = page_size
        self._found: list[Tensor] = []
        self._rows: list[int] = []  # rows of the step, for each row of these

    def next(self, most: int) -> list[Piece]:
        """The pieces to try now, of at most `most` tokens if they can be cut; none: all is done."""
        if self.lost:
            self._left = [piece for piece in self._left if self.lost.isdisjoint(piece.span.sequence.pages)]
        part, self._left = divide(self._left, most)
        return part

    def put_back(self, part: list[Piece]) -> None:
        """The part was too much at once."""
        self._left = part + self._left

    def take(self, part: Listing[Piece], hidden: Tensor) -> None:
        """The part is computed."""
        self._found.append(hidden)
        self._rows += [row for piece in part for row in range(piece.row, piece.row + piece.span.wanted)]

    def give_up(self, piece: Piece) -> None:
        """The piece can't be computed, nor what follows it."""
        self.lost.update(piece.span.sequence.pages[piece.span.start // self._page_size :])

    def joined(self, rows: int) -> Tensor | None:
        """The hidden states of all rows, zeros where they are lost; None if there are none at all."""
        if not self._rows:
            return None
        hidden = self._found[0].new_zeros(rows, self._found[0].shape[1])
        hidden[self._rows] = torch.cat(self._found)
        return hidden


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in SIGNS)


def log_failure(error: BaseException) -> None:
    """Logs what ends the process before it has served: with its trace, unless memory ran out."""
    if ran_out(error):
        log.error("%s: %s", AT_START, " ".join(str(error).split())[:SAID])
    else:
        log.error("the shard failed", exc_info=error)
