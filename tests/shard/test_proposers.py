"""Draft proposers: n-gram lookup of repeated text with an incremental index, against a scan; trees and chains sampled from a draft
model with the target's noise, against plain sampling of a toy model."""

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.shard.decoding import sampler, verify
from penstock.shard.decoding.growth import BestFirstTree, Drafting, Frontier, LayeredTree, TreeShape, best
from penstock.shard.decoding.lookup import LONGEST, NgramIndex, look_up
from penstock.shard.decoding.proposers import CATCH_UP, SHORT, DraftRequest, MergedProposer, NgramProposer
from penstock.shard.decoding.tree import ROOT, Tree
from penstock.shard.decoding.verify import VerificationRule
from penstock.shard.sequence import Sampling
from penstock.tests.shard.test_tree import path_to
from penstock.tests.shard.toy import TableModel, group, last_two_tokens, next_token_distribution

MODEL = TableModel(30, 5)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[i] for i in path_to(tree, node)) for node in range(len(tree))}


# Lookup


def earlier_by_scan(text: Sequence[int]) -> tuple[int, int]:
    """The length of the longest repeated suffix, and the place behind its most recent earlier occurrence."""
    for length in range(min(LONGEST, len(text)), 0, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[len(text) - length :]:
                return length, place
    return 0, 0


@pytest.mark.parametrize("seed", range(40))
def test_ngram_index_finds_the_repeats_of_a_full_scan(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(3) for _ in range(chance.randint(1, 60))]
    index, known = NgramIndex(), 0
    while known < len(text):
        known = min(len(text), known + chance.choice([0, 1, 1, 2, 20]))
        index.follow(text[:known])
        assert index.earlier() == earlier_by_scan(text[:known])


@pytest.mark.parametrize("seed", range(40))
def test_lookup_continues_the_longest_repeated_suffix(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(chance.randint(1, 40))]
    index = NgramIndex()
    index.follow(text)
    tree = look_up(index, nodes=6, depth=5)
    length, place = earlier_by_scan(text)
    wanted = list(text)
    for _ in range(5 if length else 0):
        wanted.append(wanted[place + len(wanted) - len(text)])  # beyond the text's end it goes on with itself
    assert list(tree.tokens) == wanted[len(text) :]
    assert tree.is_chain


def test_lookup_takes_the_most_recent_continuation() -> None:
    index = NgramIndex()
    index.follow([1, 2, 7, 7, 1, 2, 8, 8, 1, 2, 7, 9, 1, 2])
    assert look_up(index, 9, 2).tokens == (7, 9)
    assert len(look_up(index, 3, 2)) == 2
    assert len(look_up(index, 3, 9)) == 3


def test_lookup_is_more_confident_after_longer_matches() -> None:
    longer, shorter = NgramIndex(), NgramIndex()
    longer.follow([1, 2, 7, 7, 1, 2])
    shorter.follow([1, 2, 7, 7, 2])
    assert look_up(longer, 9, 1).tokens == look_up(shorter, 9, 1).tokens == (7,)
    assert look_up(longer, 9, 1).logprobs[0] > look_up(shorter, 9, 1).logprobs[0]


def test_lookup_finds_nothing_for_a_new_token_or_an_empty_text() -> None:
    index = NgramIndex()
    assert look_up(index, 4, 4) == Tree()
    index.follow([1, 2, 3])
    assert look_up(index, 4, 4) == Tree()
    index.follow([1, 2, 3, 3])
    assert look_up(index, 0, 4) == look_up(index, 4, 0) == Tree()


def test_index_reads_only_new_tokens() -> None:
    """Only the new tokens of a long text are read."""

    class CountingText(Sequence[int]):
        def __init__(self, length: int) -> None:
            self.length = length
            self.read = 0

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, place: int | slice) -> object:  # type: ignore[override]
            assert isinstance(place, slice)
            own = [5] * len(range(*place.indices(self.length)))
            self.read += len(own)
            return own

    index = NgramIndex()
    index.follow(CountingText(10_000))
    last = CountingText(10_001)
    index.follow(last)
    assert last.read == 1
    assert look_up(index, 4, 4).tokens == (5, 5, 5, 5)


