"""Builds the router and serves: `python -m penstock.router '<RouterConfig as JSON>'`. Knows the process, not what it serves.

It listens before anything is loaded, so that whoever asks learns how far the start is.
Exit status: 0 after SIGTERM or SIGINT, 1 when the shards are lost, 2 when a setting is wrong.
"""

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ..proto.process import configure_logging, die_with_parent
from ..proto.settings import load
from .api.app import make_app
from .batcher import Batcher, Misconfigured
from .config import RouterConfig
from .metrics import Metrics
from .record import request_id
from .request import Broken
from .shards import GrpcShards
from .text import Tokenizer, Unusable
from .tracing import Missing, Tracer

BACKLOG = 1024  # connections that wait to be accepted
LAST_WORDS = 5.0  # seconds that handlers get to send what they have when everything ends

logger = logging.getLogger(__name__)


def main() -> int:
    """Runs the router until it is told to stop. Returns the exit status."""
    die_with_parent()
    if len(sys.argv) != 2:
        print("usage: python -m penstock.router '<RouterConfig as JSON>'", file=sys.stderr)
        return 2
    try:
        config = load(RouterConfig, sys.argv[1])
    except (ValueError, OSError) as error:
        print(f"the router's settings cannot be read: {error}", file=sys.stderr)
        return 2
    configure_logging("router", config.json_output, config.log_level, request_id)
    try:
        with listen(config) as listening, asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, listening))
    except (Misconfigured, Unusable, Missing) as error:
        logger.error("%s", error)
        return 2
    except Broken as error:
        logger.error("%s", error)
        return 1


def listen(config: RouterConfig) -> socket.socket:
    """The socket for HTTP. Raises Misconfigured, with a remedy."""
    family = socket.AF_INET6 if ":" in config.hostname else socket.AF_INET
    try:
        return socket.create_server((config.hostname, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        place = f"port {config.port} of {config.hostname}"
        if error.errno == errno.EADDRINUSE:
            raise Misconfigured(f"{place} is in use: stop who uses it, or choose another with --port") from None
        why = error.strerror or str(error)
        raise Misconfigured(f"cannot listen on {place}: {why}; choose another with --port or --hostname") from None


async def serve(config: RouterConfig, listening: socket.socket) -> int:
    """Serves until a signal comes or the shards are lost. Raises Broken, Misconfigured or Unusable."""
    stop = _stop_signal()
    metrics = Metrics(config.model)
    tracer = Tracer(config.otlp_endpoint, config.otlp_service_name, config.model) if config.otlp_endpoint else None
    tokenizer = Tokenizer(
        Path(config.folder),
        config.chat_template,
        trust_templates=config.trust_request_chat_template,
        parsers=(config.tool_call_parser, config.reasoning_parser),
    )
    batcher = Batcher(config, tokenizer, GrpcShards(config.shards), metrics)
    app = make_app(config, tokenizer, batcher, metrics, tracer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, auto_decompress=False, shutdown_timeout=LAST_WORDS)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    logger.info("listening on http://%s:%d", *listening.getsockname()[:2])
    batching = asyncio.create_task(_batch(batcher))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([batching, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not batching.done():
            logger.info("stopping: no new requests; running ones have %g s", config.graceful_termination_timeout)
            await batcher.drain(config.graceful_termination_timeout)
    finally:
        await runner.cleanup()
        for task in (batching, stopping):
            task.cancel()
        await asyncio.wait([batching, stopping])
        await batcher.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    if not batching.cancelled():
        batching.result()
    return 0


async def _batch(batcher: Batcher) -> None:
    await batcher.start()
    if batcher.limits is not None:
        logger.info(
            "ready: %d tokens of prompt, %d with the answer; requests of full length that fit at once: %d",
            batcher.limits.max_input_tokens,
            batcher.limits.max_total_tokens,
            batcher.together,
        )
    await batcher.wait()


def _stop_signal() -> asyncio.Event:
    """Set by SIGTERM or SIGINT. The next one ends the process at once, as if nobody had asked to handle it."""
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


if __name__ == "__main__":
    sys.exit(main())
