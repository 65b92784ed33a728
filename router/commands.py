"""Builds the commands for the shards as protobuf messages (see proto/shard.proto); `replies` is the other way."""

from collections.abc import Iterable, Mapping, Sequence

from ..proto import shard_pb2
from .drafting import Allowance, needed
from .grammar import written
from .request import Beams, Priority, Request, Stopping, Thinking
from .scheduler import Action, Decode, Filter, Prefill
from .streams import Stream

BATCH = 1  # uid of the one batch on the shards
STOPPING = {
    Stopping.WORSE: shard_pb2.Beams.WORSE,
    Stopping.FULL: shard_pb2.Beams.FULL,
    Stopping.NEVER: shard_pb2.Beams.NEVER,
}


def command(
    action: Action, groups: Sequence[shard_pb2.Group] = (), allowance: shard_pb2.Allowance | None = None
) -> shard_pb2.Command:
    """The message for a scheduler's action. groups: those that join with a Prefill; allowance: budget of a step's drafts."""
    match action:
        case Decode():
            return shard_pb2.Command(decode=shard_pb2.DecodeRequest(batches=[BATCH], allowance=allowance))
        case Filter(drop, pause, end):
            uids, choices = [uid for uid, _ in end], [choice for _, choice in end]
            request = shard_pb2.FilterRequest(drop=drop, pause=pause, end_uids=uids, end_choices=choices)
            return shard_pb2.Command(filter=request)
        case Prefill(_, chunks, tokens, mixed):
            prefill = shard_pb2.PrefillRequest(
                batch=BATCH,
                groups=groups,
                chunk_uids=[uid for uid, _ in chunks],
                chunk_lengths=[length for _, length in chunks],
                prompt_tokens=tokens,
                decode_batches=[BATCH] if mixed else [],
                allowance=allowance,
            )
            return shard_pb2.Command(prefill=prefill)


def allowance_of(allowance: Allowance, streams: Mapping[int, Stream], now: float, ahead: int) -> shard_pb2.Allowance:
    """The budget of drafts, with the drafts that interactive streams need to meet the target. ahead: steps in flight."""
    wanted: dict[int, float] = {}
    for uid, stream in streams.items() if allowance.most else ():
        if stream.request.priority is Priority.INTERACTIVE and stream.request.drafts and stream.run.first:
            tokens = min((choice.generated for choice in stream.choices if choice.running), default=1) - 1
            seconds = (1 + ahead) * allowance.step
            wanted[uid] = needed(now - stream.run.first, tokens, allowance.target, seconds, ahead)
    return shard_pb2.Allowance(
        step_seconds=allowance.step,
        first_seconds=allowance.first,
        draft_seconds=allowance.draft,
        round_seconds=allowance.round,
        most=allowance.most,
        needed_uids=wanted,
        needed=wanted.values(),
    )


def group_of(stream: Stream) -> shard_pb2.Group:
    """The message for a stream that begins or resumes. Raises ValueError or TypeError for values that can't be encoded."""
    wanted = stream.continuations
    if stream.request.beams is None:
        wanted = [one for one in wanted if stream.choices[one.choice].running]
    return group(stream.uid, stream.request, wanted, stream.run.name, stream.choices[0].generated)


def group(
    uid: int, request: Request, continuations: Iterable[shard_pb2.Continuation] = (), trace: str = "", received: int = 0
) -> shard_pb2.Group:
    """The message for a request. Neutral values stay absent. `continuations`: where it resumes after preemption. `trace`: its name
    in logs and traces. `received`: tokens of its first choice that were received."""
    resumes = tuple(continuations)
    sampling = request.sampling
    return shard_pb2.Group(
        uid=uid,
        tokens=request.prompt,
        images=[
            shard_pb2.Image(start=one.start, rows=one.rows, columns=one.columns, pixels=one.pixels, shape=one.shape, size=one.size)
            for one in request.images
        ],
        choices=request.choices if request.choices > 1 else 0,
        max_new_tokens=request.max_new_tokens,
        end_ids=request.end_ids,
        sampling=shard_pb2.Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=_unless(1.0, sampling.top_p),
            min_p=sampling.min_p,
            typical_p=_unless(1.0, sampling.typical_p),
            repetition_penalty=_unless(1.0, sampling.repetition_penalty),
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            seed=sampling.seed,
            bias_ids=[id for id, _ in sampling.logit_bias],
            bias_values=[value for _, value in sampling.logit_bias],
            final_logprobs=sampling.final_logprobs,
        ),
        top_n=request.top_n,
        prompt_logprobs=request.prompt_logprobs and not resumes,
        prompt_top_n=request.prompt_top_n,
        min_new_tokens=request.min_new_tokens,
        thinking=_thinking(request.thinking) if request.thinking else None,
        grammar=written(request.grammar) if request.grammar else "",
        continuations=resumes,
        trace=trace,
        beams=_beams(request.beams, received) if request.beams else None,
        stops=request.stop if request.beams else (),
        cache_key=request.cache_key,
        adapter=request.adapter,
        drafts=request.drafts,
    )


def _thinking(thinking: Thinking) -> shard_pb2.Thinking:
    return shard_pb2.Thinking(most=thinking.most, end=thinking.end, begin=thinking.begin)


def _beams(beams: Beams, received: int) -> shard_pb2.Beams:
    return shard_pb2.Beams(
        width=beams.width,
        length_penalty=beams.length_penalty,
        stop=STOPPING[beams.stopping],
        streamed=received,
        watched=beams.watched,
    )


def _unless(neutral: float, value: float) -> float | None:
    return None if value == neutral else value
