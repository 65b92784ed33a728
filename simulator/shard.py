"""Simulated shard: executes the scheduler's commands by counting tokens and pages, and replies as shards do. Strict: what a shard
could not do, or a router should not request, is an AssertionError.

    shard = IntegerShard(pages, page_size)
    prefill(new, chunks, tokens, decode), decode() -> Outcome        filter(drop, pause, end) -> Released

The cost of simulating a step depends on what changes in it, not on what runs. Decoding sequences advance together, so one counter
of decode steps gives the progress of each, and a calendar by that counter holds when one needs a page, may soon need another, or
ends.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from .pages import ENDLESS, Hold, Pages

AHEAD = 2  # decode steps that `grow` covers

Continuations = tuple[tuple[int, int], ...]  # (choice, generated tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that joins, as the simulated shard needs it."""

    uid: int
    prompt: int  # tokens
    most: int  # generated tokens of each choice
    choices: int = 1
    ends_at: Sequence[int] = ()  # of each choice: the generated tokens after which it ends by itself; 0, or missing: never
    # Shareable content, in order: (name of the content, tokens up to which). With one choice it may reach beyond the prompt: into
    # the answer, of which a later prompt is the continuation.
    prefix: Sequence[tuple[Hashable, int]] = ()
    continuations: Sequence[tuple[int, int]] = ()  # of a preempted group: `Released.continuations`

    def limit(self, choice: int) -> int:
        """Generated tokens with which a choice ends."""
        ends_at = self.ends_at[choice] if choice < len(self.ends_at) else 0
        return min(ends_at or self.most, self.most)


def prefix_keys(asked: Asked, page_size: int) -> list[tuple[int, int]]:
    """Keys of its prompt's prefixes, like router/prefix_keys.py: (tokens, key) for each page that others may share."""
    found, chain, pages = list[tuple[int, int]](), 0, 0
    for name, tokens in asked.prefix:
        begin, end = pages, min(tokens, asked.prompt - 1) // page_size
        chain = hash((chain, begin, name))
        found += [(page * page_size, hash((chain, page))) for page in range(begin + 1, end + 1)]
        pages = max(begin, end)
    return found


@dataclass(slots=True)
class Outcome:
    """What a step did: the numbers of a reply, and some that only a simulation knows."""

    free: int = 0
    cached: int = 0
    uids: list[int] = field(default_factory=list)  # groups that go on and whose standing has changed ...
    held: list[int] = field(default_factory=list)
    grow: list[int] = field(default_factory=list)
    lacking: list[int] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)  # (uid, choice) that ended by themselves
    failed: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    restored_tokens: int = 0  # of these, tokens that resume preempted groups
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    decode_tokens: int = 0
    prompt_keys: int = 0
    decode_keys: int = 0
    rows: int = 0  # new tokens
    computed: dict[int, int] = field(default_factory=dict)  # tokens of prompts, by uid
    first: list[int] = field(default_factory=list)  # groups whose choices all got their first token
    restored: list[int] = field(default_factory=list)  # resumed groups that decode from the next step on


@dataclass(frozen=True, slots=True)
class Released:
    """Reply to a Filter: free pages, and what resumes preempted groups."""

    free: int
    cached: int
    paused: list[tuple[int, int, int]]  # (uid, grow, lacking) of known ones
    continuations: dict[int, Continuations]  # of these


@dataclass(slots=True, eq=False)
class Tail:
    """A choice, from the end of the prompt's full pages on; if it is the only one, from the beginning."""

    group: "Group"
    choice: int
    hold: Hold
    computed: int  # tokens, prompt included, at decode step `since`
    target: int  # computed tokens before it decodes
    stop: int  # ... with which it ends
    last: int  # ... that it can have at most
    since: int = 0
    due: int = -1  # the decode step at which something changes; -1: it does not decode
    grow: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """A request on the shard."""

    asked: Asked
    base: Hold  # the prompt's full pages and, until the choices fork, the one after; of a single choice everything
    goal: int  # tokens to be computed in `base` before it decodes or the choices fork
    worst: int  # pages until it decodes and for two steps after
    computed: int = 0
    decodes: bool = False
    tails: dict[int, Tail] = field(default_factory=dict)  # choices that have begun and not ended
    ended: set[int] = field(default_factory=set)
    reported: tuple[int, int, int] = (-1, -1, -1)

    @property
    def held(self) -> int:
        """Pages held."""
        if self.asked.choices == 1:
            return self.base.held
        return self.base.held + sum(tail.hold.held for tail in self.tails.values())

    @property
    def lacking(self) -> int:
        """Tokens to be computed before it decodes."""
        if self.decodes:
            return 0
        return self.goal - self.computed + sum(tail.target - max(self.goal, tail.computed) for tail in self.tails.values())

    @property
    def grow(self) -> int:
        """The most pages that it may still take: in two decode steps, if need be after its prompt."""
        return sum(tail.grow for tail in self.tails.values()) if self.decodes else self.worst - self.held


