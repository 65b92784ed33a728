"""Counts of drafted and accepted tokens, with a real model: the shard's replies, the metrics and the counts in each response
agree.
"""

import asyncio
from contextlib import aclosing

import pytest

from penstock.proto.speculation import parse
from penstock.router.batcher import Batcher
from penstock.router.cost import Work
from penstock.router.drafting import Allowance, DraftBudget
from penstock.router.request import Finish, Request, Sampling, Speculation, Token
from penstock.router.text import Tokenizer
from penstock.tests.inprocess import DEMO_MODEL, metric_value, run

STORY = "Once upon a time there was a little dog. The little dog had a red ball. One day the little dog lost the red ball. "
SPECULATE_FLAGS = {"ngram=4": "ngram=4", "draft": f"draft={DEMO_MODEL.with_name('draft')},tree=2x2x1,ngram=2"}


class FreeDrafts(DraftBudget):
    """Draft tokens cost nothing, so that their number does not depend on the machine's load."""

    def allow(self, decodes: int, keys: float, prompts: Work) -> Allowance:
        return Allowance(step=1.0, first=0.0, draft=0.0, round=0.0, most=self._drafts * decodes, target=0.0)


async def count_tokens(batcher: Batcher, request: Request) -> tuple[int, Speculation]:
    """The number of tokens in an answer, and the speculation counts in its response."""
    tokens, speculation = 0, None
    async with aclosing(batcher.submit(request)) as stream:
        async for items in stream:
            tokens += sum(isinstance(item, Token) for item in items)
            speculation = next((item.speculation for item in items if isinstance(item, Finish)), speculation)
    assert speculation is not None
    return tokens, speculation


@pytest.mark.parametrize("speculate", list(SPECULATE_FLAGS.values()), ids=list(SPECULATE_FLAGS))
def test_draft_token_counts_of_shard_metrics_and_responses_agree(speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.bounds.DraftBudget", FreeDrafts)
    most_drafts = parse(speculate).most
    prompt = tuple(Tokenizer(DEMO_MODEL).encode(STORY * 3))
    sampling = Sampling(temperature=0.8, seed=7)
    requests = [
        Request(
            prompt=prompt[: 40 + i],
            max_new_tokens=40,
            drafts=most_drafts,
            sampling=sampling if i % 2 else Sampling(),
            choices=1 + i % 2,
        )
        for i in range(6)
    ]

    async def test(batcher: Batcher) -> list[tuple[int, Speculation]]:
        counts = await asyncio.gather(*(count_tokens(batcher, request) for request in requests))
        counts += [await count_tokens(batcher, requests[0])]  # and one request alone
        drafted, accepted = (metric_value(batcher, f"penstock_{name}_tokens_total") for name in ("drafted", "accepted"))
        assert drafted > 0
        assert sum(speculation.drafted for _, speculation in counts) == drafted
        assert sum(speculation.accepted for _, speculation in counts) == accepted
        found = batcher._metrics.samples(("penstock_drafted_positions_total", "penstock_accepted_positions_total"))
        accepted_positions, drafted_positions = (
            found["penstock_accepted_positions_total"],
            found["penstock_drafted_positions_total"],
        )
        answers = sum(request.choices for request in requests) + 1
        assert 0 < accepted_positions <= min(accepted + answers, drafted_positions), (
            "an accepted draft token that ends an answer has no bonus token behind it"
        )
        assert drafted_positions <= drafted
        tokens = sum(count for count, _ in counts)
        steps = metric_value(batcher, "tgi_request_skipped_tokens_count")
        assert steps + metric_value(batcher, "tgi_request_skipped_tokens_sum") == tokens
        assert (metric_value(batcher, "penstock_draft_rounds_total") > 0) == ("draft" in speculate)
        assert metric_value(batcher, "penstock_draft_seconds_total") > 0
        return counts

    counts = run(test, shard={"speculate": speculate, "kv_pages": 200}, router={"speculate": most_drafts, "max_total_tokens": 256})
    for (tokens, speculation), request in zip(counts, [*requests, requests[0]], strict=True):
        assert speculation.drafted >= speculation.accepted
        assert speculation.steps <= tokens
        if request.choices == 1:
            # All tokens of an accepted run count, also those cut off by an end token or by max_new_tokens.
            assert tokens <= speculation.steps + speculation.accepted <= tokens + most_drafts
