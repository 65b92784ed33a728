"""`penstock serve` with a shard that records when its device works. For `gpu.py`.

    python -m penstock.benchmarks.gpu_shard serve ...

The file named by the environment variable BUSY gets the shard's process id when it starts. SIGUSR1 begins the measurement, SIGUSR2
ends it: the numbers are written to the same file, atomically.
"""

import json
import os
import signal
import sys
from pathlib import Path

BUSY = "PENSTOCK_BENCHMARK_BUSY"


def main() -> int:
    """The launcher, or the shard that it starts."""
    if sys.argv[1:2] == ["serve"]:
        return _launch()
    from penstock.benchmarks.gpu_busy import watch
    from penstock.kernels.dispatch import force
    from penstock.proto import settings
    from penstock.shard import __main__ as shard
    from penstock.shard.config import ShardConfig

    config = settings.load(ShardConfig, sys.argv[1])
    force(config.kernels)
    busy = watch(config.device == "cuda")
    path = Path(os.environ[BUSY])
    signal.signal(signal.SIGUSR1, lambda number, frame: busy.reset())
    signal.signal(signal.SIGUSR2, lambda number, frame: _write(path, json.dumps(busy.read())))
    _write(path, str(os.getpid()))
    shard.main()
    return 0


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
