"""Roofline of this CPU with one thread: read bandwidth and multiply-add peak, measured now."""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

# Independent chains of fused multiply-adds that never leave the registers, in the widest vectors that x86 has.
SOURCE = """
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define CHAINS 12
typedef float vector __attribute__((vector_size(4 * LANES)));
long flops_per_round() { return 2 * CHAINS * LANES; }
float peak(long rounds) {
  vector sum[CHAINS], factor, term;
  for (int i = 0; i < LANES; i++) { factor[i] = 0.999f; term[i] = 1e-3f; }
  for (int j = 0; j < CHAINS; j++) sum[j] = term;
  for (long r = 0; r < rounds; r++)
    for (int j = 0; j < CHAINS; j++) sum[j] = sum[j] * factor + term;
  for (int j = 1; j < CHAINS; j++) sum[0] += sum[j];
  return sum[0][0];
}
float scan(const float *data, long count) {
  vector sum[8] = {0};
  for (long i = 0; i < count; i += 8 * LANES)
    for (int j = 0; j < 8; j++) sum[j] += *(const vector *)(data + i + j * LANES);
  for (int j = 1; j < 8; j++) sum[0] += sum[j];
  return sum[0][0];
}
"""
ROUNDS = 2_000_000
REPEATS = 9


def measure() -> tuple[float, float, str]:
    """(bytes per second, FLOP per second, how they were measured): best of several runs, by CPU time of one thread."""
    data = torch.ones(192 << 20)  # 768 MiB: far beyond any cache
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        square = torch.ones(1024, 1024)
        return _best(lambda: data.sum(), data.nbytes), _best(lambda: square @ square, 2 * 1024**3), "torch: sum and matmul"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "limits.c").write_text(SOURCE)
        flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "-o", f"{folder}/limits.so", f"{folder}/limits.c"], check=True)
        library = ctypes.CDLL(f"{folder}/limits.so")
        library.peak.argtypes, library.peak.restype = [ctypes.c_long], ctypes.c_float
        library.scan.argtypes, library.scan.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_float
        bandwidth = _best(lambda: library.scan(data.data_ptr(), data.numel()), data.nbytes)
        return bandwidth, _best(lambda: library.peak(ROUNDS), ROUNDS * library.flops_per_round()), "compiled loops"


def _best(work: Callable[[], object], amount: float) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return amount / min(times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    bandwidth, flops, how = measure()
    print(f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.1f} GFLOP/s ({how})")
