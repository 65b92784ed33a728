"""A draft model that is the target itself: every guess is accepted, and every step brings all of them and one token more."""

import pytest

from penstock.shard.sequence import Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.test_drafter import all_of, engine, free
from penstock.tests.shard.test_oracle import prompt

GUESSES, STEPS, REQUESTS = 4, 50, 20
LENGTH = 1 + STEPS * (GUESSES + 1)  # the first token comes with the prompt
SAMPLINGS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1)]


@pytest.mark.parametrize("rule", ["gumbel", "rejection"])
def test_a_thousand_steps_bring_all_drafts_and_one_token_more(rule: str) -> None:
    said = f"tokens={GUESSES},verify={rule}"
    own = free(engine(said, pages=REQUESTS * 40))
    groups = [tiny.group(uid, prompt(uid, 8), LENGTH, SAMPLINGS[uid % 3], drafts=all_of(said)) for uid in range(REQUESTS)]
    own.prefill(0, groups, [(group.uid, 99) for group in groups], 999, [])
    for _ in range(STEPS):
        outcome = own.decode([0])
        assert outcome.drafted == outcome.accepted == REQUESTS * GUESSES
        assert len(outcome.emitted) == REQUESTS * (GUESSES + 1)
    assert not own.books.groups
