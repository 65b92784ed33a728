"""Renders chat templates in worker processes, within limits of time and memory: a template is a program.

Counting loops, or forbidding functions, would not do: a template can fill the memory or the time with one `replace`, one `join`,
one product.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .request import Overloaded, Refused
from .template import Chat, ChatTemplate
from .worker_processes import Busy, Died, TimedOut, WorkerProcesses, serve

SECONDS = 5.0  # for one chat. All of it costs the router 0.04 ms of CPU for a short one and 4 ms for 1 MB (x86, 2 cores)
PROCESSES = 2  # so that a slow chat does not block others
FIELDS = tuple(field.name for field in dataclasses.fields(Chat))


@dataclass(frozen=True, slots=True)
class Result:
    """The text, or why there is none and which field is to blame."""

    text: str = ""
    refused: str = ""
    parameter: str | None = None


class Renderer:
    """Renders chats in worker processes, within limits."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._workers = WorkerProcesses("penstock.router.rendering", PROCESSES)

    async def render(self, source: str, special_tokens: Mapping[str, str], chat: Chat) -> str:
        """The prompt's text. Raises Refused, or Overloaded."""
        job = json.dumps([source, special_tokens, {name: getattr(chat, name) for name in FIELDS}]).encode()
        try:
            result = Result(**json.loads(await self._workers.ask(job, self._seconds)))
        except Busy:
            raise Overloaded("no chat can be rendered now") from None
        except TimedOut:
            raise Refused(f"the chat template takes more than {self._seconds:g} s for the messages", "messages") from None
        except Died:
            raise Refused("rendering the chat template has failed: it needs too much memory", "messages") from None
        if result.refused:
            raise Refused(result.refused, result.parameter)
        return result.text


@lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _result(source: str, special_tokens: dict[str, str], chat: dict[str, Any]) -> Result:
    """The worker's job for one chat."""
    try:
        template, asked = _compiled(source, tuple(special_tokens.items())), Chat(**chat)
        text = template.render(asked)
        template.check_roles(asked)
        return Result(text)
    except Refused as refused:
        return Result(refused=str(refused)[:2000], parameter=refused.parameter)


def _work(job: bytes) -> bytes:
    return json.dumps(dataclasses.asdict(_result(*json.loads(job)))).encode()


if __name__ == "__main__":
    serve(_work)
