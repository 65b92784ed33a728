"""Converts Anthropic's messages, tools and tool choices into those of OpenAI's chats, which chat templates and output parsers
expect."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..request import Refused
from .errors import shown

Json = dict[str, Any]

CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # `tool_choice` by Anthropic's type
ROLES = ("user", "assistant", "system")
SILENT = "redacted_thinking"  # encrypted by Anthropic's servers: nobody here can read it
# The beginning of Claude Code's first `system` block, which is for Anthropic's billing. No model is meant to read it, and it may
# differ in each request, so that nothing behind it would be found in the prefix cache.
BILLING = "x-anthropic-billing-header:"


def messages_of(given: Sequence[Json], system: str | list[Json] | None) -> tuple[list[Json], list[str]]:
    """A chat's messages, and the place of each in the body. Tool results become messages of their own. Raises Refused."""
    instructions = _texts(system or "", "system")
    found = [{"role": "system", "content": instructions}] if instructions else []
    places = ["system"] * len(found)
    for index, message in enumerate(given):
        role, content, place = message.get("role"), message.get("content"), f"messages[{index}]"
        if role not in ROLES:
            raise Refused(f'`{place}.role` must be "user" or "assistant". Given: {shown(role)}', "messages")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif isinstance(content, list):
            blocks = [(_block(block, f"{place}.content[{at}]"), f"{place}.content[{at}]") for at, block in enumerate(content)]
            found += [_said(blocks)] if role == "assistant" else _asked(role, blocks)
        else:
            raise Refused(f"`{place}.content` must be a string or a list of blocks", "messages")
        places += [place] * (len(found) - len(places))
    return found, places


def _block(block: Any, place: str) -> Json:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise Refused(f"`{place}` must be an object with a type", "messages")
    return block


def _asked(role: str, blocks: Sequence[tuple[Json, str]]) -> Iterator[Json]:
    """The messages of a user's turn: the user's own, and tool results."""
    parts: list[Json] = []
    for block, place in blocks:
        if block["type"] != "tool_result":
            parts.append(_part(block, place))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        content = block.get("content") or ""
        if isinstance(content, list):
            content = [_part(_block(part, f"{place}.content"), f"{place}.content") for part in content]
        elif not isinstance(content, str):
            raise Refused(f"`{place}.content` must be a string or a list of blocks", "messages")
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if parts:
        yield {"role": role, "content": parts}


def _said(blocks: Sequence[tuple[Json, str]]) -> Json:
    """The assistant's message of a turn: its reasoning, text and tool calls."""
    texts, thoughts, calls = [], [], []
    for block, place in blocks:
        match block["type"]:
            case "text":
                texts.append(_text(block, "text", place))
            case "thinking":
                thoughts.append(_text(block, "thinking", place))
            case "tool_use":
                function = {"name": _text(block, "name", place), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind if kind != SILENT:
                raise _unknown(kind, place)
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _part(block: Json, place: str) -> Json:
    """A content part: a text, an image, or the name of a tool that a tool search has found."""
    match block["type"]:
        case "text":
            return {"type": "text", "text": _text(block, "text", place)}
        case "image":
            return {"type": "image_url", "image_url": {"url": _url(block.get("source"), place)}}
        case "tool_reference":
            return {"type": "text", "text": f"Found the tool {_text(block, 'tool_name', place)}.\n"}
        case kind:
            raise _unknown(kind, place)


def _url(source: Any, place: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise Refused(f'`{place}.source` must be of type "base64", with `media_type` and `data`, or "url", with `url`', "messages")


def _texts(said: str | list[Json], name: str) -> str:
    if isinstance(said, str):
        return said
    texts = [_text(block, "text", f"{name}[{index}]") for index, block in enumerate(said)]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _text(block: Json, name: str, place: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise Refused(f"`{place}.{name}` must be a string", place.partition("[")[0])
    return text


def _unknown(kind: str, place: str) -> Refused:
    return Refused(f'`{place}` of type "{kind}" is not supported', "messages")


def tools_of(given: Sequence[Any] | None) -> list[Json] | None:
    """A chat's `tools`. Raises Refused for tools that run on Anthropic's servers."""
    if given is None:
        return None
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]


def _tool(tool: Any, place: str) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind not in (None, "custom"):
        raise Refused(f'`{place}.type` must be "custom": no other tools are supported. Given: {shown(kind)}', f"{place}.type")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def choice_of(choice: Json | None) -> tuple[str | Json | None, bool | None]:
    """A chat's `tool_choice` and `parallel_tool_calls`. Raises Refused."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice:
        case {"type": "auto" | "any" | "none" as kind}:
            return CHOICES[kind], parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
    raise Refused('`tool_choice.type` must be "auto", "any", "none", or "tool" with a `name`', "tool_choice")
