"""Logits at every node of a draft tree equal transformers' logits of the node's path; so do logits after an accepted path, once its
keys and values have been moved to their slots. Planted faults show that the check finds them."""

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
FAR = 1e-2  # a fault makes at least this difference
NEXT = 7


@torch.inference_mode()
def forward(engine: Engine, sequence: Sequence, tokens: list[int], parents: list[int] | None = None) -> torch.Tensor:
    """Logits of all given tokens, which follow the computed ones."""
    engine.pool.extend(sequence.pages, sequence.computed + len(tokens))
    span = Span(sequence, sequence.computed, tokens, parents=parents, wanted=len(tokens))
    logits = engine.decoder.logits(engine.forward([span]))
    assert logits is not None
    return logits


def largest_differences(family: str, tree: Tree, page_size: int, chance: random.Random) -> tuple[float, float]:
    """The largest differences from transformers' logits: at the tree's nodes, and after an accepted path and one more token."""
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
    assert slots, "a path whose slots aren't moved tests nothing"
    engine.cache.move([[(source, target) for source, target in slots]])
    sequence.computed = start + len(paths[1 + node])
    after = forward(engine, sequence, [NEXT])
    wanted_after = tiny.expected_logits(family, [*PROMPT, *paths[1 + node], NEXT])[-1]
    return float((found - wanted).abs().max()), float((after - wanted_after).abs().max())


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_tree_logits_match_transformers_logits_of_each_path(family: str, page_size: int) -> None:
    """mistral's sliding window is shorter than the text, so ancestors fall out of it."""
    for seed in range(3):
        at_nodes, after = largest_differences(family, random_tree(seed, 30), page_size, random.Random(seed))
        assert at_nodes < NEAR
        assert after < NEAR


@pytest.mark.parametrize("fault", ["depths", "ancestry", "moves"])
def test_check_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.ancestry

    def without_the_parent(parents: list[int]) -> tuple[list[list[bool]], list[int]]:
        visible, depths = plain(parents)
        deepest = depths.index(max(depths))
        visible[deepest][parents[deepest]] = False
        return visible, depths

    if fault == "moves":
        monkeypatch.setattr(Cache, "move", lambda self, rows: None)
    elif fault == "depths":
        monkeypatch.setattr(attention, "depths", lambda parents: list(range(len(parents))))
    else:
        monkeypatch.setattr(attention, "ancestry", without_the_parent)
    at_nodes, after = largest_differences("llama", random_tree(0, 30), 4, random.Random(0))
    assert (at_nodes > FAR) == (fault != "moves")
    assert after > FAR
