"""Access log, request ids and traces of HTTP requests. Knows numbers, never a text.

Nothing here runs per token.
"""

import logging
import re
import secrets
from collections.abc import Callable, Set
from time import monotonic
from typing import Any

from aiohttp import web, web_response
from aiohttp.typedefs import Handler, Middleware

from ..record import Record, Run, current
from ..tracing import Tracing
from .errors import ANTHROPIC_PATH

REQUEST_ID = "X-Request-ID"
ANTHROPIC_ID = "request-id"  # the same id where Anthropic's clients look for it
ECHOED = ("X-Correlation-ID", "X-Session-Affinity")  # by which load generators and proxies group requests
SAYABLE = re.compile(r"[\x21-\x7e]{1,256}")  # ids that are safe in a header and in a log line
GONE = 499  # logged status where a client disconnected before there was one; nginx's number
SERVER = "penstock"  # without versions of libraries
vars(web_response)["SERVER_SOFTWARE"] = SERVER  # also on responses to malformed HTTP, which no handler sees

logger = logging.getLogger(__name__)


def observed(tracing: Tracing | None, silent: Set[str]) -> Middleware:
    """The outermost middleware: opens the record of each request, and logs it when it has ended. silent: paths that are not
    logged."""

    @web.middleware
    async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = Record(_sayable(request.headers.get(REQUEST_ID, "")) or f"req-{secrets.token_hex(12)}")
        # Never reset: headers are made when nothing here runs any more, and each request has a context of its own.
        current.set(record)
        logged = request.path not in silent
        span = tracing.begin(request.headers, record) if tracing is not None and logged and request.method == "POST" else None
        status = GONE
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            if logged:
                _log(request, record, status)
            if tracing is not None and span is not None:
                tracing.end(span, record, _route(request), status)
            record.runs.clear()  # timers and tasks that outlive the request share its context: they must not keep prompt and images

    return observe


async def add_headers(http: web.Request, response: web.StreamResponse) -> None:
    """Adds the request id to every response, so that a client, a proxy and a log can refer to the same request."""
    record = current.get()
    if record is not None:  # else the HTTP was malformed
        record.begun, record.streamed = True, not isinstance(response, web.Response)
        response.headers[REQUEST_ID] = record.id
        if http.path.startswith(ANTHROPIC_PATH):
            response.headers[ANTHROPIC_ID] = record.id
    for name in ECHOED:
        if _sayable(value := http.headers.get(name, "")):
            response.headers[name] = value
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = SERVER


def _sayable(text: str) -> str:
    return text if SAYABLE.fullmatch(text) else ""


def _route(http: web.Request) -> str:
    """The route as it was registered: a path that a client made up may be anything."""
    resource = http.match_info.route.resource
    return "unknown route" if resource is None else resource.canonical


def _log(http: web.Request, record: Record, status: int) -> None:
    level = logging.WARNING if status >= 500 and status != 503 else logging.INFO
    if not logger.isEnabledFor(level):
        return
    values = _values(http, record, status)
    logger.log(level, "%s", _sentence(values), extra={"values": values})


def _values(http: web.Request, record: Record, status: int) -> dict[str, Any]:
    runs = record.runs
    values: dict[str, Any] = {
        "request_id": record.id,
        "trace": record.trace,
        "method": http.method,
        "path": _route(http),
        "status": status,
        "seconds": _rounded(monotonic() - record.arrived),
        "error": record.failure or ("dropped" if status == GONE else ""),
    }
    if runs:
        values |= {
            "prompt_tokens": sum(len(run.request.prompt) for run in runs),
            "cached_tokens": sum(run.cached_tokens for run in runs),
            "generated_tokens": sum(run.generated for run in runs),
            "queue_seconds": _longest(runs, lambda run: run.started - run.arrived if run.started else run.ended - run.arrived),
            "first_token_seconds": _longest(runs, lambda run: run.first - run.arrived if run.first else 0.0),
            "inference_seconds": _longest(runs, lambda run: run.ended - run.started if run.started else 0.0),
            **_draft_counts(runs),
            "finish_reason": ",".join(dict.fromkeys(reason for run in runs for reason in run.reasons)),
        }
    return {name: value for name, value in values.items() if value != ""}


def _draft_counts(runs: list[Run]) -> dict[str, int]:
    """Draft token counts of requests that may have had drafts."""
    if not any(run.request.drafts for run in runs):
        return {}
    return {
        "drafted_tokens": sum(run.drafted for run in runs),
        "accepted_tokens": sum(run.accepted for run in runs),
        "steps": sum(run.steps for run in runs),
    }


def _sentence(values: dict[str, Any]) -> str:
    """The log line for people."""
    words = [f"{values['method']} {values['path']} {values['status']} in {values['seconds']:g} s, {values['request_id']}"]
    if "prompt_tokens" in values:
        words.append(f"tokens: {values['prompt_tokens']} in ({values['cached_tokens']} cached), {values['generated_tokens']} out")
        if values.get("drafted_tokens"):
            words.append(f"drafted {values['drafted_tokens']}, accepted {values['accepted_tokens']}, in {values['steps']} steps")
        words.append(f"queued {values['queue_seconds']:g} s, computed {values['inference_seconds']:g} s")
    words += [values[name] for name in ("finish_reason", "error") if name in values]
    return "; ".join(words)


def _longest(runs: list[Run], seconds: Callable[[Run], float]) -> float:
    return _rounded(max(seconds(run) for run in runs))


def _rounded(seconds: float) -> float:
    return round(max(seconds, 0.0), 6)
