"""Draft trees: depth-first layout with the most probable children first, merging, cutting the least probable nodes, acceptance, and
the moves of accepted nodes to the slots of plain decoding; against exhaustive search and simple definitions."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from penstock.kernels.attention import ancestry
from penstock.proto.speculation import MOST_DRAFTS, Speculation
from penstock.shard.decoding.tree import MOST_NODES, ROOT, Tree, chain, lay, merge, moves

SEEDS = range(25)
EMPTY = Tree()


def random_nodes(seed: int, nodes: int, vocabulary: int = 5) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and log-probabilities of a random tree, in the order of its growth."""
    chance = random.Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    logprobs: list[float] = []
    taken: set[tuple[int, int]] = set()
    while len(tokens) < nodes:
        key = chance.randrange(-1, len(tokens)), chance.randrange(vocabulary)
        if key in taken:
            continue
        taken.add(key)
        parents.append(key[0])
        tokens.append(key[1])
        logprobs.append((logprobs[key[0]] if key[0] >= 0 else 0.0) + math.log(chance.choice([0.1, 0.3, 0.5, 0.9])))
    return tokens, parents, logprobs


def random_tree(seed: int, nodes: int | None = None) -> Tree:
    return lay(*random_nodes(seed, random.Random(-seed).randint(0, 20) if nodes is None else nodes))[0]


def path_to(tree: Tree, node: int) -> list[int]:
    """The nodes on the path from the root to `node`, including it."""
    return [*path_to(tree, tree.parents[node]), node] if node != ROOT else []


def paths(tree: Tree) -> dict[tuple[int, ...], float]:
    """The tokens of every node's path, and the node's log-probability."""
    found = {tuple(tree.tokens[i] for i in path_to(tree, node)): tree.logprobs[node] for node in range(len(tree))}
    assert len(found) == len(tree)
    return found


