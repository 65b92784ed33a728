"""Ahead-of-time compilation of every kernel for every kind of accelerator, on a machine that may have none.

Run as `python -m penstock.kernels.compile [words]`. Every module of kernels that has `compilations()` takes part; words select
kernels whose names begin with one of them. It fails when a hot kernel spills registers, or when one needs more shared or tensor
memory than the accelerator has. Triton caches what it has compiled on disk, so that a second run takes seconds.
"""

import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from . import dependent_launch
from .compilation import Compilation

KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of accelerator to compile for."""

    name: str
    gpu: GPUTarget
    shared: int  # most bytes of shared memory per program
    tuned: bool = True  # hot kernels must not spill
    columns: int = 0  # of tensor memory, which holds the results of tensor cores


# CUDA C++ Programming Guide, "Technical specifications per compute capability"; AMD CDNA 3 ISA guide, "Local data share".
# An A100 has 163 KiB; other Ampere and Ada, which take the same kernels, 99.
TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 99 * KIB),
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * KIB),
    Target("sm_100", GPUTarget("cuda", 100, 32), 227 * KIB, columns=512),
    Target("sm_120", GPUTarget("cuda", 120, 32), 99 * KIB, tuned=False),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * KIB),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The resources that one compiled kernel needs on one target."""

    name: str
    target: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes
    seconds: float
    fault: str = ""


def gather() -> list[Compilation]:
    """The compilations of every module beside this one that has any, in the order of the modules' names."""
    package = __name__.rpartition(".")[0] if __name__ != "__main__" else "penstock.kernels"
    found: list[Compilation] = []
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module != "compile":
            found += getattr(importlib.import_module(f"{package}.{module}"), "compilations", list)()
    names = [compilation.name for compilation in found]
    assert len(set(names)) == len(names), f"names are not unique: {sorted(name for name in names if names.count(name) > 1)}"
    return found


def build(compilation: Compilation, target: Target) -> Result:
    """Compiles (or finds in Triton's cache) one kernel for one target, and checks it for spills and shared memory."""
    before = time.perf_counter()
    try:
        made = _compiled(compilation, target)
    except Exception as problem:  # whatever the compiler rejects is a line of the report, and the others still run
        reason = next((line for line in reversed(str(problem).splitlines()) if line.strip()), type(problem).__name__)
        return Result(compilation.name, target.name, 0, 0, 0, time.perf_counter() - before, f"does not compile: {reason}")
    registers, spilled = _amd_usage(made.asm["amdgcn"]) if target.gpu.backend == "hip" else _cuda_usage(made.asm["cubin"])
    seconds = time.perf_counter() - before
    shared, columns = int(made.metadata.shared), getattr(made.metadata, "tmem_size", None) or 0
    fault = _fault(compilation, target, spilled, shared, columns)
    return Result(compilation.name, target.name, registers, spilled, shared, seconds, fault)


def _compiled(compilation: Compilation, target: Target) -> Any:
    kernel = compilation.kernel
    signature = {**compilation.signature, **dict.fromkeys(compilation.constants, "constexpr")}
    types = {name: signature[name].partition(":")[0] for name in kernel.arg_names}
    # As at run time: pointers are aligned, and so are numbers that are divisible by 16 (strides, most sizes).
    aligned = [i for i, name in enumerate(kernel.arg_names) if types[name].startswith("*") or signature[name].endswith(":16")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, types, dict(compilation.constants), attributes)
    options = {"num_warps": compilation.warps, "num_stages": compilation.stages, "enable_fp_fusion": compilation.fuse}
    return triton.compile(source, target=target.gpu, options=options | dependent_launch.options(compilation.early))


def _fault(compilation: Compilation, target: Target, spilled: int, shared: int, columns: int) -> str:
    if shared > target.shared:
        return f"{shared} bytes of shared memory, {target.name} has {target.shared}"
    if columns > target.columns:
        return f"{columns} columns of tensor memory, {target.name} has {target.columns}"
    if compilation.hot and target.tuned and spilled:
        return f"spills {spilled} bytes"
    return ""


def _cuda_usage(binary: bytes) -> tuple[int, int]:
    """Registers, spilled bytes. These kernels have no local arrays: all that is on the stack are spills."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def _amd_usage(text: str) -> tuple[int, int]:
    """Registers, spilled bytes, from the metadata at the end of an assembly text. Scalar spills go to vector registers."""
    numbers = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    return numbers["vgpr_count"], 4 * numbers["vgpr_spill_count"]


def report(compilations: Iterable[Compilation], targets: Iterable[Target]) -> Iterator[Result]:
    """Compiles each kernel for each of its targets, and yields results as they come."""
    for compilation in compilations:
        for target in targets:
            if not compilation.targets or target.name in compilation.targets:
                yield build(compilation, target)


def line(result: Result) -> str:
    """One row of the table."""
    numbers = f"{result.registers:>9} {result.spilled:>7} {result.shared / KIB:>10.1f} {result.seconds:>7.1f}"
    return f"{result.name:<44} {result.target:<7} {numbers}  {result.fault}".rstrip()


def main(words: list[str]) -> int:
    """Prints the table; returns 1 if anything is wrong."""
    chosen = [one for one in gather() if not words or one.name.startswith(tuple(words))]
    print(f"{'kernel':<44} {'target':<7} registers spilled shared KiB seconds")
    faults = 0
    before = time.perf_counter()
    for result in report(chosen, TARGETS):
        print(line(result), flush=True)
        faults += bool(result.fault)
    print(f"{len(chosen)} kernels, {len(TARGETS)} targets, {faults} faults, {time.perf_counter() - before:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
