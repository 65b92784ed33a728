"""Language models so small that all their answers can be enumerated: the next token depends on the last two only. Plain sampling
and speculative decoding with them, without an engine: what a shard does with a group in a step, except for the forward pass. And
the exact distributions of the answers, with statistical tests against them."""

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

# Tensors this small are slower on two threads, and much slower where cores are shared with other processes.
torch.set_num_threads(1)

PROMPT = (0, 1, 1)


class TableModel:
    """A language model whose logits are looked up in a table."""

    def __init__(self, vocabulary: int, seed: int, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.table = torch.randn(vocabulary, vocabulary, vocabulary, generator=generator) * spread
        self.calls = 0  # how often logits were requested

    def perturbed(self, seed: int, noise: float) -> "TableModel":
        """A draft model: this one with noise added."""
        other = TableModel(self.vocabulary, seed, noise)
        other.table += self.table
        return other

    def logits_after(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, vocabulary]: logits that follow from the last two tokens of each text."""
        self.calls += 1
        places = torch.tensor([list(context) for context in contexts])
        return self.table[places[:, 0], places[:, 1]]

    def ready(self, sequences: Sequence[Any]) -> list[bool]:
        """Interface of a draft model, which can always draft."""
        return [True] * len(sequences)

    def logits(self, wanted: Sequence[Frontier]) -> Tensor:
        """Interface of a draft model."""
        return self.logits_after([last_two_tokens(one, node) for one in wanted for node in one.nodes])


def last_two_tokens(one: Frontier, node: int) -> tuple[int, int]:
    """The last two tokens of the path to a node."""
    tokens = one.sequence.tokens
    if node < 0:
        return tokens[-2], tokens[-1]
    parent = one.parents[node]
    return (tokens[-1] if parent < 0 else one.tokens[parent]), one.tokens[node]


def group(uid: int, sampling: Sampling, count: int, prompt: Sequence[int] = PROMPT, **more: object) -> Group:
    """A request whose prompt has been computed."""
    begun, _ = sequences(prompt, 1)
    end_ids = frozenset(more.pop("end_ids", ()))  # type: ignore[call-overload]
    return Group(uid, begun, [], sampling, count, end_ids, **more)  # type: ignore[arg-type]


def sample_plainly(model: TableModel, groups: Sequence[Group], count: int) -> list[list[tuple[sampler.Pick, Finish]]]:
    """Plain sampling of up to `count` tokens each."""
    answers: list[list[tuple[sampler.Pick, Finish]]] = [[] for _ in groups]
    for _ in range(count):
        live = [i for i, answer in enumerate(answers) if not answer or not answer[-1][1]]
        if not live:
            break
        firsts = [groups[i].sequences[0] for i in live]
        rows = [verify.row(groups[i], first, []) for i, first in zip(live, firsts, strict=True)]
        picks = sampler.pick(model.logits_after([first.tokens[-2:] for first in firsts]), rows)
        for i, first, one in zip(live, firsts, picks, strict=True):
            assert one is not None
            first.tokens.append(one.token)
            finish = Finish.END if one.token in groups[i].end_ids else Finish.NOT
            if not finish and first.generated >= groups[i].max_new_tokens:
                finish = Finish.LENGTH
            answers[i].append((one, finish))
    return answers


def speculate(
    model: TableModel,
    groups: Sequence[Group],
    proposer: Proposer,
    rule: VerificationRule,
    count: int,
    nodes: Callable[[int], int] = lambda uid: 127,
    record: Callable[[int, int], None] = lambda nodes, accepted: None,
) -> list[list[tuple[sampler.Pick, Finish]]]:
    """Speculative decoding of at least `count` tokens each, unless they end before. nodes: most draft tokens of a group; record:
    called with the numbers of drafted and accepted tokens after each verification."""
    answers: list[list[tuple[sampler.Pick, Finish]]] = [[] for _ in groups]
    while live := [i for i, done in enumerate(answers) if len(done) < count and (not done or not done[-1][1])]:
        requests = [DraftRequest(groups[i], one := groups[i].sequences[0], nodes(i), verify.room(groups[i], one)) for i in live]
        proposed = proposer.propose(requests)
        rows, contexts = [], []
        for one, draft in zip(requests, proposed.drafts, strict=True):
            rows_of_one = verify.rows(one.group, one.sequence, draft.tree)
            rows += rows_of_one
            contexts += [row.tokens[-2:] for row in rows_of_one]
        picks = verify.pick(model.logits_after(contexts), rows, proposed.drafts, rule, None, proposed.probabilities)
        first = 0
        for i, one, draft in zip(live, requests, proposed.drafts, strict=True):
            accepted = verify.accept(one.group, one.sequence, draft.tree, picks[first : first + len(draft.tree) + 1])
            first += len(draft.tree) + 1
            record(len(draft.tree), len(accepted.path))
            for pick in accepted.picks:
                assert pick is not None
                one.sequence.tokens.append(pick.token)
                answers[i].append((pick, Finish.NOT))
            answers[i][-1] = (answers[i][-1][0], accepted.finish)
    return answers


# Exact distributions of the answers, and tests against them


def exact_distribution(model: TableModel, sampling: Sampling, count: int, prompt: Sequence[int] = PROMPT) -> NDArray[numpy.float64]:
    """The joint distribution of the first `count` tokens, by enumeration: [vocabulary] * count."""
    return joint_distribution(lambda text: model.table[text[-2], text[-1]], model.vocabulary, sampling, count, prompt, len(prompt))


def joint_distribution(
    logits: Callable[[Sequence[int]], Tensor],
    vocabulary: int,
    sampling: Sampling,
    count: int,
    text: Sequence[int],
    prompt_length: int,
) -> NDArray[numpy.float64]:
    """The joint distribution of the `count` tokens after a text, which begins with the prompt. logits: those after a text."""
    result = numpy.ones((vocabulary,) * count)
    for length in range(count):
        for continuation in itertools.product(range(vocabulary), repeat=length):
            context = [*text, *continuation]
            scores = logits(context).double().numpy().copy()
            result[continuation] *= distribution(scores, sampling, context, prompt_length).reshape(-1, *(1,) * (count - 1 - length))
    return result


def next_token_distribution(
    model: TableModel, sampling: Sampling, text: Sequence[int], prompt_length: int
) -> NDArray[numpy.float64]:
    """[vocabulary]: the distribution of the next token."""
    return distribution(model.table[text[-2], text[-1]].double().numpy().copy(), sampling, text, prompt_length)


def distribution(
    scores: NDArray[numpy.float64], sampling: Sampling, text: Sequence[int], prompt_length: int
) -> NDArray[numpy.float64]:
    """[vocabulary], from the logits after a text: an implementation that is independent of the shard's."""
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


def seeded_groups(sampling: Sampling, count: int, tokens: int) -> list[Group]:
    """Requests that differ only by their seeds."""
    return [group(uid, replace(sampling, seed=(uid + 1) * 0x9E3779B97F4A7C15 % (1 << 64)), tokens) for uid in range(count)]


def g_test(answers: Sequence[Sequence[tuple[sampler.Pick, Finish]]], expected: NDArray[numpy.float64]) -> float:
    """The p value of the answers' first tokens, taken jointly, against the exact distribution."""
    length = expected.ndim
    observed = numpy.zeros_like(expected)
    for answer in answers:
        observed[tuple(pick.token for pick, _ in answer[:length])] += 1
    if observed[expected == 0].any():
        return 0.0
    expected_counts = expected.ravel() * len(answers)
    rare = expected_counts < 5  # too few for the test: merged into one class
    observed_counts = numpy.append(observed.ravel()[~rare], observed.ravel()[rare].sum())
    expected_counts = numpy.append(expected_counts[~rare], expected_counts[rare].sum())
    if expected_counts[-1] < 5:
        observed_counts, expected_counts = observed_counts[:-1], expected_counts[:-1]
        expected_counts *= observed_counts.sum() / expected_counts.sum()
    assert len(expected_counts) > 15
    return float(stats.power_divergence(observed_counts, expected_counts, lambda_="log-likelihood").pvalue)


def total_variation(answers: Sequence[Sequence[tuple[sampler.Pick, Finish]]], expected: NDArray[numpy.float64]) -> float:
    """The total variation distance of the answers from the exact distribution, for messages of failing tests."""
    observed = numpy.zeros_like(expected)
    for answer in answers:
        observed[tuple(pick.token for pick, _ in answer[: expected.ndim])] += 1 / len(answers)
    return math.fsum(numpy.abs(observed - expected).ravel()) / 2
