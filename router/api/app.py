"""The aiohttp application of the HTTP API: routes, and the middlewares common to all (tracing, CORS, errors, API keys, reading
bodies). It never looks into a request's content."""

import asyncio
import logging
from collections.abc import AsyncIterator, Set
from contextlib import nullcontext
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ..adapters import Adapters
from ..config import Misconfigured, RouterConfig
from ..image_placeholders import ImagePlacer
from ..record import current
from ..request import Failure
from ..text import Tokenizer
from ..tracing import Tracing
from ..validation import Validator
from .access import add_headers, observed
from .adapters import LOAD, UNLOAD, AdapterRoutes
from .admin import PREFIX, Admin
from .anthropic import Anthropic
from .body import BODY, LIMIT
from .cors import cors
from .docs import Docs
from .either import Either
from .errors import RETRY, HttpError, Problem, error_response, problem_of, unauthorized
from .links import ImageLoader
from .openai import OpenAI
from .openai_chats import Chats
from .page import FILES, Page
from .ports import Batcher, Metrics, Replicas
from .probes import HEALTH, LIVE, READY, Probes
from .responses import Responses
from .stream import OUTBOX, PATIENT, Outbox, SlowClientTimeout
from .tenant import bears, digest
from .tgi import Tgi
from .unanswered import PATIENCE, UNANSWERED, Unanswered

PROBES = {"/", HEALTH, READY, LIVE, "/ping"}  # asked by load balancers, which have no API key
# polled all the time, so that they are not logged, as little as the probes; an API key is asked for
SILENT = {"/metrics", "/stats", "/favicon.ico"}
CLOSE = {"Connection": "close"}
LONG = 1 << 18  # bytes of an answer that does not fit into the socket buffers
KINDS = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
# kinds of problems that a request may have before it reaches the batcher
TURNED_AWAY = ("validation", "overloaded", "unavailable", "timeout")

logger = logging.getLogger(__name__)


