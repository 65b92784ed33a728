"""Triton's batch-invariant matrix products: results compared with float64, and rows bit-identical whatever the other rows are."""

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
from penstock.tests.kernels.test_compile import run_python
from penstock.tests.kernels.test_large_offsets import FAR, spread_rows
from penstock.tests.kernels.test_skinny_gemm import DEVICE, poisoned_view, randn

# Relative to the largest result. bfloat16 and float16: a unit in the last place, since the interpreter truncates to bfloat16 where
# it should round. float32: the rounding of sums of some hundred numbers; tf32 would lose 5e-4.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
INTEGERS = {4: torch.int32, 2: torch.int16}
# Inputs and outputs that fill tiles, and others, where the last or only tile of outputs or inputs is partial.
SIZES = [(64, 128), (192, 256), (128, 65), (200, 128), (63, 129), (257, 300), (16, 16), (1, 1), (5, 130), (130, 3)]

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def is_accurate(x: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor) -> bool:
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    magnitude = max(1.0, expected.abs().max().item())
    return (found.double() - expected).abs().max().item() <= TOLERANCES[x.dtype] * magnitude


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products_match_float64_and_write_nothing_else(dtype: torch.dtype, rng: random.Random) -> None:
    for inputs, outputs in [*SIZES, (rng.randint(1, 600), rng.randint(1, 300))]:
        rows, with_bias = rng.choice([1, 2, 17, 63, 64, 65, 150]), rng.random() < 0.5
        x, x_parent = poisoned_view(rows, inputs, dtype)
        weight = torch.full((outputs + 1, inputs), torch.nan, dtype=dtype, device=DEVICE)[:outputs]
        weight.copy_(randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5))
        bias = randn(outputs, dtype=dtype) if with_bias else None
        out, out_parent = poisoned_view(rows, outputs, dtype)
        out.fill_(torch.nan)
        before = x_parent.clone()
        assert product(x, weight, bias, out) is out
        assert is_accurate(x, weight, bias, out), (rows, inputs, outputs, with_bias)
        assert all(part.isnan().all() for part in (out_parent[:, :3], out_parent[:, outputs + 3 :], out_parent[rows:]))
        assert x_parent.view(INTEGERS[dtype.itemsize]).equal(before.view(INTEGERS[dtype.itemsize]))


def test_every_tile_is_computed_with_more_rows_than_a_band() -> None:
    """Also in the last band."""
    rows = tile_of(torch.float32, 9, 16).rows * (BAND + 2) + 1
    x, weight = randn(rows, 16, dtype=torch.float32), randn(200, 16, dtype=torch.float32)
    assert is_accurate(x, weight, None, product(x, weight, None, torch.full((rows, 200), torch.nan, device=DEVICE)))


@pytest.mark.parametrize(("rows", "outputs"), [(0, 8), (3, 0)])
def test_empty_products_launch_no_kernel(rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_batch_invariant, "invariant_kernel", None)
    weight = randn(outputs, 24, dtype=torch.float32)
    assert product(randn(rows, 24, dtype=torch.float32), weight, None, torch.empty(rows, outputs, device=DEVICE)).numel() == 0


def test_products_of_rows_at_large_strides() -> None:
    x, weight = randn(4, 40, dtype=torch.float32), randn(24, 40, dtype=torch.float32)
    out = spread_rows(torch.full((4, 24), torch.nan, device=DEVICE))
    assert 3 * out.stride(0) > FAR // 2
    assert product(spread_rows(x), weight, None, out).equal(product(x, weight, None, torch.empty(4, 24, device=DEVICE)))


