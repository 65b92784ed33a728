"""What a tree leaves in the cache is what plain decoding would have left there: a real model goes on from it as if nothing had been
drafted, over pages of every size."""

import random
from collections.abc import Sequence

import pytest
import torch

from penstock.kernels.paging import move_slots
from penstock.shard.decoding import tree, verify
from penstock.shard.decoding.tree import Tree, chain, merge
from penstock.shard.decoding.verify import Draft, VerificationRule
from penstock.shard.engine import Engine
from penstock.shard.sequence import Group, Sampling
from penstock.shard.step import Span
from penstock.tests.shard import configurations, tiny

PROMPT = [5, 17, 99, 3, 42, 42, 7, 23, 64]
COUNT = 40
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.9, seed=5, frequency_penalty=0.3)}


def begun(engine: Engine, sampling: Sampling) -> Group:
    """A group whose prompt is computed but for its last token."""
    group = tiny.group(0, PROMPT, COUNT, sampling)
    group.waiting = []
    run(engine, group, Span(group.sequences[0], 0, PROMPT[:-1], wanted=0))
    group.sequences[0].computed = len(PROMPT) - 1
    return group


@torch.inference_mode()
def run(engine: Engine, group: Group, span: Span) -> torch.Tensor | None:
    engine.pool.extend(group.sequences[0].pages, span.start + len(span.tokens))
    hidden = engine.forward([span])
    return engine.decoder.logits(hidden) if span.wanted else None


def step(engine: Engine, group: Group, drafts: Tree) -> list[int]:
    """One step; the path that was accepted."""
    [sequence] = group.sequences
    start = sequence.computed
    tokens = [*sequence.tokens[start:], *drafts.tokens]
    span = Span(sequence, start, tokens, drafts.query(len(sequence.tokens) - start), wanted=1 + len(drafts))
    logits = run(engine, group, span)
    assert logits is not None
    picks = verify.pick(logits, verify.rows(group, sequence, drafts), [Draft(drafts)], VerificationRule.GUMBEL)
    accepted = verify.accept(group, sequence, drafts, picks)
    first = len(sequence.tokens)
    moved = tree.moves(accepted.path)
    if moved:
        size = engine.pool.page_size
        slots = [[sequence.pages[(first + i) // size] * size + (first + i) % size for i in pair] for pair in moved]
        sources, targets = torch.tensor(slots).unbind(1)
        move_slots(engine.cache.pages[0].flatten(1, 2), sources, targets, torch.tensor([0, len(slots)]))
    sequence.tokens.extend(pick.token for pick in accepted.picks if pick)
    sequence.computed = len(sequence.tokens) - 1
    return accepted.path


def plainly(sampling: Sampling) -> list[int]:
    engine = tiny.engine("llama")
    group = begun(engine, sampling)
    while group.sequences[0].generated < COUNT:
        step(engine, group, Tree())
    return list(group.sequences[0].tokens)


def speculatively(sampling: Sampling, page_size: int, text: Sequence[int]) -> tuple[list[int], int, int]:
    """Its tokens, steps and moves: by random trees, the right path somewhere in them and seldom first."""
    chance = random.Random(page_size)
    engine = tiny.engine("llama", page_size)
    group = begun(engine, sampling)
    [sequence] = group.sequences
    steps = moves = 0
    while sequence.generated < COUNT:
        room = verify.room(group, sequence)
        right = text[len(sequence.tokens) :][: min(room, chance.randint(0, 5))]
        wrong = [
            [*right[: chance.randint(0, 3)], *(chance.randrange(configurations.VOCABULARY) for _ in range(4))] for _ in range(4)
        ]
        trees = [chain(path, [-chance.random() for _ in path]) for path in (some[:room] for some in wrong)]
        drafts = merge([chain(right, [-1.5 for _ in right]), *trees])
        path = step(engine, group, drafts)
        steps, moves = steps + 1, moves + len(tree.moves(path))
    return list(sequence.tokens), steps, moves


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_a_model_goes_on_as_if_nothing_had_been_drafted(name: str, page_size: int) -> None:
    text = plainly(SAMPLINGS[name])
    found, steps, moves = speculatively(SAMPLINGS[name], page_size, text)
    assert found == text
    assert steps < COUNT / 2
    assert moves >= 8


@pytest.mark.parametrize("fault", ["nothing is moved", "parents are forgotten"])
def test_the_check_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plainly(SAMPLINGS["sampled"])
    if fault == "nothing is moved":
        monkeypatch.setattr(tree, "moves", lambda path: [])
    else:
        monkeypatch.setattr(Tree, "query", lambda self, lacking: None)
    found, _, _ = speculatively(SAMPLINGS["sampled"], 4, text)
    assert found != text
