"""gpt-oss's format: every message names its channel, and reasoning, calls and answers are messages of one answer."""

import re

from .calls import Calls, stream, usable
from .parts import Reasoning, Text
from .source import Markers, Source, Steps, before, space, up_to
from .values import follow

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
HEADER = Markers(START, CHANNEL)
BODY_END = Markers(START, CHANNEL, END, RETURN, CALL)
MAX_HEADER = 512
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def read(source: Source, calls: Calls) -> Steps[None]:
    """The whole answer. What belongs to no message is text."""
    while marker := (yield from before(source, HEADER, Text, spaces="")):
        header = yield from up_to(source, MESSAGE, MAX_HEADER)
        if header is None:
            yield Text(marker)
            source.at += len(marker)
            continue
        recipient = RECIPIENT.search(header)
        make: type[Text | Reasoning] = Text
        if recipient and usable(recipient[1]):
            yield calls.begin(recipient[1])
            if (yield from stream(follow(source), calls)):
                yield from space(source)
        elif f"{CHANNEL}analysis" in header:
            make = Reasoning
        end = yield from before(source, BODY_END, make, spaces="")
        source.at += len(end) if end in (END, RETURN, CALL) else 0
