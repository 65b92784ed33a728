"""With the target itself as the draft model every draft is accepted: every step emits all drafts and one more token."""

import pytest

from penstock.shard.sequence import Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_drafter import engine, max_drafts, with_free_drafts

DRAFTS, STEPS, REQUESTS = 4, 50, 20
LENGTH = 1 + STEPS * (DRAFTS + 1)  # the first token comes with the prompt
SAMPLINGS = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1)]


@pytest.mark.parametrize("rule", ["gumbel", "rejection"])
def test_every_step_emits_all_drafts_and_one_more_token(rule: str) -> None:
    options = f"tokens={DRAFTS},verify={rule}"
    drafting = with_free_drafts(engine(options, pages=REQUESTS * 40))
    groups = [tiny.group(uid, prompt(uid, 8), LENGTH, SAMPLINGS[uid % 3], drafts=max_drafts(options)) for uid in range(REQUESTS)]
    drafting.prefill(0, groups, [(group.uid, 99) for group in groups], 999, [])
    for _ in range(STEPS):
        outcome = drafting.decode([0])
        assert outcome.drafted == outcome.accepted == REQUESTS * DRAFTS
        assert len(outcome.emitted) == REQUESTS * (DRAFTS + 1)
        sequences = [sequence for group in drafting.books.groups.values() for sequence in group.sequences]
        assert all(
            sequence.computed == len(sequence.tokens) - 1 for sequence in sequences
        )  # accepted tokens are not computed again
    assert not drafting.books.groups
