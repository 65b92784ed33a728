"""Plain decoding: each sequence of a group grows by one token a step, greedily or by sampling."""

import math
from collections.abc import Sequence as Listing
from dataclasses import replace

from ..sequence import Group, Sampling
from ..step import Span
from .sampler import Pick, Row
from .strategy import NOT_FINITE, Emitted, Verdict, finish_of

CERTAIN = 1e9  # a bias far above any logit: the token is forced


class Sample:
    """The strategy of plain decoding; see Strategy."""

    def draft(self, group: Group) -> list[Span]:
        """One token of each sequence: its last."""
        return [Span(s, s.computed, s.tokens[s.computed :]) for s in group.sequences]

    def rows(self, group: Group) -> list[Row]:
        """One for each sequence, or for each choice that begins after the prefill."""
        bound = bool(group.grammar)
        if group.waiting:
            [first] = group.sequences
            sampling = sampling_of(group, first.tokens)
            return [
                Row(sampling, first.tokens, first.prompt_length, choice, group.top_n, bound, first.counts)
                for choice in group.waiting
            ]
        return [
            Row(sampling_of(group, s.tokens), s.tokens, s.prompt_length, s.choice, group.top_n, bound, s.counts)
            for s in group.sequences
        ]

    def judge(self, group: Group, picks: Listing[Pick | None]) -> Verdict:
        """Appends each sampled token to its sequence."""
        emitted, ended = [], []
        for sequence, pick in zip(group.sequences, picks, strict=True):
            if pick is None:
                return Verdict(failure=NOT_FINITE)
            tokens = sequence.tokens
            tokens.append(pick.token)
            finish = finish_of(group, pick, len(tokens) - sequence.prompt_length)
            if finish:
                ended.append(sequence)
            emitted.append(Emitted(sequence.choice, pick, finish))
        return Verdict(emitted, ended)


def sampling_of(group: Group, tokens: Listing[int]) -> Sampling:
    """The sampling parameters for the token after `tokens` (prompt and output). Below min_new_tokens end tokens are banned (a
    grammar's mask does that by itself); where the thinking budget is spent, the token that ends thinking is forced."""
    sampling, thinking = group.sampling, group.thinking
    if thinking is not None and thinking.overdue(tokens, group.prompt_length):
        return Sampling(bias=((thinking.end, CERTAIN),), seed=sampling.seed, final_logprobs=sampling.final_logprobs)
    if not group.min_new_tokens or group.grammar or len(tokens) - group.prompt_length >= group.min_new_tokens:
        return sampling
    kept = ((token, value) for token, value in sampling.bias if token not in group.end_ids)
    return replace(sampling, bias=(*kept, *((token, -math.inf) for token in sorted(group.end_ids))))
