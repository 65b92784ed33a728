"""Entry point of a shard process: builds one rank and serves it. `python -m penstock.shard '<ShardConfig as JSON>'`."""

import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import grpc
import torch

from ..kernels.dispatch import force
from ..proto import certificates, link, rpc, settings
from ..proto.process import configure_logging, die_with_parent
from .config import ShardConfig
from .engine import Engine
from .loading import DeviceMissing, load
from .models.shape import Unsupported
from .out_of_memory import log_failure
from .parallel import RendezvousFailed
from .relay import READY, Receiver, Sender
from .service import Service

log = logging.getLogger(__name__)

# Steps has a thread for as long as its stream lives; the others are for Info, Health and a new router.
SERVICE_THREADS = 4
LAST_WORDS = 0.2  # seconds in which callers may still receive the reason why this process ends

Load = Callable[[ShardConfig, Callable[[str], None]], Engine]  # the second argument is called with the loading stage


def main() -> None:
    """Serves the model given by the configuration in the arguments."""
    die_with_parent()
    config = settings.load(ShardConfig, sys.argv[1])
    configure_logging(config.name or f"shard {config.rank}", config.json_output)
    serve(config, Service, load)


def serve(config: ShardConfig, kind: type[Service], load: Load) -> NoReturn:
    """Ends the process: after SIGTERM (exit 0), a fault (1) or with a model that can't be served (2)."""
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    _hear_sigterm(partial(ends.put, 0))
    service = kind(config, ends.put)
    os.umask(0o077)  # files made here, above all the sockets, are for this user alone, wherever they are
    try:
        server = _server(config, service)
    except (RuntimeError, OSError) as error:
        log.error(f"can't listen at {config.listen or config.socket}: {error}")
        os._exit(1)
    server.start()
    threading.Thread(target=_work, args=(config, service, load, ends.put), daemon=True).start()
    code = ends.get()
    log.info("stopping")
    server.stop(LAST_WORDS if code else None).wait(LAST_WORDS)
    of_all = (config.relay, config.meeting) if config.rank == 0 else ()
    for path in ("" if config.listen else config.socket, *of_all):
        if path:
            Path(path).unlink(missing_ok=True)
    logging.shutdown()
    os._exit(code)  # a thread that waits for a lost peer would keep the interpreter from ending


def _hear_sigterm(end: Callable[[], None]) -> None:
    """Calls `end` when the signal comes, even while other threads wait for a peer inside torch.

    A Python handler would not do: the main thread runs it only when its own wait is over, if the signal came in the moment before
    that, or if another thread took it, as it may in a process that was stopped and goes on.
    """
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(outbox)

    def hear() -> None:
        while signal.SIGTERM not in os.read(inbox, 16):
            pass
        end()

    threading.Thread(target=hear, daemon=True).start()


def _server(config: ShardConfig, service: Service) -> grpc.Server:
    """Creates the server, which listens but does not answer yet. Raises RuntimeError or OSError."""
    options = rpc.FAR_OPTIONS if config.listen else rpc.OPTIONS
    server = grpc.server(ThreadPoolExecutor(SERVICE_THREADS), handlers=[rpc.handler(service)], options=options)
    certified = certificates.of(config)
    if not config.listen:
        server.add_insecure_port(f"unix:{config.socket}")
        os.chmod(config.socket, 0o600)
    elif certified is None:
        server.add_insecure_port(config.listen)
    else:
        server.add_secure_port(config.listen, rpc.server_credentials(certified))
    return server


def _work(config: ShardConfig, service: Service, load: Load, end: Callable[[int], None]) -> None:
    """Loads the model; then rank 0 is driven by its service, the others here, by the commands that rank 0 relays."""
    try:
        torch.set_num_threads(config.threads)
        force(config.kernels)
        began = time.perf_counter()
        try:
            relay = Sender(config)
        except OSError as error:
            place = config.relay_address or config.relay
            raise RendezvousFailed(f"can't listen for the other ranks at {place}: {link.reason(error)}") from None
        try:
            engine = load(config, lambda stage: setattr(service, "stage", stage))
        except (MemoryError, RuntimeError) as error:
            log_failure(error)
            end(1)
            return
        receiver = Receiver(config) if config.rank else None
        relay.connect()
        # All ranks have loaded. None may begin earlier: torch's collectives give up after two minutes, and loading may take one
        # rank longer than that, from a slower disk, or with a draft model.
        relay.send(READY)
        if receiver is not None:
            receiver.receive()
        service.start(engine, relay, _freeze)
        log.info(f"loaded {config.model} in {time.perf_counter() - began:.1f} s")
        while receiver is not None:
            service.follow(receiver.receive())
    except Unsupported as error:
        log.error(str(error))
        end(2)
    except (RendezvousFailed, DeviceMissing) as error:
        log.error(str(error))
        end(1)  # what has taken the port since the launcher looked, or ails the GPU, may be gone when it tries again
    except EOFError as error:
        log.error(f"rank 0 is gone{f': {error}' if str(error) else ''}")
        end(1)
    except BaseException:  # a panic in a Rust library is not an Exception
        log.exception("the shard failed")
        end(1)


def _freeze() -> None:
    """Excludes long-lived objects from garbage collection: those of warm-up, too, as compiled kernels and recorded graphs. On an
    H200's host they delayed a step of 256 rows in 44 by 12 ms. And collects less often than twice in such a step, whose objects
    are freed without it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


if __name__ == "__main__":
    main()
