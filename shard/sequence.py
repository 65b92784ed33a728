"""Request state on a shard: groups, their sequences, and sampling parameters, as plain Python ints. Tensors are derived from them
for one step and thrown away.

A group is a request: the sequences that answer it. A sequence knows its tokens, its pages and how many tokens are computed:

    tokens    |<------- prompt_length ------->|<-- generated -->|
    computed  |<---------- keys and values in pages -------->|      one behind when a token was just sampled

A group's first sequence computes the prompt. The others begin where it ends: a fresh prompt has one sequence until the choices draw
their first tokens; a resumed group has all of them, but those after the first are empty until then.
"""

import sys
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from concurrent.futures import Future
from dataclasses import dataclass, field

from .decoding.budget import Acceptance
from .decoding.grammar import GrammarState
from .decoding.hypotheses import Path, Search
from .decoding.lookup import NgramIndex
from .decoding.token_counts import TokenCounts
from .decoding.tree import DraftToken, Tree
from .draft_progress import DraftProgress
from .pages import page_table
from .pictures import PromptImage, PromptImages
from .prefix import Node

NO_DRAFT = Tree()
# Decode steps that `Group.grow` covers: the router decides on the next one while another is in flight.
AHEAD = 2
LEAD = 4  # first tokens of an answer, perhaps white space, among which reasoning begins if there is any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters: how the next token is chosen. Neutral values do nothing; temperature 0 is greedy."""

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
    final_logprobs: bool = False  # report log-probabilities of the distribution sampled from, not of the model's own

    @property
    def penalized(self) -> bool:
        """Whether penalties or biases change the logits first."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty or self.bias)

    def counts(self, prompt_length: int, vocabulary: int) -> TokenCounts:
        """Counts of the tokens that penalties depend on, and the biases, for a sequence with such a prompt."""
        first = prompt_length if self.frequency_penalty or self.presence_penalty else sys.maxsize
        return TokenCounts(0 if self.repetition_penalty != 1 else first, prompt_length, vocabulary, self.bias)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Budget for reasoning at the beginning of an answer."""

    most: int  # most tokens of reasoning
    end: int  # token that ends it
    begin: int = -1  # token that begins it; -1: the prompt has begun it

    def overdue(self, tokens: Listing[int], prompt_length: int) -> bool:
        """Whether the reasoning in `tokens` (prompt and answer) must end now. An answer that doesn't begin with reasoning has
        none."""
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
    choice: int = 0  # index of the choice: part of the key of its random numbers
    cache_key: str = ""  # what else its keys and values depend on, for the prefix cache
    adapter: int = -1  # index of its LoRA adapter in the decoder; -1: none
    pictures: PromptImages | None = None  # images in its prompt
    computed: int = 0  # tokens whose keys and values are in `pages`; while a step is planned, those of that step included
    pages: "array[int]" = field(default_factory=page_table)
    state: int = 0  # slot of its recurrent state, of models that have one; it may be a parent's until the next step: see `states`
    # token counts at which a step ends, so that the state there can be kept for the prefix cache; ascending
    halts: tuple[int, ...] = ()
    node: Node | None = None  # the prefix cache's node of its last published full page; None: there is none
    grammar_state: GrammarState | None = None  # its state in the group's grammar, once requested; on rank 0 only
    path: Path | None = None  # of a beam
    draft: Tree = NO_DRAFT  # draft tokens for the step that is planned
    # how drafts were drawn, for rejection sampling (rule `rejection`): see `verify.Draft`; on rank 0 only
    tried: tuple[tuple[DraftToken, ...], ...] = ()
    acceptance: Acceptance | None = None  # its past acceptance of drafts
    ngram_index: NgramIndex | None = None  # n-grams of its tokens, once drafts were looked up
    counts: TokenCounts | None = None  # of its tokens, if there are penalties or biases
    draft_progress: DraftProgress | None = None  # how far a draft model has computed it

    @property
    def generated(self) -> int:
        """Tokens after the prompt; also the output position of the next one."""
        return len(self.tokens) - self.prompt_length

    def slot(self, place: int, page_size: int) -> int:
        """Slot of token number `place` in the cache."""
        return self.pages[place // page_size] * page_size + place % page_size

    def position(self, place: int) -> int:
        """Position of token number `place` for the rotary embedding, which images in the prompt shift."""
        return self.pictures.position(place) if self.pictures else place

    def shows(self, start: int) -> bool:
        """Whether the prompt has images that end after token `start`."""
        return self.pictures is not None and start < self.pictures.end

    def twin(self, pages: int) -> "Sequence":
        """A fork that goes on by itself, with the same first `pages` pages, which are full; they are to be shared."""
        grammar_state = self.grammar_state.copy() if self.grammar_state else None
        path = self.path.copy() if self.path else None
        counts = self.counts.copy() if self.counts else None
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
            grammar_state,
            path,
            counts=counts,
        )

    def clear(self) -> None:
        """Resets it: nothing is computed, and its pages are released."""
        self.pages, self.state, self.computed, self.node, self.draft_progress = page_table(), 0, 0, None, None


