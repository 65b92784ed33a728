"""JSON in and out: a request's body within the limit and as the type that a route expects, an answer as a response."""

from typing import TypeVar

import msgspec
from aiohttp import web

from ..request import Refused
from .errors import Problem, Rejected

Body = TypeVar("Body")


async def read(http: web.Request, decoder: msgspec.json.Decoder[Body], limit: int) -> Body:
    """The body, decoded. Raises Rejected if it has more than `limit` bytes or is no JSON, Refused if a field has a wrong type."""
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Rejected(Problem(415, "unsupported_encoding", "compressed bodies are not supported: send plain JSON"))
    if (http.content_length or 0) > limit:  # refused before it is read
        raise Rejected(Problem(413, "payload_too_large", f"the body may have {limit} bytes", headers={"Connection": "close"}))
    data = await http.read()
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise Refused(str(error), _field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(Problem(400, "validation", f"the body is no JSON: {error}")) from error
    except RecursionError as error:
        raise Rejected(Problem(400, "validation", "the body is nested too deeply")) from error


def json_response(content: object, headers: dict[str, str] | None = None) -> web.Response:
    """200 with anything that msgspec can write."""
    return web.Response(body=msgspec.json.encode(content), content_type="application/json", headers=headers)


def _field(message: str) -> str | None:
    """The field that msgspec's message blames: "... - at `$.parameters.top_k`"."""
    _, found, path = message.rpartition("`$.")
    return path.rstrip("`") if found else None