def make_app(
    config: RouterConfig,
    tokenizer: Tokenizer,
    batcher: Batcher,
    metrics: Metrics,
    tracing: Tracing | None = None,
    replicas: Replicas | None = None,
    adapters: Adapters | None = None,
) -> web.Application:
    """The application with all routes, for `make_runner`.

    replicas: what the administration routes act on; without it there are none. adapters: the registry of LoRA adapters; without it,
    those of the configuration.
    """
    adapters = adapters or Adapters(config.model, config.adapters)
    validator = Validator(config, tokenizer, metrics.validated, adapters)
    metrics.watch("penstock_grammars_compiled", lambda: validator.grammars.compiled)
    metrics.watch("penstock_grammars_found", lambda: validator.grammars.found)
    links = ImageLoader(config)
    chats = Chats(tokenizer, validator, links)
    tgi = Tgi(config, tokenizer, validator, links, batcher)
    openai = OpenAI(config, tokenizer, validator, chats, batcher, adapters)
    responses = Responses(config, tokenizer, chats, batcher)
    anthropic = Anthropic(config, tokenizer, validator, chats, batcher)
    either = Either(config, batcher, chats, tgi, openai)
    probes = PROBES | ({config.aip_health_route} if config.aip_health_route else set())
    docs = Docs(config)
    app = _application(config, metrics, tracing, probes | FILES.keys() | docs.paths)

    async def render_metrics(http: web.Request) -> web.Response:
        return web.Response(body=metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    probe = Probes(config, batcher, replicas)
    page = Page(config, batcher, metrics, probe.health, config.max_images if validator.image_placer is not None else 0)
    app.on_shutdown.append(page.close)
    if validator.image_placer is not None:
        app.cleanup_ctx.append(partial(_image_processing, validator.image_placer, links))
    app.add_routes(
        [
            web.post("/", tgi.root),
            web.post("/generate", tgi.generate),
            web.post("/generate_stream", tgi.generate_stream),
            web.post("/tokenize", either.tokenize),
            web.post("/detokenize", tgi.detokenize),
            web.get("/tokenizer_info", tgi.tokenizer_info),
            web.post("/chat_tokenize", either.chat_tokenize),
            web.post("/invocations", either.invocations),
            web.post("/vertex", either.vertex),
            web.get("/info", tgi.info),
            web.post("/v1/chat/completions", openai.chat_completions),
            web.post("/v1/completions", openai.completions),
            web.post("/v1/responses", responses.create),
            web.post("/v1/messages", anthropic.messages),
            web.post("/v1/messages/count_tokens", anthropic.count_tokens),
            web.get("/v1/models", openai.models),
            web.get("/v1/models/{id:.+}", openai.model),
            web.get("/metrics", render_metrics),
            web.get(READY, probe.ready),
            web.get(LIVE, probe.live),
            *(web.get(path, probe.health) for path in (HEALTH, "/ping")),
            *page.routes(),
            *docs.routes(),
            *AdapterRoutes(config, adapters).routes(),
            *(Admin(config, replicas).routes() if replicas is not None else ()),
        ]
    )
    if config.aip_predict_route not in ("", "/vertex"):
        _apart(app, "POST", "--aip-predict-route", config.aip_predict_route)
        app.router.add_post(config.aip_predict_route, either.vertex)
    if config.aip_health_route not in ("", *PROBES):
        _apart(app, "GET", "--aip-health-route", config.aip_health_route)
        app.router.add_get(config.aip_health_route, probe.health)
    return app


def make_runner(app: web.Application, shutdown_timeout: float, idle_timeout: float = 60.0) -> web.AppRunner:
    """Runs the application so that a client that disconnects is noticed at once, and no compressed body is unpacked before it can
    be refused. In seconds: shutdown_timeout, what handlers get when everything ends; idle_timeout, of a connection without a
    request, also for the rest of a partial head."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=idle_timeout,
    )


async def _image_processing(placer: ImagePlacer, links: ImageLoader, app: web.Application) -> AsyncIterator[None]:
    """Keeps image preprocessing and image downloads running as long as the application does. The start does not wait for them."""
    starting = asyncio.create_task(placer.start())
    yield
    starting.cancel()
    await links.close()


def _application(config: RouterConfig, metrics: Metrics, tracing: Tracing | None, open_paths: Set[str]) -> web.Application:
    """The application without routes: middlewares and shared state. open_paths: paths that need no API key."""
    preflight, grant = cors(config.cors_allow_origin)
    patience = SlowClientTimeout(config.slow_client_timeout)
    metrics.watch("penstock_slow_clients", lambda: patience.dropped)
    unanswered = Unanswered()
    app = web.Application(
        middlewares=[
            observed(tracing, open_paths | SILENT),
            preflight,
            _problems(metrics),
            _authorization(config.api_keys, open_paths, (PREFIX, LOAD, UNLOAD) if config.admin_key else ()),
            _read(config.payload_limit, config.payload_limit_total, unanswered),
            _deliver(patience),
        ]
    )
    app[LIMIT] = config.payload_limit
    app[PATIENT] = patience
    app[OUTBOX] = Outbox()
    app[UNANSWERED] = unanswered
    app.on_response_prepare.extend((add_headers, grant))
    return app


def _apart(app: web.Application, method: str, flag: str, path: str) -> None:
    """Raises Misconfigured if the path given by the flag collides with another route: that one would answer, without a key if the
    path is taken for a probe. Paths below /admin/ are refused too, since no API key is asked for there."""
    if path.startswith(PREFIX):
        raise Misconfigured(f"{flag} {path} is below the server's own {PREFIX}: choose another path")
    for route in app.router.routes():
        resource = route.resource
        assert resource is not None
        found = resource.get_info()
        if route.method == method and (found.get("path") == path or ("pattern" in found and found["pattern"].fullmatch(path))):
            raise Misconfigured(f"{flag} {path} is the server's own {method} {resource.canonical}: choose another path")


def _problems(metrics: Metrics) -> Middleware:
    """Middleware that turns exceptions into error responses in the shape that the route's clients expect."""

    @web.middleware
    async def respond(request: web.Request, handler: Handler) -> web.StreamResponse:
        counted = False
        try:
            return await handler(request)
        except Failure as failure:
            problem, counted = problem_of(failure), failure.counted
        except HttpError as rejected:
            problem = rejected.problem
        except web.HTTPException as error:
            problem = _problem_of_http(error)
        except Exception:
            record = current.get()
            if record is None or record.begun:  # too late for a status
                raise
            logger.exception("a fault of ours")  # the client learns no more than that
            problem = Problem(500, "internal", "the server failed: its log says why")
        if problem.kind in TURNED_AWAY and not counted and request.method == "POST":
            metrics.turned_away(problem.kind)
        if (record := current.get()) is not None:
            record.error = problem.kind
        problem, body = error_response(request.path, problem)
        return web.Response(status=problem.status, body=body, content_type="application/json", headers=problem.headers)

    return respond


def _problem_of_http(error: web.HTTPException) -> Problem:
    """The problem of an aiohttp error: no such route, a method that the route lacks, a body that grew too large while it was
    read."""
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    kind = KINDS.get(error.status, "http")
    return Problem(error.status, kind, error.text or error.reason, headers=headers)


def _authorization(keys: tuple[str, ...], open_paths: Set[str], others: tuple[str, ...]) -> Middleware:
    """Middleware that requires one of the operator's API keys, if there are any, except on probes and other open paths. others:
    path prefixes of routes that ask for a key of their own."""
    expected = [digest(key.encode()) for key in keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        guarded = request.path.startswith(others)
        is_open = request.method in ("GET", "HEAD") and request.path in open_paths
        if expected and not guarded and not is_open and not bears(request, expected):
            raise unauthorized("a valid API key")
        return await handler(request)

    return check


def _deliver(patience: SlowClientTimeout) -> Middleware:
    """Middleware that sends long non-streamed answers, and gives slow clients no more time than streaming ones get."""

    @web.middleware
    async def deliver(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if isinstance(response, web.Response) and (response.content_length or 0) > LONG:
            await response.prepare(request)
            await patience.until(response.write_eof(), request)
        return response

    return deliver


def _read(limit: int, together: int, unanswered: Unanswered) -> Middleware:
    """Middleware that reads each body before its handler runs, with a deadline, and within a memory limit for all requests
    together. A body that will be refused for its size is not read."""
    held = 0  # bytes of the bodies of all requests that have not been answered

    def check(length: int) -> None:
        if length > limit:
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=length)
        if held > together:
            message = f"the requests that are read or answered have bodies of more than {together} bytes together"
            raise HttpError(Problem(429, "overloaded", message, headers=RETRY | CLOSE))

    async def receive(request: web.Request) -> bytes:
        nonlocal held
        body = bytearray()
        try:
            async with nullcontext() if request.content.is_eof() else unanswered.reading():
                while chunk := await request.content.readany():
                    body += chunk
                    held += len(chunk)
                    check(len(body))
        except TimeoutError:
            held -= len(body)
            if unanswered.closed:
                raise HttpError(Problem(503, "unavailable", "the server is shutting down", headers=RETRY | CLOSE)) from None
            message = f"the body was not complete {PATIENCE:g} s after its headers"
            raise HttpError(Problem(408, "timeout", message, headers=CLOSE)) from None
        except BaseException:  # the client may have disconnected, too
            held -= len(body)
            raise
        return bytes(body)

    @web.middleware
    async def read(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal held
        # A GET's body is not used, but anybody may send one, without a key where a path is open.
        if not request.body_exists or request.method in ("GET", "HEAD") or (request.content_length or 0) > limit:
            return await handler(request)
        with unanswered.one():
            request[BODY] = await receive(request)
            try:
                return await handler(request)
            finally:
                held -= len(request.pop(BODY))  # a connection keeps its last request until the next one comes

    return read
