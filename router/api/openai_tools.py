"""The tools of a chat: which may be called, and which must be. Knows OpenAI's fields, and no model's form of tool calls."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..request import Refused
from .errors import shown

NAME = re.compile(r"[\w./:@$-]{1,128}")  # OpenAI's are shorter, and plainer; every form of calls can write these
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may call, from `tools`, `tool_choice` and `parallel_tool_calls`."""

    given: list[dict[str, Any]] = field(default_factory=list)  # as the client sent them; empty: nothing is called
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # JSON schemas of the parameters, by the tool's name
    forced: bool = False  # the answer must be calls and nothing else
    parallel: bool = True  # several calls are allowed


def tools_of(tools: list[Any] | None, choice: str | dict[str, Any] | None, parallel: bool | None) -> Tools:
    """The tools from OpenAI's three fields. Raises Refused."""
    given = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or NO_PARAMETERS for tool in given}
    if len(schemas) < len(given):
        twice = Counter(tool["function"]["name"] for tool in given).most_common(1)[0][0]
        raise Refused(f"two `tools` have the same name: {twice}", "tools")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise Refused("`tool_choice.allowed_tools` must have `tools`, a list", "tool_choice")
        schemas = {name: _known(name, schemas) for name in map(_name, allowed["tools"])}
        given = [tool for tool in given if tool["function"]["name"] in schemas]
        choice = allowed.get("mode", "auto")
    if choice == "none" or (not given and choice in (None, "auto")):
        return Tools()
    if choice in (None, "auto", "required"):
        if not given:
            raise Refused('`tool_choice`: "required" needs `tools`', "tool_choice")
        return Tools(given, schemas, choice == "required", parallel is not False)
    name = _name(choice)
    return Tools(given, {name: _known(name, schemas)}, forced=True, parallel=False)


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise Refused(f'`{place}.type` must be "function": no other tools are supported. Given: {shown(kind)}', f"{place}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise Refused(f"`{place}.function` must be an object", f"{place}.function")
    function_name = function.get("name")
    if not isinstance(function_name, str) or not NAME.fullmatch(function_name):
        name = f"{place}.function.name"
        raise Refused(
            f"`{name}` must have 1 to 128 characters: letters, digits, and any of _ - . / : @ $. Given: {shown(function_name)}",
            name,
        )
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise Refused(f"`{place}.function.parameters` must be a JSON schema: an object", f"{place}.function.parameters")
    kind = (parameters or {}).get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        name = f"{place}.function.parameters.type"
        raise Refused(f'`{name}` must be "object". Given: {shown(kind)}', name)
    return tool


def _name(choice: Any) -> str:
    """The name of the tool in a `tool_choice`: in OpenAI's object, or a mere name as in TGI."""
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else choice.get("name")
    if not isinstance(choice, str):
        raise Refused('`tool_choice` must be "none", "auto", "required" or name a function', "tool_choice")
    return choice


def _known(name: str, schemas: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if name not in schemas:
        raise Refused(f'`tool_choice` names "{name}", which is not among `tools`', "tool_choice")
    return schemas[name]
