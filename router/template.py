"""Chat templates: renders messages as the prompt's text. Knows Jinja and Hugging Face's dialect of it; knows no tokens.

Rendering runs in this process, for as long as it takes: `rendering.py` sets limits.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .request import Refused

MAX_OUTPUT = 16_000_000  # characters: more than any model reads
MAX_SOURCE = 500_000
DEFAULT = "default"
MARK = "penstock0mark0of0a0try"
ROLES = ("system", "user", "assistant")  # known to every template; how others are treated depends on the template
MOST_SAID = 64  # characters of an unknown role
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # of a message; templates read one or another

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Input of a template, beside the model's special tokens. All of it JSON values."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`: enable_thinking...
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the prompt ends where the last message's own text ends
    folds_system: bool = False  # a later system message is merged into the one before it, where the template does not support it


class ChatTemplate:
    """A compiled chat template: untrusted code that came with a download, run in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token... Raises Refused if it does not compile."""
        if len(source) > MAX_SOURCE:
            raise Refused(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}", "chat_template")
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        # Python, which compiles what Jinja makes of it, finds others: `break` outside of a loop, too deep a nest, endless numbers.
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise Refused(f"the chat template is no template: {error}", "chat_template") from error
        self._special_tokens = special_tokens
        self.reads_messages = any(name.name == "messages" for name in tree.find_all(nodes.Name))
        self._loops = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))  # over a message's content
        tests = list(tree.find_all(nodes.Test))
        self._asks = any(test.name in ("string", "iterable", "sequence") for test in tests)
        self._asks_for_none = any(test.name == "none" and _is_content(test.node) for test in tests)

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises Refused."""
        if not chat.messages:
            raise Refused("`messages` cannot be empty", "messages")
        if chat.folds_system and not self._takes_later_system:
            chat = replace(chat, messages=_folded(chat.messages))
        messages = [self._message(message) for message in chat.messages]
        if not chat.continue_final_message:
            return self._run(chat, messages, chat.add_generation_prompt)
        content = _last_text(chat.messages[-1])
        if content is None:
            raise Refused("the last message has no text that could be continued", "messages")
        if not content and messages[-1].get("tool_calls"):
            raise Refused("the last message has only calls, which can't be continued", "messages")
        if not content:  # nothing to continue: the answer begins
            return self._run(chat, messages[:-1], True)
        mark = secrets.token_hex(16)
        return _cut(self._run(chat, [*messages[:-1], _marked(messages[-1], f"{mark} ")], False), content, mark)

    def check_roles(self, chat: Chat) -> None:
        """Raises Refused if the template silently drops messages, as many do with roles that they don't know. Found out by a trial
        rendering: some know roles that no other does."""
        unsure = {index for index, message in enumerate(chat.messages) if message.get("role") not in ROLES}
        if not unsure:
            return
        mark = str(secrets.randbits(128))  # no letters: templates may write them in capitals
        messages = [
            _signed(message, f"{mark}-{index}-") if index in unsure else message
            for index, message in enumerate(map(self._message, chat.messages))
        ]
        try:
            text = self._run(chat, messages, chat.add_generation_prompt)
        except Refused:  # it would accept the real messages, perhaps: unknown
            return
        found = {int(index) for index in re.findall(mark + "-([0-9]+)-", text)}
        for index in sorted(unsure - found):
            role = str(chat.messages[index].get("role"))[:MOST_SAID]
            raise Refused(
                f'`messages[{index}].role` "{role}": the model\'s chat template leaves such a message out; use one of '
                f"{', '.join(ROLES)}, or one that the template knows",
                "messages",
            )

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it accepts a message's content as a list of parts."""
        return self._loops or bool(self._writes({"role": "user", "content": [{"type": "text", "text": MARK}]}))

    @cached_property
    def _writes_strings(self) -> bool:
        """Whether it writes a message's content that is a string. For a template that loops over contents a trial decides: it may
        loop over some and write others. One that refuses the trial is judged by the tests in its source."""
        if not self.takes_parts:
            return True
        found = self._writes({"role": "user", "content": MARK})
        return self._asks if found is None else found

    @cached_property
    def _takes_later_system(self) -> bool:
        """Whether it writes system messages where they are. Many refuse those after other messages, drop them, or put them
        first."""
        said = [(role, f"{MARK}{place}") for place, role in enumerate(("system", "user", "assistant", "user", "system"))]
        try:
            text = self._run(Chat(messages=()), [self._message({"role": role, "content": word}) for role, word in said], True)
        except Refused:
            return False
        places = [-1, *(text.find(word) for _, word in said)]
        return places == sorted(set(places))

    @cached_property
    def _text_arguments(self) -> bool:
        """Whether it inserts a tool call's arguments as text, rather than as JSON or in its own form."""
        content = None if self._keeps_none else ""
        return not self._writes_call(content, {MARK: 1}) and self._writes_call(content, json.dumps({MARK: 1}))

    @cached_property
    def _keeps_none(self) -> bool:
        """Whether a message with calls may have no content. Some templates test for that, but fail before they get there."""
        return self._asks_for_none and (self._calls_beside[None] or not self._calls_beside[""])

    @cached_property
    def _calls_beside(self) -> dict[str | None, bool]:
        """Whether it writes calls beside no content, and beside an empty one: some drop them beside any text."""
        forms = ({MARK: 1}, json.dumps({MARK: 1}))
        return {content: any(self._writes_call(content, form) for form in forms) for content in (None, "")}

    def _writes_call(self, content: str | None, arguments: object) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asked = {"role": "assistant", "content": content, "tool_calls": [call]}
        return bool(self._writes({"role": "user", "content": "x"}, asked))

    def _writes(self, *messages: Message) -> bool | None:
        """Whether MARK appears in the output, and not within Python's or JSON's notation of its container. None: refused."""
        try:
            text = self._run(Chat(messages=()), messages, False)
        except Refused:
            return None
        return MARK in text and not any(word in text for word in (f"'{MARK}'", f'"text": "{MARK}"', f'"text":"{MARK}"'))

    def _message(self, message: Message) -> dict[str, Any]:
        """A message as the template reads it: its text as a string or in parts, and its reasoning under all field names."""
        found = dict(message)
        content = found.get("content")
        calls = found.get("tool_calls")
        if content is None and not (calls and self._keeps_none):
            content = found["content"] = ""  # templates concatenate it with other texts
        elif content == "" and calls and self._asks_for_none and self._calls_beside[None] and not self._calls_beside[""]:
            content = found["content"] = None
        if isinstance(content, list) and not self.takes_parts:
            found["content"] = "".join(map(_part_text, content))
        elif isinstance(content, str) and not self._writes_strings:
            found["content"] = [{"type": "text", "text": content}]
        if calls and self._text_arguments:
            found["tool_calls"] = [*map(_with_text_arguments, calls)]
        reasoning = next((found[name] for name in REASONING_FIELDS if found.get(name) is not None), None)
        return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}

    def _run(self, chat: Chat, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        variables = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": add_generation_prompt,
        }
        found: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                found.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise Refused(f"the chat template writes more than {MAX_OUTPUT} characters", "messages")
            text = "".join(found)
            text.encode()  # no tokenizer takes half of a surrogate pair, which a template may write
            return text
        # A template is untrusted code, run on a client's data: it may fail in any of these ways.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RuntimeError,
            MemoryError,
            AssertionError,
        ) as error:
            raise Refused(f"the chat template refuses the messages: {str(error) or type(error).__name__}", "messages") from error