def is_batch_invariant(product: Product, dtype: torch.dtype, inputs: int = 200) -> bool:
    """Whether rows are bit-identical alone, with some other rows, and with different other rows."""
    rows, outputs = 150, 140
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
    fillers = randn(rows, inputs, dtype=dtype), torch.full((rows, inputs), torch.nan, dtype=dtype, device=DEVICE)

    def compute(x: Tensor) -> Tensor:
        return product(x, weight, bias, torch.full((len(x), outputs), torch.nan, dtype=dtype, device=DEVICE))

    whole = compute(x)
    for first, after in ((0, 1), (0, 16), (0, 65), (0, 149), (1, 2), (149, 150), (63, 65), (37, 137)):
        batch = fillers[(first + after) % 2].clone()
        batch[first:after] = x[first:after]
        for found in (compute(x[first:after]), compute(batch)[first:after]):
            if not found.equal(whole[first:after]):
                return False
    return True


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("inputs", [128, 101])
def test_rows_are_bit_identical_whatever_the_other_rows_are(dtype: torch.dtype, inputs: int, rng: random.Random) -> None:
    assert is_batch_invariant(product, dtype, inputs)


def split_for_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """A planted fault: for few rows the inputs are summed in two halves."""
    if len(x) > 64:
        return product(x, weight, bias, out)
    half = x.shape[1] // 2
    first = product(x[:, :half], weight[:, :half].contiguous(), bias, torch.empty_like(out))
    return out.copy_(first + product(x[:, half:], weight[:, half:].contiguous(), None, torch.empty_like(out)))


def leaking_into_the_next_row(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """A planted fault: a little of each row is added to the next one."""
    return product(x + 1e-6 * x.roll(1, 0), weight, bias, out)


@pytest.mark.parametrize("faulty", [split_for_few_rows, leaking_into_the_next_row])
def test_check_detects_products_that_depend_on_other_rows(faulty: Product, rng: random.Random) -> None:
    assert not is_batch_invariant(faulty, torch.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="tensor cores may sum a tile of inputs as they sum two half ones")
def test_check_detects_another_tile_for_few_rows(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    def faulty(x: Tensor, *rest: Any) -> Tensor:
        monkeypatch.setattr(fused_batch_invariant, "tile_of", lambda *given: Tile(64, 64, 64 if len(x) > 64 else 32, 4, 2))
        return product(x, *rest)

    assert not is_batch_invariant(faulty, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_compiled_kernel_serves_all_numbers_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert len(grid) == 1
            return lambda *arguments, **options: launches.append((arguments[5:], options))

    monkeypatch.setattr(fused_batch_invariant, "invariant_kernel", Kernel())
    weight = torch.empty(96, 48, dtype=dtype, device="meta")
    for rows in (1, 2, 16, 17, 64, 65, 256, 1000, 100_000):
        product(weight.new_empty(rows, 48), weight, None, weight.new_empty(rows, 96))
    assert len(launches) == 9
    assert all(launch == launches[0] for launch in launches)


INSTRUCTIONS_SCRIPT = r"""
import re
from dataclasses import replace
from penstock.kernels import compile, fused_batch_invariant

print([parameter.name for parameter in fused_batch_invariant.invariant_kernel.params if parameter.do_not_specialize])
for one in fused_batch_invariant.compilations():
    for target in compile.TARGETS:
        if one.name.startswith("invariant queries") and target.name in one.targets and target.name in ("sm_90", "gfx942"):
            found = []
            for stride in ("i32:16", "i32"):
                made = compile._compiled(replace(one, types=one.signature | {"x_stride": stride}), target)
                code = made.asm["amdgcn" if target.gpu.backend == "hip" else "ptx"]
                found.append(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)[\w.:]*", code))
            print(target.name, len(found[0]) > 0, found[0] == found[1])
"""


def test_kernels_for_other_strides_use_the_same_matrix_instructions() -> None:
    """Triton compiles another kernel for a stride that is not divisible by 16, but not for any number of rows."""
    process = run_python("-c", INSTRUCTIONS_SCRIPT)
    lines = process.stdout.splitlines()
    assert lines[:1] == ["['rows']"], process.stderr
    expected_on_amd = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)  # Triton 3.6 uses other instructions for AMD
    assert sorted(lines[1:]) == [f"gfx942 True {expected_on_amd}", "sm_90 True True"], lines
