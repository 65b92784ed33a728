"""How far a draft model has computed a sequence, whose pages may have been found, resumed or shared without it. Plain ints."""

from collections.abc import Sequence as Listing
from collections.abc import Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftProgress:
    """A draft model's progress in one sequence. It may understate it, never overstate."""

    computed: int = 0  # leading tokens whose keys and values the draft model has
    drafts: list[int] = field(default_factory=list)  # drafts that it has computed after all tokens, each on top of the one before
    draft_pages: Listing[int] = ()  # pages in which they are, from that of token `computed` on
    settled: int = 0  # leading pages that are not checked again

    def accept(self, tokens: Listing[int], size: int) -> Listing[int]:
        """Accepted drafts stay computed, but for the last one. Returns the pages that they have filled."""
        first, end = self.computed, len(tokens) - 1
        while self.drafts and self.computed < end and self.drafts[0] == tokens[self.computed]:
            self.computed += 1
            del self.drafts[0]
        filled = self.draft_pages[: self.computed // size - first // size]
        self.drafts, self.draft_pages, self.computed = [], (), min(self.computed, end)
        return filled

    def look(self, end: int, pages: Listing[int], size: int, full: Set[int], final: int) -> None:
        """Determines what is computed in the pages of the first `end` tokens. full: pages computed as a whole, by any sequence;
        final: leading pages that can't be swapped for others of the same content any more."""
        for i in range(self.settled, self.computed // size):
            if pages[i] not in full:
                self.computed = i * size
                break
        self.settled = min(final, self.computed // size)
        while (whole := (self.computed // size + 1) * size) <= end and pages[self.computed // size] in full:
            self.computed = whole
