"""The HTTP application: routes, who may use them, what a failure becomes. Knows no request's content."""

import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..config import RouterConfig
from ..request import Failure
from ..text import Tokenizer
from ..validation import Validator
from .body import json_response
from .errors import OPENAI_PATH, Problem, Rejected, as_openai, openai_body, problem_of, tgi_body
from .openai import OpenAI
from .ports import Batcher, Metrics
from .tenant import bearer
from .tgi import Tgi

PROBES = {"/", "/health", "/ping"}  # to be asked by load balancers, which have no key
KINDS = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}


def make_app(config: RouterConfig, tokenizer: Tokenizer, batcher: Batcher, metrics: Metrics) -> web.Application:
    """All routes. Run it with `handler_cancellation=True`, or a client that leaves is noticed late, and with
    `auto_decompress=False`, or a compressed body is unpacked before it can be refused.
    """
    validator = Validator(config, tokenizer)
    tgi = Tgi(config, tokenizer, validator, batcher)
    openai = OpenAI(config, tokenizer, validator, batcher)
    app = web.Application(
        middlewares=[_problems(metrics), _authorization(config.api_keys)],
        client_max_size=config.payload_limit,
    )
    app.on_response_prepare.append(_echo_request_id)

    async def health(http: web.Request) -> web.Response:
        """Ready or not, and if not, why."""
        if batcher.ready:
            return web.Response()
        content = {"error": "unhealthy", "error_type": "healthcheck", "stage": batcher.stage}
        response = json_response(content, {"Retry-After": "1"})
        response.set_status(503)
        return response

    async def render_metrics(http: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app.add_routes(
        [
            web.post("/", tgi.root),
            web.post("/generate", tgi.generate),
            web.post("/generate_stream", tgi.generate_stream),
            web.post("/tokenize", tgi.tokenize),
            web.get("/info", tgi.info),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.post("/v1/completions", openai.completions),
            web.get("/v1/models", openai.models),
            web.get("/metrics", render_metrics),
            *(web.get(path, health) for path in sorted(PROBES)),
        ]
    )
    return app


def _problems(metrics: Metrics) -> Middleware:
    """Turns failures into responses, in the shape that the route's clients expect."""

    @web.middleware
    async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Failure as failure:
            problem = problem_of(failure)
        except Rejected as rejected:
            problem = rejected.problem
        except web.HTTPException as error:
            problem = _problem_of_http(error)
        if problem.kind == "validation":  # it never came to the batcher, which counts all others
            metrics.failed("validation")
        if request.path.startswith(OPENAI_PATH):
            return _response(as_openai(problem), openai_body(problem))
        return _response(problem, tgi_body(problem))

    return respond


def _response(problem: Problem, body: bytes) -> web.Response:
    return web.Response(status=problem.status, body=body, content_type="application/json", headers=problem.headers)


def _problem_of_http(error: web.HTTPException) -> Problem:
    """aiohttp's own: no such route, a method that a route lacks, a body that grew too large while it was read."""
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    kind = KINDS.get(error.status, "http")
    return Problem(error.status, kind, error.text or error.reason, headers=headers)


def _authorization(keys: tuple[str, ...]) -> Middleware:
    """Asks for one of the operator's keys, if there are any, on all routes but the probes."""
    expected = [key.encode() for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected and not (request.method in ("GET", "HEAD") and request.path in PROBES):
            given = bearer(request)
            # All are compared, each in constant time, so that nobody learns a key letter by letter, or which of them is near.
            if not sum(hmac.compare_digest(given, key) for key in expected):
                headers = {"WWW-Authenticate": "Bearer"}
                raise Rejected(
                    Problem(401, "unauthorized", "a valid API key is needed: Authorization: Bearer KEY", headers=headers)
                )
        return await handler(request)

    return check


async def _echo_request_id(http: web.Request, response: web.StreamResponse) -> None:
    """So that a client, a proxy and a log can speak of the same request."""
    identifier = http.headers.get("X-Request-ID", "")
    if identifier.isascii() and 0 < len(identifier) <= 256:
        response.headers["X-Request-ID"] = identifier
