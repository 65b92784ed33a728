"""`penstock serve` with a shard that records when its device works. For `gpu.py`.

    python -m penstock.benchmarks.gpu_shard serve ...

The file named by the environment variable BUSY gets the shard's process id when it starts. SIGUSR1 begins the measurement, SIGUSR2
ends it: the numbers are written to the same file, atomically.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.benchmarks.gpu_busy import Busy

BUSY = "PENSTOCK_BENCHMARK_BUSY"
SIGNALS = signal.SIGUSR1, signal.SIGUSR2


def main() -> int:
    """The launcher, or the shard that it starts."""
    if sys.argv[1:2] == ["serve"]:
        return _launch()
    # A thread waits for the signals, which all others block, and so those must begin later: a handler would run once the main
    # thread's own wait is over, and what begins a measurement could come as late as what ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    from penstock.benchmarks.gpu_busy import watch
    from penstock.kernels.dispatch import force
    from penstock.proto import settings
    from penstock.shard import __main__ as shard
    from penstock.shard.config import ShardConfig

    config = settings.load(ShardConfig, sys.argv[1])
    force(config.kernels)
    busy = watch(config.device == "cuda")
    path = Path(os.environ[BUSY])
    threading.Thread(target=_measure, args=(busy, path), daemon=True).start()
    _write(path, str(os.getpid()))
    shard.main()
    return 0


def _measure(busy: "Busy", path: Path) -> None:
    while True:
        if signal.sigwait(SIGNALS) == signal.SIGUSR1:
            busy.reset()
        else:
            _write(path, json.dumps(busy.read()))


def _launch() -> int:
    from penstock.launcher import children, cli

    usual = children.command

    def command(module: str, configuration: str) -> list[str]:
        return usual("penstock.benchmarks.gpu_shard" if module == "penstock.shard" else module, configuration)

    children.command = command
    return cli.main(sys.argv[1:])


def _write(path: Path, text: str) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.rename(path)


if __name__ == "__main__":
    sys.exit(main())
