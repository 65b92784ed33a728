"""What holds for all tests."""

import os

# Before numpy comes: its threads wait by spinning, and take the cores of those who compute. For shards the launcher says so.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
