"""The simulated shard, which only counts, compared with a reference that models each sequence by itself; and its page
bookkeeping.
"""

import random
from dataclasses import dataclass, field

import pytest

from penstock.simulator.shard import Asked, IntegerShard, Outcome


@dataclass
class ReferenceSequence:
    """A choice in the reference: nothing is cached, and only the group's own prompt is shared."""

    limit: int
    target: int  # tokens to compute before it decodes
    computed: int
    ended: bool = False


@dataclass
class ReferenceGroup:
    """A group in the reference, computed token by token."""

    asked: Asked
    prompt: int = 0  # computed prompt tokens
    decodes: bool = False
    sequences: dict[int, ReferenceSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generated = dict(self.asked.continuations) or dict.fromkeys(range(self.asked.choices), 1)
        for choice, count in generated.items():
            target = self.asked.prompt + count - 1
            self.sequences[choice] = ReferenceSequence(self.asked.limit(choice), target, 0)

    @property
    def live(self) -> list[ReferenceSequence]:
        return [sequence for sequence in self.sequences.values() if not sequence.ended]

    @property
    def lacking(self) -> int:
        prompt = self.asked.prompt
        return prompt - self.prompt + sum(each.target - max(prompt, each.computed) for each in self.live if not self.decodes)

    def pages(self, size: int, ahead: int) -> int:
        """Pages held; with `ahead`, when the prompt is computed and every sequence has so many more tokens."""
        full, last = self.asked.prompt // size, self.asked.prompt + self.asked.most - 1
        if not ahead and self.prompt < self.asked.prompt:
            return -(-self.prompt // size)
        reached = [max(each.target, each.computed) if ahead else each.computed for each in self.live]
        return full + sum(-(-min(tokens + ahead, last) // size) - full for tokens in reached)

    def compute(self, tokens: int) -> int:
        more = used = min(tokens, self.lacking)
        step = min(more, self.asked.prompt - self.prompt)
        self.prompt += step
        more -= step
        if self.prompt == self.asked.prompt:
            for each in self.live:
                each.computed = max(each.computed, self.prompt)
                step = min(more, each.target - each.computed)
                each.computed += step
                more -= step
        return used

    def first(self) -> bool:
        """Whether the group begins to decode now."""
        if self.decodes or self.lacking:
            return False
        self.decodes = True
        for each in self.live:
            each.ended = each.computed - self.asked.prompt + 1 == each.limit
        return True


class RandomCommands:
    """Random commands for the simulated shard and the reference."""

    def __init__(self, seed: int, caching: bool) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice((1, 2, 3, 4, 16))
        self.pages = 4000
        self.shard = IntegerShard(self.pages, self.size, caching)
        self.groups: dict[int, ReferenceGroup] = {}
        self.asked: dict[int, Asked] = {}
        self.paused: dict[int, tuple[tuple[int, int], ...]] = {}
        self.standing: dict[int, tuple[int, int, int]] = {}
        self.uid = 0

    def join(self) -> list[Asked]:
        """New groups, and some of the paused ones."""
        joining = []
        for uid in [uid for uid in self.paused if self.random.random() < 0.4]:
            old = self.asked[uid]
            fields = {name: getattr(old, name) for name in ("uid", "prompt", "most", "choices", "ends_at", "prefix")}
            joining.append(Asked(**fields, continuations=self.paused.pop(uid)))
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.uid += 1
            choices, most = self.random.choice((1, 1, 2, 4)), self.random.choice((1, 2, 3, 9, 40))
            prompt = self.random.choice((1, 2, self.random.randint(1, 70)))
            ends_at = tuple(self.random.choice((0, self.random.randint(1, most))) for _ in range(choices))
            prefix = sorted(self.random.randint(1, prompt + 20) for _ in range(self.random.choice((0, 1, 2))))
            names = [(f"{depth}-{self.random.randint(0, 1)}", end) for depth, end in enumerate(prefix)]
            joining.append(Asked(uid=self.uid, prompt=prompt, most=most, choices=choices, ends_at=ends_at, prefix=names))
        for asked in joining:
            self.asked[asked.uid] = asked
            self.groups[asked.uid] = ReferenceGroup(asked)
        return joining

    def act(self) -> tuple[Outcome | None, int, int, list[tuple[int, int]]]:
        """One command. Returns the shard's outcome, and the reference's prompt tokens, decodes and ended choices."""
        if self.random.random() < 0.15:
            self.filter()
            return None, 0, 0, []
        new = self.join() if self.random.random() < 0.5 else []
        named = {group.asked.uid for group in self.groups.values() if group.lacking} | {asked.uid for asked in new}
        chunks = [(uid, self.random.choice((1, 5, 100))) for uid in self.random.sample(sorted(named), len(named))]
        decode = not chunks or self.random.random() < 0.6
        tokens = self.random.choice((1, 7, 50, 400))
        self.before = {uid: (self.groups[uid].prompt, self.groups[uid].lacking) for uid in named}
        outcome = self.shard.prefill(new, chunks, tokens, decode) if chunks else self.shard.decode()
        return outcome, *self.step(chunks, tokens, decode)

    def step(self, chunks: list[tuple[int, int]], tokens: int, decode: bool) -> tuple[int, int, list[tuple[int, int]]]:
        running = [group for group in self.groups.values() if group.decodes] if decode else []
        decodes = 0
        for group in running:
            for each in group.live:
                decodes += 1
                each.computed += 1
                each.ended = each.computed - group.asked.prompt + 1 == each.limit
        left = tokens
        for most in (lambda bound: bound, lambda bound: 10**9):
            for uid, bound in chunks:
                left -= self.groups[uid].compute(min(most(bound), left))
        began = [self.groups[uid] for uid, _ in chunks if self.groups[uid].first()]
        finished = [
            (group.asked.uid, choice)
            for group in running + began
            for choice, each in group.sequences.items()
            if each.ended and (group.asked.uid, choice) not in self.finished_choices
        ]
        self.finished_choices.update(finished)
        self.groups = {uid: group for uid, group in self.groups.items() if group.live}
        return tokens - left if chunks else 0, decodes, finished

    finished_choices: set[tuple[int, int]]

    def filter(self) -> None:
        groups = list(self.groups)
        drop = [uid for uid in groups if self.random.random() < 0.05]
        end = [
            (uid, choice)
            for uid, group in self.groups.items()
            for choice in group.sequences
            if group.decodes and self.random.random() < 0.05 and not group.sequences[choice].ended
        ]
        pause = [uid for uid in groups if self.random.random() < 0.1]
        released = self.shard.filter(drop, pause, end)
        for uid in drop:
            del self.groups[uid]
        for uid, choice in end:
            if uid in self.groups:
                self.groups[uid].sequences[choice].ended = True
                self.finished_choices.add((uid, choice))
        self.groups = {uid: group for uid, group in self.groups.items() if group.live}
        assert [uid for uid, _, _ in released.paused] == [uid for uid in pause if uid in self.groups]
        for uid, grow, lacking in released.paused:
            group = self.groups.pop(uid)
            went_on = group.decodes or bool(group.asked.continuations)
            continuations = tuple(
                (choice, max(each.target, each.computed) - group.asked.prompt + 1)
                for choice, each in group.sequences.items()
                if not each.ended and went_on
            )
            self.paused[uid] = released.continuations[uid]
            assert released.continuations[uid] == continuations
            again = ReferenceGroup(group.asked)
            again.sequences = {
                c: ReferenceSequence(e.limit, max(e.target, e.computed), 0) for c, e in group.sequences.items() if not e.ended
            }
            assert lacking == again.lacking
            assert grow == again.pages(self.size, 2)


@pytest.mark.parametrize("seed", range(75))
def test_shard_counts_tokens_and_pages_like_the_reference_without_prefix_caching(seed: int) -> None:
    """Without a prefix cache, all counts follow from each sequence alone."""
    traffic = RandomCommands(seed, caching=False)
    traffic.finished_choices = set()
    for _ in range(120):
        outcome, prompt_tokens, decodes, finished = traffic.act()
        traffic.shard.audit()
        if outcome is None:
            continue
        assert (outcome.prompt_tokens, outcome.decode_tokens) == (prompt_tokens, decodes)
        assert sorted(outcome.finished) == sorted(finished)
        for uid, *standing in zip(outcome.uids, outcome.held, outcome.grow, outcome.lacking, strict=True):
            traffic.standing[uid] = tuple(standing)
        for uid, group in traffic.groups.items():
            held, lacking = group.pages(traffic.size, 0), group.lacking
            assert traffic.standing[uid] == (held, group.pages(traffic.size, 2) - held, lacking), uid
        assert outcome.free == traffic.pages - sum(group.pages(traffic.size, 0) for group in traffic.groups.values())


@pytest.mark.parametrize("seed", range(75))
def test_page_counts_and_growth_bounds_hold_with_prefix_caching(seed: int) -> None:
    """Whatever is shared, evicted and restored: pages are counted once, `grow` is an upper bound, and in the end all pages are
    free."""
    rng = random.Random(seed)
    traffic = RandomCommands(seed, caching=True)
    traffic.finished_choices = set()
    traffic.pages = rng.choice((60, 150, 600))
    traffic.shard = shard = IntegerShard(traffic.pages, traffic.size)
    bounds: dict[int, list[int]] = {}
    for _ in range(200):
        # As the router: no step unless all growth fits. Groups that don't fit are dropped.
        while shard.groups and sum(group.grow for group in shard.groups.values()) > shard.free:
            shard.filter(drop=[next(reversed(shard.groups))])
        fits = shard.free - sum(group.grow for group in shard.groups.values())
        new = []
        for asked in traffic.join():
            fits -= shard._needs(asked, tuple(asked.continuations))[1]
            if fits >= 0:
                new.append(asked)
        traffic.paused.clear()
        lacking = [group.asked.uid for group in shard.groups.values() if group.lacking]
        chunks = [(uid, rng.choice((1, 5, 100))) for uid in [*lacking, *(asked.uid for asked in new)]]
        decode = not chunks or rng.random() < 0.7
        outcome = shard.prefill(new, chunks, rng.choice((1, 7, 50)), decode) if chunks else shard.decode()
        shard.audit()
        assert outcome.free == shard.free
        for uid, group in shard.groups.items():
            reported_bounds = bounds.setdefault(uid, [])
            assert group.held <= min(reported_bounds[-2:], default=10**9), "the group grew beyond its reported bound"
            reported_bounds.append(group.held + group.grow)
            assert group.reported == (group.held, group.grow, group.lacking)
        if rng.random() < 0.1 and shard.groups:
            traffic.paused.update(shard.filter(pause=[rng.choice(list(shard.groups))]).continuations)
            for uid in traffic.paused:
                bounds.pop(uid)
            shard.audit()
        if rng.random() < 0.05 and shard.groups:
            shard.failing.add(rng.choice(list(shard.groups)))
    shard.filter(drop=list(shard.groups))
    shard.audit()
    assert shard.free == traffic.pages
