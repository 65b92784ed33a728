"""Verification of drafts: with the rule `gumbel` speculation changes no token, with `rejection` it doesn't change the distribution,
against plain sampling of toy models whose outputs can be enumerated. Planted faults show that every check finds what it is for."""

import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from penstock.kernels.sampling import Draws
from penstock.shard.decoding import growth, sampler, verify
from penstock.shard.decoding.growth import Drafting, LayeredTree
from penstock.shard.decoding.proposers import DraftRequest, NgramProposer, Proposal, Proposer
from penstock.shard.decoding.sampler import Pick, Row
from penstock.shard.decoding.strategy import Finish
from penstock.shard.decoding.tree import Tree, chain, merge
from penstock.shard.decoding.verify import Draft, DraftToken, TokensView, VerificationRule, deterministic_draft
from penstock.shard.sequence import Group, Sampling, Thinking
from penstock.tests.shard.toy import (
    TableModel,
    exact_distribution,
    g_test,
    group,
    next_token_distribution,
    sample_plainly,
    seeded_groups,
    speculate,
)

Answers = list[list[tuple[Pick, Finish]]]

COUNT = 20_000  # requests for a test of a distribution
FEWER = 5_000  # requests for a distribution much like another that is tested
SOME = 3_000  # requests that reveal a small fault
FEW = 1_000  # requests that reveal a large fault
FAIR, FAULTY = 1e-3, 1e-6  # p values: above the first the distribution is right, below the second it is wrong
TARGET = TableModel(4, 10)
DRAFT = TARGET.perturbed(20, 1.2)
FILTERED = Sampling(temperature=0.8, top_p=0.95, min_p=0.02, frequency_penalty=0.4, repetition_penalty=1.2, bias=((2, 0.3),))
PLAIN = Sampling(temperature=1.1)
CHAIN, PAIRS, TREE = LayeredTree((1, 1)), LayeredTree((2, 2)), LayeredTree((3, 2))


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Garbage collection would take half the time, among hundreds of thousands of live rows."""
    gc.disable()
    yield
    gc.enable()


# Token identity


class RandomTreeProposer:
    """Proposes random trees, some of whose paths begin with the tokens that will be emitted."""

    def __init__(self, seed: int, nodes: int = 12) -> None:
        self._chance = random.Random(seed)
        self._nodes = nodes

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """See Proposer."""
        return Proposal([Draft(self._tree(one)) for one in requests])

    def _tree(self, one: DraftRequest) -> Tree:
        trees = []
        answer = [pick.token for pick, _ in expected()[one.group.uid]][one.sequence.generated :]
        for _ in range(self._chance.randrange(5)):
            length, correct = self._chance.randint(0, min(4, one.depth)), self._chance.randint(0, 4)
            random_tokens = [self._chance.randrange(WIDE.vocabulary) for _ in range(length)]
            path = [*answer[:correct], *random_tokens][:length]
            trees.append(chain(path, [-self._chance.random() for _ in path]))
        return merge(trees).cut(min(self._nodes, one.nodes))


WIDE = TableModel(40, 3)
LONGEST = 17


def requests(count: int, seed: int) -> list[Group]:
    """Random requests with all kinds of sampling parameters."""
    chance = random.Random(seed)
    groups = []
    for uid in range(count):
        sampling = Sampling(
            temperature=chance.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
            top_k=chance.choice([0, 0, 5]),
            top_p=chance.choice([1.0, 0.9]),
            min_p=chance.choice([0.0, 0.05]),
            typical_p=chance.choice([1.0, 1.0, 0.9]),
            repetition_penalty=chance.choice([1.0, 1.3]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            presence_penalty=chance.choice([0.0, 0.5]),
            bias=chance.choice([(), ((3, 1.0), (7, -2.0))]),
            seed=chance.getrandbits(64),
            final_logprobs=chance.random() < 0.3,
        )
        prompt = [chance.randrange(WIDE.vocabulary) for _ in range(chance.randint(2, 9))]
        ends = frozenset(chance.sample(range(WIDE.vocabulary), chance.randrange(6)))
        min_tokens = chance.choice([0, 0, 3, 30])
        tops = chance.choice([0, 0, 3])
        groups.append(group(uid, sampling, chance.randint(1, LONGEST), prompt, end_ids=ends, min_new_tokens=min_tokens, top_n=tops))
    return groups


@functools.cache
def expected() -> Answers:
    """The answers of plain sampling to these requests."""
    return sample_plainly(WIDE, requests(200, 5), LONGEST)


def same_answers(found: Answers, wanted: Answers) -> bool:
    """Compares tokens and finish reasons exactly, log-probabilities to rounding."""
    if [len(own) for own in found] != [len(own) for own in wanted]:
        return False
    for found_answer, expected_answer in zip(found, wanted, strict=True):
        for (pick, finish), (plain, end) in zip(found_answer, expected_answer, strict=True):
            if (pick.token, finish) != (plain.token, end) or [one for one, _ in pick.top] != [one for one, _ in plain.top]:
                return False
            assert pick.logprob == pytest.approx(plain.logprob, abs=1e-5)
            assert [value for _, value in pick.top] == pytest.approx([value for _, value in plain.top], abs=1e-5)
    return True


def proposers() -> dict[str, Proposer]:
    near = WIDE.perturbed(4, 0.7)
    return {
        "wild": RandomTreeProposer(1),
        "chain": Drafting(near, LayeredTree((1,) * 5)),
        "expansion": Drafting(near, LayeredTree((3, 2, 1, 1))),
        "best first": Drafting(near, growth.BestFirstTree(5)),
        "lookup": NgramProposer(),
        "nothing": RandomTreeProposer(1, nodes=0),
    }


@pytest.mark.parametrize("name", list(proposers()))
def test_gumbel_speculation_gives_the_tokens_of_plain_sampling(name: str) -> None:
    """200 requests, which end by end tokens, by length, and by both at once."""
    accepted_counts: list[int] = []
    found = speculate(
        WIDE,
        requests(200, 5),
        proposers()[name],
        VerificationRule.GUMBEL,
        LONGEST,
        nodes=lambda uid: uid % 14,
        record=lambda nodes, accepted: accepted_counts.append(accepted),
    )
    assert same_answers(found, expected())
    assert {own[-1][1] for own in found} == {Finish.END, Finish.LENGTH}
    assert sum(accepted_counts) >= {"nothing": 0, "lookup": 1}.get(name, 50)


def with_the_roots_tokens(original: Callable[..., Row]) -> Callable[..., Row]:
    return lambda one, sequence, path: replace(original(one, sequence, path), tokens=original(one, sequence, []).tokens)


@pytest.mark.parametrize("fault", ["tokens of the root", "min_new_tokens", "end tokens ignored", "too long"])
def test_check_of_token_identity_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: noise and penalties of the root at all nodes; min_new_tokens counted from the root; tokens behind an end."""
    expected()  # without the fault
    original, accept = verify.row, verify.accept
    if fault == "tokens of the root":
        monkeypatch.setattr(verify, "row", with_the_roots_tokens(original))
    elif fault == "min_new_tokens":
        monkeypatch.setattr(verify, "sampling_of", lambda one, generated: one.sampling)
    elif fault == "end tokens ignored":
        without_end_ids = lambda one: replace(one, end_ids=frozenset())  # noqa: E731
        monkeypatch.setattr(verify, "accept", lambda one, *rest: accept(without_end_ids(one), *rest))
    else:
        with_one_more_token = lambda one: replace(one, max_new_tokens=one.max_new_tokens + 1)  # noqa: E731
        monkeypatch.setattr(verify, "accept", lambda one, *rest: accept(with_one_more_token(one), *rest))
    found = speculate(WIDE, requests(200, 5), RandomTreeProposer(1), VerificationRule.GUMBEL, LONGEST)
    assert not same_answers(found, expected())


