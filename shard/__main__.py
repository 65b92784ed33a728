"""Builds one rank and serves it: `python -m penstock.shard '<ShardConfig as JSON>'`."""

import logging
import os
import queue
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import grpc
import torch

from ..proto import rpc, settings
from ..proto.process import configure_logging, die_with_parent
from .config import ShardConfig
from .engine import Engine
from .loading import load
from .models.families import Unsupported
from .relay import Receiver, Sender
from .service import Service

log = logging.getLogger(__name__)

# Steps has a thread for as long as its stream lives; the others are for Info, Health and a router that comes anew.
SERVICE_THREADS = 4


def main() -> None:
    """Serves until SIGTERM (exit 0), a fault (1) or a model that can't be served (2)."""
    die_with_parent()
    config = settings.load(ShardConfig, sys.argv[1])
    configure_logging(f"shard {config.rank}", config.json_output)
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _leave)
    service = Service(config, ends.put)
    server = grpc.server(ThreadPoolExecutor(SERVICE_THREADS), handlers=[rpc.handler(service)], options=rpc.OPTIONS)
    server.add_insecure_port(f"unix:{config.socket}")
    server.start()
    code = 0
    try:
        code = _serve(config, service, ends)
    except Unsupported as error:
        log.error(str(error))
        code = 2
    except SystemExit:
        log.info("stopping")
    except Exception:
        log.exception("the shard failed")
        code = 1
    server.stop(grace=None)
    Path(config.socket).unlink(missing_ok=True)
    logging.shutdown()
    os._exit(code)  # a thread that waits for a peer that is gone would keep the interpreter from ending


def _serve(config: ShardConfig, service: Service, ends: "queue.SimpleQueue[int]") -> int:
    torch.set_num_threads(config.threads)
    began = time.perf_counter()
    relay = Sender(config.relay, config.ranks - 1 if config.rank == 0 else 0)
    try:
        engine: Engine = load(config, lambda stage: setattr(service, "stage", stage))
        receiver = Receiver(config.relay) if config.rank else None
        relay.connect()
        service.start(engine, relay)
        log.info(f"loaded {config.model} in {time.perf_counter() - began:.1f} s")
        if receiver is None:
            return ends.get()
        return _follow(service, receiver)
    finally:
        relay.close()


def _follow(service: Service, receiver: Receiver) -> int:
    try:
        while True:
            service.follow(receiver.receive())
    except (EOFError, ConnectionError):
        log.error("rank 0 is gone")
        return 1


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
