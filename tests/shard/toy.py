"""Language models small enough to be enumerated: the next token follows from the last two. And speculation with them, without an
engine: what a shard does with a group in a step, but for the forward."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from penstock.shard.decoding import sampler, verify
from penstock.shard.decoding.growth import Frontier
from penstock.shard.decoding.proposers import DraftRequest, Proposer
from penstock.shard.decoding.strategy import Finish
from penstock.shard.decoding.verify import VerificationRule
from penstock.shard.sequence import Group, Sampling, sequences

# What is this small is slower on two threads, much slower where cores are shared.
torch.set_num_threads(1)

PROMPT = (0, 1, 1)


class Toy:
    """Logits by a table."""

    def __init__(self, vocabulary: int, seed: int, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.table = torch.randn(vocabulary, vocabulary, vocabulary, generator=generator) * spread
        self.asked = 0  # times

    def near(self, seed: int, noise: float) -> "Toy":
        """One that guesses what this one says."""
        other = Toy(self.vocabulary, seed, noise)
        other.table += self.table
        return other

    def after(self, ends: Sequence[Sequence[int]]) -> Tensor:
        """[texts, vocabulary], by their last two tokens."""
        self.asked += 1
        places = torch.tensor([list(end) for end in ends])
        return self.table[places[:, 0], places[:, 1]]

    def ready(self, sequences: Sequence[Any]) -> list[bool]:
        """As a draft model: always."""
        return [True] * len(sequences)

    def logits(self, wanted: Sequence[Frontier]) -> Tensor:
        """Likewise."""
        return self.after([end(one, node) for one in wanted for node in one.nodes])


def end(one: Frontier, node: int) -> tuple[int, int]:
    """The last two tokens of the path to a node."""
    tokens = one.sequence.tokens
    if node < 0:
        return tokens[-2], tokens[-1]
    parent = one.parents[node]
    return (tokens[-1] if parent < 0 else one.tokens[parent]), one.tokens[node]


def group(uid: int, sampling: Sampling, count: int, prompt: Sequence[int] = PROMPT, **more: object) -> Group:
    """A request whose prompt is computed."""
    begun, _ = sequences(prompt, 1)
    end_ids = frozenset(more.pop("end_ids", ()))  # type: ignore[call-overload]
    return Group(uid, begun, [], sampling, count, end_ids, **more)  # type: ignore[arg-type]


def plainly(model: Toy, groups: Sequence[Group], count: int) -> list[list[tuple[sampler.Pick, Finish]]]:
    """Plain sampling of up to `count` tokens each."""
    answers: list[list[tuple[sampler.Pick, Finish]]] = [[] for _ in groups]
    for _ in range(count):
        live = [i for i, own in enumerate(answers) if not own or not own[-1][1]]
        if not live:
            break
        firsts = [groups[i].sequences[0] for i in live]
        rows = [verify.row(groups[i], first, []) for i, first in zip(live, firsts, strict=True)]
        picks = sampler.pick(model.after([first.tokens[-2:] for first in firsts]), rows)
        for i, first, one in zip(live, firsts, picks, strict=True):
            assert one is not None
            first.tokens.append(one.token)
            finish = Finish.END if one.token in groups[i].end_ids else Finish.NOT
            if not finish and first.generated >= groups[i].max_new_tokens:
                finish = Finish.LENGTH
            answers[i].append((one, finish))
    return answers


def speculate(
    model: Toy,
    groups: Sequence[Group],
    proposer: Proposer,
    rule: VerificationRule,
    count: int,
    nodes: Callable[[int], int] = lambda uid: 127,
    told: Callable[[int, int], None] = lambda nodes, accepted: None,
) -> list[list[tuple[sampler.Pick, Finish]]]:
    """At least `count` tokens each, if they don't end before. nodes: most drafts of a group; told: is told of all verifications."""
    answers: list[list[tuple[sampler.Pick, Finish]]] = [[] for _ in groups]
    while live := [i for i, own in enumerate(answers) if len(own) < count and (not own or not own[-1][1])]:
        asked = [DraftRequest(groups[i], one := groups[i].sequences[0], nodes(i), verify.room(groups[i], one)) for i in live]
        proposed = proposer.propose(asked)
        rows, ends = [], []
        for one, draft in zip(asked, proposed.drafts, strict=True):
            own = verify.rows(one.group, one.sequence, draft.tree)
            rows += own
            ends += [row.tokens[-2:] for row in own]
        picks = verify.pick(model.after(ends), rows, proposed.drafts, rule, None, proposed.probabilities)
        first = 0
        for i, one, draft in zip(live, asked, proposed.drafts, strict=True):
            accepted = verify.accept(one.group, one.sequence, draft.tree, picks[first : first + len(draft.tree) + 1])
            first += len(draft.tree) + 1
            told(len(draft.tree), len(accepted.path))
            for pick in accepted.picks:
                assert pick is not None
                one.sequence.tokens.append(pick.token)
                answers[i].append((pick, Finish.NOT))
            answers[i][-1] = (answers[i][-1][0], accepted.finish)
    return answers


