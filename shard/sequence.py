"""What a shard knows of a request: plain Python ints. Tensors are derived from them for one step and thrown away.

A group is a request: the sequences that answer it. A sequence knows its tokens and pages and how far it is computed:

    tokens    |<------- prompt_length ------->|<-- generated -->|
    computed  |<---------- keys and values in pages -------->|      one behind when a token was just sampled

A group's first sequence computes the prompt. The others begin where it ends: a fresh prompt has one sequence until the choices
draw their first tokens, one that is restored has all of them, but those after the first are empty until then.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from dataclasses import dataclass, field

from .decoding.budget import Acceptance
from .decoding.grammar import Guide
from .decoding.hypotheses import Path, Search
from .decoding.lookup import NgramIndex
from .decoding.tree import Drawn, Tree
from .draft_progress import DraftProgress
from .pictures import Picture, Pictures
from .prefix import Node

# Decode steps that `Group.grow` covers: the router decides on the next one while another is under way.
AHEAD = 2
LEAD = 4  # tokens of an answer, white space perhaps, among which its thoughts begin if it has any


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


@dataclass(frozen=True, slots=True)
class Thinking:
    """How long an answer's beginning may be that is no answer yet."""

    most: int  # tokens
    end: int  # token that ends it
    begin: int = -1  # token that begins it; -1: it is begun in the prompt

    def overdue(self, tokens: Listing[int], prompt_length: int) -> bool:
        """Whether behind prompt and answer, `tokens`, the end has to come. Who doesn't begin with thoughts has none."""
        start = prompt_length
        if self.begin >= 0:
            first = tokens[prompt_length : prompt_length + LEAD]
            if self.begin not in first:
                return False
            start += first.index(self.begin) + 1
        return len(tokens) - start == self.most and self.end not in tokens[start:]


@dataclass(slots=True)
class Sequence:
    """One continuation of a group's prompt."""

    tokens: "array[int]"
    prompt_length: int
    choice: int = 0  # which of the group's sequences: part of the key of its noise
    cache_key: str = ""  # what else its keys and values depend on
    adapter: int = -1  # of the decoder's, by which its tokens go; -1: none
    pictures: Pictures | None = None  # that its prompt shows
    computed: int = 0  # tokens whose keys and values are in `pages`; while a step is planned, those of that step included
    pages: list[int] = field(default_factory=list)
    state: int = 0  # slot of what it remembers, of models that do; it may be a parent's until the next step: see `states`
    halts: tuple[int, ...] = ()  # tokens behind which a step ends, so that others can find what is remembered there; ascending
    node: Node | None = None  # of its last full page that others can find; None: there is none
    guide: Guide | None = None  # its place in the group's grammar, once it was asked for; on rank 0 only
    path: Path | None = None  # of a beam
    draft: Tree = field(default_factory=Tree)  # guesses of what follows, for the step that is planned
    tried: tuple[tuple[Drawn, ...], ...] = ()  # how they were drawn, for the rule `rejection`: see `verify.Draft`; on rank 0 only
    acceptance: Acceptance | None = None  # of such guesses, as it was
    repeats: NgramIndex | None = None  # in its tokens, once guesses were looked up
    draft_progress: DraftProgress | None = None  # of it, by a draft model

    @property
    def generated(self) -> int:
        """Tokens after the prompt; also the output position of the next one."""
        return len(self.tokens) - self.prompt_length

    @property
    def reached(self) -> int:
        """Tokens whose pages it has, of one that decodes: of what remembers, right guesses are computed once more."""
        return max(self.computed, len(self.tokens) - 1)

    def position(self, place: int) -> int:
        """Of the token there, behind all that its prompt shows, for the rotary embedding."""
        return self.pictures.position(place) if self.pictures else place

    def shows(self, start: int) -> bool:
        """Whether what its prompt shows ends behind so many tokens."""
        return self.pictures is not None and start < self.pictures.end

    def twin(self, pages: int) -> "Sequence":
        """One that goes on by itself, with the same first pages, which are full; they are to be shared."""
        guide = self.guide.copy() if self.guide else None
        path = self.path.copy() if self.path else None
        return Sequence(
            self.tokens[:],
            self.prompt_length,
            self.choice,
            self.cache_key,
            self.adapter,
            self.pictures,
            self.computed,
            self.pages[:pages],
            self.state,
            (),
            self.node,
            guide,
            path,
        )

    def clear(self) -> None:
        """Nothing is computed; its pages are somebody else's."""
        self.pages, self.state, self.computed, self.node, self.draft_progress = [], 0, 0, None, None


