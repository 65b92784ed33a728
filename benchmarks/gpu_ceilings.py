"""The GPU's measured ceilings (roofline): copy and read bandwidth, matrix products, launch overhead."""

import shutil
import subprocess
from contextlib import suppress
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from penstock.benchmarks.gpu_measure import Bench, clocked
from penstock.benchmarks.gpu_report import Line, timing

SECTION = "ceilings"
# Of an 8 B model, [out, in]: queries, keys and values; attention's output; gate and up; down; the vocabulary.
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
READ_BLOCK, READ_ROUNDS = 2048, 16  # numbers that a program adds at once, and how often


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(data, sums, block: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program sums `rounds` times `block` contiguous numbers."""
    place = tl.program_id(0).to(tl.int64) * block * rounds + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in range(rounds):
        total += tl.load(data + place + i * block)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read(data: Tensor, sums: Tensor) -> None:
    """data: float32, a multiple of READ_BLOCK * READ_ROUNDS numbers."""
    read_kernel[(len(sums),)](data, sums, READ_BLOCK, READ_ROUNDS, num_warps=8, enable_fp_fusion=False)


def facts(bench: Bench) -> dict[str, str]:
    """Facts about device and software."""
    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda), "device": "cpu"}
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found["device"] = properties.name
        found["processors"] = str(properties.multi_processor_count)
        found["L2"] = f"{properties.L2_cache_size / 2**20:.0f} MiB"
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
    return found | clocks()


def clocks() -> dict[str, str]:
    """Clocks, power and temperature by nvidia-smi, if available."""
    tool = shutil.which("nvidia-smi")
    names = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu"]
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    answer = ""
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    return dict(zip(names, (value.strip() for value in answer.split(",")), strict=False))


def measure(bench: Bench) -> None:
    """Measures the ceilings that everything after is compared with."""
    bench.each(SECTION, (_copies, _reads, _squares, _products, _launches), whole=True)


def _squares(bench: Bench) -> None:
    side = 64 if bench.tiny else 8192
    left, right = _square(bench, side), _square(bench, side)
    took = bench.time([lambda: torch.mm(left, right)])
    bench.product_rate = 2 * side**3 / took.seconds
    bench.add(Line(section=SECTION, what=f"product {side}^3", timing=took, value=bench.product_rate / 1e12, unit="TFLOP/s"))


def _products(bench: Bench) -> None:
    for rows in (1, 32, 256):
        for outputs, inputs in [(64, 32)] if bench.tiny else PRODUCTS:
            _product(bench, rows, outputs, inputs)


def _copies(bench: Bench) -> None:
    size = 1 << 16 if bench.tiny else 1 << 31
    # Random bits: zeros take less power, and a power-limited GPU runs slower with real data.
    source, target = torch.randint(256, (2, size), dtype=torch.uint8, device=bench.device).unbind()
    # The better of two: a graph may copy in another way than a stream, and a ceiling that is too low flatters everything.
    took = min((bench.time([lambda: target.copy_(source)], graph) for graph in (True, False)), key=lambda one: one.seconds)
    bench.copy_rate = 2 * size / took.seconds
    what, unit = f"copy {size >> 20} MiB", "GB/s read and written"
    bench.add(Line(section=SECTION, what=what, timing=took, value=bench.copy_rate / 1e9, unit=unit))


def _reads(bench: Bench) -> None:
    numbers = torch.randn(READ_BLOCK * READ_ROUNDS * (2 if bench.tiny else 1 << 15), device=bench.device)
    sums = torch.empty(len(numbers) // READ_BLOCK // READ_ROUNDS, device=bench.device)
    took = bench.time([lambda: read(numbers, sums)])
    bench.read_rate = numbers.nbytes / took.seconds
    what = f"read {numbers.nbytes >> 20} MiB"
    bench.add(Line(section=SECTION, what=what, timing=took, value=bench.read_rate / 1e9, unit="GB/s"))


def _square(bench: Bench, side: int) -> Tensor:
    return torch.randn(side, side, device=bench.device).bfloat16()


def _product(bench: Bench, rows: int, outputs: int, inputs: int) -> None:
    """The product of a decode step: few rows, a weight that is read once."""
    weights = [torch.randn(outputs, inputs, device=bench.device).bfloat16() for _ in range(bench.copies(2 * outputs * inputs))]
    x = torch.randn(rows, inputs, device=bench.device).bfloat16()
    took = bench.time([partial(functional.linear, x, weight) for weight in weights])
    floor = max(2 * outputs * inputs / bench.copy_rate, 2 * rows * outputs * inputs / bench.product_rate)
    what = f"product of {rows} rows with {outputs} x {inputs}"
    bench.add(Line(section=SECTION, what=what, timing=took, ratio=floor / took.seconds, against="its floor"))


def _launches(bench: Bench) -> None:
    """The cost of a launch: in a graph on the device, and one by one on the CPU."""
    data, sums = torch.zeros(READ_BLOCK * READ_ROUNDS, device=bench.device), torch.empty(1, device=bench.device)
    took = bench.time([lambda: read(data, sums)] * (2 if bench.tiny else 100))
    bench.add(Line(section=SECTION, what="a tiny kernel inside a graph", timing=took))
    samples = []
    for _ in range(3 if bench.tiny else 100):
        bench.synchronize()
        samples.append(clocked(lambda: read(data, sums)))
    bench.add(Line(section=SECTION, what="a launch, on the processor", timing=timing(samples, "wall")))
