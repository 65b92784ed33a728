"""After an accepted path of a draft tree is moved, the KV cache is as after plain decoding: a real model continues with the same
tokens, for several page sizes. Planted faults show that the check finds them."""

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


def group_with_prompt(engine: Engine, sampling: Sampling) -> Group:
    """A group whose prompt is computed except for its last token."""
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
    """Runs one step; the accepted path."""
    [sequence] = group.sequences
    start = sequence.computed
    tokens = [*sequence.tokens[start:], *drafts.tokens]
    span = Span(sequence, start, tokens, parents=drafts.query(len(sequence.tokens) - start), wanted=1 + len(drafts))
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


def decode_plainly(sampling: Sampling) -> list[int]:
    engine = tiny.engine("llama")
    group = group_with_prompt(engine, sampling)
    while group.sequences[0].generated < COUNT:
        step(engine, group, Tree())
    return list(group.sequences[0].tokens)


def decode_with_random_trees(sampling: Sampling, page_size: int, text: Sequence[int]) -> tuple[list[int], int, int]:
    """Tokens, steps and moves with random trees that contain the right path, seldom as the first one."""
    chance = random.Random(page_size)
    engine = tiny.engine("llama", page_size)
    group = group_with_prompt(engine, sampling)
    [sequence] = group.sequences
    steps = move_count = 0
    while sequence.generated < COUNT:
        room = verify.room(group, sequence)
        correct = text[len(sequence.tokens) :][: min(room, chance.randint(0, 5))]
        incorrect = [
            [*correct[: chance.randint(0, 3)], *(chance.randrange(configurations.VOCABULARY) for _ in range(4))] for _ in range(4)
        ]
        trees = [chain(path, [-chance.random() for _ in path]) for path in (tokens[:room] for tokens in incorrect)]
        drafts = merge([chain(correct, [-1.5 for _ in correct]), *trees])
        path = step(engine, group, drafts)
        steps, move_count = steps + 1, move_count + len(tree.moves(path))
    return list(sequence.tokens), steps, move_count


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_model_continues_after_accepted_drafts_as_in_plain_decoding(name: str, page_size: int) -> None:
    text = decode_plainly(SAMPLINGS[name])
    found, steps, move_count = decode_with_random_trees(SAMPLINGS[name], page_size, text)
    assert found == text
    assert steps < COUNT / 2
    assert move_count >= 8


@pytest.mark.parametrize("fault", ["no moves", "no parents"])
def test_check_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = decode_plainly(SAMPLINGS["sampled"])
    if fault == "no moves":
        monkeypatch.setattr(tree, "moves", lambda path: [])
    else:
        monkeypatch.setattr(Tree, "query", lambda self, lacking: None)
    found, _, _ = decode_with_random_trees(SAMPLINGS["sampled"], 4, text)
    assert found != text
