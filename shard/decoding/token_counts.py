"""How often each token is in a sequence, for penalties, and its logit bias. Counts are kept while the sequence grows: a step costs
its new tokens, not the whole text. Plain ints; knows no sequence and no tensors."""

from array import array
from collections import ChainMap
from collections.abc import Iterable, MutableMapping
from collections.abc import Sequence as Listing

Bias = tuple[tuple[int, float], ...]  # (token, what is added to its logit)


class Entries:
    """Distinct tokens: of each how often it is in the output, 0 if it is in the prompt alone, -1 if it is in neither; and its bias,
    unless no token has one."""

    __slots__ = ("biases", "counts", "ids", "places")

    def __init__(self, ids: "array[int]", counts: "array[int]", biases: "array[float]", places: MutableMapping[int, int]) -> None:
        self.ids = ids
        self.counts = counts
        self.biases = biases
        self.places = places  # by token

    def copy(self, places: MutableMapping[int, int]) -> "Entries":
        """With places of its own."""
        return Entries(self.ids[:], self.counts[:], self.biases[:], places)

    def add(self, tokens: Iterable[int], count: int) -> None:
        """Adds tokens that are so often in the output, or nowhere (-1)."""
        ids, counts, places = self.ids, self.counts, self.places
        for token in tokens:
            place = places.setdefault(token, len(ids))
            if place == len(ids):
                ids.append(token)
                counts.append(count)
            elif count >= 0:
                counts[place] = count + (counts[place] if counts[place] > 0 else 0)
        if self.biases:
            self.biases.extend([0.0] * (len(ids) - len(self.biases)))

    def add_biases(self, bias: Bias) -> None:
        """Adds biases, in place of all others."""
        self.add([token for token, _ in bias], -1)
        self.biases = array("f", bytes(4 * len(self.ids) if bias else 0))
        for token, value in bias:
            self.biases[self.places[token]] += value


class TokenCounts:
    """The entries of a sequence that grows."""

    __slots__ = ("_bias", "_counted", "_entries", "_prompt_length", "_vocabulary")

    def __init__(self, first: int, prompt_length: int, vocabulary: int, bias: Bias) -> None:
        """first: the first token that counts: 0, the one after the prompt, or none. Tokens outside of the vocabulary, which stand
        for images, never do."""
        self._prompt_length = prompt_length
        self._vocabulary = vocabulary
        self._counted = first  # tokens of the sequence that are counted, or skipped
        self._bias = bias
        self._entries = Entries(array("i"), array("i"), array("f"), {})
        self._entries.add_biases(bias)

    def copy(self) -> "TokenCounts":
        """For a fork of the sequence."""
        other = TokenCounts(self._counted, self._prompt_length, self._vocabulary, ())
        other._bias, other._entries = self._bias, self._entries.copy(dict(self._entries.places))
        return other

    def entries(self, tokens: Listing[int], drafts: int, bias: Bias) -> Entries:
        """The entries for a step. tokens: of the sequence, the last `drafts` of which may be gone the next time; bias: of this
        step, mostly the one that it was made with."""
        own = self._entries
        if self._counted < self._prompt_length:
            own.add([token for token in dict.fromkeys(tokens[: self._prompt_length]) if token < self._vocabulary], 0)
            self._counted = self._prompt_length
        if self._counted < len(tokens) - drafts:
            own.add(tokens[self._counted : len(tokens) - drafts], 1)
            self._counted = len(tokens) - drafts
        if drafts or bias is not self._bias:
            own = own.copy(ChainMap({}, own.places))
            own.add(tokens[max(self._counted, len(tokens) - drafts) :], 1)
            if bias is not self._bias:
                own.add_biases(bias)
        return own
