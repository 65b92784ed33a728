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
    """The columns of a step's reply. The next step may have begun: nothing that it changes is read here."""
    emitted = outcome.emitted
    tops = [pair for _, row in emitted for pair in row.pick.top]
    reply = wire.StepReply(
        step=step,
        uids=[uid for uid, _ in emitted],
        choices=[row.choice for _, row in emitted],
        tokens=[row.pick.token for _, row in emitted],
        logprobs=[row.pick.logprob for _, row in emitted],
        finishes=[row.finish for _, row in emitted],
        top_counts=[len(row.pick.top) for _, row in emitted] if tops else [],
        top_ids=[token for token, _ in tops],
        top_logprobs=[logprob for _, logprob in tops],
        prompt_uids=[uid for uid, _, _ in outcome.prompts],
        prompt_counts=[len(scores) for _, scores, _ in outcome.prompts],
        prompt_logprobs=[score for _, scores, _ in outcome.prompts for score in scores],
        prompt_tops=[len(tops) // max(len(scores), 1) for _, scores, tops in outcome.prompts],
        prompt_top_ids=[token for _, _, tops in outcome.prompts for token, _ in tops],
        prompt_top_logprobs=[logprob for _, _, tops in outcome.prompts for _, logprob in tops],
        held_uids=[uid for uid, _, _, _ in outcome.standing],
        held=[held for _, held, _, _ in outcome.standing],
        grow=[grow for _, _, grow, _ in outcome.standing],
        lacking=[lacking for _, _, _, lacking in outcome.standing],
        free=outcome.free,
        cached=outcome.cached,
        saved_pages=outcome.saved,
        loaded_pages=outcome.loaded,
        failed_uids=[uid for uid, _ in outcome.failed],
        failed_messages=[message for _, message in outcome.failed],
        seconds=outcome.seconds,
        mask_seconds=outcome.mask_seconds,
        mask_wait_seconds=outcome.mask_wait_seconds,
        prompt_tokens=outcome.prompt_tokens,
        restored_tokens=outcome.restored_tokens,
        cached_tokens=outcome.cached_tokens,
        found_uids=[uid for uid, _ in outcome.found],
        found_tokens=[tokens for _, tokens in outcome.found],
        decode_tokens=outcome.decode_tokens,
        prompt_keys=outcome.prompt_keys,
        decode_keys=outcome.decode_keys,
        drafted_tokens=outcome.drafted,
        accepted_tokens=outcome.accepted,
        draft_uids=[uid for uid, _, _ in outcome.drafts],
        draft_counts=[drafted for _, drafted, _ in outcome.drafts],
        accepted_counts=[accepted for _, _, accepted in outcome.drafts],
        tried_by_depth=outcome.tried,
        kept_by_depth=outcome.kept,
        draft_seconds=outcome.draft_seconds,
        rounds=outcome.rounds,
        later_seconds=outcome.later_seconds,
        exhausted=outcome.exhausted,
        ahead=outcome.ahead,
        scored_uids=[uid for uid, _ in outcome.scored],
        scored_counts=[len(scores) for _, scores in outcome.scored],
        scores=[score for _, scores in outcome.scored for score in scores],
        grown=[grown_to(uid, grown) for uid, grown in outcome.grown],
        searched_uids=[uid for uid, _ in outcome.searched],
        searched_tokens=[tokens for _, tokens in outcome.searched],
    )
    return wire.Reply(step=reply)


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
