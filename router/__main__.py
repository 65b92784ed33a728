"""Entry point of the router process: `python -m penstock.router '<RouterConfig as JSON>'`. Knows the process, not what it serves.

It listens and answers health probes before the router's own modules are imported, so that probes see the progress of the start.
Exit status: 0 after SIGTERM or SIGINT, 1 after a fault, 2 when a setting is wrong.
"""

import errno
import logging
import os
import resource
import signal
import socket
import sys

from ..proto.process import configure_logging, die_with_parent
from ..proto.settings import load
from .admission import places
from .config import BACKLOG, Misconfigured, RouterConfig
from .record import request_id
from .startup_probes import StartupProbes

# Bytes of unsent data that the kernel buffers per client beyond those in flight. By default it buffers megabytes, and a slow reader
# would get an event for each token all the same, late.
UNSENT = 16384
OWN_FILES = 100  # files open beside connections: shards, processes that render chats, logs, and probes

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
    # Until there is something to be stopped. An exception would be lost in a callback of a weak reference, as imports have them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os._exit(0))
    raise_limit(places(config.max_concurrent_requests * max(1, len(config.groups))))
    try:
        with listen(config) as listening:
            probes = StartupProbes(listening)
            from .process import run  # which imports aiohttp, grpc, the tokenizer...

            return run(config, listening, probes)
    except Misconfigured as error:
        logger.error("%s", error)
        return 2


def raise_limit(requests: int) -> None:
    """Raises the limit of open files to what the operator allows (ulimit -Hn): the default of shells and systemd is 1024. Logs a
    warning if that is too low for so many requests in flight."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < requests + OWN_FILES:
        logger.warning(
            "%d requests in flight need as many open files, and %d are allowed here: connections beyond them, probes too, find "
            "nobody. Raise the hard limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=), or lower --max-concurrent-requests",
            requests,
            hard,
        )


def listen(config: RouterConfig) -> socket.socket:
    """The listening socket for HTTP. Raises Misconfigured, with a remedy."""
    family = socket.AF_INET6 if ":" in config.hostname else socket.AF_INET
    try:
        both = config.hostname == "::" and socket.has_dualstack_ipv6()  # else probes over IPv4 would fail
        listening = socket.create_server((config.hostname, config.port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        place = f"port {config.port} of {config.hostname}"
        if error.errno == errno.EADDRINUSE:
            raise Misconfigured(f"{place} is in use: stop who uses it, or choose another with --port") from None
        why = error.strerror or str(error)
        raise Misconfigured(f"cannot listen on {place}: {why}; choose another with --port or --hostname") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # accepted sockets inherit it
    return listening


if __name__ == "__main__":
    sys.exit(main())
