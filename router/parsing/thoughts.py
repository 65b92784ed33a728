"""Reasoning between two markers, such as <think> and </think>. Whitespace next to a marker belongs to the marker."""

from dataclasses import dataclass

from .parts import Reasoning
from .source import Markers, Source, Steps, after_space, before, expect, space


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """How a family of models marks its reasoning."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    name: str = ""  # a word on the line of the opening marker, behind it
    answer: tuple[str, str] | None = None  # markers between which the answer that follows may stand
    frames: tuple[str, ...] = ()  # special tokens around the parts of an answer, left out wherever they stand behind the reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *(self.answer or ()), *self.frames)

    def begun(self, prompt: str, continued: str) -> bool:
        """Whether the answer begins inside reasoning: the prompt ends with an opening marker, as many templates have it, or the
        message that is `continued`, whose text the prompt ends with, has opened reasoning and not closed it. continued: "" if no
        message is."""
        if continued.strip():
            return continued.lstrip().startswith(self.opens) and not any(marker in continued for marker in self.closes)
        return prompt[-256:].rstrip().removesuffix(self.name).rstrip().endswith(self.opens)

    def unwrap(self, source: Source, continued: str) -> Steps[str]:
        """Reads over the opening marker of the answer itself. Returns the closing marker, which is to be left out at its end; "":
        none. continued: as in `begun`."""
        if self.answer is None:
            return ""
        opened, closed = self.answer
        if opened in continued:
            return closed if closed not in continued else ""
        if not (yield from after_space(source, opened)):
            return ""
        yield from space(source)
        return closed

    def _closed(self, source: Source) -> Steps[bool]:
        """Reads over the end of a reasoning that has not begun, by which a model may say that it doesn't reason."""
        for marker in self.closes:
            if (yield from expect(source, marker)):
                yield from space(source)
                return True
        return False

    def read(self, source: Source, prompt: str, continued: str) -> Steps[None]:
        """Reads the reasoning if the answer begins with it or inside it, and nothing otherwise."""
        begun = self.begun(prompt, continued)
        if not begun:
            yield from space(source)
            for marker in self.opens:
                if (yield from expect(source, marker)):
                    break
            else:
                if continued.strip() or not (yield from self._closed(source)):
                    source.at = 0
                return
        if not begun or self.begun(prompt, ""):  # an opening marker has just been read, here or at the prompt's end
            if self.name:
                yield from after_space(source, f"{self.name}\n")
            yield from space(source)
        marker = yield from before(source, Markers(*self.closes), Reasoning)
        if marker:
            yield from space(source)
            source.at += len(marker)
            yield from space(source)
