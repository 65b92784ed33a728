"""Chat templates: messages in, the prompt's text out. Knows Jinja and the dialect of Hugging Face; knows no tokens."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .request import Refused

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's own template, run in a sandbox: it came with a download."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token..."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        environment.filters["tojson"] = _json
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends where the last message's own text ends."""
        if not continue_final_message:
            return self._run(messages, tools, add_generation_prompt)
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise Refused("the last message has no text that could be continued", "messages")
        if not content:  # nothing to continue: the answer begins
            return self._run(messages[:-1], tools, True)
        mark = secrets.token_hex(16)
        marked = {**messages[-1], "content": f"{content}{mark} "}
        return _cut(self._run([*messages[:-1], marked], tools, False), content, mark)

    def _run(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template is a program of somebody else's, run on a client's data: it may fail in any of these ways.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise Refused(f"the chat template refuses the messages: {error}", "messages") from error


class Generation(Extension):
    """`{% generation %}` marks what the model writes, for those who train. Here it only has to be no error."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _cut(text: str, content: str, mark: str) -> str:
    """The text up to the `mark`, which stands behind the last message's content with a space after it, as transformers cuts."""
    head, found, tail = text.rpartition(mark)
    if not found or not head.rstrip().endswith(content.strip()):
        raise Refused("the chat template changes the last message, so it can't be continued", "messages")
    # A template that strips the content (the mark's space is missing) would have stripped its last spaces too.
    return head if tail.startswith(" ") or not content.strip() else head.rstrip()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
