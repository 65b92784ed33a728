"""Converts chat messages from the form that OpenAI's clients send to the one that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..request import Refused

TEXTS = ("text", "input_text", "output_text")  # types of content parts
# types of content parts, and the field with the URL
IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "image"}


def messages_of(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the chat template: call arguments become objects, nulls and empty lists of calls are removed, and content is a
    text, None, or parts that are texts or bare images. Other fields are left to the template. Raises Refused."""
    if not given:
        raise Refused("`messages` cannot be empty", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def images_of(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """The URLs of all images in a chat, in order. Raises Refused."""
    parts = [
        (part, f"messages[{index}]")
        for index, message in enumerate(given)
        if isinstance(content := message.get("content"), list)
        for part in content
    ]
    return [url for part, place in parts if (url := _url(part, place)) is not None]


def _message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise Refused(f"`{place}.role` must be a string", "messages")
    result = {name: value for name, value in message.items() if value is not None}
    if role == "developer":  # OpenAI's newer name, which templates do not know
        result["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        result["content"] = [_part(part, place) for part in content]
    elif content is not None and not isinstance(content, str):
        raise Refused(f"`{place}.content` must be a string or a list of parts", "messages")
    else:
        result["content"] = content
    calls = result.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise Refused(f"`{place}.tool_calls` must be a list", "messages")
        result["tool_calls"] = [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return result


def _part(part: object, place: str) -> dict[str, Any]:
    if isinstance(part, dict):
        if part.get("type") in TEXTS:
            if not isinstance(part.get("text"), str):
                raise Refused(f"`{place}.content` has a part of type {part['type']} whose `text` is no string", "messages")
            return {"type": "text", "text": part["text"]}
        if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
            return {"type": "text", "text": part["refusal"]}
        if _url(part, place) is not None:
            return {"type": "image"}
    raise Refused(f"`{place}.content` has a part that is neither a text nor an image: only these are supported", "messages")


def _url(part: object, place: str) -> str | None:
    """The URL of an image part; None for other parts. `detail` is ignored: the model decides."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in IMAGES:
        return None
    value = part.get(IMAGES[kind])
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise Refused(f"`{place}.content` has an image without a URL in `{IMAGES[kind]}`", "messages")
    return url


def _call(call: object, place: str) -> dict[str, Any]:
    """A tool call with its arguments as an object. Templates encode arguments as JSON themselves: a string would come out
    quoted."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"`{place}.function` must be an object with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # no JSON, or with half of a surrogate pair, which a template's text must not contain
            found = arguments
        arguments = found if isinstance(found, dict) else arguments
    return call | {"function": function | {"arguments": {} if arguments is None else arguments}}
