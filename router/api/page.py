"""The playground page for people, and the statistics that it shows. Knows numbers of the batch, and no request's content.

GET /           a browser, which prefers HTML, gets the playground; other clients get what a probe gets
GET /page/...   its files: plain HTML, CSS and JavaScript, all from here. Open without a key, since no secret is in them
GET /stats      state of the batch: JSON, or an event a second for clients that accept text/event-stream

A snapshot is taken only on request, at most once a second, however many clients watch; nothing is sent elsewhere, and nothing kept.
"""

import asyncio
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import monotonic

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from ..config import RouterConfig
from .ports import Batcher, Metrics
from .stream import EventStream, sse_frame

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = FOLDER / "index.html"
FILES = {f"/page/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS and path != INDEX}
# The page may load and call only what is served here; a text cannot become markup, whatever a script does.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect")),
        "img-src 'self' data:",  # images that are attached to a chat
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # cached, but revalidated by its ETag: after an update nobody sees half of the old page
}
PHASE = 0.01  # seconds after a full second when watchers wake: all at once, so that they share a snapshot
# The metrics that a snapshot reads, by their names in /metrics.
SAMPLES = (
    "penstock_running",
    "penstock_waiting",
    "penstock_paused",
    "penstock_pages_total",
    "penstock_pages_free",
    "penstock_pages_cached",
    "penstock_prompt_budget",
    "penstock_prompt_budget_used",
    "penstock_generated_tokens_total",
    "penstock_prompt_tokens_total",
    "penstock_cached_prompt_tokens_total",
    "penstock_step_seconds_count",
    "penstock_step_seconds_sum",
)


class Longest(msgspec.Struct):
    """Limits of a request. Lengths are 0 until the model is loaded and they are known."""

    max_input_tokens: int
    max_total_tokens: int
    choices: int
    beams: int
    stop_sequences: int
    top_tokens: int
    images: int  # of a request; 0: none are taken


class Requests(msgspec.Struct):
    running: int
    waiting: int
    paused: int


class Pages(msgspec.Struct):
    """Pages of the KV cache by state; each page is in exactly one of the three."""

    total: int
    held: int
    cached: int
    free: int


class Counted(msgspec.Struct):
    """Counters since the server's start; a rate is the difference between two readings."""

    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    steps: int
    step_seconds: float


class Budget(msgspec.Struct):
    """Prompt tokens of the last step that had any: how many it might have computed, and how many it did."""

    tokens: int
    used: int


class Stats(msgspec.Struct):
    """The answer of GET /stats: the state of the server at a glance."""

    time: float  # seconds, from an arbitrary origin
    model: str
    version: str
    ready: bool
    stage: str
    limits: Longest
    requests: Requests
    pages: Pages
    counted: Counted
    prompt_budget: Budget


class Page:
    """The handlers of the page and its statistics. `probe` answers GET / for clients that are no browser."""

    def __init__(self, config: RouterConfig, batcher: Batcher, metrics: Metrics, probe: Handler, images: int) -> None:
        """images: most of a request, if the shards take any."""
        self._config = config
        self._images = images
        self._batcher = batcher
        self._metrics = metrics
        self._probe = probe
        self._version = version("penstock")
        self._closing = asyncio.Event()
        self._second = -1  # when `_latest` was made
        self._latest = b""

    def routes(self) -> list[web.RouteDef]:
        """The routes; HEAD is included."""
        return [web.get("/", self.root), web.get("/stats", self.stats), *(web.get(path, self.file) for path in FILES)]

    async def close(self, app: web.Application) -> None:
        """Ends the streams of watchers, for which the shutdown would otherwise wait."""
        self._closing.set()

    async def root(self, http: web.Request) -> web.StreamResponse:
        """GET /."""
        wanted = prefers_html(http.headers.get("Accept", ""))
        response = file_response(INDEX) if wanted else await self._probe(http)
        response.headers["Vary"] = "Accept"
        return response

    async def file(self, http: web.Request) -> web.StreamResponse:
        """GET /page/..."""
        return file_response(FILES[http.path])

    async def stats(self, http: web.Request) -> web.StreamResponse:
        """GET /stats."""
        if "text/event-stream" in http.headers.get("Accept", "") and http.method == "GET":
            return await self._watched(http)
        headers = {"Cache-Control": "no-store", "Vary": "Accept"}
        return web.Response(body=self._snapshot(), content_type="application/json", headers=headers)

    async def _watched(self, http: web.Request) -> web.StreamResponse:
        async with EventStream(http, {}) as out:
            while not self._closing.is_set():
                await out.write(sse_frame(self._snapshot()))
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0 + PHASE - monotonic() % 1.0):
                        await self._closing.wait()
        return out.response

    def _snapshot(self) -> bytes:
        """The encoded statistics of this second."""
        second = int(monotonic())
        if second != self._second:
            self._second, self._latest = second, msgspec.json.encode(self._stats())
        return self._latest

    def _stats(self) -> Stats:
        config, limits = self._config, self._batcher.limits
        found = self._metrics.samples(SAMPLES)

        def count(name: str) -> int:
            return int(found.get(f"penstock_{name}", 0))

        cached, total = count("pages_cached"), count("pages_total")
        return Stats(
            time=monotonic(),
            model=config.model,
            version=self._version,
            ready=self._batcher.ready,
            stage=self._batcher.stage,
            limits=Longest(
                max_input_tokens=limits.max_input_tokens if limits else 0,
                max_total_tokens=limits.max_total_tokens if limits else 0,
                choices=config.most_choices,
                beams=config.most_beams,
                stop_sequences=config.max_stop_sequences,
                top_tokens=config.max_top_n_tokens,
                images=self._images if limits is not None and limits.images else 0,
            ),
            requests=Requests(count("running"), count("waiting"), count("paused")),
            pages=Pages(total, total - count("pages_free"), cached, count("pages_free") - cached),
            counted=Counted(
                generated_tokens=count("generated_tokens_total"),
                prompt_tokens=count("prompt_tokens_total"),
                cached_prompt_tokens=count("cached_prompt_tokens_total"),
                steps=count("step_seconds_count"),
                step_seconds=found.get("penstock_step_seconds_sum", 0.0),
            ),
            prompt_budget=Budget(count("prompt_budget"), count("prompt_budget_used")),
        )


def prefers_html(accept: str) -> bool:
    """Whether HTML is named, and nothing is preferred to it: browsers say so, but neither probes (`*/*`, or nothing) nor API
    clients."""
    likes: dict[str, float] = {}
    for part in accept.split(","):
        kind, *options = (word.strip() for word in part.split(";"))
        values = [option[2:] for option in options if option.startswith("q=")]
        likes.setdefault(kind.lower(), _number(values[0]) if values else 1.0)
    return likes.get("text/html", 0.0) > 0 and max(likes, key=likes.__getitem__) == "text/html"


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= 1 else 0.0


def file_response(path: Path) -> web.FileResponse:
    """A file with the headers for a browser."""
    return web.FileResponse(path, headers={**HEADERS, "Content-Type": KINDS[path.suffix]})