@dataclass(slots=True)
class Group:
    """A request, in the words of the shard."""

    uid: int
    sequences: list[Sequence]  # those that have not ended, never none
    waiting: list[int]  # choices that begin when the prompt is computed; none: they have begun, or the group is restored
    sampling: Sampling
    max_new_tokens: int
    end_ids: frozenset[int]
    top_n: int = 0
    prompt_logprobs: bool = False  # they are wanted, and were not reported yet
    prompt_scores: list[float] = field(default_factory=list)  # of prompt tokens 1, 2, ... as far as computed, if asked for
    prompt_top_n: int = 0
    prompt_tops: list[tuple[int, float]] = field(default_factory=list)  # so many for each of these scores: (token, logprob)
    min_new_tokens: int = 0  # before so many, end_ids can't be drawn
    thinking: Thinking | None = None  # that it may do before it answers
    grammar: str = ""  # that its sequences keep, as `decoding.grammar` wants it; "": none
    compiled: bool = False  # the grammar is, as rank 0 has told
    found: int = 0  # tokens that were cached, until a step tells
    beginning: "Future[Guide] | None" = None  # of the grammar, once somebody has asked for it; on rank 0 only
    search: Search | None = None  # its sequences are beams, best first; it has one until its prompt is computed
    heirs: list[Sequence] = field(default_factory=list)  # what takes their place when the step that is under way lands
    most: int = 0  # pages that it may hold, heirs' included; 0: it never has any
    drafts: int = 0  # the most guesses for each of its sequences in a step
    stops: tuple[str, ...] = ()  # texts that complete a beam
    adapter: str = ""  # by which its tokens go; "": none
    images: tuple[Picture, ...] = ()  # that its prompt shows, as they arrived, until its sequences have them
    trace: str = ""  # by which logs of others know it
    batch: int = 0
    decodes: bool = False  # all is computed but the last tokens
    told: tuple[int, int, int] = (-1, -1, -1)  # the standing that was last reported
    counted: int = -1  # pages that it holds, of several choices that decode; -1: to be counted anew

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.sequences[0].prompt_length

    def goal(self, sequence: Sequence) -> int:
        """Tokens of a sequence to be computed before the group decodes: the prompt, or all but the last one."""
        return sequence.prompt_length if self.waiting else len(sequence.tokens) - 1

    @property
    def ahead(self) -> int:
        """Tokens that `grow` covers for each of its sequences."""
        return AHEAD * (1 + self.drafts)

    @property
    def last(self) -> int:
        """Tokens of a sequence that are computed at most: the last one never is."""
        return self.prompt_length + self.max_new_tokens - 1

    @property
    def lacking(self) -> int:
        """Tokens to be computed before it decodes. Those of the prompt count once."""
        if self.decodes:
            return 0
        first, *others = self.sequences
        rest = sum(len(s.tokens) - 1 - max(s.computed, s.prompt_length) for s in others)
        return self.goal(first) - first.computed + rest

    def worst(self, page_size: int) -> int:
        """The most pages that it holds before it decodes, and in the steps that `grow` covers after that."""
        shared = self.prompt_length // page_size
        generated = [1] * len(self.waiting) if self.waiting else [s.generated for s in self.sequences]
        if self.search is not None:
            generated = [generated[0]] * self.search.width
        most = [self.prompt_length + min(count - 1 + self.ahead, self.max_new_tokens - 1) for count in generated]
        return shared + sum(-(-tokens // page_size) - shared for tokens in most)

    def standing(self, page_size: int) -> tuple[int, int, int]:
        """(pages that it holds, the most that it may still take, `lacking`): see shard.proto."""
        if not self.decodes:
            held = self._count(page_size)
            return held, self.worst(page_size) - held, self.lacking
        if self.search is not None:
            held = self._count(page_size)
            grow = self._beams_grow(page_size, self.last, self.search.width)
            if self.most:
                grow = max(grow, min(self._heirs_grow(page_size, self.search.width), self.most - held))
            return held, grow, 0
        if len(self.sequences) == 1:
            [sequence] = self.sequences
            held = len(sequence.pages)
            return held, max(0, -(-min(sequence.reached + self.ahead, self.last) // page_size) - held), 0
        if self.counted < 0:
            self.counted = self._count(page_size)
        last = self.last
        grow = sum(max(0, -(-min(s.reached + self.ahead, last) // page_size) - len(s.pages)) for s in self.sequences)
        return self.counted, grow, 0

    def _beams_grow(self, page_size: int, last: int, width: int) -> int:
        """The most pages that beams take in the steps that `grow` covers: each goes on, then parents give way to other parents'
        children, which share their full pages and copy what is in the next one."""
        computed, live, taken = self.sequences[0].computed, len(self.sequences), 0
        partial = live if computed % page_size else 0
        for _ in range(min(AHEAD, last - computed)):
            if not computed % page_size:
                taken, partial = taken + live, live
            computed += 1
            if computed % page_size:
                taken, partial = taken + width - partial, width
            live = width
        return taken

    def _heirs_grow(self, page_size: int, width: int) -> int:
        """The same where every step is planned on top of another: its heirs take a page each before their parents, whose last pages
        they copy, give theirs back."""
        computed, live, taken, most = self.sequences[0].computed, len(self.sequences), 0, 0
        for _ in range(min(AHEAD, self.last - computed)):
            taken += width
            most = max(most, taken)
            taken -= live if computed % page_size else 0
            computed, live = computed + 1, width
        return most

    def may_inherit(self, pages: int, page_size: int) -> None:
        """From now on its beams may have heirs, in a pool of so many pages: with these it holds no more than as many sequences that
        share nothing but the prompt, and a page more for each."""
        assert self.search is not None
        self.most = min(pages, -(-self.prompt_length // page_size) + self.search.width * (1 + -(-self.max_new_tokens // page_size)))

    def roomy(self, page_size: int) -> bool:
        """Whether there is room in that for heirs of its beams, if there are to be any."""
        if self.search is None or not self.decodes or self.sequences[0].generated + 1 >= self.max_new_tokens:
            return True
        return self._count(page_size) + self.search.width <= self.most

    def _count(self, page_size: int) -> int:
        """Pages; one that several of its sequences hold counts once. They all hold the prompt's full pages."""
        first, *others = self.sequences
        if not others:
            return len(first.pages)
        shared = self.prompt_length // page_size
        return min(shared, len(first.pages)) + len({page for s in self.sequences for page in s.pages[shared:]})


def sequences(
    prompt: Listing[int], choices: int, continuations: Iterable[tuple[int, Listing[int]]] = (), cache_key: str = ""
) -> tuple[list[Sequence], list[int]]:
    """`Group.sequences` and `Group.waiting` of a request for so many choices, or of one that goes on with `continuations`, as
    (choice, generated tokens)."""
    begun = [Sequence(array("I", [*prompt, *tokens]), len(prompt), choice, cache_key) for choice, tokens in continuations]
    if begun:
        return begun, []
    return [Sequence(array("I", prompt), len(prompt), 0, cache_key)], list(range(choices))


@dataclass(slots=True)
class Batch:
    """A named, ordered list of groups."""

    uid: int
    groups: dict[int, Group] = field(default_factory=dict)  # by uid