# What the answers have to be like


def exact(model: Toy, sampling: Sampling, count: int, prompt: Sequence[int] = PROMPT) -> NDArray[numpy.float64]:
    """The joint distribution of the first `count` tokens, by enumeration: [vocabulary] * count."""
    return joint(lambda text: model.table[text[-2], text[-1]], model.vocabulary, sampling, count, prompt, len(prompt))


def joint(
    logits: Callable[[Sequence[int]], Tensor],
    vocabulary: int,
    sampling: Sampling,
    count: int,
    text: Sequence[int],
    prompt_length: int,
) -> NDArray[numpy.float64]:
    """That of the `count` tokens after a text, which begins with the prompt. logits: after a text."""
    result = numpy.ones((vocabulary,) * count)
    for length in range(count):
        for path in itertools.product(range(vocabulary), repeat=length):
            after = [*text, *path]
            scores = logits(after).double().numpy().copy()
            result[path] *= distribution(scores, sampling, after, prompt_length).reshape(-1, *(1,) * (count - 1 - length))
    return result


def next_token(model: Toy, sampling: Sampling, text: Sequence[int], prompt_length: int) -> NDArray[numpy.float64]:
    """[vocabulary]."""
    return distribution(model.table[text[-2], text[-1]].double().numpy().copy(), sampling, text, prompt_length)


def distribution(
    scores: NDArray[numpy.float64], sampling: Sampling, text: Sequence[int], prompt_length: int
) -> NDArray[numpy.float64]:
    """[vocabulary], from the logits after a text: written once more, without a look at how the shard does it."""
    output = text[prompt_length:]
    for token in set(text):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(output):
        scores[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty  # type: ignore[attr-defined]
    for token, value in sampling.bias:
        scores[token] += value
    weights = numpy.exp((scores - scores.max()) / sampling.temperature)
    order = numpy.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    before = numpy.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()  # type: ignore[no-any-return]


def seeded(sampling: Sampling, count: int, tokens: int) -> list[Group]:
    """Requests that differ by their seeds."""
    return [group(uid, replace(sampling, seed=(uid + 1) * 0x9E3779B97F4A7C15 % (1 << 64)), tokens) for uid in range(count)]


def g_test(answers: Sequence[Sequence[tuple[sampler.Pick, Finish]]], expected: NDArray[numpy.float64]) -> float:
    """The p value of the answers' first tokens, all at once, against the exact distribution."""
    length = expected.ndim
    observed = numpy.zeros_like(expected)
    for own in answers:
        observed[tuple(pick.token for pick, _ in own[:length])] += 1
    if observed[expected == 0].any():
        return 0.0
    wanted = expected.ravel() * len(answers)
    rare = wanted < 5  # too few for the test: one class of their own
    seen = numpy.append(observed.ravel()[~rare], observed.ravel()[rare].sum())
    wanted = numpy.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 5:
        seen, wanted = seen[:-1], wanted[:-1]
        wanted *= seen.sum() / wanted.sum()
    assert len(wanted) > 15
    return float(stats.power_divergence(seen, wanted, lambda_="log-likelihood").pvalue)


def total_variation(answers: Sequence[Sequence[tuple[sampler.Pick, Finish]]], expected: NDArray[numpy.float64]) -> float:
    """Between what was answered and what had to be, for the messages of failing tests."""
    observed = numpy.zeros_like(expected)
    for own in answers:
        observed[tuple(pick.token for pick, _ in own[: expected.ndim])] += 1 / len(answers)
    return math.fsum(numpy.abs(observed - expected).ravel()) / 2