@dataclass(slots=True)
class Group:
    """A request on the shard: its sequences, sampling parameters and standing."""

    uid: int
    sequences: list[Sequence]  # those that have not ended, never none
    waiting: list[int]  # choices that begin when the prompt is computed; empty: they have begun, or the group is resumed
    sampling: Sampling
    max_new_tokens: int
    end_ids: frozenset[int]
    top_n: int = 0
    prompt_logprobs: bool = False  # log-probabilities of the prompt are wanted, and were not reported yet
    # log-probabilities of prompt tokens 1, 2, ... as far as computed, if wanted
    prompt_scores: list[float] = field(default_factory=list)
    prompt_top_n: int = 0
    prompt_tops: list[tuple[int, float]] = field(default_factory=list)  # prompt_top_n for each of these: (token, logprob)
    min_new_tokens: int = 0  # end_ids can't be drawn earlier
    thinking: Thinking | None = None  # budget for reasoning
    grammar: str = ""  # that constrains its sequences, as `decoding.grammar` takes it; "": none
    compiled: bool = False  # the grammar is compiled, by rank 0's broadcast
    found: int = 0  # tokens found in the prefix cache, until a step reports them
    beginning: "Future[GrammarState] | None" = None  # the compiled grammar, once requested; on rank 0 only
    search: Search | None = None  # beam search: its sequences are beams, best first; it has one until its prompt is computed
    heirs: list[Sequence] = field(default_factory=list)  # beams that take the place of `sequences` when the step in flight lands
    settled: int = 0  # full pages that all beams whose place they take share from the start
    most: int = 0  # pages that it may hold, heirs' included; 0: it never has heirs
    drafts: int = 0  # the most drafts per sequence in a step
    stops: tuple[str, ...] = ()  # strings that complete a beam
    adapter: str = ""  # LoRA adapter; "": none
    images: tuple[PromptImage, ...] = ()  # of its prompt, as received, until its sequences have them
    trace: str = ""  # its name in other processes' logs and traces
    batch: int = 0
    decodes: bool = False  # all is computed but the last tokens
    reported: tuple[int, int, int] = (-1, -1, -1)  # the standing that was last reported
    counted: int = -1  # pages held, cached for several choices, or beams, that decode; -1: to be counted anew

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
        """Most tokens of a sequence that are ever computed: the last one never is."""
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
            held = self._held(page_size)
            grow = self._beams_grow(page_size, self.search.width)
            if self.most:
                grow = max(grow, min(self._heirs_grow(page_size, self.search.width), self.most - held))
            return held, grow, 0
        ahead, last, grow = AHEAD * (1 + self.drafts), self.sequences[0].prompt_length + self.max_new_tokens - 1, 0
        for sequence in self.sequences:  # many per step: without calls
            reached = sequence.computed if sequence.computed >= len(sequence.tokens) else len(sequence.tokens) - 1
            most = reached + ahead if reached + ahead < last else last
            lacking = -(-most // page_size) - len(sequence.pages)
            grow += lacking if lacking > 0 else 0
        if len(self.sequences) == 1:  # nearly all groups are such
            return len(self.sequences[0].pages), grow, 0
        return self._held(page_size), grow, 0

    def _beams_grow(self, page_size: int, width: int) -> int:
        """The most pages that beams take in the steps that `grow` covers: each goes on, then parents are replaced by children of
        other parents, which share the full pages and copy the partial one."""
        computed, live, taken = self.sequences[0].computed, len(self.sequences), 0
        partial = live if computed % page_size else 0
        for _ in range(min(AHEAD, self.last - computed)):
            if not computed % page_size:
                taken, partial = taken + live, live
            computed += 1
            if computed % page_size:
                taken, partial = taken + width - partial, width
            live = width
        return taken

    def _heirs_grow(self, page_size: int, width: int) -> int:
        """The same where every step is planned on top of another: heirs take a page each before their parents, whose last pages
        they copy, release theirs."""
        computed, live, taken, most = self.sequences[0].computed, len(self.sequences), 0, 0
        for _ in range(min(AHEAD, self.last - computed)):
            taken += width
            most = max(most, taken)
            taken -= live if computed % page_size else 0
            computed, live = computed + 1, width
        return most

    def may_inherit(self, pages: int, page_size: int) -> None:
        """Lets its beams have heirs from now on, in a pool of `pages` pages: with these it holds no more than as many sequences
        that share only the prompt, and a page more for each."""
        assert self.search is not None
        self.most = min(pages, -(-self.prompt_length // page_size) + self.search.width * (1 + -(-self.max_new_tokens // page_size)))

    def roomy(self, page_size: int) -> bool:
        """Whether that bound leaves room for heirs of its beams, if there are to be any."""
        if self.search is None or not self.decodes or self.sequences[0].generated + 1 >= self.max_new_tokens:
            return True
        return self._held(page_size) + self.search.width <= self.most

    def _held(self, page_size: int) -> int:
        """`_count`, of a group that decodes."""
        if self.counted < 0:
            self.counted = self._count(page_size)
        return self.counted

    def _count(self, page_size: int) -> int:
        """Pages held; one shared by several of its sequences counts once. They all hold the prompt's full pages."""
        first, *others = self.sequences
        if not others:
            return len(first.pages)
        shared = self.prompt_length // page_size
        return min(shared, len(first.pages)) + len(set[int]().union(*[s.pages[shared:] for s in self.sequences]))


def sequences(
    prompt: Listing[int], choices: int, continuations: Iterable[tuple[int, Listing[int]]] = (), cache_key: str = ""
) -> tuple[list[Sequence], list[int]]:
    """`Group.sequences` and `Group.waiting` of a new request with `choices` choices, or of one resumed with `continuations`, as
    (choice, generated tokens)."""
    begun = [Sequence(array("I", [*prompt, *tokens]), len(prompt), choice, cache_key) for choice, tokens in continuations]
    if begun:
        return begun, []
    return [Sequence(array("I", prompt), len(prompt), 0, cache_key)], list(range(choices))
