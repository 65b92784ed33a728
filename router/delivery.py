"""Turns the shards' replies into items of streams: tokens and their texts, log-probabilities, beams, finishes.

Knows requests and texts; no scheduler, and not how shards are reached. What follows from a finish, the caller does.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..proto import shard_pb2
from .metrics import Metrics
from .replies import prompt_logprobs, scores_of, tops
from .request import Alternative, Beam, Finish, Grown, Piece, Prompt, Request, Speculation, Token
from .streams import Choice, Stream, Tokenizer

REASONS = {1: "eos_token", 2: "length"}  # by StepReply.finishes

Streams = Mapping[int, Stream]
Prompts = Mapping[int, tuple[Any, Any]]  # log-probabilities and alternatives of prompts, by uid


@dataclass(slots=True)
class Delivered:
    """The streams that a step's reply has changed."""

    touched: list[Stream] = field(default_factory=list)  # streams with new items; repeated for several tokens
    stopped: list[tuple[Stream, Choice]] = field(default_factory=list)  # ended by a stop string, which the shards don't know
    complete: list[Stream] = field(default_factory=list)  # streams whose choices are all done


class Delivery:
    """Delivers replies to the streams of one batcher."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics

    def deliver(self, reply: shard_pb2.StepReply, streams: Streams, now: float) -> Delivered:
        """Appends what a reply says to the items of its streams, by uid. Missing streams have ended meanwhile."""
        found = Delivered()
        before: list[float] = []  # when the previous token of each row came, if in another step
        prompts = prompt_logprobs(reply) if reply.prompt_uids else {}
        scores = scores_of(reply) if reply.scored_uids else {}
        _count(reply, streams)
        self._deliver_beams(reply, streams, prompts, found)
        rows = zip(reply.uids, reply.choices, reply.tokens, reply.logprobs, reply.finishes, tops(reply), strict=True)
        for uid, index, token, logprob, finish, top in rows:
            stream = streams.get(uid)
            if stream is None or (choice := stream.choices[index]).done:  # it was closed or stopped in the meantime
                continue
            if stream.stepped < now:  # else it has tokens of this step already
                stream.stepped = now
                stream.run.steps += 1
            if choice.ids:
                if choice.last < now:  # not of this step
                    before.append(choice.last)
            elif not any(other.ids for other in stream.choices):
                self._metrics.first_token(now - stream.arrived)
                stream.run.first, stream.run.cached_tokens = now, stream.cached
                _open(stream, prompts)
            choice.last = now
            choice.ids.append(token)
            stop = self._add(stream, choice, token, logprob, finish, top)
            if finish or stop:
                reason = "stop_sequence" if stop else REASONS[finish]
                _finish(stream, choice, reason, stop, now, scores.get((uid, index)), found)
            found.touched.append(stream)
        self._metrics.tokens(len(reply.tokens), {now - last: count for last, count in Counter(before).items()})
        return found

    def _add(
        self, stream: Stream, choice: Choice, token: int, logprob: float, finish: int, top: Sequence[tuple[int, float]]
    ) -> str:
        """Appends a token and detokenizes it. Returns the stop string that ends the text, if one does."""
        text = self._tokenizer.token_text
        hidden = finish and _hides(stream.request, token)
        piece = Piece(text(token), "", "") if hidden else choice.text.push(token)
        special = self._tokenizer.is_special
        alternatives = tuple(Alternative(id, text(id), logprob, special(id)) for id, logprob in top) if top else ()
        stream.items.append(Token(token, piece.text, piece.delta, logprob, special(token), alternatives, choice.index))
        return piece.stop

    def _deliver_beams(self, reply: shard_pb2.StepReply, streams: Streams, prompts: Prompts, found: Delivered) -> None:
        """Delivers the growth of beams, and ends choices for which a beam search has found no answers."""
        for uid in prompts:
            stream = streams.get(uid)
            if stream is not None and stream.request.beams is not None:
                _open(stream, prompts)
                found.touched.append(stream)
        for uid, tokens in zip(reply.searched_uids, reply.searched_tokens, strict=True):
            if uid in streams:
                streams[uid].searched = tokens
        for grown in reply.grown:
            stream = streams.get(grown.uid)
            if stream is not None and grown.length > stream.grown:  # else it was restarted on other shards
                _open(stream, prompts)
                stream.grown = grown.length
                stream.items.append(self._grown(grown))
                found.touched.append(stream)
        for uid, count in zip(reply.scored_uids, reply.scored_counts, strict=True):
            stream = streams.get(uid)
            if stream is not None:
                for choice in stream.choices[count:]:
                    choice.done = True
                    stream.left -= 1
                if not stream.left:  # stop strings, which the shards don't know, had ended the others before
                    found.complete.append(stream)
                    found.touched.append(stream)

    def _grown(self, grown: shard_pb2.Grown) -> Grown:
        text = self._tokenizer.token_text
        live = zip(grown.parents, grown.tokens, grown.scores, strict=True)
        complete = zip(grown.complete_parents, grown.complete_tokens, grown.complete_scores, strict=True)
        return Grown(
            *(tuple(Beam(parent, token, text(token), score) for parent, token, score in beams) for beams in (live, complete))
        )


def _count(reply: shard_pb2.StepReply, streams: Streams) -> None:
    """Counts cached prompt tokens and drafts in the records of their streams."""
    for uid, found in zip(reply.found_uids, reply.found_tokens, strict=True):
        if uid in streams:
            streams[uid].cached += found
    for uid, drafted, accepted in zip(reply.draft_uids, reply.draft_counts, reply.accepted_counts, strict=True):
        if uid in streams:
            run = streams[uid].run
            run.drafted, run.accepted = run.drafted + drafted, run.accepted + accepted


def _open(stream: Stream, prompts: Prompts) -> None:
    """Appends the Prompt item, if it isn't there yet."""
    if not stream.opened:
        stream.opened = True
        stream.items.append(Prompt(*prompts.get(stream.uid, ((), ())), stream.cached))


def _finish(stream: Stream, choice: Choice, reason: str, stop: str, now: float, score: float | None, found: Delivered) -> None:
    delta = choice.text.end()
    queued, inference = stream.started - stream.arrived, now - stream.started
    run = stream.run
    speculation = Speculation(run.drafted, run.accepted, run.steps) if stream.request.drafts else None
    finish = Finish(reason, choice.text.text, delta, choice.generated, queued, inference, choice.index, score, speculation, stop)
    stream.items.append(finish)
    run.reasons.append(reason)
    choice.done = True
    stream.left -= 1
    stream.finish = finish
    if choice.running:
        choice.running = False
        found.stopped.append((stream, choice))
    if not stream.left:
        found.complete.append(stream)


def _hides(request: Request, token: int) -> bool:
    """Whether an end token is left out of the text, as a stop string is. A token that completes a grammar never is."""
    return not request.include_stop and token in request.end_ids and token not in request.shown
