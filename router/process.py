"""Builds the router's parts and serves until it is told to stop."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from ..proto import certificates
from .api.app import make_app, make_runner
from .api.unanswered import UNANSWERED
from .config import BACKLOG, RouterConfig
from .fleet import Fleet
from .folder import Unusable
from .log_filters import HttpErrorFilter, calm
from .metrics import Metrics
from .request import Broken
from .shards import GrpcShards, Shards
from .startup_probes import StartupProbes
from .text import Tokenizer
from .tracing import Missing, Tracer

LAST_WORDS = 5.0  # seconds that handlers get to send what they have when everything ends
YIELD = 1.0  # seconds for a failed shard to end before the router does, so that its reason is reported

logger = logging.getLogger(__name__)


def run(config: RouterConfig, listening: socket.socket, probes: StartupProbes) -> int:
    """Serves on the socket until the router is told to stop. Returns the exit status. Raises Misconfigured."""
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, listening, probes))
    except (Unusable, Missing) as error:
        logger.error("%s", error)
        return 2
    except Broken as error:
        logger.error("%s", error)
        time.sleep(YIELD)
        return 1


async def serve(config: RouterConfig, listening: socket.socket, probes: StartupProbes) -> int:
    """Serves until a signal comes or something fails. Raises Broken, Misconfigured or Unusable."""
    stop = _stop_signal()
    metrics = Metrics(config.model)
    tracer = Tracer(config.otlp_endpoint, config.otlp_service_name, config.model) if config.otlp_endpoint else None
    calm("opentelemetry")  # else a collector that is down is logged each second
    tokenizer = Tokenizer(
        Path(config.folder),
        config.chat_template,
        trust_templates=config.trust_request_chat_template,
        parsers=(config.tool_call_parser, config.reasoning_parser),
    )
    fleet = Fleet(config, tokenizer, partial(_connect, config), metrics)
    app = make_app(config, tokenizer, fleet, metrics, tracer, fleet, fleet.adapters)
    logging.getLogger("aiohttp.server").addFilter(HttpErrorFilter())
    runner = make_runner(app, LAST_WORDS, config.idle_timeout)
    await runner.setup()
    gc.freeze()  # long-lived objects are excluded from garbage collection, which would take 15 ms, and delay every stream
    probes.relieve()
    await web.SockSite(runner, listening, backlog=BACKLOG).start()
    host, port = listening.getsockname()[:2]
    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    batching = asyncio.create_task(_batch(fleet, tokenizer))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([batching, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not batching.done():
            logger.info("stopping: no new requests; running ones have %g s", config.graceful_termination_timeout)
            await fleet.drain(config.graceful_termination_timeout, app[UNANSWERED].close())
    finally:
        await runner.cleanup()
        for task in (batching, stopping):
            task.cancel()
        await asyncio.wait([batching, stopping])
        await fleet.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    if not batching.cancelled():
        batching.result()
    return 0


async def _batch(fleet: Fleet, tokenizer: Tokenizer) -> None:
    await fleet.start()
    if fleet.limits is not None:
        for missing in tokenizer.missing(fleet.limits.vocabulary):
            logger.warning("%s", missing)
        logger.info(
            "ready: %d tokens of prompt, %d with the answer; requests of full length that fit at once: %d",
            fleet.limits.max_input_tokens,
            fleet.limits.max_total_tokens,
            fleet.together,
        )
    await fleet.wait()


def _connect(config: RouterConfig, name: str, addresses: Sequence[str]) -> Shards:
    """The client of a replica's rank group. Only for groups that the launcher has started is there a pipe for reports of hangs, in
    which they have the launcher's names: their numbers, whatever a replica is called that has left and joined again."""
    known = tuple(addresses) in config.groups
    hang_reports, name = (config.hang_reports, str(config.groups.index(tuple(addresses)))) if known else ("", name)
    return GrpcShards(addresses, config.step_timeout, hang_reports, certificates.of(config), name)


def _stop_signal() -> asyncio.Event:
    """Set by SIGTERM or SIGINT. The next one ends the process at once, by the default handler."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle() -> None:
        stop.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
    return stop


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
