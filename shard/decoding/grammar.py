"""Where a sequence stands in its grammar, and which tokens may come next: llguidance, fitted to a model's tokens.

Knows tokens and grammars; no group, no row and no logits. llguidance's matchers end with a token of their own, which it writes into
a mask wherever nothing else is possible. Here that token stands for nothing: which tokens end a sequence is the group's business,
and they are allowed where the grammar is complete.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import llguidance
import numpy
from numpy.typing import NDArray

from ...proto.grammar import limits

MOST_THREADS = 8  # that compute masks
KEPT = 256  # compiled grammars, of which the least recently used go first
MOST_SAID = 200  # characters of llguidance's message
NOWHERE = "its grammar comes to a place where none of the model's tokens fits"

Result = TypeVar("Result")


class Unusable(Exception):
    """The model's tokenizer is not there, or is none that grammars can be applied to."""


class Guide:
    """One sequence's place in its grammar. It never goes back: what it has followed was generated."""

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

    def fits(self, path: Listing[int]) -> int:
        """How many of these tokens, one after the other, may come next. It stays where it is."""
        return self.matcher.validate_tokens(list(path))

    def completed_by(self, token: int) -> bool:
        """Whether nothing may follow this next token. It stays where it is."""
        after = self.matcher.deep_copy()
        return after.consume_token(token) and after.is_accepting() and after.is_stopped()


class Grammars:
    """Compiled grammars of one model, in its tokens. The tokenizer is read in the background, from the start on, and every grammar
    is compiled in the background, from the first time that it is asked for."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: ids that the model knows; its tokenizer may have fewer or more."""
        self._vocabulary = vocabulary
        self._executor = llguidance.LLExecutor(max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2)))
        self._tokenizer = _background(lambda: _tokenizer(folder, vocabulary))
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()

    def ready(self, grammar: str, wait: bool = False) -> bool:
        """Whether `guide` answers without delay. wait: until it does."""
        compiled = self._compile(grammar)
        if wait:
            compiled.exception()
        return compiled.done()

    def guide(self, grammar: str) -> Guide:
        """At the grammar's beginning. Raises Unusable."""
        return Guide(self._compile(grammar).result().deep_copy())

    def masks(self, guides: Listing[Guide]) -> NDArray[numpy.int32]:
        """Which of the model's tokens may come next: [guides, words] int32, bit i of word w allows token 32 w + i. There are none
        where a guide has come to an end, or has a problem."""
        tokenizer = self._tokenizer.result()
        mask = numpy.zeros((len(guides), -(-tokenizer.vocab_size // 32)), numpy.int32)
        place, size = mask.ctypes.data, mask.shape[1] * mask.itemsize
        if len(guides) == 1:  # a hand-over to another thread takes longer
            guides[0].matcher.unsafe_compute_mask_ptr(place, size)
        else:
            jobs = [(guide.matcher, row) for row, guide in enumerate(guides)]
            self._executor.unsafe_compute_mask_ptr(jobs, place, size, len(guides))
        for end in tokenizer.eos_tokens:
            mask[:, end // 32] &= ~bit(end)
        mask = mask[:, : -(-self._vocabulary // 32)]
        if self._vocabulary % 32:
            mask[:, -1] &= (1 << self._vocabulary % 32) - 1
        return mask

    def bytes_of(self, tokens: Listing[int]) -> bytes:
        """The text that tokens stand for. Raises Unusable."""
        text: bytes = self._tokenizer.result().decode_bytes(list(tokens))
        return text

    def _compile(self, grammar: str) -> "Future[llguidance.LLMatcher]":
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = _background(lambda: self._matcher(grammar))
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At the beginning, with the first mask computed: copies inherit what that took, up to a thousand times a later mask."""
        matcher = llguidance.LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher


def bit(token: int) -> int:
    """In its word of a mask, which is signed."""
    return 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def _tokenizer(folder: Path, vocabulary: int) -> llguidance.LLTokenizer:
    """Raises Unusable. llguidance takes a token for the end of every text; a special one is none that a text needs."""
    path = folder / "tokenizer.json"
    try:
        source = path.read_text(encoding="utf-8")
        special = [token["id"] for token in json.loads(source)["added_tokens"] if token["special"]]
        if not special:
            raise Unusable(f"grammars need a tokenizer with a special token, and {path} has none")
        return _sized(source, vocabulary, special[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"grammars need {path}, as the tokenizers library writes it: {error!r}") from error


def _sized(source: str, vocabulary: int, end: int) -> llguidance.LLTokenizer:
    """With as many tokens as the model knows, or as the tokenizer has if these are more."""
    try:
        return llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=end)
    except ValueError:
        return llguidance.LLTokenizer(source, eos_token=end)


def _background(function: Callable[[], Result]) -> "Future[Result]":
    """On a thread of its own, which doesn't keep the process from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return future
