"""What speculation answers has the distribution that it has without: the joint one of three tokens, by a model of some two thousand
parameters whose answers can be enumerated, with another one as its draft model. Through the engine, hundreds of requests in a step,
each of which is at another place when its next step begins.
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
from penstock.tests.shard.toy import g_test, joint, total_variation

VOCABULARY = 4
PROMPT = [0, 1, 2, 3, 1]
BEGUN = [1]  # what has been answered: all that counts is drawn by speculation
COUNT = 3
CHOICES = 4  # of a request, each drawn by itself
AT_ONCE = 500  # requests
FREE = Allowance(LinearCost(1.0, 0.0, 0.0), 1 << 20)  # drafts cost nothing: there are as many as can be
DEAR = Allowance(LinearCost(1.0, 3e-5, 0.05), 1 << 20)  # each costs, so that sequences get them by how often theirs were accepted
PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.8, top_k=3, frequency_penalty=0.4, presence_penalty=0.2)
# The p value below which a test fails. Seeds are fixed, so a test that has passed passes.
FAIR = 0.01
FOUL = 1e-4

Answer = list[tuple[Pick, Finish]]


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Thousands of sequences at once are looked through again and again, which takes most of the time."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def draft_model() -> Decoder:
    """Much like the target."""
    near = load(ShardConfig(folder=str(tiny.folder("four")), model="four"), lambda stage: None).decoder
    near.embedding += 0.25 * torch.randn(near.embedding.shape, generator=torch.Generator().manual_seed(1))
    return near


def engine(said: str) -> Engine:
    target = tiny.decoder("four")
    speculation = parse(f"draft=x,{said}")
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


def answers(said: str, count: int, sampling: Sampling = PLAIN, allowance: Allowance = FREE) -> tuple[list[Answer], int, int]:
    """Of so many requests; and how much was drafted and accepted."""
    found: dict[tuple[int, int], Answer] = {}
    drafted = accepted = 0
    for first in range(0, count, AT_ONCE):
        own = engine(said)  # so short answers tell nothing of how good drafts are: who is right ends
        groups = requests(range(first, min(count, first + AT_ONCE)), sampling, parse(f"draft=x,{said}").most)
        own.prefill(0, groups, [(group.uid, 99) for group in groups], 1 << 20, [])
        while own.books.groups:
            outcome = own.decode([0], allowance)
            drafted, accepted = drafted + outcome.drafted, accepted + outcome.accepted
            for uid, emitted in outcome.emitted:
                found.setdefault((uid, emitted.choice), []).append((emitted.pick, emitted.finish))
    return list(found.values()), drafted, accepted


def exact(sampling: Sampling) -> torch.Tensor:
    """By plain forwards of transformers' model."""
    return joint(lambda text: tiny.expected_logits("four", text)[-1], VOCABULARY, sampling, COUNT, [*PROMPT, *BEGUN], len(PROMPT))


@pytest.mark.parametrize(
    ("said", "count", "sampling", "allowance"),
    [
        ("tokens=3", 200, PLAIN, FREE),
        ("tree=3x2x1", 200, PLAIN, FREE),
        ("tokens=3,verify=rejection", 900, PLAIN, FREE),
        ("tokens=3,verify=rejection", 450, FILTERED, DEAR),
        ("tree=3x2x1,verify=rejection", 900, PLAIN, FREE),
        ("tree=2x2,verify=rejection", 450, FILTERED, DEAR),
    ],
)
def test_answers_have_the_distribution_of_plain_sampling(said: str, count: int, sampling: Sampling, allowance: Allowance) -> None:
    found, drafted, accepted = answers(said, count, sampling, allowance)
    assert len(found) == CHOICES * count
    assert drafted > accepted > CHOICES * count
    assert g_test(found, exact(sampling)) > FAIR, total_variation(found, exact(sampling))


def test_siblings_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn twice is one node and two tries: without such, the check of trees would not be one."""
    seen: list[tuple[int, int]] = []
    drafts = logits._drafts

    def looked_at(one: logits.WantedRows) -> list[Draft]:
        found = drafts(one)
        seen.extend((len(set(family)), len(family)) for draft in found for family in draft.drawn if family)
        return found

    monkeypatch.setattr(logits, "_drafts", looked_at)
    answers("tree=3x2,verify=rejection", 50)
    assert sum(own < tries for own, tries in seen) > len(seen) / 4 > 50


def once(one: logits.WantedRows, plain: Callable[[logits.WantedRows], list[Draft]] = logits._drafts) -> list[Draft]:
    return [replace(draft, drawn=tuple(tuple(dict.fromkeys(family)) for family in draft.drawn)) for draft in plain(one)]


def rolled(*given: Any, plain: Callable[..., Tensor] = verify._proposed) -> Tensor:
    return plain(*given).roll(1, 0)


FAULTS = {
    "whatever is likely is accepted": ("tokens=3", (verify, "_accepts", lambda target, proposed, uniform: target > 0.25)),
    "p and q are swapped": ("tokens=3", (verify, "_accepts", lambda target, proposed, uniform: uniform * target < proposed)),
    "nothing is subtracted": ("tokens=3", (verify, "_residual", lambda target, proposed: target)),
    "repeats are left out": ("tree=6x2", (logits, "_drafts", once)),
    "another draft's distribution": ("tree=3x2x1", (verify, "_proposed", rolled)),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_check_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, planted = FAULTS[fault]
    monkeypatch.setattr(*planted)
    count = 1000 if "repeats" in fault else 300  # it is a small one
    found, _, _ = answers(f"{said},verify=rejection", count)
    assert g_test(found, exact(PLAIN)) < FOUL
