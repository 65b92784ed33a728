"""What a model thinks before it answers, between two markers. Whitespace next to a marker is the marker's."""

from dataclasses import dataclass

from .parts import Reasoning
from .source import Markers, Source, Steps, after_space, before, expect, space


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a family of models writes them."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    name: str = ""  # behind a marker, on its line, of what it opens
    answer: tuple[str, str] | None = None  # what the answer that follows may stand between

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *(self.answer or ()))

    def begun(self, prompt: str, continued: str) -> bool:
        """Whether the prompt ends where the answer's reasoning begins, as many templates have it, or in the reasoning of the
        message that is `continued`, whose text the prompt ends with; "" if none is."""
        if continued.strip():
            return continued.lstrip().startswith(self.opens) and not any(marker in continued for marker in self.closes)
        return prompt[-256:].rstrip().removesuffix(self.name).rstrip().endswith(self.opens)

    def unwrap(self, source: Source, continued: str) -> Steps[str]:
        """Reads over what the answer stands behind. Returns what is to be left out at its end; "": nothing. continued: as of
        `begun`."""
        if self.answer is None:
            return ""
        opened, closed = self.answer
        if opened in continued:
            return closed if closed not in continued else ""
        if not (yield from after_space(source, opened)):
            return ""
        yield from space(source)
        return closed

    def read(self, source: Source, prompt: str, continued: str) -> Steps[None]:
        """Reads the reasoning if the answer begins with it or in it, and nothing otherwise."""
        begun = self.begun(prompt, continued)
        if not begun:
            yield from space(source)
            for marker in self.opens:
                if (yield from expect(source, marker)):
                    break
            else:
                source.at = 0
                return
        if not begun or self.begun(prompt, ""):  # a marker has just been there
            if self.name:
                yield from after_space(source, f"{self.name}\n")
            yield from space(source)
        marker = yield from before(source, Markers(*self.closes), Reasoning)
        if marker:
            yield from space(source)
            source.at += len(marker)
            yield from space(source)
