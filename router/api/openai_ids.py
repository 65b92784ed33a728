"""vLLM's `return_token_ids`: adds the ids of tokens to OpenAI's answers, for clients that train on the exact tokens. It wraps
another `Shapes`."""

from collections.abc import Sequence

from ..request import Finish, Prompt, Token
from .openai_logprobs import encode
from .openai_shapes import Json, Shapes
from .stream import Answer


class WithTokenIds(Shapes):
    """A `Shapes` that adds `token_ids`, and `prompt_token_ids`, to the choices of another one."""

    def __init__(self, shapes: Shapes, prompts: Sequence[Sequence[int]], shown: int, silent: bool) -> None:
        """prompts: those whose ids stand in their first choices' chunks or answers; (): none. shown: answers for each prompt.
        silent: no generated token is shown."""
        self.id_prefix, self.whole, self.part = shapes.id_prefix, shapes.whole, shapes.part
        self._shapes = shapes
        self._prompts = prompts
        self._shown = shown
        self._silent = silent
        self._begun: set[int] = set()  # choices for which ids were sent

    async def open(self, place: int, prompt: Prompt) -> None:
        await self._shapes.open(place, prompt)

    async def choice(self, index: int, answer: Answer) -> Json:
        tokens = () if self._silent else answer.tokens
        return await self._shapes.choice(index, answer) | self._ids(index, [token.id for token in tokens])

    def opening(self, index: int) -> bytes | None:
        return self._numbered(index, self._shapes.opening(index), [])

    def delta(self, index: int, item: Token | Finish) -> bytes | None:
        return self._numbered(index, self._shapes.delta(index, item), [item.id] if isinstance(item, Token) else [])

    def reasoning_tokens(self) -> int | None:
        return self._shapes.reasoning_tokens()

    def _numbered(self, index: int, choice: bytes | None, ids: list[int]) -> bytes | None:
        if choice is None:
            return None
        return choice[:-1] + b"," + encode(self._ids(index, ids))[1:]

    def _ids(self, index: int, ids: list[int]) -> Json:
        """The fields to add to a choice; the first of a choice's includes the prompt's ids."""
        first = index not in self._begun
        self._begun.add(index)
        prompt = {"prompt_token_ids": self._prompts[index // self._shown]} if self._prompts and first else {}
        return prompt | {"token_ids": ids}
