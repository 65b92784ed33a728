"""Speculation changes nothing: by `gumbel` not a token, by `rejection` not the distribution. Every check is shown faults of the
kind that it is there for, and finds them."""

import functools
import gc
import random
from array import array
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
from penstock.tests.shard.toy import Toy, exact, g_test, group, next_token, plainly, seeded, speculate

Answers = list[list[tuple[Pick, Finish]]]

COUNT = 20_000  # requests for a distribution
FEWER = 5_000  # where it is much the same as another
SOME = 3_000  # that show a small fault
FEW = 1_000  # that show another
FAIR, FAULTY = 1e-3, 1e-6  # p values
TARGET = Toy(4, 10)
DRAFT = TARGET.near(20, 1.2)
FILTERED = Sampling(temperature=0.8, top_p=0.95, min_p=0.02, frequency_penalty=0.4, repetition_penalty=1.2, bias=((2, 0.3),))
PLAIN = Sampling(temperature=1.1)
CHAIN, PAIRS, TREE = LayeredTree((1, 1)), LayeredTree((2, 2)), LayeredTree((3, 2))


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Half the time here would go to looking for garbage among hundreds of thousands of rows that live."""
    gc.disable()
    yield
    gc.enable()


# Token identity


class Wild:
    """Proposes random trees, here and there with what will be said."""

    def __init__(self, seed: int, nodes: int = 12) -> None:
        self._chance = random.Random(seed)
        self._nodes = nodes

    def propose(self, asked: Sequence[DraftRequest]) -> Proposal:
        """See Proposer."""
        return Proposal([Draft(self._tree(one)) for one in asked])

    def _tree(self, one: DraftRequest) -> Tree:
        trees = []
        said = [pick.token for pick, _ in expected()[one.group.uid]][one.sequence.generated :]
        for _ in range(self._chance.randrange(5)):
            length, right = self._chance.randint(0, min(4, one.depth)), self._chance.randint(0, 4)
            wrong = [self._chance.randrange(WIDE.vocabulary) for _ in range(length)]
            path = [*said[:right], *wrong][:length]
            trees.append(chain(path, [-self._chance.random() for _ in path]))
        return merge(trees).cut(min(self._nodes, one.nodes))


WIDE = Toy(40, 3)
LONGEST = 17


def requests(count: int, seed: int) -> list[Group]:
    """Of all kinds."""
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
        least = chance.choice([0, 0, 3, 30])
        tops = chance.choice([0, 0, 3])
        groups.append(group(uid, sampling, chance.randint(1, LONGEST), prompt, end_ids=ends, min_new_tokens=least, top_n=tops))
    return groups


@functools.cache
def expected() -> Answers:
    """What plain sampling answers them."""
    return plainly(WIDE, requests(200, 5), LONGEST)


def same(found: Answers, wanted: Answers) -> bool:
    """Tokens and finish reasons; log-probabilities to rounding."""
    if [len(own) for own in found] != [len(own) for own in wanted]:
        return False
    for ours, theirs in zip(found, wanted, strict=True):
        for (pick, finish), (plain, end) in zip(ours, theirs, strict=True):
            if (pick.token, finish) != (plain.token, end) or [one for one, _ in pick.top] != [one for one, _ in plain.top]:
                return False
            assert pick.logprob == pytest.approx(plain.logprob, abs=1e-5)
            assert [value for _, value in pick.top] == pytest.approx([value for _, value in plain.top], abs=1e-5)
    return True


def proposers() -> dict[str, Proposer]:
    near = WIDE.near(4, 0.7)
    return {
        "wild": Wild(1),
        "chain": Drafting(near, LayeredTree((1,) * 5)),
        "expansion": Drafting(near, LayeredTree((3, 2, 1, 1))),
        "best first": Drafting(near, growth.BestFirstTree(5)),
        "lookup": NgramProposer(),
        "nothing": Wild(1, nodes=0),
    }


@pytest.mark.parametrize("name", list(proposers()))
def test_speculation_says_what_plain_sampling_says(name: str) -> None:
    """200 requests, every end included: end tokens, lengths, and the first of both."""
    told: list[int] = []
    found = speculate(
        WIDE,
        requests(200, 5),
        proposers()[name],
        VerificationRule.GUMBEL,
        LONGEST,
        nodes=lambda uid: uid % 14,
        told=lambda nodes, accepted: told.append(accepted),
    )
    assert same(found, expected())
    assert {own[-1][1] for own in found} == {Finish.END, Finish.LENGTH}
    assert sum(told) >= {"nothing": 0, "lookup": 1}.get(name, 50)


def at_the_root(right: Callable[..., Row]) -> Callable[..., Row]:
    return lambda one, sequence, path: replace(right(one, sequence, path), tokens=right(one, sequence, []).tokens)


@pytest.mark.parametrize("fault", ["position", "too early", "beyond the end", "too long"])
def test_the_check_of_identity_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with the root's noise and penalties; min_new_tokens that counts from the root; what is behind an end."""
    expected()  # without the fault
    right, accept = verify.row, verify.accept
    if fault == "position":
        monkeypatch.setattr(verify, "row", at_the_root(right))
    elif fault == "too early":
        monkeypatch.setattr(verify, "sampling_of", lambda one, generated: one.sampling)
    elif fault == "beyond the end":
        blind = lambda one: replace(one, end_ids=frozenset())  # noqa: E731
        monkeypatch.setattr(verify, "accept", lambda one, *rest: accept(blind(one), *rest))
    else:
        longer = lambda one: replace(one, max_new_tokens=one.max_new_tokens + 1)  # noqa: E731
        monkeypatch.setattr(verify, "accept", lambda one, *rest: accept(longer(one), *rest))
    found = speculate(WIDE, requests(200, 5), Wild(1), VerificationRule.GUMBEL, LONGEST)
    assert not same(found, expected())