def check_layout(tree: Tree) -> None:
    """Checks the layout that `decoding/tree.py` promises."""
    assert len(tree.tokens) == len(tree.parents) == len(tree.logprobs)
    paths(tree)
    open_nodes = [ROOT]
    for node, parent in enumerate(tree.parents):
        assert parent in open_nodes, "not depth-first"
        del open_nodes[open_nodes.index(parent) + 1 :]
        open_nodes.append(node)
        assert tree.logprobs[node] <= (tree.logprobs[parent] if parent >= 0 else 0.0)
    for family in tree.children:
        own = [tree.logprobs[node] for node in family]
        assert own == sorted(own, reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_layout_keeps_paths_and_puts_the_most_probable_first(seed: int) -> None:
    tokens, parents, logprobs = random_nodes(seed, seed % 40)
    tree, order = lay(tokens, parents, logprobs)
    check_layout(tree)
    assert sorted(order) == list(range(len(tokens)))
    assert [tokens[node] for node in order] == list(tree.tokens)
    assert [logprobs[node] for node in order] == list(tree.logprobs)
    assert [parents[node] for node in order] == [order[parent] if parent >= 0 else ROOT for parent in tree.parents]
    node = ROOT
    for place in itertools.count():  # the first chain is that of the most probable children
        family = [i for i, parent in enumerate(parents) if parent == node]
        if not family:
            break
        node = max(family, key=lambda i: (logprobs[i], -i))
        assert order[place] == node


def test_children_are_never_more_probable_than_their_parent() -> None:
    tree, _ = lay([1, 2, 3], [-1, 0, 1], [-0.5, -0.4, -0.6])
    assert tree.logprobs == (-0.5, -0.5, -0.6)


def test_layout_refuses_nodes_before_their_parents() -> None:
    with pytest.raises(AssertionError, match="node 0 stands before its parent 1"):
        lay([1, 2], [1, -1], [0.0, 0.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_merge_keeps_every_path_once_with_its_best_probability(seed: int) -> None:
    trees = [random_tree(5 * seed + i) for i in range(seed % 4)]
    merged = merge(trees)
    check_layout(merged)
    known = [paths(tree) for tree in trees]
    wanted = {path: max(own[path] for own in known if path in own) for path in {path for own in known for path in own}}
    assert paths(merged) == wanted
    assert paths(merge([merged, *trees])) == wanted


def test_equal_tokens_at_one_depth_under_different_parents_are_different_nodes() -> None:
    merged = merge([chain([1, 7]), chain([2, 7])])
    assert sorted(paths(merged)) == [(1,), (1, 7), (2,), (2, 7)]


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_keeps_the_most_probable_subtree(seed: int) -> None:
    tree = random_tree(seed, 9)
    for nodes in range(10):
        kept = tree.cut(nodes)
        check_layout(kept)
        assert len(kept) == nodes
        assert paths(kept).items() <= paths(tree).items()
        assert math.fsum(map(math.exp, kept.logprobs)) == pytest.approx(best_subtree_probability(tree, nodes))
    assert tree.cut(100) == tree


def best_subtree_probability(tree: Tree, nodes: int) -> float:
    """The largest total probability of a subtree with so many nodes, by trying all."""
    best = 0.0
    for chosen in itertools.combinations(range(len(tree)), nodes):
        if all(tree.parents[node] in (ROOT, *chosen) for node in chosen):
            best = max(best, math.fsum(math.exp(tree.logprobs[node]) for node in chosen))
    return best


@pytest.mark.parametrize("seed", SEEDS)
def test_depths_match_the_ancestry_used_by_attention(seed: int) -> None:
    tree = random_tree(seed)
    assert tree.depths == [len(path_to(tree, node)) - 1 for node in range(len(tree))] == ancestry(tree.parents)[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_query_of_a_span_attends_to_lacking_tokens_and_ancestors(seed: int) -> None:
    tree, lacking = random_tree(seed), 1 + seed % 3
    parents = tree.query(lacking)
    if parents is None:
        assert tree.is_chain
        parents = list(range(-1, lacking + len(tree) - 1))
    visible, depths = ancestry(parents)
    assert depths == [*range(lacking), *(lacking + depth for depth in tree.depths)]
    for node in range(len(tree)):
        own = {lacking + i for i in path_to(tree, node)} | set(range(lacking))
        assert {i for i, is_visible in enumerate(visible[lacking + node]) if is_visible} == own


def test_a_chain_needs_no_parents() -> None:
    assert chain([4, 5, 6]).query(2) is None
    assert EMPTY.query(1) is None
    assert chain([4, 5, 6], [-1.0, -0.5, -0.25]).logprobs == (-1.0, -1.5, -1.75)


@pytest.mark.parametrize("seed", SEEDS)
def test_accepted_path_follows_the_picked_tokens(seed: int) -> None:
    tree, chance = random_tree(seed), random.Random(seed)
    picked = [chance.randrange(5) for _ in range(len(tree) + 1)]
    accepted = tree.accepted(picked)
    text = [picked[0]]
    for node in accepted:
        assert tuple(tree.tokens[i] for i in path_to(tree, node)) == tuple(text)
        text.append(picked[node + 1])
    assert tuple(text) not in paths(tree)
    ranks, widths = tree.trial(accepted)
    families = tree.children
    assert [families[parent + 1][rank] for parent, rank in zip([ROOT, *accepted], ranks, strict=False)] == accepted
    assert len(ranks) == len(accepted)
    assert widths == [len(families[node + 1]) for node in (ROOT, *accepted) if families[node + 1]]


def test_accepted_path_ends_at_a_missing_pick() -> None:
    assert chain([4, 5, 6]).accepted([4, 5, None, 6]) == [0, 1]
    assert chain([4, 5, 6]).accepted([None, 5, 6, 6]) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_bring_accepted_nodes_to_consecutive_slots(seed: int) -> None:
    tree, chance = random_tree(seed, 12), random.Random(seed)
    path = path_to(tree, chance.randrange(12))
    slots: list[object] = list(range(12))
    for source, target in moves(path):
        assert target < source, "a slot would be overwritten before it is moved"
        slots[target] = slots[source]
    assert slots[: len(path)] == path


def test_check_catches_moves_in_reverse_order() -> None:
    slots = list(range(3))
    for source, target in reversed(moves([1, 2])):
        slots[target] = slots[source]
    assert slots[:2] != [1, 2]


def test_accepting_the_first_chain_needs_no_moves() -> None:
    tree = random_tree(1, 20)
    node, first = ROOT, []
    while tree.children[node + 1]:
        node = tree.children[node + 1][0]
        first.append(node)
        assert moves(first) == []


@pytest.mark.parametrize(("widths", "nodes"), [((), 0), ((1, 1, 1), 3), ((4, 2, 2, 1), 44), ((1, 1, 3, 1, 1, 1, 1, 1), 20)])
def test_node_count_of_layered_trees_is_within_the_limit(widths: Sequence[int], nodes: int) -> None:
    assert Speculation(widths=tuple(widths)).grown == nodes <= MOST_NODES == MOST_DRAFTS
