"""Chunked prefill: plans what has to be computed before a group decodes, its prompt and, if it is resumed after preemption, what it
generated. Divides a step's token budget among the groups, looks up the prefix cache, and forks choices where the prompt ends. Knows
no model and no logits.
"""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Listing
from dataclasses import replace

from .cache import Cache
from .pages import OutOfPages, PagePool
from .pictures import PromptImages
from .prefix import Node, PrefixCache
from .sequence import Group, Sequence
from .step import Run, Span

# With recurrent states: tokens saved for later requests that are worth ending a step early, so that the state there can be kept.
WORTH = 128


class ImageBudget:
    """Limit on images encoded in one step: any one, and more as long as all together have no more tokens than the step may compute.
    A request may have many large images of whose tokens all but a few are cached."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens
        self._keys = set[Hashable]()
        self._planned = False

    def reach(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens can be computed; they count as planned. If nothing else is planned, there may be
        more, up to the end of an image that is computed at once."""
        start = sequence.computed
        if count and sequence.shows(start):
            assert sequence.pictures is not None
            last, first = sequence.pictures.reach(start, start + count)
            count = self._seen(sequence.pictures, start, (last if self._planned or last > start else first) - start)
        self._planned = self._planned or count > 0
        return count

    def _seen(self, pictures: PromptImages, start: int, count: int) -> int:
        """`count`, or fewer, so that images remain within the limit."""
        for picture in pictures:
            if not start < picture.end or not picture.start < start + count or picture.key in self._keys:
                continue
            if self._keys and picture.tokens > self._left:
                return max(0, picture.start - start)
            self._keys.add(picture.key)
            self._left -= picture.tokens
        return count