@pytest.mark.parametrize("rule", VerificationRule)
def test_every_rule_is_greedy_at_temperature_0(rule: VerificationRule) -> None:
    groups = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests(100, 6)]
    equal_groups = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests(100, 6)]
    assert same_answers(
        speculate(WIDE, groups, Drafting(WIDE.perturbed(4, 0.7), LayeredTree((3, 2, 1)), rule), rule, 17),
        sample_plainly(WIDE, equal_groups, 17),
    )


def test_rejection_without_drafts_is_plain_sampling() -> None:
    found = speculate(WIDE, requests(100, 7), RandomTreeProposer(1, nodes=0), VerificationRule.REJECTION, 17)
    assert same_answers(found, sample_plainly(WIDE, requests(100, 7), 17))


@pytest.mark.parametrize("rule", [VerificationRule.GUMBEL, VerificationRule.REJECTION])
@pytest.mark.parametrize("count", [1, 4])
def test_all_drafts_are_accepted_if_the_target_is_the_draft_model(rule: VerificationRule, count: int) -> None:
    """Every step emits all drafts and one more token."""
    accepted_counts: list[tuple[int, int]] = []
    sampled = [one for one in requests(120, 8) if one.sampling.temperature > 0 or rule is VerificationRule.GUMBEL]
    groups = [replace(one, end_ids=frozenset(), max_new_tokens=40) for one in sampled]
    proposer = Drafting(WIDE, LayeredTree((1,) * count), rule)
    speculate(WIDE, groups, proposer, rule, 30, record=lambda nodes, accepted: accepted_counts.append((nodes, accepted)))
    assert len(accepted_counts) > 400
    assert all(accepted == nodes == count for nodes, accepted in accepted_counts)


