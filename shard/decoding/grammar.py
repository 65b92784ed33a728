"""Where a sequence stands in its grammar, and which tokens may come next: llguidance, fitted to a model's tokens.

Knows tokens and grammars; no group, no row and no logits. llguidance's matchers end with a token of their own, which it writes into
a mask wherever nothing else is possible. Here that token stands for nothing: which tokens end a sequence is the group's business,
and they are allowed where the grammar is complete.
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

MOST_THREADS = 8  # that compute masks
# Compiled grammars, of which the least recently used go first, and characters that they were compiled from: up to 170 bytes each.
KEPT, KEPT_CHARACTERS = 256, 2_000_000
COMPILING = 2  # threads that compile
MOST_SAID = 200  # characters of llguidance's message
NOWHERE = "its grammar comes to a place where none of the model's tokens fits"


class Unusable(Exception):
    """The model's tokenizer is not there, or is none that grammars can be applied to."""


class Guide:
    """One sequence's place in its grammar. What it has followed was generated; of drafts it only goes back and forth."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self._followed = 0

    def copy(self) -> "Guide":
        """One that goes on by itself."""
        twin = Guide(self.matcher.deep_copy())
        twin._followed = self._followed
        return twin

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self.matcher.is_accepting()

    @property
    def problem(self) -> str:
        """Why it can't go on, if it can't."""
        if not self.matcher.is_error():
            return ""
        error = self.matcher.get_error().split("\n", 1)[0]  # what follows shows the grammar
        return NOWHERE if error.startswith("NoExtension") else f"its grammar can't be followed: {error[:MOST_SAID]}"

    def follow(self, tokens: Listing[int]) -> None:
        """Goes on to where the generated tokens lead, of which it may have followed some before."""
        if len(tokens) > self._followed:
            self.matcher.consume_tokens(list(tokens[self._followed :]))
            self._followed = len(tokens)

    def after(self, path: Listing[int]) -> "Guide | None":
        """One that stands after these next tokens, if they may come."""
        twin = self.copy()
        return twin if twin.matcher.try_consume_tokens(list(path)) == len(path) else None

    def visit(self, tree: Tree, ends: Container[int] = ()) -> Iterator[int]:
        """Stands where it is, which is ROOT, then after each node of a tree in turn, and at last where it was. Nodes that may not
        come are left out with all below them; so is what would follow `ends`, or a place where nothing fits."""
        spare = self.matcher.deep_copy() if len(tree) else self.matcher
        yield ROOT
        if self.matcher.is_error():
            return
        path: list[int] = []  # to where it stands
        closed: set[int] = set()  # nodes that nothing is to follow
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
        """Stands after the first `depth` nodes of the path to where it stands, which it shortens. A matcher that has met an error
        never recovers: a copy of the spare one takes its place. One that goes back keeps the last mask that it computed, and would
        give it out on another path that looks alike to its lexer: so another mask takes that one's place."""
        if depth == len(path):
            return
        if self.matcher.rollback(len(path) - depth):
            self.matcher.compute_bitmask()
        else:
            self.matcher = spare.deep_copy()
            self.matcher.consume_tokens([tree.tokens[node] for node in path[:depth]])
        del path[depth:]

    def completed_by(self, tokens: Listing[int]) -> int:
        """After how many of these next tokens nothing may follow; 0: there are too few. It stays where it is."""
        after = self.matcher.deep_copy()
        for count, token in enumerate(tokens, 1):
            if not after.consume_token(token):
                break
            if after.is_accepting() and after.is_stopped():
                return count
        return 0


