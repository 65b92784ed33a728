"""Answers with speculation have the distribution of plain sampling: the joint distribution of three tokens, with a model of some
two thousand parameters whose outputs can be enumerated, and another one as its draft model. Through the engine, with hundreds of
requests in a step, whose positions differ when the next step begins. Planted faults show that the check finds them.
"""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.proto.speculation import parse
from penstock.shard import logits
from penstock.shard.config import ShardConfig
from penstock.shard.decoding import verify
from penstock.shard.decoding.budget import Allowance, LinearCost
from penstock.shard.decoding.sampler import Pick
from penstock.shard.decoding.strategy import Finish
from penstock.shard.decoding.verify import Draft
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.sequence import Group, Sampling
from penstock.shard.speculator import Speculator
from penstock.tests.shard import tiny
from penstock.tests.shard.toy import g_test, joint_distribution, total_variation

VOCABULARY = 4
PROMPT = [0, 1, 2, 3, 1]
BEGUN = [1]  # tokens generated before, so that all tokens that count come from speculative steps
COUNT = 3
CHOICES = 4  # for each request, sampled independently
AT_ONCE = 500  # requests in a step
FREE = Allowance(LinearCost(1.0, 0.0, 0.0), 1 << 20)  # drafts cost nothing: there are as many as possible
DEAR = Allowance(LinearCost(1.0, 3e-5, 0.05), 1 << 20)  # drafts cost time: sequences get them by their acceptance so far
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.8, top_k=3, frequency_penalty=0.4, presence_penalty=0.2)
# The p value below which a test fails. Seeds are fixed, so a test that has passed passes.
FAIR = 0.01
FAULTY = 1e-4

Answer = list[tuple[Pick, Finish]]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Garbage collection of thousands of live sequences would take most of the time."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def draft_model() -> Decoder:
    """A model much like the target."""
    near = load(ShardConfig(folder=str(tiny.folder("four")), model="four"), lambda stage: None).decoder
    near.embedding += 0.25 * torch.randn(near.embedding.shape, generator=torch.Generator().manual_seed(1))
    return near


def engine(options: str) -> Engine:
    target = tiny.decoder("four")
    speculation = parse(f"draft=x,{options}")
    drafter = Drafter(draft_model(), VOCABULARY, tiny.CPU, speculation.most)
    result = Engine(target, tiny.CPU, 16, speculator=Speculator(target.ranks, tiny.CPU, speculation, drafter))
    result.resize(AT_ONCE * CHOICES * 2)
    return result


def requests(uids: Sequence[int], sampling: Sampling, drafts: int) -> list[Group]:
    return [
        tiny.group(
            uid,
            PROMPT,
            len(BEGUN) + COUNT + 1,
            replace(sampling, seed=(uid + 1) * 0x9E3779B97F4A7C15 % (1 << 64)),
            continuations=[(choice, BEGUN) for choice in range(CHOICES)],
            drafts=drafts,
        )
        for uid in uids
    ]


def answers(options: str, count: int, sampling: Sampling = PLAIN, allowance: Allowance = FREE) -> tuple[list[Answer], int, int]:
    """The answers to so many requests, and the numbers of drafted and accepted tokens."""
    found: dict[tuple[int, int], Answer] = {}
    drafted = accepted = 0
    for first in range(0, count, AT_ONCE):
        drafting = engine(options)  # a new one: acceptance learned from so short answers is biased, since accepted drafts end them
        groups = requests(range(first, min(count, first + AT_ONCE)), sampling, parse(f"draft=x,{options}").most)
        drafting.prefill(0, groups, [(group.uid, 99) for group in groups], 1 << 20, [])
        while drafting.books.groups:
            outcome = drafting.decode([0], allowance)
            drafted, accepted = drafted + outcome.drafted, accepted + outcome.accepted
            for uid, emitted in outcome.emitted:
                found.setdefault((uid, emitted.choice), []).append((emitted.pick, emitted.finish))
    return list(found.values()), drafted, accepted


def exact(sampling: Sampling) -> torch.Tensor:
    """The exact distribution, by plain forward passes of transformers' model."""
    return joint_distribution(
        lambda text: tiny.expected_logits("four", text)[-1], VOCABULARY, sampling, COUNT, [*PROMPT, *BEGUN], len(PROMPT)
    )


@pytest.mark.parametrize(
    ("options", "count", "sampling", "allowance"),
    [
        ("tokens=3", 200, PLAIN, FREE),
        ("tree=3x2x1", 200, PLAIN, FREE),
        ("tokens=3,verify=rejection", 900, PLAIN, FREE),
        ("tokens=3,verify=rejection", 450, FILTERED, DEAR),
        ("tree=3x2x1,verify=rejection", 900, PLAIN, FREE),
        ("tree=2x2,verify=rejection", 450, FILTERED, DEAR),
    ],
)
def test_answers_have_the_distribution_of_plain_sampling(
    options: str, count: int, sampling: Sampling, allowance: Allowance
) -> None:
    found, drafted, accepted = answers(options, count, sampling, allowance)
    assert len(found) == CHOICES * count
    assert drafted > accepted > CHOICES * count
    assert g_test(found, exact(sampling)) > FAIR, total_variation(found, exact(sampling))


def test_tested_draft_trees_contain_repeated_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token sampled twice is one node and two tries: without such siblings, the check of trees would not cover repeats."""
    siblings: list[tuple[int, int]] = []
    drafts = logits._drafts

    def recording_drafts(group: Group, rows: int) -> list[Draft]:
        found = drafts(group, rows)
        siblings.extend((len(set(family)), len(family)) for draft in found for family in draft.drawn if family)
        return found

    monkeypatch.setattr(logits, "_drafts", recording_drafts)
    answers("tree=3x2,verify=rejection", 50)
    assert sum(distinct < tries for distinct, tries in siblings) > len(siblings) / 4 > 50


def without_repeats(*given: Any, plain: Callable[..., list[Draft]] = logits._drafts) -> list[Draft]:
    return [replace(draft, drawn=tuple(tuple(dict.fromkeys(family)) for family in draft.drawn)) for draft in plain(*given)]


def of_another_draft(*given: Any, plain: Callable[..., Tensor] = verify._proposed) -> Tensor:
    return plain(*given).roll(1, 0)


FAULTS = {
    "probable drafts always accepted": ("tokens=3", (verify, "_accepts", lambda target, proposed, uniform: target > 0.25)),
    "p and q swapped": ("tokens=3", (verify, "_accepts", lambda target, proposed, uniform: uniform * target < proposed)),
    "nothing subtracted": ("tokens=3", (verify, "_residual", lambda target, proposed: target)),
    "repeats left out": ("tree=6x2", (logits, "_drafts", without_repeats)),
    "another draft's distribution": ("tree=3x2x1", (verify, "_proposed", of_another_draft)),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_check_catches_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, planted = FAULTS[fault]
    monkeypatch.setattr(*planted)
    count = 1000 if "repeats" in fault else 300  # this fault has a small effect
    found, _, _ = answers(f"{options},verify=rejection", count)
    assert g_test(found, exact(PLAIN)) < FAULTY
