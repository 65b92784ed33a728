"""Errors as HTTP responses: one table from failures to statuses, and the error bodies of TGI, OpenAI and Anthropic.

Knows no route and no request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from ..replica import Conflict, Unknown
from ..request import Broken, Expired, Failure, NoModel, NotReady, Overloaded, Refused

RETRY = {"Retry-After": "1"}
# OpenAI's clients retry after a 5xx unless told not to. A request that missed its deadline would miss it again, and one that broke
# a shard could break it again.
NO_RETRY = {"x-should-retry": "false"}
MOST_SAID = 4000  # characters of a refusal, which may repeat what was sent
OPENAI_PATH = "/v1/"
ANTHROPIC_PATH = "/v1/messages"
# Names of fields for clients of /v1, where they differ from those in TGI's rules.
OPENAI_NAMES = {"inputs": "prompt", "max_new_tokens": "max_tokens", "top_n_tokens": "top_logprobs"}
OPENAI_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "overloaded_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it. `status` and `kind` are TGI's, where TGI has one."""

    status: int
    kind: str
    message: str
    parameter: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """An error in HTTP itself: a body that does not parse, a missing API key..."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def shown(value: object) -> str:
    """A value of a body as JSON, for error messages."""
    return msgspec.json.encode(value).decode()


def unauthorized(needed: str) -> HttpError:
    """The 401 for a client that lacks the needed key."""
    return HttpError(
        Problem(401, "unauthorized", f"{needed} is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})
    )


def problem_of(failure: Failure) -> Problem:
    """The table from failures to HTTP problems."""
    match failure:
        case NoModel():
            return Problem(404, "model_not_found", str(failure)[:MOST_SAID], failure.parameter)
        case Unknown():
            return Problem(404, "not_found", str(failure), failure.parameter)
        case Conflict():
            return Problem(409, "conflict", str(failure))
        case Refused():
            return Problem(422, "validation", str(failure)[:MOST_SAID], failure.parameter)
        case Overloaded():
            after = str(max(1, math.ceil(failure.retry_after)))
            return Problem(429, "overloaded", "Model is overloaded", headers={"Retry-After": after})
        case Expired():
            return Problem(504, "timeout", str(failure), "timeout", headers=NO_RETRY)
        case NotReady():
            return Problem(503, "unavailable", str(failure), headers=RETRY)
        case Broken():
            return Problem(424, "generation", f"Request failed during generation: {failure}", headers=NO_RETRY)
        case _:
            raise failure


def tgi_body(problem: Problem) -> bytes:
    prefix = "Input validation error: " if problem.kind == "validation" else ""
    return msgspec.json.encode({"error": prefix + problem.message, "error_type": problem.kind})


def as_openai(problem: Problem) -> Problem:
    """The same problem with OpenAI's statuses and field names."""
    message = problem.message
    for name, theirs in OPENAI_NAMES.items():
        message = message.replace(f"`{name}`", f"`{theirs}`")
    parameter = OPENAI_NAMES.get(problem.parameter or "", problem.parameter)
    status = {422: 400, 424: 500}.get(problem.status, problem.status)
    return replace(problem, status=status, message=message, parameter=parameter)


def openai_body(problem: Problem) -> bytes:
    """OpenAI's error body. `error_type` stands beside `error` for huggingface_hub, which looks for it in the middle of a stream."""
    return msgspec.json.encode({"error": _error(problem, OPENAI_TYPES, "server_error"), "error_type": problem.kind})


def anthropic_error(problem: Problem) -> dict[str, object]:
    """Anthropic's error body, which is also the data of an error event."""
    return {"type": "error", "error": _error(problem, ANTHROPIC_TYPES, "api_error")}


def _error(problem: Problem, types: Mapping[int, str], ours: str) -> dict[str, str | None]:
    """types: error types by OpenAI's statuses; ours: the type of a server's failure that is not among them."""
    problem = as_openai(problem)
    kind = types.get(problem.status, "invalid_request_error" if problem.status < 500 else ours)
    return {"message": problem.message, "type": kind, "param": problem.parameter, "code": problem.kind}


def error_response(path: str, problem: Problem) -> tuple[Problem, bytes]:
    """The problem as clients of this path know it, and the error body for them."""
    if not path.startswith(OPENAI_PATH):
        return problem, tgi_body(problem)
    if not path.startswith(ANTHROPIC_PATH):
        return as_openai(problem), openai_body(problem)
    return as_openai(problem), msgspec.json.encode(anthropic_error(problem))
