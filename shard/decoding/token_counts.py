"""How often each token is in a sequence, for penalties and logit biases. Counts are kept while the sequence grows: a step costs its
new tokens, not the whole text. Plain ints; knows no sequence and no tensors."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing

Entries = tuple["array[int]", "array[int]", "array[float]"]


class TokenCounts:
    """The distinct tokens of a sequence that penalties concern, and of each how often it is in the output."""

    __slots__ = ("_counted", "_counts", "_ids", "_places", "_prompt_length", "_vocabulary")

    def __init__(self, prompt_length: int, vocabulary: int, prompt: bool) -> None:
        """prompt: whether the prompt's tokens belong to these, which count as 0 there. Those outside of the vocabulary stand for
        images, and don't."""
        self._prompt_length = prompt_length
        self._vocabulary = vocabulary
        self._counted = 0 if prompt else prompt_length  # tokens of the sequence that are counted, or skipped
        self._ids, self._counts = array("i"), array("i")
        self._places: dict[int, int] = {}  # by token

    def copy(self) -> "TokenCounts":
        """For a fork of the sequence."""
        other = TokenCounts(self._prompt_length, self._vocabulary, False)
        other._ids, other._counts, other._places = self._ids[:], self._counts[:], self._places.copy()
        other._counted = self._counted
        return other

    def entries(self, tokens: Listing[int], drafts: int = 0, bias: Iterable[tuple[int, float]] = ()) -> Entries:
        """Distinct tokens, their counts, and their biases (none: empty). tokens: of the sequence, the last `drafts` of which may be
        gone the next time; bias: (token, bias) of tokens that the text need not have, whose count is -1 then."""
        self._count(tokens, len(tokens) - drafts)
        if not (drafts or bias):
            return self._ids, self._counts, array("f")
        ids, counts, more = self._ids[:], self._counts[:], dict[int, int]()
        for token in tokens[len(tokens) - drafts :] if drafts else ():
            counts[_place(token, ids, counts, self._places, more, 0)] += 1
        biases: array[float] = array("f", bytes(4 * len(ids) if bias else 0))
        for token, value in bias:
            place = _place(token, ids, counts, self._places, more, -1)
            biases.extend([0.0] * (len(ids) - len(biases)))
            biases[place] += value
        return ids, counts, biases

    def _count(self, tokens: Listing[int], end: int) -> None:
        """Counts up to token number `end`."""
        if self._counted < self._prompt_length:
            words = [token for token in dict.fromkeys(tokens[: self._prompt_length]) if token < self._vocabulary]
            self._ids, self._counts = array("i", words), array("i", bytes(4 * len(words)))
            self._places, self._counted = dict(zip(words, range(len(words)), strict=True)), self._prompt_length
        ids, counts, places = self._ids, self._counts, self._places
        for token in tokens[self._counted : end]:
            place = places.setdefault(token, len(ids))
            if place < len(ids):
                counts[place] += 1
            else:
                ids.append(token)
                counts.append(1)
        self._counted = end


def _place(token: int, ids: "array[int]", counts: "array[int]", known: dict[int, int], more: dict[int, int], count: int) -> int:
    """Where a token's entry is. One that is in neither dict gets a new one, with this count, in `more`."""
    place = known.get(token)
    if place is None:
        place = more.setdefault(token, len(ids))
        if place == len(ids):
            ids.append(token)
            counts.append(count)
    return place
