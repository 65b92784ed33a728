"""gpt-oss's format: every message names its channel, and reasoning, calls and answers are messages of one answer."""

import re

from .calls import Calls, stream, usable
from .parts import Reasoning, Text
from .source import Markers, Source, Steps, before, expect, space, up_to
from .values import follow

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
HEADER = Markers(START, CHANNEL)
BODY_END = Markers(START, CHANNEL, END, RETURN, CALL)
MAX_HEADER = 512
RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
GOES_ON = (" to=", CHANNEL, CONSTRAIN, MESSAGE)  # as the header of a message may, behind the role


def begun(prompt: str) -> str:
    """The header of the message that the prompt ends in, as far as it is there; "" if it ends in none."""
    _, start, message = prompt.rpartition(START)
    header, marker, body = message.partition(MESSAGE)
    return f"{start}{header.rstrip()}{marker}" if start and not BODY_END.find(body, 0) else ""


def answers(begun: str) -> bool:
    """Whether the message that begins so is the answer, neither thoughts nor a call."""
    return begun.endswith(MESSAGE) and f"{CHANNEL}analysis" not in begun and not RECIPIENT.search(begun)


def read(source: Source, calls: Calls, begun: str) -> Steps[None]:
    """The whole answer. What belongs to no message is text. `begun`: the header, or some of it, that the prompt ends with."""
    if begun:
        header = "" if begun.endswith(MESSAGE) else (yield from _rest(source))
        if header is not None:
            yield from _body(source, calls, begun + header)
    while marker := (yield from before(source, HEADER, Text, spaces="")):
        header = yield from up_to(source, MESSAGE, MAX_HEADER)
        if header is None:
            yield Text(marker)
            source.at += len(marker)
        else:
            yield from _body(source, calls, header)


def _rest(source: Source) -> Steps[str | None]:
    """Of a header behind the role; None, and nothing is read, if that is not how the answer begins."""
    for text in GOES_ON:
        if (yield from expect(source, text)):
            source.at = 0
            return (yield from up_to(source, MESSAGE, MAX_HEADER))
    return None


def _body(source: Source, calls: Calls, header: str) -> Steps[None]:
    """Of a message, and its end."""
    make: type[Text | Reasoning] = Reasoning if f"{CHANNEL}analysis" in header else Text
    if recipient := RECIPIENT.search(header):
        function, name = recipient.groups()
        if not usable(name) or not (function or calls.known(name)):  # a tool that gpt-oss comes with, and that nobody has here
            make = Reasoning
        elif (yield from space(source)) in ("{", "<", ""):
            yield calls.begin(name)
            if (yield from stream(follow(source), calls)):
                yield from space(source)
    end = yield from before(source, BODY_END, make, spaces="")
    source.at += len(end) if end in (END, RETURN, CALL) else 0