# The joint distribution of three tokens


def p_value(shape: LayeredTree, rule: VerificationRule, sampling: Sampling, count: int, model: TableModel = DRAFT) -> float:
    answers = speculate(TARGET, seeded_groups(sampling, count, 9), Drafting(model, shape, rule), rule, 3)
    return g_test(answers, exact_distribution(TARGET, sampling, 3))


@pytest.mark.parametrize(
    ("rule", "shape", "sampling", "count"),
    [
        (VerificationRule.GUMBEL, CHAIN, PLAIN, COUNT),
        (VerificationRule.REJECTION, CHAIN, PLAIN, COUNT),
        (VerificationRule.REJECTION, CHAIN, FILTERED, FEWER),
        (VerificationRule.REJECTION, PAIRS, PLAIN, COUNT),
        (VerificationRule.REJECTION, TREE, FILTERED, FEWER),
    ],
    ids=["gumbel", "chain", "chain, filtered", "pairs", "tree, filtered"],
)
def test_three_tokens_have_the_joint_distribution_of_plain_sampling(
    rule: VerificationRule, shape: LayeredTree, sampling: Sampling, count: int
) -> None:
    assert p_value(shape, rule, sampling, count) > FAIR


class ConstantProposer:
    """Always proposes the same tree, whatever the tokens are."""

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        tree = merge([chain((2, 0)), chain((1, 3)), chain((0,)), chain((3,))])
        return Proposal([deterministic_draft(tree.cut(one.nodes)) for one in requests])