class Grammars:
    """Compiled grammars of one model, in its tokens. The tokenizer is read in the background, from the start on, and every grammar
    is compiled there. What was asked for once is kept for others, while there is room."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: ids that the model knows; its tokenizer may have fewer or more."""
        self._vocabulary = vocabulary
        self._threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._executor = llguidance.LLExecutor(self._threads)
        self._walkers = ThreadPoolExecutor(self._threads, "grammar")
        self._background = Background(COMPILING)
        self._written = frozenset[int]()  # tokens that were added and are text; known when the tokenizer is
        self._tokenizer = self._background.submit(lambda: self._read(folder))
        self._compiled: OrderedDict[str, Future[Guide]] = OrderedDict()
        self._size = 0  # characters of these

    def compile(self, grammar: str) -> "Future[Guide]":
        """A guide at the grammar's beginning, to be copied; raises Unusable there. Whoever waits for it has to hold it: it is kept
        until others have taken its place."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._background.submit(lambda: self._guide(grammar))
            self._size += len(grammar)
            while len(self._compiled) > KEPT or (self._size > KEPT_CHARACTERS and len(self._compiled) > 1):
                self._size -= len(self._compiled.popitem(last=False)[0])
        self._compiled.move_to_end(grammar)
        return compiled

    def masks(self, guides: Listing[Guide]) -> NDArray[numpy.int32]:
        """Which of the model's tokens may come next: [guides, words] int32, bit i of word w allows token 32 w + i. There are none
        where a guide has come to an end, or has a problem."""
        mask = self._rows(len(guides), 0)
        place, size = mask.ctypes.data, mask.shape[1] * mask.itemsize
        if len(guides) == 1:  # a hand-over to another thread takes longer
            guides[0].matcher.unsafe_compute_mask_ptr(place, size)
        else:
            jobs = [(guide.matcher, row) for row, guide in enumerate(guides)]
            self._executor.unsafe_compute_mask_ptr(jobs, place, size, len(guides))
        return self._fitted(mask)

    def masks_along(self, guides: Listing[Guide], trees: Listing[Tree]) -> tuple[NDArray[numpy.int32], list[bool]]:
        """The same where each guide stands and after every node of its tree, one after the other; and whether the text may end
        there. What would follow a node that may not come doesn't matter: its row has all bits."""
        if not any(map(len, trees)):
            return self.masks(guides), [guide.complete for guide in guides]
        counts = [1 + len(tree) for tree in trees]
        mask = self._rows(sum(counts), -1)
        parts = numpy.split(mask, list(accumulate(counts))[:-1])
        if len(guides) == 1 or self._threads == 1:
            complete = list(map(self._along, guides, trees, parts))
        else:
            complete = list(self._walkers.map(self._along, guides, trees, parts))
        return self._fitted(mask), list(chain.from_iterable(complete))

    def _along(self, guide: Guide, tree: Tree, rows: NDArray[numpy.int32]) -> list[bool]:
        """Fills the rows of one tree. Says where the text may end."""
        complete = [False] * len(rows)
        place, size = rows.ctypes.data, rows.strides[0]
        for node in guide.visit(tree, self._tokenizer.result().eos_tokens):
            guide.matcher.unsafe_compute_mask_ptr(place + (1 + node) * size, size)
            complete[1 + node] = guide.complete
        return complete

    def _rows(self, count: int, words: int) -> NDArray[numpy.int32]:
        """For llguidance to write into: as wide as its own vocabulary, which isn't quite the model's."""
        return numpy.full((count, -(-self._tokenizer.result().vocab_size // 32)), words, numpy.int32)

    def _fitted(self, rows: NDArray[numpy.int32]) -> NDArray[numpy.int32]:
        """What llguidance has written, for the model's tokens."""
        for end in self._tokenizer.result().eos_tokens:
            rows[:, end // 32] &= ~bit(end)
        rows = rows[:, : -(-self._vocabulary // 32)]
        if self._vocabulary % 32:
            rows[:, -1] &= (1 << self._vocabulary % 32) - 1
        return rows

    def bytes_of(self, tokens: Listing[int]) -> bytes:
        """The text that tokens stand for, without special ones and ids that have none. Raises Unusable."""
        tokenizer = self._tokenizer.result()
        # To llguidance all that are written like <think> are special.
        seen = [token for token in tokens if token in self._written or not tokenizer.is_special_token(token)]
        text: bytes = tokenizer.decode_bytes(seen)
        return text

    def _read(self, folder: Path) -> llguidance.LLTokenizer:
        tokenizer, self._written = _tokenizer(folder, self._vocabulary)
        return tokenizer

    def _guide(self, grammar: str) -> Guide:
        """At the beginning, with the first mask computed: copies inherit what that took, up to a thousand times a later mask."""
        matcher = llguidance.LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return Guide(matcher)


def bit(token: int) -> int:
    """In its word of a mask, which is signed."""
    return 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def _tokenizer(folder: Path, vocabulary: int) -> tuple[llguidance.LLTokenizer, frozenset[int]]:
    """And the tokens that were added and are text. Raises Unusable. llguidance takes a token for the end of every text; a special
    one is none that a text needs."""
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
    """With as many tokens as the model knows, or as the tokenizer has if these are more."""
    try:
        return llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=end)
    except ValueError:
        return llguidance.LLTokenizer(source, eos_token=end)
