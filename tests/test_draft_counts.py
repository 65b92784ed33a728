"""What a server counts of its drafts, over a real model: the shard's columns, the metrics and what each client is told agree."""

import asyncio
from contextlib import aclosing

import pytest

from penstock.proto.speculation import parse
from penstock.router.batcher import Batcher
from penstock.router.cost import Work
from penstock.router.drafting import Allowance, DraftBudget
from penstock.router.request import Finish, Request, Sampling, Speculation, Token
from penstock.router.text import Tokenizer
from penstock.tests.inprocess import DEMO, run, value

STORY = "Once upon a time there was a little dog. The little dog had a red ball. One day the little dog lost the red ball. "
SPEAKS = {"ngram=4": "ngram=4", "draft": f"draft={DEMO.with_name('draft')},tree=2x2x1,ngram=2"}


class Free(DraftBudget):
    """Drafts cost nothing: how many there are must not depend on how busy the machine is."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        return Allowance(step=1.0, first=0.0, draft=0.0, round=0.0, most=self._drafts * decodes, target=0.0)


async def answered(batcher: Batcher, request: Request) -> tuple[int, Speculation]:
    """How many tokens it has, and what is told of its drafts."""
    tokens, last = 0, None
    async with aclosing(batcher.submit(request)) as stream:
        async for items in stream:
            tokens += sum(isinstance(item, Token) for item in items)
            last = next((item.speculation for item in items if isinstance(item, Finish)), last)
    assert last is not None
    return tokens, last


@pytest.mark.parametrize("speaks", list(SPEAKS.values()), ids=list(SPEAKS))
def test_all_counts_agree(speaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.bounds.DraftBudget", Free)
    most = parse(speaks).most
    prompt = tuple(Tokenizer(DEMO).encode(STORY * 3))
    drawn = Sampling(temperature=0.8, seed=7)
    requests = [
        Request(prompt=prompt[: 40 + i], max_new_tokens=40, drafts=most, sampling=drawn if i % 2 else Sampling(), choices=1 + i % 2)
        for i in range(6)
    ]

    async def test(batcher: Batcher) -> list[tuple[int, Speculation]]:
        told = await asyncio.gather(*(answered(batcher, request) for request in requests))
        told += [await answered(batcher, requests[0])]  # and one alone
        drafted, accepted = (value(batcher, f"penstock_{name}_tokens_total") for name in ("drafted", "accepted"))
        assert drafted > 0
        assert sum(speculation.drafted for _, speculation in told) == drafted
        assert sum(speculation.accepted for _, speculation in told) == accepted
        found = batcher._metrics.samples(("penstock_drafted_positions_total", "penstock_accepted_positions_total"))
        kept, tried = found["penstock_accepted_positions_total"], found["penstock_drafted_positions_total"]
        answers = sum(request.choices for request in requests) + 1
        assert 0 < kept <= min(accepted + answers, tried), "a guess that ends an answer was right, but adds no token behind it"
        assert tried <= drafted
        tokens = sum(count for count, _ in told)
        steps = value(batcher, "tgi_request_skipped_tokens_count")
        assert steps + value(batcher, "tgi_request_skipped_tokens_sum") == tokens
        assert (value(batcher, "penstock_draft_rounds_total") > 0) == ("draft" in speaks)
        assert value(batcher, "penstock_draft_seconds_total") > 0
        return told

    told = run(test, shard={"speculate": speaks, "kv_pages": 200}, router={"speculate": most, "max_total_tokens": 256})
    for (tokens, speculation), request in zip(told, [*requests, requests[0]], strict=True):
        assert speculation.drafted >= speculation.accepted
        assert speculation.steps <= tokens
        if request.choices == 1:
            # Of an accepted run that an end or the last token cuts, all counts.
            assert tokens <= speculation.steps + speculation.accepted <= tokens + most
