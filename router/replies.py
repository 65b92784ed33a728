"""Decodes a step's reply from the flat columns of the protocol, which are cheapest to transfer (see proto/shard.proto)."""

import itertools
from collections.abc import Iterable, Sequence

from ..proto import shard_pb2
from .scheduler import Report

Pair = tuple[int, float]  # a token and its log-probability


def report_of(step: shard_pb2.StepReply, finished: Sequence[int]) -> Report:
    """What the scheduler needs to know. finished: the uid of each choice that has ended."""
    return Report(
        free=step.free,
        cached=step.cached,
        uids=step.held_uids,
        held=step.held,
        grow=step.grow,
        lacking=step.lacking,
        finished=finished,
        failed=step.failed_uids,
        seconds=step.seconds,
        prompt_tokens=step.prompt_tokens,
        cached_tokens=step.cached_tokens,
        decode_tokens=step.decode_tokens,
        prompt_keys=step.prompt_keys,
        decode_keys=step.decode_keys,
        rows=len(step.tokens) + step.drafted_tokens - step.accepted_tokens,
        drafted=step.drafted_tokens,
        accepted=step.accepted_tokens,
        rounds=step.rounds,
        draft_seconds=step.draft_seconds,
        later_seconds=step.later_seconds,
        ahead=step.ahead,
    )


def prompt_logprobs(step: shard_pb2.StepReply) -> dict[int, tuple[tuple[float | None, ...], tuple[Pair, ...]]]:
    """`Prompt.logprobs` and `Prompt.top` by uid, for the groups whose first token is in this reply and that asked for them."""
    values = iter(step.prompt_logprobs)
    pairs = zip(step.prompt_top_ids, step.prompt_top_logprobs, strict=True)
    groups = zip(step.prompt_uids, step.prompt_counts, step.prompt_tops, strict=True)
    return {
        uid: ((None, *itertools.islice(values, count)), tuple(itertools.islice(pairs, count * wide))) for uid, count, wide in groups
    }


def tops(step: shard_pb2.StepReply) -> Iterable[Sequence[Pair]]:
    """The alternatives of each row."""
    if not step.top_ids:
        return itertools.repeat((), len(step.tokens))
    pairs = zip(step.top_ids, step.top_logprobs, strict=True)
    return [tuple(itertools.islice(pairs, count)) for count in step.top_counts]


def scores_of(step: shard_pb2.StepReply) -> dict[tuple[int, int], float]:
    """Scores of the answers, by uid and choice, of beam searches that have ended."""
    scores = iter(step.scores)
    counts = zip(step.scored_uids, step.scored_counts, strict=True)
    return {(uid, choice): next(scores) for uid, count in counts for choice in range(count)}
