"""What is measured. Scripts; some share what they need."""

import os

# Before numpy comes: models within a benchmark compute by one thread, as the launcher tells shards with one. Others would spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
