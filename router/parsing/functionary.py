"""functionary 3.2's answers: parts that begin with a recipient on a line of its own, `all` for text, or a function whose arguments
follow as JSON. `>>>` stands between parts; before the first one it is in the prompt."""

from .calls import MAX_NAME, Calls, stream, usable
from .source import Source, Steps, space, up_to
from .values import follow_json

NEXT, EVERYBODY = ">>>", "all"


class FunctionaryForm:
    """The form `all\\ntext>>>f\\n{...}>>>g\\n{...}`."""

    opens = (NEXT,)
    markers = (NEXT,)

    def first(self, source: Source, calls: Calls) -> Steps[bool]:
        return (yield from _part(source, calls, strict=True))

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        return (yield from _part(source, calls, strict=False))


def _part(source: Source, calls: Calls, strict: bool) -> Steps[bool]:
    """Reads a part's recipient, and its call. `strict`: the tool must exist."""
    name = yield from up_to(source, "\n", MAX_NAME)
    if name == EVERYBODY:
        return True
    if name is None or not usable(name) or (strict and not calls.known(name)) or (yield from space(source)) != "{":
        return False
    yield calls.begin(name)
    yield from stream(follow_json(source), calls)
    return True
