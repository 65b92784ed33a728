"""gpt-oss's harmony format: every message names its channel, and reasoning, tool calls and content are messages of one answer."""

import re
from collections.abc import Callable

from .calls import Calls, stream, usable
from .parts import Part, Reasoning, Text
from .source import Markers, Source, Steps, before, expect, space, up_to
from .values import follow_json

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
HEADER = Markers(START, CHANNEL)
BODY_END = Markers(START, CHANNEL, END, RETURN, CALL)
MAX_HEADER = 512
RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
GOES_ON = (" to=", CHANNEL, CONSTRAIN, MESSAGE)  # how a message's header may go on behind the role


def begun(prompt: str) -> str:
    """The header, as far as it goes, of the message that the prompt ends in; "" if it ends in none."""
    _, start, message = prompt.rpartition(START)
    header, marker, body = message.partition(MESSAGE)
    return f"{start}{header.rstrip()}{marker}" if start and not BODY_END.find(body, 0) else ""


def answers(begun: str) -> bool:
    """Whether the message with this header is content, neither reasoning nor a call."""
    return begun.endswith(MESSAGE) and f"{CHANNEL}analysis" not in begun and not RECIPIENT.search(begun)


def read(source: Source, calls: Calls, begun: str) -> Steps[None]:
    """Reads the whole answer. Text outside of messages is content. `begun`: the header, or its beginning, that the prompt ends
    with."""
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
    """Reads the rest of a header, behind the role; None, and nothing is read, if the answer does not begin so."""
    for text in GOES_ON:
        if (yield from expect(source, text)):
            source.at = 0
            return (yield from up_to(source, MESSAGE, MAX_HEADER))
    return None


def _body(source: Source, calls: Calls, header: str) -> Steps[None]:
    """Reads the body of a message, and its end marker."""
    make: Callable[[str], Part] = Reasoning if f"{CHANNEL}analysis" in header else Text
    if recipient := RECIPIENT.search(header):
        function, name = recipient.groups()
        if not usable(name) or not (function or calls.known(name)):  # gpt-oss's built-in tool, which nobody has here
            make = Reasoning
        elif (yield from space(source)) in ("{", "<", ""):
            yield calls.begin(name)
            if (yield from stream(follow_json(source), calls)):
                yield from space(source)
    end = yield from before(source, BODY_END, make, spaces="")
    source.at += len(end) if end in (END, RETURN, CALL) else 0