def test_ngram_proposer_serves_several_sequences() -> None:
    proposer = NgramProposer()
    requests = [
        DraftRequest(one := group(uid, Sampling(), 9, text), one.sequences[0], 4, 3) for uid, text in enumerate([(1, 1), (1, 2)])
    ]
    first, second = proposer.propose(requests).drafts
    assert first.tree.tokens == (1, 1, 1)
    assert not len(second.tree)
    requests[1].sequence.tokens.extend([1])
    assert proposer.propose(requests).drafts[1].tree.tokens == (2, 1, 2)


def test_long_texts_are_indexed_over_several_steps_without_delaying_others() -> None:
    proposer, chance = NgramProposer(), random.Random(1)
    texts = [[chance.randrange(9) for _ in range(3 * CATCH_UP)], [3] * 9, [chance.randrange(9) for _ in range(2 * CATCH_UP)]]
    requests = [DraftRequest(one := group(uid, Sampling(), 9, text), one.sequences[0], 4, 3) for uid, text in enumerate(texts)]
    ready = list[list[bool]]()
    for _ in range(8):
        before = [len(one.sequence.ngram_index.tokens) if one.sequence.ngram_index else 0 for one in requests]
        ready.append([len(draft.tree) > 0 for draft in proposer.propose(requests).drafts])
        lengths = [len(one.sequence.ngram_index.tokens) for one in requests if one.sequence.ngram_index]
        assert sum(lengths) - sum(before) <= CATCH_UP + SHORT * len(requests)
        for one in requests:
            one.sequence.tokens.append(3)
    assert ready[0] == [False, True, False]
    assert all(short for _, short, _ in ready)
    assert ready[-1] == [True, True, True]
    whole = NgramIndex()
    whole.follow(requests[0].sequence.tokens[:-1])
    assert requests[0].sequence.ngram_index is not None
    assert requests[0].sequence.ngram_index.earlier() == whole.earlier()


# A draft model


class CheckedModel:
    """A draft model that checks that it is called as the protocol says."""

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self.rounds: list[int] = []
        self._known: dict[int, set[int]] = {}

    def ready(self, sequences: Sequence[Any]) -> list[bool]:
        """See Model."""
        return [True] * len(sequences)

    def logits(self, wanted: Sequence[Frontier]) -> Tensor:
        """See Model."""
        for one in wanted:
            known = self._known.setdefault(id(one.sequence), set())
            assert one.nodes
            assert not known & set(one.nodes), "a node is requested twice"
            assert len(set(one.nodes)) == len(one.nodes)
            assert all(node == ROOT or one.parents[node] in known for node in one.nodes), "a parent was never computed"
            known.update(one.nodes)
        self.rounds.append(sum(len(one.nodes) for one in wanted))
        return self._model.logits_after([last_two_tokens(one, node) for one in wanted for node in one.nodes])


GROWTHS: dict[str, TreeShape] = {
    "chain": LayeredTree((1,) * 6),
    "expansion": LayeredTree((3, 2, 1, 1)),
    "best first": BestFirstTree(5, together=3, width=4),
    "one by one": BestFirstTree(20, together=1, width=2),
}


@functools.cache
def requests(temperature: float = 1.0) -> list[DraftRequest]:
    """Requests for very different numbers of nodes and depths."""
    chance = random.Random(3)
    result = []
    for uid in range(30):
        one = group(uid, Sampling(temperature=temperature, seed=uid, top_k=uid % 3 * 4), 50, (uid, 1))
        result.append(DraftRequest(one, one.sequences[0], chance.randint(0, 40), chance.randint(0, 6)))
    return result