@pytest.mark.parametrize("rule", VerificationRule)
def test_without_a_temperature_every_rule_is_greedy(rule: VerificationRule) -> None:
    calm = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests(100, 6)]
    again = [replace(one, sampling=replace(one.sampling, temperature=0.0)) for one in requests(100, 6)]
    assert same(
        speculate(WIDE, calm, Drafting(WIDE.near(4, 0.7), LayeredTree((3, 2, 1)), rule), rule, 17), plainly(WIDE, again, 17)
    )


def test_without_drafts_rejection_is_plain_sampling() -> None:
    found = speculate(WIDE, requests(100, 7), Wild(1, nodes=0), VerificationRule.REJECTION, 17)
    assert same(found, plainly(WIDE, requests(100, 7), 17))


@pytest.mark.parametrize("rule", [VerificationRule.GUMBEL, VerificationRule.REJECTION])
@pytest.mark.parametrize("count", [1, 4])
def test_a_draft_that_is_the_target_is_always_right(rule: VerificationRule, count: int) -> None:
    """So every step brings all drafts and one token more."""
    told: list[tuple[int, int]] = []
    sampled = [one for one in requests(120, 8) if one.sampling.temperature > 0 or rule is VerificationRule.GUMBEL]
    groups = [replace(one, end_ids=frozenset(), max_new_tokens=40) for one in sampled]
    proposer = Drafting(WIDE, LayeredTree((1,) * count), rule)
    speculate(WIDE, groups, proposer, rule, 30, told=lambda nodes, accepted: told.append((nodes, accepted)))
    assert len(told) > 400
    assert all(accepted == nodes == count for nodes, accepted in told)


# Distribution: the joint one of three tokens


def p_value(shape: LayeredTree, rule: VerificationRule, sampling: Sampling, count: int, model: Toy = DRAFT) -> float:
    answers = speculate(TARGET, seeded(sampling, count, 9), Drafting(model, shape, rule), rule, 3)
    return g_test(answers, exact(TARGET, sampling, 3))


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


class Same:
    """Proposes a tree that no token decides on."""

    def propose(self, asked: Sequence[DraftRequest]) -> Proposal:
        tree = merge([chain((2, 0)), chain((1, 3)), chain((0,)), chain((3,))])
        return Proposal([deterministic_draft(tree.cut(one.nodes)) for one in asked])


