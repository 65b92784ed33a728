"""Converts between protobuf messages and the engine's types."""

from array import array
from collections.abc import Sequence as Listing
from itertools import islice
from typing import Any

import torch

from ..proto import shard_pb2 as wire
from .decoding.budget import Allowance, LinearCost
from .decoding.hypotheses import Hypothesis, Path, Search, Stop
from .decoding.strategy import Grown
from .outcome import Outcome
from .pictures import PromptImage
from .sequence import Group, Sampling, Thinking, sequences


def step_reply(step: int, outcome: Outcome) -> wire.Reply:
    """A step's reply. The next step may have begun: nothing that it changes is read here."""
    reply = wire.Reply()
    told, emitted = reply.step, outcome.emitted
    _tell_numbers(told, step, outcome)
    rows = [(uid, row.choice, row.pick.token, row.pick.logprob, row.finish) for uid, row in emitted]
    _extend(told, rows, "uids", "choices", "tokens", "logprobs", "finishes")
    if tops := [pair for _, row in emitted for pair in row.pick.top]:
        told.top_counts.extend([len(row.pick.top) for _, row in emitted])
        _extend(told, tops, "top_ids", "top_logprobs")
    for uid, scores, tops in outcome.prompts:
        counts = [(uid, len(scores), len(tops) // max(len(scores), 1))]
        _extend(told, counts, "prompt_uids", "prompt_counts", "prompt_tops")
        told.prompt_logprobs.extend(scores)
        _extend(told, tops, "prompt_top_ids", "prompt_top_logprobs")
    _extend(told, outcome.standing, "held_uids", "held", "grow", "lacking")
    _extend(told, outcome.failed, "failed_uids", "failed_messages")
    _extend(told, outcome.found, "found_uids", "found_tokens")
    if outcome.drafts:
        _extend(told, outcome.drafts, "draft_uids", "draft_counts", "accepted_counts")
        told.tried_by_depth.extend(outcome.tried)
        told.kept_by_depth.extend(outcome.kept)
    for uid, scores in outcome.scored:
        _extend(told, [(uid, len(scores))], "scored_uids", "scored_counts")
        told.scores.extend(scores)
    _extend(told, outcome.searched, "searched_uids", "searched_tokens")
    if outcome.grown:
        told.grown.extend([grown_to(uid, grown) for uid, grown in outcome.grown])
    return reply


def _tell_numbers(told: wire.StepReply, step: int, outcome: Outcome) -> None:
    told.step, told.seconds, told.ahead, told.exhausted = step, outcome.seconds, outcome.ahead, outcome.exhausted
    told.mask_seconds, told.mask_wait_seconds = outcome.mask_seconds, outcome.mask_wait_seconds
    told.free, told.cached, told.saved_pages, told.loaded_pages = outcome.free, outcome.cached, outcome.saved, outcome.loaded
    told.prompt_tokens, told.restored_tokens = outcome.prompt_tokens, outcome.restored_tokens
    told.cached_tokens, told.prompt_keys = outcome.cached_tokens, outcome.prompt_keys
    told.decode_tokens, told.decode_keys = outcome.decode_tokens, outcome.decode_keys
    told.drafted_tokens, told.accepted_tokens, told.rounds = outcome.drafted, outcome.accepted, outcome.rounds
    told.draft_seconds, told.later_seconds = outcome.draft_seconds, outcome.later_seconds


def _extend(told: wire.StepReply, rows: Listing[tuple[Any, ...]], *columns: str) -> None:
    """Appends rows to columns. Most columns are empty: those are not touched, which would take as long as a few entries."""
    if rows:
        for column, values in zip(columns, zip(*rows, strict=True), strict=True):
            getattr(told, column).extend(values)


def allowance_from(request: wire.PrefillRequest | wire.DecodeRequest) -> Allowance | None:
    """The budget of the step's drafts, if the router sets one."""
    if not request.HasField("allowance"):
        return None
    told = request.allowance
    cost = LinearCost(told.step_seconds, told.draft_seconds, told.round_seconds, told.first_seconds)
    return Allowance(cost, told.most, dict(zip(told.needed_uids, told.needed, strict=True)))


def group_from(message: wire.Group) -> Group:
    """A group as it arrives: new, or resumed with what it generated before."""
    asked: Any = message.sampling
    sampling = Sampling(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p if asked.HasField("top_p") else 1.0,
        min_p=asked.min_p,
        typical_p=asked.typical_p if asked.HasField("typical_p") else 1.0,
        repetition_penalty=asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        bias=tuple(zip(asked.bias_ids, asked.bias_values, strict=True)),
        seed=asked.seed,
        final_logprobs=asked.final_logprobs,
    )
    search = search_from(message) if message.HasField("beams") else None
    live = [part for part in message.continuations if not part.complete]
    continuations = [(part.choice, part.tokens) for part in live]
    begun, waiting = sequences(message.tokens, 1 if search else message.choices or 1, continuations, message.cache_key)
    if search is not None:
        for sequence, part in zip(begun, live or [wire.Continuation()], strict=True):
            sequence.path = path_from(part)
    return Group(
        uid=message.uid,
        sequences=begun,
        waiting=waiting,
        sampling=sampling,
        max_new_tokens=message.max_new_tokens,
        end_ids=frozenset(message.end_ids),
        top_n=message.top_n,
        prompt_logprobs=message.prompt_logprobs and not continuations,  # they were reported with the first token
        prompt_top_n=message.prompt_top_n,
        min_new_tokens=message.min_new_tokens,
        thinking=thinking_from(message.thinking) if message.HasField("thinking") else None,
        grammar=message.grammar,
        search=search,
        drafts=0 if search else message.drafts,
        stops=tuple(message.stops),
        adapter=message.adapter,
        images=tuple(map(picture_from, message.images)),
        trace=message.trace,
    )


def thinking_from(message: wire.Thinking) -> Thinking:
    """Budget for reasoning."""
    return Thinking(message.most, message.end, message.begin if message.HasField("begin") else -1)


def picture_from(message: wire.Image) -> PromptImage:
    """An image as it arrives; the width of its rows in the prompt depends on the model family."""
    pixels = torch.frombuffer(bytearray(message.pixels), dtype=torch.uint8).view(*message.shape)
    return PromptImage(message.start, message.rows, message.columns, message.columns, pixels, size=tuple(message.size))


def search_from(message: wire.Group) -> Search:
    """Beam search as it arrives, with the hypotheses it had kept before it was preempted."""
    asked = message.beams
    kept = [Hypothesis(array("I", part.tokens), path_from(part), part.score) for part in message.continuations if part.complete]
    wanted = message.choices or 1
    return Search(asked.width, wanted, asked.length_penalty, Stop(asked.stop), asked.streamed, asked.watched, kept)


def path_from(part: wire.Continuation) -> Path:
    """A beam's history."""
    pairs = zip(part.top_ids, part.top_logprobs, strict=True)
    return Path(part.score, array("f", part.logprobs), [tuple(islice(pairs, count)) for count in part.top_counts])


def paused_to(group: Group, page_size: int) -> wire.Paused:
    """What resumes a group that was preempted."""
    begun = [] if group.waiting else group.sequences
    continuations = [continuation_to(s.choice, s.tokens[s.prompt_length :], s.path) for s in begun]
    if group.search is not None:
        for rank, kept in enumerate(group.search.kept):
            part = continuation_to(rank, kept.tokens, kept.path)
            part.score, part.complete = kept.score, True
            continuations.append(part)
    return wire.Paused(uid=group.uid, continuations=continuations, grow=group.worst(page_size), lacking=group.lacking)


def continuation_to(choice: int, tokens: Listing[int], path: Path | None) -> wire.Continuation:
    """What one sequence has generated."""
    if path is None:
        return wire.Continuation(choice=choice, tokens=tokens)
    return wire.Continuation(
        choice=choice,
        tokens=tokens,
        score=path.score,
        logprobs=path.logprobs,
        top_counts=[len(top) for top in path.tops],
        top_ids=[token for top in path.tops for token, _ in top],
        top_logprobs=[logprob for top in path.tops for _, logprob in top],
    )


def grown_to(uid: int, grown: Grown) -> wire.Grown:
    """Growth of the beams, for requests that watch the search."""
    return wire.Grown(
        uid=uid,
        parents=[parent for parent, _, _ in grown.live],
        tokens=[token for _, token, _ in grown.live],
        scores=[score for _, _, score in grown.live],
        complete_parents=[parent for parent, _, _ in grown.complete],
        complete_tokens=[token for _, token, _ in grown.complete],
        complete_scores=[score for _, _, score in grown.complete],
        length=grown.length,
    )