class Prompts:
    """Plans the prefill of the groups on one pool."""

    def __init__(self, pool: PagePool, cache: Cache, prefixes: PrefixCache, renew: Callable[[], object]) -> None:
        """renew: prepares newly allocated pages."""
        self._pool = pool
        self._cache = cache
        self._prefixes = prefixes
        self._renew = renew

    def fill(self, chunks: Listing[tuple[Group, int]], tokens: int) -> list[Run]:
        """One run per group, for a step with a budget of `tokens` for prompts: in order, at most what a chunk allows, and then, in
        the same order, as long as tokens last. A run has no spans if there is nothing left to compute, or no budget."""
        runs = [Run(group, [], sampled=False) for group, _ in chunks]
        images = ImageBudget(tokens)
        for run, (_, most) in zip(runs, chunks, strict=True):
            tokens -= self._advance(run, min(most, max(0, tokens)), images, whole=self._prefixes.enabled and most < tokens)
        for run in runs:
            tokens -= self._advance(run, tokens, images, whole=False) if tokens > 0 else 0
        for run in runs:
            self._want(run)
        return runs

    def claim(self, group: Group) -> None:
        """Gives a new group its cached prefix. The router counts on that, and the group may have to wait for its grammar; so one
        token is always left to be computed: nobody would request a chunk again for a group that lacks none, and it would never
        decode."""
        first = group.sequences[0]
        self._find(group, first, (), spare=True)
        if self._prefixes.most and not group.prompt_logprobs:
            goal, size = self._goal(group, first) - 1, self._pool.page_size
            first.halts = halts(first.computed, self._prefixes.known(first, goal), goal // size * size)

    @staticmethod
    def halted(groups: Iterable[Group]) -> bool:
        """Whether any of these goes on at a point where its recurrent state is to be kept for the prefix cache."""
        return any(group.sequences[0].computed in group.sequences[0].halts for group in groups)

    def settle(self, group: Group) -> None:
        """Called when the planned step is over: forks the choices if the prompt is computed, and lets the group decode if all is.
        Raises OutOfPages."""
        if group.waiting:
            return
        first, *others = group.sequences
        if first.computed >= first.prompt_length:
            self._fork(first, [sequence for sequence in others if not sequence.computed])
        group.decodes = not group.lacking
        if group.decodes and first.pictures is not None:
            first.pictures.forget()

    def end(self, group: Group, sequence: Sequence) -> None:
        """Takes one of several sequences out of the group. If it was to compute the prompt for the others, another one does."""
        group.counted = -1
        heir = next((other for other in group.sequences if other is not sequence), None)
        if heir and sequence is group.sequences[0] and not heir.computed:
            self._bequeath(sequence, heir)
        else:
            self._pool.release(sequence.pages)
        sequence.clear()
        group.sequences.remove(sequence)

    def _bequeath(self, sequence: Sequence, heir: Sequence) -> None:
        """Gives another sequence what is computed of the prompt; only full pages of it, if cached pages reach into the answer of
        `sequence`, which differs from the heir's."""
        size, length = self._pool.page_size, sequence.prompt_length
        full = length // size if sequence.computed > length else len(sequence.pages)
        heir.pages, heir.node, heir.state = sequence.pages[:full], _ancestor(sequence.node, full), sequence.state
        heir.computed = min(sequence.computed, full * size)
        self._pool.release(sequence.pages[full:])

    def _advance(self, run: Run, most: int, images: ImageBudget, whole: bool) -> int:
        """Plans at most `most` more tokens of a group and returns how many. whole: end at a full page, if possible, so that another
        group with the same tokens can go on from there."""
        group, used = run.group, 0
        for sequence in group.sequences:
            if group.decodes or run.problem or (sequence is not group.sequences[0] and not sequence.computed):
                break
            self._find(group, sequence, run.spans)
            lacking = self._end(run, sequence) - sequence.computed
            count = min(max(0, most - used), lacking)
            if whole and count < lacking:
                end = (sequence.computed + count) // self._pool.page_size * self._pool.page_size
                count = end - sequence.computed if end > sequence.computed else count
            count = images.reach(sequence, count)
            if count:
                used += self._plan(run, sequence, count)
        return used

    def _goal(self, group: Group, sequence: Sequence) -> int:
        """How far the sequence is computed before the group decodes, or before others fork from it: a recurrent state is in no
        page, so they begin with what it is then."""
        goal, [first, *others] = group.goal(sequence), group.sequences
        parting = self._cache.states and sequence is first and not all(other.computed for other in others)
        return min(goal, sequence.prompt_length) if parting else goal

    def _end(self, run: Run, sequence: Sequence) -> int:
        """How far it is computed in this step at most."""
        begun = next((span.start for span in run.spans if span.sequence is sequence), sequence.computed)
        return min([self._goal(run.group, sequence), *(halt for halt in sequence.halts if halt > begun)])

    def _find(self, group: Group, sequence: Sequence, spans: Listing[Span], spare: bool = False) -> None:
        """Adopts cached pages. Of a fresh prompt one token is left to be computed, since its logits are wanted; with prompt
        log-probabilities, all tokens are. spans: what is computed of the group in this step; spare: leave one token of any
        group."""
        if group.prompt_logprobs:
            return
        writing = sequence.computed % self._pool.page_size > 0 or bool(self._cache.states)
        if writing and any(span.sequence is sequence for span in spans):
            return  # this step writes to the page that would be released, or to the recurrent state
        goal = self._goal(group, sequence)
        group.found += self._prefixes.adopt(sequence, goal - 1 if group.waiting or spare else goal)

    def _plan(self, run: Run, sequence: Sequence, count: int) -> int:
        start = sequence.computed
        try:
            self._pool.extend(sequence.pages, start + count)
        except OutOfPages as error:
            run.problem = str(error)
            return 0
        if start in sequence.halts:
            self._prefixes.remember(sequence)
        for i, span in enumerate(run.spans):
            if span.sequence is sequence and span.start + len(span.tokens) == start:
                start = run.spans.pop(i).start
                break
        sequence.computed += count
        run.spans.append(Span(sequence, start, sequence.tokens[start : sequence.computed], wanted=0))
        self._prefixes.announce(sequence)
        return count

    def _want(self, run: Run) -> None:
        group = run.group
        run.found, group.found = group.found, 0
        if run.spans and group.prompt_logprobs:
            run.spans = [replace(span, wanted=len(span.tokens)) for span in run.spans]
        if run.spans and group.waiting and not group.lacking and not run.problem:
            run.spans[-1] = replace(run.spans[-1], wanted=max(1, run.spans[-1].wanted))
            run.sampled = True

    def _fork(self, first: Sequence, others: Listing[Sequence]) -> None:
        """Forks `others` from the prompt of `first`: they share its full pages and copy what is in the next one."""
        rows = first.prompt_length % self._pool.page_size
        full = first.prompt_length // self._pool.page_size
        copies = []
        for sequence in others:
            sequence.pages, sequence.node, sequence.state = first.pages[:full], _ancestor(first.node, full), first.state
            sequence.computed = first.prompt_length - rows
            self._pool.share(sequence.pages)
            self._prefixes.adopt(sequence, len(sequence.tokens) - 1)
            if sequence.computed < sequence.prompt_length:
                copies += self._pool.take(1)
                sequence.pages.append(copies[-1])
                sequence.computed = sequence.prompt_length
        if copies:
            self._renew()
            self._cache.copy([(first.pages[full], page, rows) for page in copies])


def halts(computed: int, *places: int) -> tuple[int, ...]:
    """Of these token counts, ascending: those that save others enough work, when `computed` tokens need none. The first is where a
    sequence diverges from cached prefixes, the last where its own full pages end."""
    found = []
    for place in places:
        if place - computed >= WORTH:
            found.append(place)
            computed = place
    return tuple(found)


def _ancestor(node: Node | None, depth: int) -> Node | None:
    """The node of page number `depth` on the way to `node`, or `node` if it is nearer to the root."""
    while node and node.depth > depth:
        node = node.parent
    return node if node and node.depth else None
