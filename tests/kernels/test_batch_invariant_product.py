"""Products whose rows don't depend on each other are right, and don't: not by a bit."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from penstock.kernels import fused_batch_invariant
from penstock.kernels.fused_batch_invariant import BAND, Tile, product, tile_of
from penstock.tests.kernels.test_compile import run
from penstock.tests.kernels.test_large_offsets import FAR, apart
from penstock.tests.kernels.test_skinny_gemm import DEVICE, randn, wide

# Of the largest result. bfloat16 and float16: a place, since to bfloat16 the interpreter doesn't round, but cuts off. float32: what
# sums of some hundred numbers lose; tf32 would lose 5e-4.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
INTEGERS = {4: torch.int32, 2: torch.int16}
# Inputs and outputs that fill tiles, and others: the last tile of columns or inputs is cut, or the only one is.
SIZES = [(64, 128), (192, 256), (128, 65), (200, 128), (63, 129), (257, 300), (16, 16), (1, 1), (5, 130), (130, 3)]

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def right(x: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor) -> bool:
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    size = max(1.0, expected.abs().max().item())
    return (found.double() - expected).abs().max().item() <= TOLERANCES[x.dtype] * size


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products(dtype: torch.dtype, rng: random.Random) -> None:
    for inputs, outputs in [*SIZES, (rng.randint(1, 600), rng.randint(1, 300))]:
        rows, biased = rng.choice([1, 2, 17, 63, 64, 65, 150]), rng.random() < 0.5
        x, around = wide(rows, inputs, dtype)
        weight = torch.full((outputs + 1, inputs), torch.nan, dtype=dtype, device=DEVICE)[:outputs]
        weight.copy_(randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5))
        bias = randn(outputs, dtype=dtype) if biased else None
        out, whole = wide(rows, outputs, dtype)
        out.fill_(torch.nan)
        before = around.clone()
        assert product(x, weight, bias, out) is out
        assert right(x, weight, bias, out), (rows, inputs, outputs, biased)
        assert all(part.isnan().all() for part in (whole[:, :3], whole[:, outputs + 3 :], whole[rows:]))
        assert around.view(INTEGERS[dtype.itemsize]).equal(before.view(INTEGERS[dtype.itemsize]))


def test_more_rows_than_a_band() -> None:
    """Every tile is somebody's, also in the last band."""
    rows = tile_of(torch.float32, 9, 16).rows * (BAND + 2) + 1
    x, weight = randn(rows, 16, dtype=torch.float32), randn(200, 16, dtype=torch.float32)
    assert right(x, weight, None, product(x, weight, None, torch.full((rows, 200), torch.nan, device=DEVICE)))


@pytest.mark.parametrize(("rows", "outputs"), [(0, 8), (3, 0)])
def test_nothing_is_launched_for_nothing(rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_batch_invariant, "invariant_kernel", None)
    weight = randn(outputs, 24, dtype=torch.float32)
    assert product(randn(rows, 24, dtype=torch.float32), weight, None, torch.empty(rows, outputs, device=DEVICE)).numel() == 0


def test_rows_far_apart() -> None:
    x, weight = randn(4, 40, dtype=torch.float32), randn(24, 40, dtype=torch.float32)
    out = apart(torch.full((4, 24), torch.nan, device=DEVICE))
    assert 3 * out.stride(0) > FAR // 2
    assert product(apart(x), weight, None, out).equal(product(x, weight, None, torch.empty(4, 24, device=DEVICE)))


def invariant(product: Product, dtype: torch.dtype, inputs: int = 200) -> bool:
    """Whether rows come to the same alone, with some neighbours, and with others."""
    rows, outputs = 150, 140
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    among = randn(rows, inputs, dtype=dtype), torch.full((rows, inputs), torch.nan, dtype=dtype, device=DEVICE)

    def made(x: Tensor) -> Tensor:
        return product(x, weight, bias, torch.full((len(x), outputs), torch.nan, dtype=dtype, device=DEVICE))

    whole = made(x)
    for first, after in ((0, 1), (0, 16), (0, 65), (0, 149), (1, 2), (149, 150), (63, 65), (37, 137)):
        others = among[(first + after) % 2].clone()
        others[first:after] = x[first:after]
        for found in (made(x[first:after]), made(others)[first:after]):
            if not found.equal(whole[first:after]):
                return False
    return True


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("inputs", [128, 101])
def test_rows_know_no_neighbours(dtype: torch.dtype, inputs: int, rng: random.Random) -> None:
    assert invariant(product, dtype, inputs)


def split(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Of few rows, two sums are added up."""
    if len(x) > 64:
        return product(x, weight, bias, out)
    half = x.shape[1] // 2
    first = product(x[:, :half], weight[:, :half].contiguous(), bias, torch.empty_like(out))
    return out.copy_(first + product(x[:, half:], weight[:, half:].contiguous(), None, torch.empty_like(out)))


def leaning(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Something of each row is in the next."""
    return product(x + 1e-6 * x.roll(1, 0), weight, bias, out)


@pytest.mark.parametrize("faulty", [split, leaning])
def test_a_fault_would_be_seen(faulty: Product, rng: random.Random) -> None:
    assert not invariant(faulty, torch.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="matrix units may go through a tile of inputs as through two")
def test_another_tile_would_be_seen(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """For few rows."""

    def faulty(x: Tensor, *rest: Any) -> Tensor:
        monkeypatch.setattr(fused_batch_invariant, "tile_of", lambda *given: Tile(64, 64, 64 if len(x) > 64 else 32, 4, 2))
        return product(x, *rest)

    assert not invariant(faulty, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_kernel_serves_all_numbers_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert len(grid) == 1
            return lambda *given, **how: launches.append((given[5:], how))

    monkeypatch.setattr(fused_batch_invariant, "invariant_kernel", Kernel())
    weight = torch.empty(96, 48, dtype=dtype, device="meta")
    for rows in (1, 2, 16, 17, 64, 65, 256, 1000, 100_000):
        product(weight.new_empty(rows, 48), weight, None, weight.new_empty(rows, 96))
    assert len(launches) == 9
    assert all(launch == launches[0] for launch in launches)


MULTIPLIED = r"""
import re
from dataclasses import replace
from penstock.kernels import compile, fused_batch_invariant

print([parameter.name for parameter in fused_batch_invariant.invariant_kernel.params if parameter.do_not_specialize])
for one in fused_batch_invariant.compilations():
    for target in compile.TARGETS:
        if one.name.startswith("invariant queries") and target.name in one.targets and target.name in ("sm_90", "gfx942"):
            found = []
            for stride in ("i32:16", "i32"):
                made = compile._compiled(replace(one, signature=one.signature | {"x_stride": stride}), target)
                code = made.asm["amdgcn" if target.gpu.backend == "hip" else "ptx"]
                found.append(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)[\w.:]*", code))
            print(target.name, len(found[0]) > 0, found[0] == found[1])
"""


def test_rows_of_another_stride_are_multiplied_by_the_same_instructions() -> None:
    """Which are compiled anew for what isn't divisible by 16, but for no number of rows."""
    answer = run("-c", MULTIPLIED)
    lines = answer.stdout.splitlines()
    assert lines[:1] == ["['rows']"], answer.stderr
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)  # Triton 3.6 takes others for AMD's
    assert sorted(lines[1:]) == [f"gfx942 True {newer}", "sm_90 True True"], lines
