"""What a shard knows of a request: plain Python ints. Tensors are derived from them for one step and thrown away.

A group is a request: the sequences that answer it. A sequence knows its tokens and pages and how far it is computed:

    tokens    |<------- prompt_length ------->|<-- generated -->|
    computed  |<---------- keys and values in pages -------->|      one behind when a token was just sampled
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Neutral values do nothing; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # unsigned 64 bit
    final_logprobs: bool = False  # of the distribution sampled from, not of the model's own

    @property
    def penalized(self) -> bool:
        """Whether the logits are changed before anything else is done with them."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty or self.bias)


@dataclass(slots=True)
class Sequence:
    """One continuation of a group's prompt."""

    tokens: list[int]
    prompt_length: int
    choice: int = 0  # which of the group's sequences: part of the key of its noise
    computed: int = 0  # tokens whose keys and values are in `pages`
    pages: list[int] = field(default_factory=list)
    running: bool = False  # a token was chosen from what is in `pages`: it can be decoded, and all numbers there are finite

    @property
    def generated(self) -> int:
        """Tokens after the prompt; also the output position of the next one."""
        return len(self.tokens) - self.prompt_length

    @property
    def lacking(self) -> int:
        """Tokens that have to be computed before the next can be sampled: 1 in the steady state."""
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class Group:
    """A request, in the words of the shard."""

    uid: int
    sequences: list[Sequence]
    sampling: Sampling
    max_new_tokens: int
    end_ids: frozenset[int]
    top_n: int = 0
    prompt_logprobs: bool = False
    prompt_scores: list[float] = field(default_factory=list)  # of prompt tokens 1, 2, ... as far as computed, if asked for

    @property
    def pages(self) -> int:
        """Pages that it holds; a page that two of its sequences share counts once."""
        return len({page for sequence in self.sequences for page in sequence.pages})

    def grow(self, page_size: int) -> int:
        """The most pages that one more decode step may add."""
        return sum(max(0, -(-len(s.tokens) // page_size) - len(s.pages)) for s in self.sequences)


@dataclass(slots=True)
class Batch:
    """A named, ordered list of groups."""

    uid: int
    groups: list[Group] = field(default_factory=list)

    def drop(self, uids: Listing[int] | set[int]) -> None:
        """Forgets the groups of that name; others are ignored."""
        self.groups = [group for group in self.groups if group.uid not in uids]
