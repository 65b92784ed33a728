"""Structured output: a sequence's state in its grammar, and masks of the tokens allowed next, by llguidance.

Knows tokens and grammars; no group, no row and no logits. llguidance's matchers end with an end token of their own, which they
write into a mask wherever nothing else is possible. It is removed here: the end tokens are the group's, and they are allowed where
the grammar is complete.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Container, Iterator
from collections.abc import Sequence as Listing
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain
from pathlib import Path

import llguidance
import numpy
from numpy.typing import NDArray

from ...proto.grammar import limits
from .background import Background
from .tree import ROOT, Tree

MOST_THREADS = 8  # threads that compute masks
# The cache of compiled grammars, least recently used first to go: entries, and characters of their sources, which take up to 170
# bytes each.
KEPT, KEPT_CHARACTERS = 256, 2_000_000
COMPILING = 2  # threads that compile grammars
MOST_SAID = 200  # characters of llguidance's message that are reported
NOWHERE = "its grammar comes to a place where none of the model's tokens fits"


class Unusable(Exception):
    """The model's tokenizer is missing, or of a kind that grammars can't be applied to."""


class GrammarState:
    """One sequence's grammar state. It advances for good by generated tokens, and temporarily along drafts."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self._followed = 0

    def copy(self) -> "GrammarState":
        """An independent copy."""
        twin = GrammarState(self.matcher.deep_copy())
        twin._followed = self._followed
        return twin

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return self.matcher.is_accepting()

    @property
    def problem(self) -> str:
        """Why the grammar can't go on; "": it can."""
        if not self.matcher.is_error():
            return ""
        error = self.matcher.get_error().split("\n", 1)[0]  # the rest shows the grammar
        return NOWHERE if error.startswith("NoExtension") else f"its grammar can't be followed: {error[:MOST_SAID]}"

    def follow(self, tokens: Listing[int]) -> None:
        """Advances to the end of the generated tokens, of which it may have consumed some before."""
        if len(tokens) > self._followed:
            self.matcher.consume_tokens(list(tokens[self._followed :]))
            self._followed = len(tokens)

    def after(self, path: Listing[int]) -> "GrammarState | None":
        """A copy advanced by these next tokens; None if they are not allowed."""
        twin = self.copy()
        return twin if twin.matcher.try_consume_tokens(list(path)) == len(path) else None

    def visit(self, tree: Tree, ends: Container[int] = ()) -> Iterator[int]:
        """Walks a draft tree: yields ROOT, then each node after advancing to it, and returns to the start. Nodes that the grammar
        rejects are skipped with all below them; so is what would follow `ends`, or a state where nothing fits."""
        spare = self.matcher.deep_copy() if len(tree) else self.matcher
        yield ROOT
        if self.matcher.is_error():
            return
        path: list[int] = []  # nodes from the root to the present state
        closed: set[int] = set()  # nodes without valid descendants
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent in closed or token in ends:
                closed.add(node)
                continue
            depth = path.index(parent) + 1 if parent != ROOT else 0
            self._back(path, depth, tree, spare)
            if self.matcher.try_consume_tokens([token]):
                path.append(node)
                yield node
            if path[-1:] != [node] or self.matcher.is_error():
                closed.add(node)
                self._back(path, depth, tree, spare)
        self._back(path, 0, tree, spare)

    def _back(self, path: list[int], depth: int, tree: Tree, spare: llguidance.LLMatcher) -> None:
        """Rolls back to the first `depth` nodes of `path`, which it shortens. A matcher that has met an error never recovers: a
        copy of the spare one takes its place. One that rolls back keeps the last mask that it computed, and would return it on
        another path that looks alike to its lexer: so another mask is computed to replace it."""
        if depth == len(path):
            return
        if self.matcher.rollback(len(path) - depth):
            self.matcher.compute_bitmask()
        else:
            self.matcher = spare.deep_copy()
            self.matcher.consume_tokens([tree.tokens[node] for node in path[:depth]])
        del path[depth:]

    def completed_by(self, tokens: Listing[int]) -> int:
        """The number of these next tokens that complete the grammar, so that nothing may follow; 0: they don't. The state stays."""
        after = self.matcher.deep_copy()
        for count, token in enumerate(tokens, 1):
            if not after.consume_token(token):
                break
            if after.is_accepting() and after.is_stopped():
                return count
        return 0