def choose(templates: Mapping[str, str], chat: Chat) -> str | None:
    """The source for this chat among a model's named templates; None if there is none for it."""
    if chat.tools and "tool_use" in templates:
        return templates["tool_use"]
    if chat.documents and not chat.tools and "rag" in templates:
        return templates["rag"]
    return templates.get(DEFAULT)


class Generation(Extension):
    """`{% generation %}` marks what the model writes, for training. Here it only opens a scope, as there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(utils.Namespace):
    """Jinja's namespace, without names that lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template must not set {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja environment like transformers'. Constants are not folded at compile time: that would happen outside of all limits."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, Generation]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Namespace}
    environment.filters["tojson"] = _json
    return environment


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise Refused(f"a message's content has a part of type {kind!r}: the chat template takes only text", "messages")


def _with_text_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _folded(messages: Sequence[Message]) -> list[Message]:
    """Merges later system messages into the messages before them. Claude Code sends models without such messages the same kind of
    reminder; a message of its own would end a turn, and templates drop reasoning of turns before the last."""
    found = [messages[0]]
    for message in messages[1:]:
        last = found[-1]
        if message.get("role") != "system":
            found.append(message)
            continue
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(map(_part_text, content))
        if last.get("role") != "system":
            text = f"<system-reminder>\n{text}\n</system-reminder>"
        if last.get("role") == "assistant":
            found.append({"role": "user", "content": text})
        elif _last_text(last) is not None:
            found[-1] = _marked(last, f"\n\n{text}")
        else:
            found[-1] = {**last, "content": [*(last.get("content") or ()), {"type": "text", "text": text}]}
    return found


def _last_text(message: Message) -> str | None:
    """The text to be continued: the content, or its last text part."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = texts[-1] if texts else None
    return content if isinstance(content, str) else None


def _marked(message: Message, mark: str) -> Message:
    """The message with `mark` appended to its last text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    last = max(index for index, part in enumerate(content) if isinstance(part, Mapping) and isinstance(part.get("text"), str))
    part = {**content[last], "text": content[last]["text"] + mark}
    return {**message, "content": [*content[:last], part, *content[last + 1 :]]}


def _signed(message: Message, mark: str) -> Message:
    """The message with `mark` appended, whatever its content."""
    content = message.get("content")
    return _marked(message, mark) if content and _last_text(message) is not None else {**message, "content": mark}


def _cut(text: str, content: str, mark: str) -> str:
    """The text up to the `mark`, which follows the last message's content with a space after it, as transformers cuts."""
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
    """Replaces Jinja's own filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
