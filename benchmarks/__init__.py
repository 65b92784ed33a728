"""Benchmarks: scripts that measure speed and cost, and modules that they share."""

import os

# Before numpy is imported: models within a benchmark compute with one thread, as shards do by the launcher's settings with one.
# Other threads would spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
