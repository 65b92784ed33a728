"""Logits after every node of a tree are those of a plain forward over its path, by transformers; and so are those after what was
accepted, once it has been moved to where it belongs."""

import random

import pytest
import torch

from penstock.kernels import attention
from penstock.shard.cache import Cache
from penstock.shard.decoding.tree import ROOT, Tree, moves
from penstock.shard.engine import Engine
from penstock.shard.sequence import Sequence
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_tree import path_to, random_tree

PROMPT = prompt(5, 19)
NEAR = 1e-4
FAR = 1e-2  # what a fault makes of it, at least
NEXT = 7


@torch.inference_mode()
def forward(engine: Engine, sequence: Sequence, tokens: list[int], parents: list[int] | None = None) -> torch.Tensor:
    """Logits of all tokens that follow what is computed."""
    engine.pool.extend(sequence.pages, sequence.computed + len(tokens))
    span = Span(sequence, sequence.computed, tokens, parents, wanted=len(tokens))
    logits = engine.decoder.logits(engine.forward([span]))
    assert logits is not None
    return logits


def farthest(family: str, tree: Tree, page_size: int, chance: random.Random) -> tuple[float, float]:
    """From transformers' logits: of the tree's nodes, and of what follows an accepted path and one token more."""
    engine = tiny.engine(family, page_size)
    sequence = tiny.group(0, PROMPT, 99).sequences[0]
    forward(engine, sequence, PROMPT[:-1])
    sequence.computed = len(PROMPT) - 1
    found = forward(engine, sequence, [PROMPT[-1], *tree.tokens], tree.query(1))
    paths = [[tree.tokens[one] for one in path_to(tree, node)] for node in (ROOT, *range(len(tree)))]
    wanted = torch.stack([tiny.expected_logits(family, [*PROMPT, *path])[-1] for path in paths])
    node = max(chance.sample(range(len(tree)), 8), key=lambda one: len(moves(path_to(tree, one))))
    start = len(PROMPT)
    slots = [
        [sequence.pages[(start + at) // page_size] * page_size + (start + at) % page_size for at in pair]
        for pair in moves(path_to(tree, node))
    ]
    assert slots, "a path that stays where it is shows nothing"
    engine.cache.move([[(source, target) for source, target in slots]])
    sequence.computed = start + len(paths[1 + node])
    after = forward(engine, sequence, [NEXT])
    wanted_after = tiny.expected_logits(family, [*PROMPT, *paths[1 + node], NEXT])[-1]
    return float((found - wanted).abs().max()), float((after - wanted_after).abs().max())


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_tree_is_computed_as_its_paths_are(family: str, page_size: int) -> None:
    """mistral's window is shorter than the text, so that ancestors leave it."""
    for seed in range(3):
        own, after = farthest(family, random_tree(seed, 30), page_size, random.Random(seed))
        assert own < NEAR
        assert after < NEAR


@pytest.mark.parametrize("fault", ["depths", "a bit", "moves"])
def test_the_check_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.ancestry

    def faulty(parents: list[int]) -> tuple[list[list[bool]], list[int]]:
        sees, depths = plain(parents)
        deepest = depths.index(max(depths))
        sees[deepest][parents[deepest]] = False
        return sees, depths

    if fault == "moves":
        monkeypatch.setattr(Cache, "move", lambda self, rows: None)
    elif fault == "depths":
        monkeypatch.setattr(attention, "depths", lambda parents: list(range(len(parents))))
    else:
        monkeypatch.setattr(attention, "ancestry", faulty)
    own, after = farthest("llama", random_tree(0, 30), 4, random.Random(0))
    assert (own > FAR) == (fault != "moves")
    assert after > FAR