@pytest.mark.parametrize(("proposer", "min_accepted"), [(NgramProposer(), FEWER // 2), (ConstantProposer(), FEWER)])
def test_deterministic_drafts_keep_the_distribution_with_rejection(proposer: Proposer, min_accepted: int) -> None:
    """Deterministic drafts: the proposal's distribution is all on one token."""
    text = (0, 1, 2, 0, 1, 3, 0, 1, 1, 0, 1)
    groups = [replace(one, sequences=group(0, PLAIN, 9, text).sequences) for one in seeded_groups(PLAIN, FEWER, 9)]
    accepted_counts: list[int] = []
    answers = speculate(
        TARGET,
        groups,
        proposer,
        VerificationRule.REJECTION,
        3,
        lambda uid: 6,
        lambda nodes, accepted: accepted_counts.append(accepted),
    )
    assert sum(accepted_counts) > min_accepted
    assert g_test(answers, exact_distribution(TARGET, PLAIN, 3, text)) > FAIR


def test_tested_draft_trees_contain_repeated_siblings() -> None:
    """In the trees tested here siblings are sampled repeatedly, and the tree has one node for each token."""
    groups = seeded_groups(PLAIN, 200, 9)
    draft_requests = [DraftRequest(one, one.sequences[0], 127, 8) for one in groups]
    drafts = [
        one for shape in (PAIRS, TREE) for one in Drafting(DRAFT, shape, VerificationRule.REJECTION).propose(draft_requests).drafts
    ]
    repeats = [own for draft in drafts for own in draft.drawn if len({one.token for one in own}) < len(own)]
    assert len(repeats) > 200
    for draft in drafts:
        for own, family in zip(draft.drawn, draft.tree.children, strict=True):
            assert {one.token for one in own} == {draft.tree.tokens[node] for node in family}


def swapped_acceptance(target: Tensor, proposed: Tensor, uniform: Tensor) -> Tensor:
    return uniform * target < proposed


def without_repeats(original: Callable[..., Any]) -> Callable[..., Any]:
    """A fault: a token that was sampled repeatedly is tried only once."""

    def faulty(target: Tensor, draws: Draws, tried: Sequence[Sequence[DraftToken]], probabilities: Tensor | None) -> Tensor:
        return original(target, draws, [list({one.token: one for one in own}.values()) for own in tried], probabilities)  # type: ignore[no-any-return]

    return faulty


def likeliest_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A fault: tries siblings in the tree's order, most probable first."""

    def faulty(target: Tensor, draws: Draws, tried: Sequence[Sequence[DraftToken]], probabilities: Tensor | None) -> Tensor:
        assert probabilities is not None
        known = probabilities
        ordered = [sorted(own, key=lambda one: -float(known[one.source, one.token])) for own in tried]
        return original(target, draws, ordered, probabilities)  # type: ignore[no-any-return]

    return faulty


def one_number_for_all_tries(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(draws, 1, stream).expand(-1, count)


def stream_of_the_drafts(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(draws, count, 1)


def same_for_all_positions(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(replace(draws, positions=torch.zeros_like(draws.positions)), count, stream)


UNIFORM = verify._uniform
FAULTS: dict[str, tuple[LayeredTree, str, Any]] = {
    "p and q swapped": (CHAIN, "_accepts", swapped_acceptance),
    "always accepted": (CHAIN, "_accepts", lambda target, proposed, uniform: uniform < 2),
    "never more than target": (CHAIN, "_accepts", lambda target, proposed, uniform: uniform < target),
    "nothing subtracted": (CHAIN, "_residual", lambda target, proposed: target),
    "subtracted the wrong way round": (CHAIN, "_residual", lambda target, proposed: verify_residual(proposed, target)),
    "not renormalised": (TREE, "_residual", lambda target, proposed: (target - proposed).clamp(min=0)),
    "random numbers of the drafts": (CHAIN, "_uniform", stream_of_the_drafts),
    "one random number for all tries": (TREE, "_uniform", one_number_for_all_tries),
    "one random number for all positions": (CHAIN, "_uniform", same_for_all_positions),
    "repeats left out": (LayeredTree((8,)), "_by_rejection", without_repeats(verify._by_rejection)),
    "likeliest first": (TREE, "_by_rejection", likeliest_first(verify._by_rejection)),
}
SMALL = {"one random number for all tries", "repeats left out"}
verify_residual = verify._residual


@pytest.mark.parametrize("fault", list(FAULTS))
def test_check_of_the_distribution_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, name, faulty = FAULTS[fault]
    monkeypatch.setattr(verify, name, faulty)
    assert p_value(shape, VerificationRule.REJECTION, PLAIN, SOME if fault in SMALL else FEW) < FAULTY


def test_check_of_the_distribution_catches_the_lossy_typical_rule() -> None:
    assert p_value(TREE, VerificationRule.TYPICAL, PLAIN, FEW) < FAULTY


def test_check_of_the_distribution_catches_tree_shapes_that_depend_on_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here improbable drafts are cut off. This is why `Drafting` refuses such shapes for `rejection`."""

    def cut(one: growth.GrowingTree) -> Draft:
        draft = DRAFTED(one)
        kept = draft.tree.cut(1)
        own = [tuple(drawn for drawn in draft.drawn[0] if drawn.token in kept.tokens)]
        return Draft(kept, (*own, ()))

    monkeypatch.setattr(growth, "_draft", cut)
    assert p_value(TREE, VerificationRule.REJECTION, PLAIN, FEW) < FAULTY


DRAFTED = growth._draft


def test_rejection_refuses_tree_shapes_that_depend_on_samples() -> None:
    with pytest.raises(AssertionError, match="rejection needs a shape"):
        Drafting(DRAFT, growth.BestFirstTree(3), VerificationRule.REJECTION)


def first_acceptance_rate(width: int, rule: VerificationRule) -> float:
    """How often one of `width` drafts of the first token is accepted."""
    accepted_counts: list[int] = []
    proposer = Drafting(DRAFT, LayeredTree((width,)), rule)
    speculate(
        TARGET, seeded_groups(PLAIN, SOME, 9), proposer, rule, 1, record=lambda nodes, accepted: accepted_counts.append(accepted)
    )
    return sum(accepted_counts) / len(accepted_counts)


def test_acceptance_rates_of_one_draft_of_three_drafts_and_of_gumbel() -> None:
    found = {
        "one": first_acceptance_rate(1, VerificationRule.REJECTION),
        "three": first_acceptance_rate(3, VerificationRule.REJECTION),
        "gumbel": first_acceptance_rate(1, VerificationRule.GUMBEL),
    }
    p = next_token_distribution(TARGET, PLAIN, (1, 1), 2)
    q = next_token_distribution(DRAFT, PLAIN, (1, 1), 2)
    common = float(numpy.minimum(p, q).sum())  # 1 - total variation distance
    assert found["one"] == pytest.approx(common, abs=0.03)
    assert found["three"] > common + 0.03
    assert common / (2 - common) - 0.03 < found["gumbel"] <= common + 0.03  # Daliri et al. 2024, arXiv:2408.07978


# Parts


def test_rejection_reports_the_requested_kind_of_logprobs() -> None:
    for final in (False, True):
        sampling = replace(FILTERED, final_logprobs=final)
        groups = seeded_groups(sampling, 300, 9)
        answers = speculate(TARGET, groups, Drafting(DRAFT, TREE, VerificationRule.REJECTION), VerificationRule.REJECTION, 4)
        for own, one in zip(answers, groups, strict=True):
            text = list(one.sequences[0].tokens[:3])
            for pick, _ in own:
                wanted = next_token_distribution(TARGET, sampling if final else Sampling(temperature=1.0), text, 3)
                assert pick.logprob == pytest.approx(float(numpy.log(wanted[pick.token])), abs=1e-4)
                text.append(pick.token)


def test_rows_of_tree_nodes_hold_the_tokens_of_their_paths() -> None:
    one = group(0, Sampling(temperature=1.0, seed=5), 20, (3, 4), end_ids=(1,), min_new_tokens=3, top_n=2)
    one.sequences[0].tokens.extend([5, 6])
    tree = merge([chain([7, 8], [-0.1, -0.1]), chain([9], [-3.0])])
    rows = verify.rows(one, one.sequences[0], tree)
    assert [list(own.tokens) for own in rows] == [[3, 4, 5, 6, *path] for path in ([], [7], [7, 8], [9])]
    assert [len(own.tokens) for own in rows] == [4, 5, 6, 5]
    assert [own.tokens[-1] for own in rows] == [6, 7, 8, 9]
    assert rows[2].tokens[-2:] == [7, 8]
    assert [bool(own.sampling.bias) for own in rows] == [True, False, False, False]  # the third token may be an end
    assert {own.top_n for own in rows} == {2}


@pytest.mark.parametrize(
    ("picked", "generated", "complete", "path", "tokens", "finish"),
    [
        ([5, 6, 7, 8], 0, (), [0, 1, 2], [5, 6, 7, 8], Finish.NOT),
        ([5, 6, 4, 8], 0, (), [0, 1], [5, 6, 4], Finish.NOT),
        ([4, 6, 7, 8], 0, (), [], [4], Finish.NOT),
        ([5, 6, 7, 1], 0, (), [0, 1, 2], [5, 6, 7, 1], Finish.END),
        ([1, 6, 7, 8], 0, (), [], [1], Finish.END),
        ([5, 6, 7, 8], 6, (), [0, 1, 2], [5, 6, 7, 8], Finish.LENGTH),
        ([5, 6, 7, 8], 8, (), [0], [5, 6], Finish.LENGTH),
        ([5, 6, 7, 8], 9, (), [], [5], Finish.LENGTH),
        ([5, 1, 7, 8], 8, (), [0], [5, 1], Finish.END),  # both at once: the same as plain decoding
        ([5, 6, 7, 8], 0, (1,), [0], [5, 6], Finish.END),
    ],
)
def test_accepted_drafts_end_where_plain_decoding_ends(
    picked: list[int], generated: int, complete: Sequence[int], path: list[int], tokens: list[int], finish: Finish
) -> None:
    one = group(0, Sampling(), 10, end_ids=(1,))
    one.sequences[0].tokens.extend([3] * generated)
    picks = [Pick(token, 0.0, complete=i in complete) for i, token in enumerate(picked)]
    accepted = verify.accept(one, one.sequences[0], chain([5, 6, 7]), picks)
    assert accepted.path == path
    assert [pick.token for pick in accepted.picks] == tokens
    assert accepted.finish == finish


def test_end_token_among_the_drafts_ends_the_answer() -> None:
    one = group(0, Sampling(), 10, end_ids=(6,))
    accepted = verify.accept(one, one.sequences[0], chain([5, 6, 7]), [Pick(token, 0.0) for token in (5, 6, 7, 8)])
    assert (accepted.path, accepted.right, accepted.finish) == ([0], [0, 1], Finish.END)
    assert [pick.token for pick in accepted.picks] == [5, 6]


def test_room_for_drafts_is_limited_by_max_new_tokens() -> None:
    one = group(0, Sampling(), 10)
    assert verify.room(one, one.sequences[0]) == 9
    one.sequences[0].tokens.extend([3] * 9)
    assert verify.room(one, one.sequences[0]) == 0


@pytest.mark.parametrize("rule", [VerificationRule.GUMBEL, VerificationRule.TYPICAL])
def test_non_finite_logits_matter_only_on_the_accepted_path(rule: VerificationRule) -> None:
    one = group(0, Sampling(temperature=1.0), 10)
    tree = merge([chain([5, 6], [-0.1, -0.1]), chain([7], [-3.0])])
    logits = torch.zeros(4, 9)
    logits[0, 5] = logits[2, 3] = 50
    logits[3] = torch.nan
    drafts, rows = [Draft(tree)], verify.rows(one, one.sequences[0], tree)
    logits[1, 6] = 50
    picks = verify.pick(logits, rows, drafts, rule)
    assert picks[3] is None
    assert [pick.token for pick in verify.accept(one, one.sequences[0], tree, picks).picks] == [5, 6, 3]
    logits[1] = torch.inf
    picks = verify.pick(logits, rows, drafts, rule)
    accepted = verify.accept(one, one.sequences[0], tree, picks)
    assert ([pick.token for pick in accepted.picks], accepted.path) == ([5], [])  # the next step fails
    logits[0] = torch.inf
    accepted = verify.accept(one, one.sequences[0], tree, verify.pick(logits, rows, drafts, rule))
    assert (accepted.picks, accepted.path, accepted.finish) == ([], [], Finish.NOT)


def test_rejection_respects_the_grammar_mask() -> None:
    """Tokens that the mask forbids are neither accepted nor sampled."""
    groups = seeded_groups(PLAIN, 500, 9)
    draft_requests = [DraftRequest(one, one.sequences[0], 127, 8) for one in groups]
    proposed = Drafting(DRAFT, LayeredTree((3,)), VerificationRule.REJECTION).propose(draft_requests)
    rows, ends = [], []
    for one, draft in zip(groups, proposed.drafts, strict=True):
        own = verify.rows(one, one.sequences[0], draft.tree)
        rows += own
        ends += [line.tokens[-2:] for line in own]
    mask = torch.full((len(rows), 1), 0b0110, dtype=torch.int32)
    picks = verify.pick(TARGET.logits_after(ends), rows, proposed.drafts, VerificationRule.REJECTION, mask, proposed.probabilities)
    assert {pick.token for pick in picks if pick} == {1, 2}


def expected_probable_tokens(p: Tensor) -> list[int]:
    entropy = -float((p[p > 0] * p[p > 0].log()).sum())
    min_accepted = min(0.09, 0.3 * float(numpy.exp(-entropy)))
    return [token for token, own in enumerate(p.tolist()) if own > min_accepted]


def test_typical_accepts_the_longest_path_of_probable_tokens() -> None:
    one = group(0, Sampling(temperature=1.0, seed=3), 10)
    p = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05])
    assert expected_probable_tokens(p) == [0, 1, 2, 3]
    flat = torch.full((5,), 0.2)
    tree = merge([chain([0], [-0.1]), chain([3, 1], [-1.0, -1.0]), chain([4, 0, 0], [-2.0, -1.0, -1.0])])
    rows = verify.rows(one, one.sequences[0], tree)
    logits = torch.stack([p.log() if i == 0 else flat.log() for i in range(len(rows))])
    accepted = verify.accept(one, one.sequences[0], tree, verify.pick(logits, rows, [Draft(tree)], VerificationRule.TYPICAL))
    assert [tree.tokens[node] for node in accepted.path][:2] == [3, 1]  # not 4, which isn't probable; nor 0, whose path is shorter


def test_typical_without_a_probable_draft_is_plain_sampling() -> None:
    """For the emitted token; the tokens after it are the next step's."""
    p = torch.tensor([0.9, 0.06, 0.04])
    assert expected_probable_tokens(p) == [0]
    for seed in range(50):
        one = group(0, Sampling(temperature=1.0, seed=seed), 10)
        rows = verify.rows(one, one.sequences[0], chain([2]))
        [plain, _] = sampler.pick(p.log().expand(2, -1), rows)
        [found, _] = verify.pick(p.log().expand(2, -1), rows, [Draft(chain([2]))], VerificationRule.TYPICAL)
        assert found == plain


def test_residual_is_the_target_if_rounding_leaves_nothing() -> None:
    target = torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    found = verify._residual(target, torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    assert found.tolist() == [[0.25, 0.75], [0.0, 1.0]]


class TailOnlyText(Sequence[int]):
    """A long text of which only the length and single tokens from `end` on may be read."""

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        self._tokens = tokens
        self._end = end

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: Any) -> Any:
        assert place >= self._end, "the time would grow with the length of the text"
        return self._tokens[place]


def test_thinking_budget_reads_only_the_generated_tokens() -> None:
    """For each draft, however long the prompt is: the prompt is not read."""
    text, thinking = [5, 6, 7, 9, 3], Thinking(most=3, end=8, begin=9)
    view = TokensView(TailOnlyText(text, 3), [4, 4])
    assert view[3:] == [9, 3, 4, 4]
    assert view[-1:] == [4]
    assert (view[3], view[5], view[-1]) == (9, 4, 4)
    assert thinking.overdue(view, 3)
    assert not thinking.overdue(TokensView(TailOnlyText(text, 3), [4]), 3)
    assert not thinking.overdue(TokensView(TailOnlyText(text, 3), [8, 4]), 3)


def test_penalties_count_a_drafted_text_only_once() -> None:
    sampling, text, more, logits = (
        Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
        [5, 1, 2, 5],
        [2, 3, 2],
        torch.randn(1, 9),
    )
    expected = sampler.penalized(logits, [Row(sampling, [*text, *more], 3, 0)])
    counts = sampling.counts(3, 9)
    counts.entries(text, 0, ())
    for _ in range(2):
        row = Row(sampling, TokensView(TailOnlyText(text, 4), more), 3, 0, counts=counts, drafts=3)
        assert sampler.penalized(logits, [row]).equal(expected)
