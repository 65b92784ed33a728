"""Validation of commands that no shard can execute, whatever its model: numbers out of range, columns of different lengths.

They are refused as a whole, before any rank has received them. What depends on the model, or on the running groups, is checked by
the engine, where a group fails alone.
"""

import math
from collections.abc import Iterator
from typing import Any

from ..proto import shard_pb2 as wire
from .commands import Refused
from .decoding.tree import MOST_NODES

LAST = (1 << 64) - 1  # a step number that no command could follow
MOST_CHOICES = 1 << 16  # of a group: more rows than any step samples
LARGEST_FLOAT = 3.4028e38  # of 32 bits


def checked(command: wire.Command) -> wire.Command:
    """Returns the command. Raises Refused."""
    for problem in _problems(command):
        raise Refused(problem)
    return command


def check_warmup(request: wire.WarmupRequest) -> None:
    """Checks a Warmup request. Raises Refused."""
    for name in ("max_step_tokens", "max_step_rows"):
        if not getattr(request, name):
            raise Refused(f"{name} is 0: the largest step would be none")


def _problems(command: wire.Command) -> Iterator[str]:
    kind = command.WhichOneof("kind")
    if kind is None:
        return  # `commands` refuses it
    request: Any = getattr(command, kind)
    if request.step == LAST:
        yield f"step {request.step} leaves none for the next command"
    if kind == "filter":
        yield from _uneven(request, "end_uids", "end_choices")
    if kind == "prefill":
        yield from _uneven(request, "chunk_uids", "chunk_lengths")
        for group in request.groups:
            yield from (f"group {group.uid}: {problem}" for problem in _of_group(group))
    if kind in ("prefill", "decode") and request.HasField("allowance"):
        yield from _of_allowance(request.allowance)


def _of_group(group: wire.Group) -> Iterator[str]:
    if group.choices > MOST_CHOICES:
        yield f"{group.choices} choices are too many"
    if group.drafts > MOST_NODES:
        yield f"{group.drafts} drafts are too many: a step has bits for {MOST_NODES}"
    yield from _of_sampling(group.sampling)
    for image in group.images:
        if math.prod(image.shape) != len(image.pixels) or not image.pixels:
            yield f"{len(image.pixels)} pixels of an image are not of shape {[*image.shape]}"
    if group.HasField("beams"):
        yield from _of_beams(group)


def _of_sampling(asked: wire.Sampling) -> Iterator[str]:
    yield from _infinite(asked)
    yield from _uneven(asked, "bias_ids", "bias_values")
    if asked.temperature < 0:
        yield f"temperature {asked.temperature} is negative"
    if not 0 <= asked.min_p <= 1:
        yield f"min_p {asked.min_p} is not within [0, 1]"
    for name in ("top_p", "typical_p"):
        if asked.HasField(name) and not 0 < getattr(asked, name) <= 1:
            yield f"{name} {getattr(asked, name)} is not within (0, 1]"
    if asked.HasField("repetition_penalty") and asked.repetition_penalty <= 0:
        yield f"repetition_penalty {asked.repetition_penalty} is not above 0"


def _of_beams(group: wire.Group) -> Iterator[str]:
    beams = group.beams
    yield from _infinite(beams)
    if beams.width < 2:
        yield f"{beams.width} beams are too few: a search has two at least"
    if beams.stop not in wire.Beams.Stop.values():
        yield f"nobody knows the stop {beams.stop}"
    if group.max_new_tokens and abs(beams.length_penalty) * math.log(group.max_new_tokens) > math.log(LARGEST_FLOAT):
        yield f"{group.max_new_tokens} tokens to the power of length_penalty {beams.length_penalty} are no number of 32 bits"
    live = [part for part in group.continuations if not part.complete]
    if len(live) > beams.width:
        yield f"{len(live)} beams go on, {beams.width} are wanted"
    if len({len(part.tokens) for part in live}) > 1:
        yield "beams that go on differ in length"
    for part in group.continuations:
        if len(part.logprobs) != len(part.tokens) or len(part.top_counts) != (len(part.tokens) if group.top_n else 0):
            yield "a beam's logprobs or top_counts are not as many as its tokens"
        if not len(part.top_ids) == len(part.top_logprobs) == sum(part.top_counts):
            yield "a beam's top_ids or top_logprobs are not as many as top_counts says"


def _of_allowance(allowed: wire.Allowance) -> Iterator[str]:
    yield from _infinite(allowed)
    yield from _uneven(allowed, "needed_uids", "needed")
    if allowed.most and allowed.step_seconds <= 0:
        yield f"a step of {allowed.step_seconds} seconds is none"
    for name in ("draft_seconds", "round_seconds", "first_seconds"):
        if getattr(allowed, name) < 0:
            yield f"{name} {getattr(allowed, name)} is negative"


def _uneven(message: Any, one: str, other: str) -> Iterator[str]:
    """Reports two columns of one table that differ in length."""
    if len(getattr(message, one)) != len(getattr(message, other)):
        yield f"{one} has {len(getattr(message, one))} values and {other} has {len(getattr(message, other))}"


def _infinite(message: Any) -> Iterator[str]:
    """Reports fields with values that are not finite."""
    for field, value in message.ListFields():
        if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            listed = value if field.is_repeated else [value]
            if not all(map(math.isfinite, listed)):
                yield f"{field.name} is no finite number"