@pytest.mark.parametrize("name", list(GROWTHS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_no_larger_and_no_deeper_than_requested(name: str, temperature: float) -> None:
    checked, shape = CheckedModel(MODEL), GROWTHS[name]
    drafts = Drafting(checked, shape).propose(requests(temperature)).drafts
    assert len(checked.rounds) <= shape.rounds
    for one, draft in zip(requests(temperature), drafts, strict=True):
        assert len(draft.tree) <= one.nodes
        assert max(draft.tree.depths, default=-1) < one.depth
        assert paths(draft.tree) == {path for path in paths(draft.tree) if len(path) == 1 or path[:-1] in paths(draft.tree)}
    assert sum(len(draft.tree) for draft in drafts) > 60


def test_draft_model_is_not_called_if_no_drafts_are_requested() -> None:
    checked = CheckedModel(MODEL)
    one = group(0, Sampling(), 9)
    none = [DraftRequest(one, one.sequences[0], 0, 5), DraftRequest(one, one.sequences[0], 5, 0)]
    for shape in GROWTHS.values():
        assert [len(draft.tree) for draft in Drafting(checked, shape).propose(none).drafts] == [0, 0]
    assert checked.rounds == []


@pytest.mark.parametrize("nodes", [15, 14, 8, 3, 2, 1])
def test_layered_tree_keeps_its_most_probable_nodes(nodes: int) -> None:
    one = group(0, Sampling(temperature=1.0), 50)
    [whole] = Drafting(MODEL, LayeredTree((3, 2, 1))).propose([DraftRequest(one, one.sequences[0], 15, 9)]).drafts
    [draft] = Drafting(MODEL, LayeredTree((3, 2, 1))).propose([DraftRequest(one, one.sequences[0], nodes, 9)]).drafts
    assert len(whole.tree) == 15
    assert draft.tree.tokens == whole.tree.cut(nodes).tokens
    assert draft.tree.parents == whole.tree.cut(nodes).parents


@pytest.mark.parametrize(("nodes", "widths"), [(15, (3, 2, 1)), (14, (3, 2)), (8, (3, 1)), (4, (3,)), (2, (2,)), (0, ())])
def test_layered_tree_for_rejection_is_narrowed_independently_of_samples(nodes: int, widths: tuple[int, ...]) -> None:
    for seed in range(20):
        one = group(0, Sampling(temperature=1.0, seed=seed), 50)
        drafting = Drafting(MODEL, LayeredTree((3, 2, 1)), VerificationRule.REJECTION)
        [draft] = drafting.propose([DraftRequest(one, one.sequences[0], nodes, 9)]).drafts
        assert len(draft.tree) <= nodes
        for depth, tries in zip([-1, *draft.tree.depths], draft.drawn, strict=False):
            assert len(tries) == (*widths, 0)[depth + 1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chain_equals_plain_sampling_from_the_draft_model(temperature: float) -> None:
    """With the target's noise, so that a draft model that agrees with the target proposes what the target samples."""
    for uid in range(20):
        one = group(uid, Sampling(temperature=temperature, seed=uid, frequency_penalty=0.5), 50, (uid, 2))
        [draft] = Drafting(MODEL, LayeredTree((1,) * 5)).propose([DraftRequest(one, one.sequences[0], 5, 9)]).drafts
        for token in draft.tree.tokens:
            [pick] = sampler.pick(MODEL.logits_after([one.sequences[0].tokens[-2:]]), [verify.row(one, one.sequences[0], [])])
            assert pick is not None
            assert pick.token == token
            one.sequences[0].tokens.append(token)


def test_children_are_the_best_logits_plus_noise_with_matching_logprobs() -> None:
    from penstock.kernels.noise import gumbel_all

    one = group(0, Sampling(temperature=0.7, seed=11), 50)
    logits = MODEL.logits_after([(3, 4)])
    ids, logprobs = best(logits, [verify.row(one, one.sequences[0], [5, 6])], 4)
    noise = gumbel_all(torch.tensor([11]), torch.tensor([0]), torch.tensor([2]), MODEL.vocabulary)
    sums = logits / 0.7 + noise
    torch.testing.assert_close(ids, sums.topk(4).indices)
    torch.testing.assert_close(logprobs, sums.log_softmax(-1).topk(4).values)


def test_filtered_tokens_are_not_proposed() -> None:
    """Not even if more children are requested than there are tokens left."""
    one = group(0, Sampling(temperature=1.0, top_k=2), 50)
    [draft] = Drafting(MODEL, LayeredTree((5,))).propose([DraftRequest(one, one.sequences[0], 9, 9)]).drafts
    allowed = {
        token for token, own in enumerate(next_token_distribution(MODEL, Sampling(temperature=1.0, top_k=2), (1, 1), 2)) if own
    }
    assert set(draft.tree.tokens) == allowed
    mixed = [verify.row(one, one.sequences[0], []), verify.row(group(1, Sampling(), 9), one.sequences[0], [])]
    ids, logprobs = best(MODEL.logits_after([(1, 1), (1, 1)]), mixed, 5)
    assert logprobs.isfinite().sum(-1).tolist() == [2, 5]
    assert set(ids[0, :2].tolist()) == allowed


def path_logprobs(one: DraftRequest, depth: int) -> dict[tuple[int, ...], float]:
    """Every path up to a depth, and its log-probability by the model."""
    found: dict[tuple[int, ...], float] = {(): 0.0}
    layer = [()]
    for _ in range(depth):
        layer = [(*path, token) for path in layer for token in range(MODEL.vocabulary)]
        for path in layer:
            text = [*one.sequence.tokens, *path[:-1]]
            found[path] = found[path[:-1]] + float(MODEL.table[text[-2], text[-1]].log_softmax(-1)[path[-1]])
    del found[()]
    return found


def test_best_first_tree_finds_the_most_probable_nodes() -> None:
    one = group(0, Sampling(), 50, (7, 8))
    wanted = DraftRequest(one, one.sequences[0], 8, 2)
    [draft] = Drafting(MODEL, BestFirstTree(9, together=8, width=8)).propose([wanted]).drafts
    known = path_logprobs(wanted, 2)
    assert paths(draft.tree) == set(sorted(known, key=lambda path: -known[path])[:8])


def test_best_first_tree_stops_when_no_further_node_could_be_kept() -> None:
    checked = CheckedModel(MODEL)
    one = group(0, Sampling(), 50, (7, 8))
    Drafting(checked, BestFirstTree(100, together=1, width=8)).propose([DraftRequest(one, one.sequences[0], 3, 50)])
    assert len(checked.rounds) < 8


def test_best_first_tree_has_more_accepted_than_a_chain_of_as_many_nodes() -> None:
    """With a draft model that is often wrong. If the tree were no better than the chain, its order would be at fault."""
    target, counts = MODEL.perturbed(9, 1.0), {}
    groups = [group(uid, Sampling(temperature=1.0, seed=uid), 50, (uid % 30, 3)) for uid in range(400)]
    for name, shape in (("chain", LayeredTree((1,) * 8)), ("tree", BestFirstTree(4, together=4, width=4))):
        wanted = [DraftRequest(one, one.sequences[0], 8, 8) for one in groups]
        drafts = Drafting(MODEL, shape).propose(wanted).drafts
        rows = [row for one, draft in zip(groups, drafts, strict=True) for row in verify.rows(one, one.sequences[0], draft.tree)]
        picks = verify.pick(target.logits_after([row.tokens[-2:] for row in rows]), rows, drafts, VerificationRule.GUMBEL)
        first, accepted = 0, 0
        for draft in drafts:
            accepted += len(draft.tree.accepted([pick.token if pick else None for pick in picks[first:]]))
            first += 1 + len(draft.tree)
        counts[name] = accepted / len(drafts)
    assert counts["tree"] > 1.15 * counts["chain"]


# Several proposers


def test_drafts_of_several_proposers_are_merged_into_one_tree() -> None:
    text = (1, 2, 3, 1, 2, 4, 1, 2)
    one = group(0, Sampling(), 50, text)
    wanted = [DraftRequest(one, one.sequences[0], 6, 4)]
    looked_up = NgramProposer().propose([DraftRequest(one, one.sequences[0], 6, 4)]).drafts[0].tree
    grown = Drafting(MODEL, LayeredTree((2, 1))).propose(wanted).drafts[0].tree
    [draft] = MergedProposer([NgramProposer(), Drafting(MODEL, LayeredTree((2, 1)))]).propose(wanted).drafts
    assert len(draft.tree) == 6
    assert paths(draft.tree) <= paths(looked_up) | paths(grown)
    [alone] = MergedProposer([NgramProposer()]).propose(wanted).drafts
    assert alone.tree == looked_up