@pytest.mark.parametrize(("proposer", "least"), [(NgramProposer(), FEWER // 2), (Same(), FEWER)])
def test_what_is_certain_is_accepted_as_often_as_it_is_drawn(proposer: Proposer, least: int) -> None:
    """Certain to be proposed: a distribution that is all on one token."""
    text = (0, 1, 2, 0, 1, 3, 0, 1, 1, 0, 1)
    groups = [replace(one, sequences=group(0, PLAIN, 9, text).sequences) for one in seeded(PLAIN, FEWER, 9)]
    told: list[int] = []
    answers = speculate(
        TARGET, groups, proposer, VerificationRule.REJECTION, 3, lambda uid: 6, lambda nodes, accepted: told.append(accepted)
    )
    assert sum(told) > least
    assert g_test(answers, exact(TARGET, PLAIN, 3, text)) > FAIR


def test_siblings_repeat() -> None:
    """In the tests of trees, and each token stands once in the tree."""
    groups = seeded(PLAIN, 200, 9)
    asked = [DraftRequest(one, one.sequences[0], 127, 8) for one in groups]
    drafts = [one for shape in (PAIRS, TREE) for one in Drafting(DRAFT, shape, VerificationRule.REJECTION).propose(asked).drafts]
    repeats = [own for draft in drafts for own in draft.drawn if len({one.token for one in own}) < len(own)]
    assert len(repeats) > 200
    for draft in drafts:
        for own, family in zip(draft.drawn, draft.tree.children, strict=True):
            assert {one.token for one in own} == {draft.tree.tokens[node] for node in family}


def swapped(target: Tensor, proposed: Tensor, uniform: Tensor) -> Tensor:
    return uniform * target < proposed


def once_each(right: Callable[..., Any]) -> Callable[..., Any]:
    """What was drawn again is not tried again."""

    def faulty(target: Tensor, draws: Draws, tried: Sequence[Sequence[DraftToken]], probabilities: Tensor | None) -> Tensor:
        return right(target, draws, [list({one.token: one for one in own}.values()) for own in tried], probabilities)  # type: ignore[no-any-return]

    return faulty


def likeliest_first(right: Callable[..., Any]) -> Callable[..., Any]:
    """Tries in the order of the tree."""

    def faulty(target: Tensor, draws: Draws, tried: Sequence[Sequence[DraftToken]], probabilities: Tensor | None) -> Tensor:
        assert probabilities is not None
        known = probabilities
        ordered = [sorted(own, key=lambda one: -float(known[one.source, one.token])) for own in tried]
        return right(target, draws, ordered, probabilities)  # type: ignore[no-any-return]

    return faulty


def of_one_word(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(draws, 1, stream).expand(-1, count)


def of_one_stream(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(draws, count, 1)


def of_no_position(draws: Draws, count: int, stream: int) -> Tensor:
    return UNIFORM(replace(draws, positions=torch.zeros_like(draws.positions)), count, stream)


UNIFORM = verify._uniform
FAULTS: dict[str, tuple[LayeredTree, str, Any]] = {
    "p and q swapped": (CHAIN, "_accepts", swapped),
    "always accepted": (CHAIN, "_accepts", lambda target, proposed, uniform: uniform < 2),
    "never more than target": (CHAIN, "_accepts", lambda target, proposed, uniform: uniform < target),
    "nothing subtracted": (CHAIN, "_residual", lambda target, proposed: target),
    "the wrong way round": (CHAIN, "_residual", lambda target, proposed: verify_residual(proposed, target)),
    "not renormalised": (TREE, "_residual", lambda target, proposed: (target - proposed).clamp(min=0)),
    "accepted by what was drawn with": (CHAIN, "_uniform", of_one_stream),
    "one number for all tries": (TREE, "_uniform", of_one_word),
    "one number for all positions": (CHAIN, "_uniform", of_no_position),
    "repeats left out": (LayeredTree((8,)), "_by_rejection", once_each(verify._by_rejection)),
    "likeliest first": (TREE, "_by_rejection", likeliest_first(verify._by_rejection)),
}
SMALL = {"one number for all tries", "repeats left out"}
verify_residual = verify._residual


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_check_of_the_distribution_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, name, faulty = FAULTS[fault]
    monkeypatch.setattr(verify, name, faulty)
    assert p_value(shape, VerificationRule.REJECTION, PLAIN, SOME if fault in SMALL else FEW) < FAULTY


def test_the_check_of_the_distribution_finds_a_lossy_rule() -> None:
    assert p_value(TREE, VerificationRule.TYPICAL, PLAIN, FEW) < FAULTY


def test_the_check_of_the_distribution_finds_a_shape_that_depends_on_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is improbable is cut off: that is why `Drafting` refuses such shapes for `rejection`."""

    def cut(one: growth.GrowingTree) -> Draft:
        draft = DRAFTED(one)
        kept = draft.tree.cut(1)
        own = [tuple(drawn for drawn in draft.drawn[0] if drawn.token in kept.tokens)]
        return Draft(kept, (*own, ()))

    monkeypatch.setattr(growth, "_draft", cut)
    assert p_value(TREE, VerificationRule.REJECTION, PLAIN, FEW) < FAULTY


DRAFTED = growth._draft


def test_rejection_needs_a_shape_that_does_not_depend_on_draws() -> None:
    with pytest.raises(AssertionError, match="rejection needs a shape"):
        Drafting(DRAFT, growth.BestFirstTree(3), VerificationRule.REJECTION)


def accepted_first(width: int, rule: VerificationRule) -> float:
    """How often one of so many first tokens is."""
    told: list[int] = []
    proposer = Drafting(DRAFT, LayeredTree((width,)), rule)
    speculate(TARGET, seeded(PLAIN, SOME, 9), proposer, rule, 1, told=lambda nodes, accepted: told.append(accepted))
    return sum(told) / len(told)


def test_several_tries_are_accepted_more_often_than_one_and_gumbel_nearly_as_often() -> None:
    found = {
        "one": accepted_first(1, VerificationRule.REJECTION),
        "three": accepted_first(3, VerificationRule.REJECTION),
        "gumbel": accepted_first(1, VerificationRule.GUMBEL),
    }
    p = next_token(TARGET, PLAIN, (1, 1), 2)
    q = next_token(DRAFT, PLAIN, (1, 1), 2)
    common = float(numpy.minimum(p, q).sum())  # 1 - the distance in total variation
    assert found["one"] == pytest.approx(common, abs=0.03)
    assert found["three"] > common + 0.03
    assert common / (2 - common) - 0.03 < found["gumbel"] <= common + 0.03  # Daliri et al. 2024, arXiv:2408.07978


# Parts


def test_log_probabilities_of_rejection_are_those_asked_for() -> None:
    for final in (False, True):
        sampling = replace(FILTERED, final_logprobs=final)
        groups = seeded(sampling, 300, 9)
        answers = speculate(TARGET, groups, Drafting(DRAFT, TREE, VerificationRule.REJECTION), VerificationRule.REJECTION, 4)
        for own, one in zip(answers, groups, strict=True):
            text = list(one.sequences[0].tokens[:3])
            for pick, _ in own:
                wanted = next_token(TARGET, sampling if final else Sampling(temperature=1.0), text, 3)
                assert pick.logprob == pytest.approx(float(numpy.log(wanted[pick.token])), abs=1e-4)
                text.append(pick.token)


def test_rows_of_nodes_are_those_of_their_paths() -> None:
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
        ([5, 1, 7, 8], 8, (), [0], [5, 1], Finish.END),  # both at once: as plain decoding has it
        ([5, 6, 7, 8], 0, (1,), [0], [5, 6], Finish.END),
    ],
)
def test_what_is_accepted_ends_where_plain_decoding_ends(
    picked: list[int], generated: int, complete: Sequence[int], path: list[int], tokens: list[int], finish: Finish
) -> None:
    one = group(0, Sampling(), 10, end_ids=(1,))
    one.sequences[0].tokens.extend([3] * generated)
    picks = [Pick(token, 0.0, complete=i in complete) for i, token in enumerate(picked)]
    accepted = verify.accept(one, one.sequences[0], chain([5, 6, 7]), picks)
    assert accepted.path == path
    assert [pick.token for pick in accepted.picks] == tokens
    assert accepted.finish == finish


def test_an_end_within_the_drafts_is_the_end() -> None:
    one = group(0, Sampling(), 10, end_ids=(6,))
    accepted = verify.accept(one, one.sequences[0], chain([5, 6, 7]), [Pick(token, 0.0) for token in (5, 6, 7, 8)])
    assert (accepted.path, accepted.right, accepted.finish) == ([0], [0, 1], Finish.END)
    assert [pick.token for pick in accepted.picks] == [5, 6]


def test_no_draft_is_deeper_than_the_answer_may_be_long() -> None:
    one = group(0, Sampling(), 10)
    assert verify.room(one, one.sequences[0]) == 9
    one.sequences[0].tokens.extend([3] * 9)
    assert verify.room(one, one.sequences[0]) == 0


@pytest.mark.parametrize("rule", [VerificationRule.GUMBEL, VerificationRule.TYPICAL])
def test_logits_that_are_not_finite_matter_where_the_answer_goes(rule: VerificationRule) -> None:
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
    assert ([pick.token for pick in accepted.picks], accepted.path) == ([5], [])  # it is for the next step to fail
    logits[0] = torch.inf
    accepted = verify.accept(one, one.sequences[0], tree, verify.pick(logits, rows, drafts, rule))
    assert (accepted.picks, accepted.path, accepted.finish) == ([], [], Finish.NOT)


def test_a_mask_binds_rejection() -> None:
    """What it forbids is not accepted, nor drawn."""
    groups = seeded(PLAIN, 500, 9)
    asked = [DraftRequest(one, one.sequences[0], 127, 8) for one in groups]
    proposed = Drafting(DRAFT, LayeredTree((3,)), VerificationRule.REJECTION).propose(asked)
    rows, ends = [], []
    for one, draft in zip(groups, proposed.drafts, strict=True):
        own = verify.rows(one, one.sequences[0], draft.tree)
        rows += own
        ends += [line.tokens[-2:] for line in own]
    mask = torch.full((len(rows), 1), 0b0110, dtype=torch.int32)
    picks = verify.pick(TARGET.after(ends), rows, proposed.drafts, VerificationRule.REJECTION, mask, proposed.probabilities)
    assert {pick.token for pick in picks if pick} == {1, 2}


def probable_by_hand(p: Tensor) -> list[int]:
    entropy = -float((p[p > 0] * p[p > 0].log()).sum())
    least = min(0.09, 0.3 * float(numpy.exp(-entropy)))
    return [token for token, own in enumerate(p.tolist()) if own > least]


def test_typical_accepts_the_longest_path_of_probable_tokens() -> None:
    one = group(0, Sampling(temperature=1.0, seed=3), 10)
    p = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05])
    assert probable_by_hand(p) == [0, 1, 2, 3]
    flat = torch.full((5,), 0.2)
    tree = merge([chain([0], [-0.1]), chain([3, 1], [-1.0, -1.0]), chain([4, 0, 0], [-2.0, -1.0, -1.0])])
    rows = verify.rows(one, one.sequences[0], tree)
    logits = torch.stack([p.log() if i == 0 else flat.log() for i in range(len(rows))])
    accepted = verify.accept(one, one.sequences[0], tree, verify.pick(logits, rows, [Draft(tree)], VerificationRule.TYPICAL))
    assert [tree.tokens[node] for node in accepted.path][:2] == [3, 1]  # not 4, which isn't probable; nor 0, which is short


def test_typical_without_a_probable_draft_is_plain_sampling() -> None:
    """Of the token that is emitted; what follows then is the next step's."""
    p = torch.tensor([0.9, 0.06, 0.04])
    assert probable_by_hand(p) == [0]
    for seed in range(50):
        one = group(0, Sampling(temperature=1.0, seed=seed), 10)
        rows = verify.rows(one, one.sequences[0], chain([2]))
        [plain, _] = sampler.pick(p.log().expand(2, -1), rows)
        [found, _] = verify.pick(p.log().expand(2, -1), rows, [Draft(chain([2]))], VerificationRule.TYPICAL)
        assert found == plain


def test_where_rounding_leaves_nothing_the_target_stays() -> None:
    target = torch.tensor([[0.25, 0.75], [0.25, 0.75]])
    found = verify._residual(target, torch.tensor([[0.25, 0.75], [1.0, 0.0]]))
    assert found.tolist() == [[0.25, 0.75], [0.0, 1.0]]


class Untouched(Sequence[int]):
    """A long text of which one may only ask for the length, and for single tokens of its end."""

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        self._tokens = tokens
        self._end = end

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: Any) -> Any:
        assert place >= self._end, "whoever looks here takes the longer the longer the text is"
        return self._tokens[place]


def test_a_budget_of_reasoning_looks_at_the_answer_alone() -> None:
    """For each draft, however long the prompt is."""
    text, thinking = [5, 6, 7, 9, 3], Thinking(most=3, end=8, begin=9)
    view = TokensView(Untouched(text, 3), [4, 4])
    assert view[3:] == [9, 3, 4, 4]
    assert view[-1:] == [4]
    assert (view[3], view[5], view[-1]) == (9, 4, 4)
    assert thinking.overdue(view, 3)
    assert not thinking.overdue(TokensView(Untouched(text, 3), [4]), 3)
    assert not thinking.overdue(TokensView(Untouched(text, 3), [8, 4]), 3)


def test_penalties_take_tokens_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one, which takes long for drafts after a long text."""
    sampling, more, logits = Sampling(repetition_penalty=1.3, frequency_penalty=0.5), [2, 3, 2], torch.randn(1, 9)
    expected = sampler.penalized(logits, [Row(sampling, [5, 1, 2, 5, *more], 3, 0)])
    monkeypatch.setattr(TokensView, "__getitem__", None)
    monkeypatch.setattr(TokensView, "__iter__", None)
    assert sampler.penalized(logits, [Row(sampling, TokensView(array("I", [5, 1, 2, 5]), more), 3, 0)]).equal(expected)