class Grammars:
    """The compiled grammars of one model, for its tokenizer. The tokenizer is read in the background from the start, and grammars
    are compiled there. Compiled ones are cached while there is room."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: ids that the model has; its tokenizer may have fewer or more."""
        self._vocabulary = vocabulary
        self._threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._executor = llguidance.LLExecutor(self._threads)
        self._walkers = ThreadPoolExecutor(self._threads, "grammar")
        self._background = Background(COMPILING)
        self._written = frozenset[int]()  # added tokens that are text, not special; known once the tokenizer is read
        self._tokenizer = self._background.submit(lambda: self._read(folder))
        self._compiled: OrderedDict[str, Future[GrammarState]] = OrderedDict()
        self._size = 0  # characters of all cached grammars

    def compile(self, grammar: str) -> "Future[GrammarState]":
        """A state at the grammar's start, to be copied; its future raises Unusable. Whoever waits for it has to hold it: the cache
        may evict it."""
        compiled = self._compiled.get(grammar)
        if compiled is None or _failed(compiled):  # perhaps for lack of a thread
            self._size -= len(grammar) if compiled else 0
            compiled = self._compiled[grammar] = self._background.submit(lambda: self._state(grammar))
            self._size += len(grammar)
            while len(self._compiled) > KEPT or (self._size > KEPT_CHARACTERS and len(self._compiled) > 1):
                self._size -= len(self._compiled.popitem(last=False)[0])
        self._compiled.move_to_end(grammar)
        return compiled

    def masks(self, states: Listing[GrammarState]) -> NDArray[numpy.int32]:
        """Token masks for the next step: [states, words] int32, bit i of word w allows token 32 w + i. Zero where one has ended
        or failed."""
        mask = self._rows(len(states), 0)
        place, size = mask.ctypes.data, mask.shape[1] * mask.itemsize
        if len(states) == 1:  # handing one over to another thread takes longer
            states[0].matcher.unsafe_compute_mask_ptr(place, size)
        else:
            jobs = [(state.matcher, row) for row, state in enumerate(states)]
            self._executor.unsafe_compute_mask_ptr(jobs, place, size, len(states))
        return self._fitted(mask)

    def masks_along(self, states: Listing[GrammarState], trees: Listing[Tree]) -> tuple[NDArray[numpy.int32], list[bool]]:
        """Masks for the present state and after every node of each state's tree, one after the other; and whether the output may
        end there. Rows after rejected nodes don't matter: they have all bits."""
        if not any(map(len, trees)):
            return self.masks(states), [state.complete for state in states]
        counts = [1 + len(tree) for tree in trees]
        mask = self._rows(sum(counts), -1)
        parts = numpy.split(mask, list(accumulate(counts))[:-1])
        if len(states) == 1 or self._threads == 1:
            complete = list(map(self._along, states, trees, parts))
        else:
            complete = list(self._walkers.map(self._along, states, trees, parts))
        return self._fitted(mask), list(chain.from_iterable(complete))

    def _along(self, state: GrammarState, tree: Tree, rows: NDArray[numpy.int32]) -> list[bool]:
        """Fills the mask rows of one tree; returns where the output may end."""
        complete = [False] * len(rows)
        place, size = rows.ctypes.data, rows.strides[0]
        for node in state.visit(tree, self._tokenizer.result().eos_tokens):
            state.matcher.unsafe_compute_mask_ptr(place + (1 + node) * size, size)
            complete[1 + node] = state.complete
        return complete

    def _rows(self, count: int, words: int) -> NDArray[numpy.int32]:
        """A buffer for llguidance's masks, as wide as its own vocabulary, which may differ from the model's."""
        return numpy.full((count, -(-self._tokenizer.result().vocab_size // 32)), words, numpy.int32)

    def _fitted(self, rows: NDArray[numpy.int32]) -> NDArray[numpy.int32]:
        """llguidance's masks cut to the model's vocabulary, without llguidance's end token."""
        for end in self._tokenizer.result().eos_tokens:
            rows[:, end // 32] &= ~bit(end)
        rows = rows[:, : -(-self._vocabulary // 32)]
        if self._vocabulary % 32:
            rows[:, -1] &= (1 << self._vocabulary % 32) - 1
        return rows

    def bytes_of(self, tokens: Listing[int]) -> bytes:
        """The text of tokens in UTF-8, without special tokens and ids that have no text. Raises Unusable."""
        tokenizer = self._tokenizer.result()
        # llguidance takes all tokens written like <think> for special ones.
        seen = [token for token in tokens if token in self._written or not tokenizer.is_special_token(token)]
        text: bytes = tokenizer.decode_bytes(seen)
        return text

    def _read(self, folder: Path) -> llguidance.LLTokenizer:
        tokenizer, self._written = _tokenizer(folder, self._vocabulary)
        return tokenizer

    def _state(self, grammar: str) -> GrammarState:
        """A state at the start, with the first mask computed: copies inherit that work, which takes up to a thousand times as long
        as a later mask."""
        matcher = llguidance.LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return GrammarState(matcher)


def _failed(future: "Future[GrammarState]") -> bool:
    return future.done() and future.exception() is not None


def bit(token: int) -> int:
    """The bit of a token in its mask word, which is signed."""
    return 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def _tokenizer(folder: Path, vocabulary: int) -> tuple[llguidance.LLTokenizer, frozenset[int]]:
    """The tokenizer for llguidance, and the added tokens that are text. Raises Unusable. llguidance needs one end token for every
    text: a special token is used, which no text contains."""
    path = folder / "tokenizer.json"
    try:
        source = path.read_text(encoding="utf-8")
        added = {token["id"]: token["special"] for token in json.loads(source)["added_tokens"]}
        special = [id for id, is_special in added.items() if is_special]
        if not special:
            raise Unusable(f"grammars need a tokenizer with a special token, and {path} has none")
        return _sized(source, vocabulary, special[0]), frozenset(added).difference(special)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Unusable(f"grammars need {path}, as the tokenizers library writes it: {error!r}") from error


def _sized(source: str, vocabulary: int, end: int) -> llguidance.LLTokenizer:
    """A tokenizer with the model's vocabulary size, or its own if that is larger."""
    try:
        return llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=end)
    except ValueError:
        return llguidance.LLTokenizer(source, eos_token=end)