class IntegerShard:
    """A simulated shard: any number of groups over a pool of pages."""

    def __init__(self, pages: int, page_size: int, prefix_caching: bool = True) -> None:
        self.page_size = page_size
        self.pool = Pages(pages, prefix_caching)
        self.groups: dict[int, Group] = {}
        self.steps = 0  # that computed something
        self.largest = 0  # query tokens of a step
        self.decoding = 0  # sequences
        self.failing: set[int] = set()  # groups that will fail in the next step that they are part of
        self._resumes: dict[int, Continuations | None] = {}  # all groups that ever were here; None: it is here or has ended
        self._tick = 0  # decode steps
        self._keys = 0  # computed tokens of all decoding sequences
        self._calendar: dict[int, list[Tail]] = {}
        self._changed: dict[Group, None] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return self.pool.free

    def expect(self, uid: int, continuations: Continuations) -> None:
        """Announces a group that will join with these continuations: it was computed on another shard, which is lost."""
        self._resumes.setdefault(uid, continuations)

    def prefill(self, new: Iterable[Asked], chunks: Sequence[tuple[int, int]], tokens: int, decode: bool) -> Outcome:
        """`new` groups join. `chunks` (uid, most tokens of it) are computed in this order as long as `tokens` last, then once more
        without their bounds. With `decode`, all groups that decoded before decode in the same step."""
        assert chunks, "a Prefill without prompts"
        assert tokens > 0, "a Prefill without tokens"
        assert all(most > 0 for _, most in chunks), "a chunk of nothing"
        assert len({uid for uid, _ in chunks}) == len(chunks), "two chunks of a group in a step"
        for asked in new:
            self._join(asked)
        return self._step(chunks, tokens, decode)

    def decode(self) -> Outcome:
        """One step of every group that can decode."""
        return self._step((), 0, True)

    def filter(self, drop: Iterable[int] = (), pause: Iterable[int] = (), end: Iterable[tuple[int, int]] = ()) -> Released:
        """Drops groups, ends single choices, preempts groups: in this order. Unknown ones are ignored."""
        for uid in drop:
            self._leave(uid)
        for uid, choice in end:
            assert uid in self._resumes, "a filter of a group that never was here"
            if uid in self.groups:
                self._end(self.groups[uid], choice)
        paused, continuations = [], {}
        for uid in pause:
            group = self._leave(uid)
            if group is not None:
                resumes = self._resumes[uid] = continuations[uid] = self._generated(group)
                lacking, worst = self._needs(group.asked, resumes)
                paused.append((uid, worst, lacking))
        return Released(self.pool.free, self.pool.cached, paused, continuations)

    def audit(self) -> None:
        """Recounts everything, slowly. AssertionError: the books are wrong."""
        self.pool.audit()
        holds = [group.base for group in self.groups.values()]
        holds += [tail.hold for group in self.groups.values() if group.asked.choices > 1 for tail in group.tails.values()]
        if self.pool.caching:
            held = sum(chain.pinned - chain.start for chain in self.pool.chains()) + sum(hold.own for hold in holds)
        else:
            held = sum(hold.held for hold in holds)
        assert held == self.pool.pages - self.pool.free, "pages are lost"
        decoding = [tail for group in self.groups.values() if group.decodes for tail in group.tails.values()]
        assert len(decoding) == self.decoding
        assert sum(self._reached(tail) for tail in decoding) == self._keys
        assert all(tail.due > self._tick for tail in decoding)

    # Joining and leaving

    def _join(self, asked: Asked) -> None:
        assert asked.uid not in self.groups, "a group joins twice"
        assert min(asked.prompt, asked.most, asked.choices) > 0
        expected = self._resumes.get(asked.uid, ())
        assert expected is not None, "a group joins again"
        resumes = tuple(asked.continuations)
        assert set(resumes) <= set(expected), "not what was paused"
        assert bool(resumes) == bool(expected), "it starts anew, although it had begun"
        self._resumes[asked.uid] = None
        full = asked.prompt // self.page_size
        names = [(name, end // self.page_size) for name, end in asked.prefix]
        if asked.choices == 1:
            base = self.pool.hold([*names, ((asked.uid, 0), ENDLESS)])
            goal = asked.prompt + (resumes[0][1] - 1 if resumes else 0)
        else:
            base = self.pool.hold([*((name, min(end, full)) for name, end in names), ((asked.uid, -1), full)])
            goal = asked.prompt
        group = Group(asked, base, goal, self._needs(asked, resumes)[1])
        if resumes:
            group.ended = set(range(asked.choices)) - {choice for choice, _ in resumes}
        for choice, generated in resumes if asked.choices > 1 else ():
            tail = self._tail(group, choice, asked.prompt + generated - 1)
            tail.computed = full * self.page_size
        self.groups[asked.uid] = group
        self._changed[group] = None

    def _tail(self, group: Group, choice: int, target: int) -> Tail:
        """Begins a choice."""
        asked = group.asked
        full = asked.prompt // self.page_size
        hold = group.base
        if asked.choices > 1:
            hold = self.pool.hold([((asked.uid, choice), ENDLESS)], group.base, full)
        stop, last = asked.prompt + asked.limit(choice) - 1, asked.prompt + asked.most - 1
        tail = group.tails[choice] = Tail(group, choice, hold, target, target, stop, last)
        return tail

    def _needs(self, asked: Asked, resumes: Continuations) -> tuple[int, int]:
        """(tokens to be computed before it decodes, pages until then and for two steps after), if nothing is cached."""
        generated = [count for _, count in resumes] or [1] * asked.choices
        pages = asked.prompt // self.page_size + sum(self._share(asked, count) for count in generated)
        return asked.prompt + sum(generated) - len(generated), pages

    def _share(self, asked: Asked, generated: int) -> int:
        """Pages of a choice beyond the prompt's full ones, until it decodes with so many tokens and for two steps after."""
        tokens = asked.prompt + min(generated - 1 + AHEAD, asked.most - 1)
        return self._pages(tokens) - asked.prompt // self.page_size

    def _generated(self, group: Group) -> Continuations:
        """What resumes a group that is preempted."""
        if not group.decodes:
            return tuple(group.asked.continuations) and tuple(
                (choice, count) for choice, count in group.asked.continuations if choice not in group.ended
            )
        prompt = group.asked.prompt
        return tuple((choice, self._reached(tail) - prompt + 1) for choice, tail in group.tails.items())

    def _leave(self, uid: int) -> Group | None:
        assert uid in self._resumes, "a filter of a group that never was here"
        group = self.groups.pop(uid, None)
        if group is not None:
            self._release(group)
        elif self._resumes[uid] is not None:
            self._resumes[uid] = None  # it was preempted, and is cancelled
        return group

    def _release(self, group: Group) -> None:
        for tail in group.tails.values():
            self._stop(tail)
        self.pool.release(group.base)
        self._changed.pop(group, None)

    def _stop(self, tail: Tail) -> None:
        """Ends a choice. Its full pages stay in the trie."""
        if tail.due >= 0:
            self._publish(tail.hold, self._reached(tail))
            self._halt(tail)
        if tail.hold is not tail.group.base:
            self.pool.release(tail.hold)

    def _halt(self, tail: Tail) -> None:
        """Stops it from decoding."""
        if tail.due >= 0:
            tail.computed = self._reached(tail)
            tail.due = -1
            self.decoding -= 1
            self._keys -= tail.computed

    def _end(self, group: Group, choice: int) -> None:
        if choice in group.ended:
            return
        group.ended.add(choice)
        group.worst -= self._share(group.asked, dict(group.asked.continuations).get(choice, 1))
        tail = group.tails.pop(choice, None)
        if tail is not None:
            self._stop(tail)
        if len(group.ended) == group.asked.choices:
            del self.groups[group.asked.uid]
            self._release(group)
        else:
            self._changed[group] = None

    def _fail(self, group: Group, outcome: Outcome) -> None:
        """Fails a group: what it has computed leaves the cache."""
        outcome.failed.append(group.asked.uid)
        del self.groups[group.asked.uid]
        for tail in group.tails.values():
            self._halt(tail)
            if tail.hold is not group.base:
                self.pool.withdraw(tail.hold, (group.asked.uid, tail.choice))
        self.pool.withdraw(group.base, (group.asked.uid, 0 if group.asked.choices == 1 else -1))
        self._changed.pop(group, None)

    # A step

    def _step(self, chunks: Sequence[tuple[int, int]], tokens: int, decode: bool) -> Outcome:
        outcome = Outcome()
        failing = self._failing(chunks, decode) if self.failing else ()
        ending = self._advance(outcome) if decode else []
        prompts = [(self.groups[uid], most) for uid, most in chunks if uid in self.groups]
        for group, most in prompts:
            tokens -= self._compute(group, min(most, tokens), outcome)
        for group, _ in prompts:
            tokens -= self._compute(group, tokens, outcome)
        for group in failing:
            self._fail(group, outcome)
        for tail in ending:
            if tail.due >= 0:  # else its group has failed
                self._finish(tail.group, tail.choice, outcome)
        for group, _ in prompts:
            if not group.decodes and not group.lacking and group.asked.uid in self.groups:
                self._begin(group, outcome)
        self._count(outcome)
        return outcome

    def _failing(self, chunks: Sequence[tuple[int, int]], decode: bool) -> list[Group]:
        named = {uid for uid, _ in chunks}
        groups = [self.groups[uid] for uid in sorted(self.failing) if uid in self.groups]
        found = [group for group in groups if group.asked.uid in named or (decode and group.decodes)]
        self.failing -= {group.asked.uid for group in found}
        return found

    def _count(self, outcome: Outcome) -> None:
        """Completes the outcome."""
        used = outcome.prompt_tokens + outcome.decode_tokens
        self.steps += used > 0
        self.largest = max(self.largest, used)
        for group in self._changed:
            standing = group.held, group.grow, group.lacking
            if standing != group.reported:
                group.reported = standing
                outcome.uids.append(group.asked.uid)
                outcome.held.append(standing[0])
                outcome.grow.append(standing[1])
                outcome.lacking.append(standing[2])
        self._changed.clear()
        outcome.free, outcome.cached = self.pool.free, self.pool.cached

    # Prompts

    def _compute(self, group: Group, tokens: int, outcome: Outcome) -> int:
        """Finds what is cached, computes at most `tokens` more tokens, and returns how many."""
        if group.decodes:
            return 0
        self._changed[group] = None
        before = group.lacking
        self._match(group)
        outcome.cached_tokens += before - group.lacking
        tokens = used = min(tokens, group.lacking)
        if not used:
            self._part(group)
            return 0
        more = min(tokens, group.goal - group.computed)
        outcome.prompt_keys += _keys(group.computed, more)
        if more:
            group.computed += more
            self._publish(group.base, group.computed)
            tokens -= more
        self._part(group)
        for tail in group.tails.values():
            more = min(tokens, tail.target - tail.computed) if tokens else 0
            if more:
                outcome.prompt_keys += _keys(tail.computed, more)
                tail.computed += more
                self._publish(tail.hold, tail.computed)
                tokens -= more
        outcome.prompt_tokens += used
        outcome.restored_tokens += used if group.asked.continuations else 0
        outcome.computed[group.asked.uid] = outcome.computed.get(group.asked.uid, 0) + used
        return used

    def _match(self, group: Group) -> None:
        """Adopts pages that others have computed, where they reach further. One token of a fresh prompt is left to compute."""
        if not self.pool.caching:
            return
        size = self.page_size
        limit = (group.goal if group.asked.continuations else group.goal - 1) // size
        known = self.pool.known(group.base, limit)
        if known * size > group.computed:
            self.pool.adopt(group.base, known)
            group.computed = known * size
        if group.tails and group.base.pages == group.goal // size:
            for tail in group.tails.values():
                known = self.pool.known(tail.hold, tail.target // size)
                if known * size > tail.computed:
                    self.pool.adopt(tail.hold, known)
                    tail.computed = known * size
            if group.computed < group.goal and all(tail.computed > group.goal for tail in group.tails.values()):
                self.pool.adopt(group.base, group.base.pages)  # the prompt's last page is in all choices' pages
                group.computed = group.goal

    def _part(self, group: Group) -> None:
        """At the prompt's end resumed choices fork: the first takes the page that is not full, the others copy it."""
        if group.computed < group.goal:
            return
        for tail in group.tails.values():
            if tail.computed < group.goal:
                self._fork(group, tail)

    def _fork(self, group: Group, tail: Tail) -> None:
        tail.computed = group.goal
        if group.goal % self.page_size:
            if group.base.own:
                group.base.own, tail.hold.own = 0, 1
            else:
                self.pool.compute(tail.hold, tail.hold.pages, 1)

    def _begin(self, group: Group, outcome: Outcome) -> None:
        """All is computed: a fresh prompt gets its first tokens; choices that do not end with these decode from the next step
        on."""
        asked, uid = group.asked, group.asked.uid
        group.decodes = True
        if asked.continuations:
            outcome.restored.append(uid)
        else:
            outcome.first.append(uid)
        if asked.choices == 1:
            self._tail(group, 0, group.goal)
        elif not asked.continuations:
            for choice in range(asked.choices):
                if choice not in group.ended:
                    self._fork(group, self._tail(group, choice, group.goal))
        if not asked.continuations:
            outcome.rows += len(group.tails)
        for tail in list(group.tails.values()):
            if tail.computed == tail.stop:
                self._finish(group, tail.choice, outcome)
            else:
                self._decode(tail)

    # Decoding

    def _decode(self, tail: Tail) -> None:
        """It decodes from now on."""
        tail.since = self._tick
        self.decoding += 1
        self._keys += tail.computed
        self._enter(tail)

    def _enter(self, tail: Tail) -> None:
        """Enters it into the calendar: at the next step at which its pages or its `grow` change, or at which it ends."""
        size, computed = self.page_size, tail.computed
        held, soon = self._pages(computed), self._pages(min(computed + AHEAD, tail.last))
        tail.grow = soon - held
        change = min(held * size + 1, tail.stop)
        if soon * size + 1 <= tail.last:
            change = min(change, max(soon * size + 1 - AHEAD, computed + 1))
        tail.due = self._tick + change - computed
        self._calendar.setdefault(tail.due, []).append(tail)

    def _advance(self, outcome: Outcome) -> list[Tail]:
        """One token for every decoding sequence. Returns those that end with it."""
        outcome.decode_tokens = self.decoding
        outcome.rows += self.decoding
        self._tick += 1
        self._keys += self.decoding
        outcome.decode_keys = self._keys
        ending = []
        for tail in self._calendar.pop(self._tick, ()):
            if tail.due == self._tick:
                tail.computed, tail.since = self._reached(tail), self._tick
                self._publish(tail.hold, tail.computed)
                if tail.computed == tail.stop:
                    ending.append(tail)
                else:
                    self._enter(tail)
                self._changed[tail.group] = None
        return ending

    def _finish(self, group: Group, choice: int, outcome: Outcome) -> None:
        outcome.finished.append((group.asked.uid, choice))
        self._end(group, choice)

    def _reached(self, tail: Tail) -> int:
        """Its computed tokens."""
        return tail.computed + (self._tick - tail.since if tail.due >= 0 else 0)

    def _publish(self, hold: Hold, computed: int) -> None:
        """Makes the hold cover the pages of so many tokens. Full ones are in the trie from now on."""
        full = computed // self.page_size
        own = 1 if computed % self.page_size else 0
        if (full, own) != (hold.pages, hold.own):
            self.pool.compute(hold, full, own)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def _keys(position: int, tokens: int) -> int:
    """Keys that `tokens` tokens attend to which follow the first `position`: each attends to itself, too."""
    return tokens * position + tokens * (tokens + 1) // 2
