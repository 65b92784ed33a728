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
    bare = True

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        name = yield from up_to(source, "\n", MAX_NAME)
        if name == EVERYBODY:
            return True
        if name is None or not usable(name) or name != name.strip():  # Python's prompt, in a text: `>>> `
            return False
        if not (marker or calls.known(name)) or (yield from space(source)) != "{":
            return False
        yield calls.begin(name)
        yield from stream(follow_json(source), calls)
        return True
