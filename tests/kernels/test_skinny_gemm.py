"""Triton's matrix products of few rows, fused with the norm before and the activation or residual sum after them, compared with
float64; and how `Stream` and `Weight` use them."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_skinny_gemm, linear, reference
from penstock.kernels.fused_norm import rms_norm
from penstock.kernels.fused_skinny_gemm import LEAST, MOST, product
from penstock.kernels.linear import Weight
from penstock.shard.models.stream import Stream
from penstock.shard.parallel import Ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# In float32 the order of additions differs; in bfloat16 norms and SwiGLU are rounded elsewhere.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def poisoned_view(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view [rows, size] of a larger tensor that is NaN elsewhere, and the larger tensor."""
    parent = torch.full((rows + 2, size + 7), torch.nan, dtype=dtype, device=DEVICE)
    parent[:rows, 3 : size + 3] = randn(rows, size, dtype=dtype)
    return parent[:rows, 3 : size + 3], parent


def product_in_float64(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, gains: Tensor | None, gated: bool, gelu: bool, add: bool
) -> tuple[Tensor, float]:
    """In float64, except for the norm of several rows, which is another kernel's (Triton's interpreter truncates where it should
    round); and the magnitude that tolerances are in proportion to."""
    values = x.double()
    if gains is not None and len(x) > 1:
        values = rms_norm(x, gains, 1e-3, torch.empty_like(x)).double()
    elif gains is not None:
        values = values * (values.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gains.double()
    found = values @ weight.double().T + (bias.double() if bias is not None else 0)
    if gated:
        found = reference.gated(found, reference.Activation(gelu))
    if add:
        found = found + before.double()
    return found, max(1.0, found.abs().max().item())


SIZES = [(16, 16), (40, 24), (64, 33), (256, 130), (300, 257), (512, 64)]
ROWS = [1, 2, 7, LEAST, LEAST + 1, 32, 33, MOST]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_fused_products_match_float64(dtype: torch.dtype, gated: bool, norm: bool, rng: random.Random) -> None:
    for inputs, outputs in [*rng.sample(SIZES, 3), (rng.randint(1, 600), rng.randint(1, 200))]:
        rows, add, with_bias = rng.choice(ROWS), not gated and rng.random() < 0.6, rng.random() < 0.5
        gelu = gated and rng.random() < 0.5
        x, _ = poisoned_view(rows, inputs, dtype)
        weight = randn(outputs * (1 + gated), inputs, dtype=dtype, scale=inputs**-0.5)
        bias = randn(len(weight), dtype=dtype) if with_bias else None
        gains = randn(inputs, dtype=rng.choice([dtype, torch.float32])) if norm else None
        out, parent = poisoned_view(rows, outputs, dtype)
        before = out.clone()
        if not add:
            out.fill_(torch.nan)
        assert product(x, weight, bias, out, gains=gains, epsilon=1e-3, gated=gated, gelu=gelu, add=add) is out
        expected, magnitude = product_in_float64(x, weight, bias, before, gains, gated, gelu, add)
        assert (out.double() - expected).abs().max() <= TOLERANCES[dtype] * magnitude
        assert all(part.isnan().all() for part in (parent[:, :3], parent[:, outputs + 3 :], parent[rows:]))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_k_parts_sum_to_the_product(dtype: torch.dtype, parts: int, rng: random.Random) -> None:
    """Also where the last parts have no inputs; the bias is in the first part."""
    for inputs, outputs in [(40, 24), (512, 130), (1024, 64), (rng.randint(1, 1200), rng.randint(1, 200))]:
        rows = rng.choice(ROWS)
        x, _ = poisoned_view(rows, inputs, dtype)
        weight, bias = randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5), randn(outputs, dtype=dtype)
        parent = torch.full((parts, rows + 2, outputs + 7), torch.nan, device=DEVICE)
        out = parent[:, :rows, 3 : outputs + 3]
        assert product(x, weight, bias, out) is out
        expected, magnitude = product_in_float64(x, weight, bias, bias, None, gated=False, gelu=False, add=False)
        assert (out.double().sum(0) - expected).abs().max() <= 2e-5 * magnitude
        assert all(part.isnan().all() for part in (parent[..., :3], parent[..., outputs + 3 :], parent[:, rows:]))


def test_inputs_are_split_where_outputs_are_few() -> None:
    """As was fastest on an H200, where something adds up the parts."""
    found = {
        shape: fused_skinny_gemm._parts(32, *shape, 132) for shape in ((4096, 4096), (14336, 4096), (4096, 6144), (4096, 128256))
    }
    assert list(found.values()) == [2, 2, 2, 1]
    assert fused_skinny_gemm._parts(64, 4096, 4096, 132) == 4  # each tile has twice as many outputs
    assert [fused_skinny_gemm._parts(16, inputs, 1024, 132) for inputs in (300, 1024, 3072)] == [1, 2, 4]
    x, weight = randn(2, 4096, dtype=torch.float32), torch.empty(64, 4096, device=DEVICE)
    assert fused_skinny_gemm.parts_of(x, weight) > fused_skinny_gemm.parts_of(x[:1], weight) == 1


def test_rows_are_bit_identical_whatever_the_other_rows_are(rng: random.Random) -> None:
    x, weight, gains = randn(9, 200, dtype=torch.float32), randn(48, 200, dtype=torch.float32), randn(200, dtype=torch.float32)
    x[4] = torch.nan
    others = x.clone()
    others[[0, 1, 5, 7, 8]] = randn(5, 200, dtype=torch.float32)
    found = [product(rows, weight, None, torch.empty(9, 48, device=DEVICE), gains=gains, epsilon=1e-5) for rows in (x, others)]
    assert found[0][[2, 3, 6]].equal(found[1][[2, 3, 6]])
    assert found[0].isnan().any(1).tolist() == [row == 4 for row in range(9)]


@pytest.mark.filterwarnings("ignore:overflow")
def test_fused_swiglu_of_large_numbers_matches_the_reference() -> None:
    weight = torch.tensor([[1e4], [-1e4], [90.0], [1.0], [1.0], [1.0]], device=DEVICE)
    found = product(torch.tensor([[1.0]], device=DEVICE), weight, None, torch.empty(1, 3, device=DEVICE), gated=True)
    torch.testing.assert_close(found, reference.gated(weight.T.contiguous()))


def test_check_detects_a_kernel_that_skips_the_last_input(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused_skinny_gemm._constants
    monkeypatch.setattr(fused_skinny_gemm, "_constants", lambda rows, inputs, *rest: original(rows, inputs - 1, *rest))
    monkeypatch.setattr(sys.modules[__name__], "ROWS", [2, 33])
    with pytest.raises(AssertionError):
        test_fused_products_match_float64(torch.float32, False, False, rng)
    with pytest.raises(AssertionError):
        test_split_k_parts_sum_to_the_product(torch.float32, 2, rng)


class TwoEqualRanks:
    """Two ranks with equal results."""

    size = 2

    def __init__(self) -> None:
        self.all_reduces = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.all_reduces += 1
        return x.mul_(2)


SINGLE_RANK = Ranks(0, 1, torch.device(DEVICE))


@pytest.mark.parametrize(("ranks", "shortest"), [(SINGLE_RANK, 512), (SINGLE_RANK, 8), (TwoEqualRanks(), 8)])
def test_stream_of_two_layers_matches_unfused_products_with_one_or_two_ranks(
    ranks: Any, shortest: int, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """With fused products of few rows, with and without split-K, and with torch's products."""
    monkeypatch.setattr(fused_skinny_gemm, "SHORTEST", shortest)
    hidden, width = 24, 40
    gains = [randn(hidden, dtype=torch.float32) for _ in range(2)]
    tensors = [randn(2 * width, hidden, dtype=torch.float32), randn(hidden, width, dtype=torch.float32)]
    initial = randn(3, hidden, dtype=torch.float32)
    dispatch.force("triton")
    try:
        found = []
        for dtypes in (set(), {torch.float32}):
            monkeypatch.setattr(linear, "STREAMED", dtypes)
            gate_up, down = (Weight(tensor) for tensor in tensors)
            assert down.streams(initial) == bool(dtypes)
            stream = Stream(initial.clone(), ranks, 1e-5)
            for _ in range(2):
                stream.add(stream.through(gains[0], gate_up, gates=True), down)
                if ranks.size == 1 and dtypes:
                    assert (stream._more is None) == (shortest > width)  # the sum is still in split-K parts, or was added at once
            found.append(stream.normalized(gains[1]))
    finally:
        dispatch.force("")
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert ranks.size == 1 or ranks.all_reduces == 4


READERS: dict[str, Callable[[Stream], object]] = {
    "normalized without gains": lambda stream: stream.normalized(None),
    "layer norm": lambda stream: stream.normalized(torch.ones(2, 24, device=DEVICE)),
    "scale": lambda stream: stream.scale(3.0),
    "put rows": lambda stream: stream.put(torch.tensor([2, 0], device=DEVICE), torch.ones(2, 24, device=DEVICE)),
    "select rows": lambda stream: stream.select(torch.tensor([2, 0], device=DEVICE)),
    "fused product": lambda stream: stream.through(
        torch.ones(24, device=DEVICE), Weight(torch.ones(8, 24, device=DEVICE)), gates=True
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_split_k_parts_are_added_before_any_next_use_of_the_stream(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_skinny_gemm, "SHORTEST", 8)
    initial, x, tensor = (randn(*shape, dtype=torch.float32) for shape in ((3, 24), (3, 40), (24, 40)))
    found = []
    with dispatch.forced("triton"):
        for dtypes in (set(), {torch.float32}):
            monkeypatch.setattr(linear, "STREAMED", dtypes)
            stream = Stream(initial.clone(), SINGLE_RANK, 1e-5)
            stream.add(x, Weight(tensor))
            assert stream._more is not None
            assert stream._more.dim() == 2 + len(dtypes)
            result = READERS[reader](stream)
            found.append((stream.normalized(None), result))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def dispatched_weight(weight: Tensor) -> Weight:
    with dispatch.forced("triton"):
        return Weight(weight)


def test_wide_products_are_the_same_numbers_in_float32() -> None:
    weight = dispatched_weight(randn(32, 24, dtype=torch.bfloat16))
    for rows in (1, 2, linear.FEW, linear.FEW + 1):
        x = randn(rows, 24, dtype=torch.bfloat16)
        found = weight(x, wide=True)
        assert found.dtype == torch.float32
        assert found.equal(weight(x).float())


def test_products_of_few_rows_are_fused_and_of_many_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STREAMED", {torch.float32})
    weight = dispatched_weight(randn(32, 24, dtype=torch.float32))
    calls = []
    original = fused_skinny_gemm.product
    monkeypatch.setattr(
        fused_skinny_gemm,
        "product",
        lambda *arguments, **options: calls.append(len(arguments[0])) or original(*arguments, **options),
    )
    for rows in (0, 1, linear.FEWER, linear.FEWER + 1, linear.FEW, linear.FEW + 1):
        x = randn(rows, 24, dtype=torch.float32)
        assert weight.streams(x) == (0 < rows <= linear.FEW)
        torch.testing.assert_close(weight(x), weight.product(x))
    assert calls == [1, linear.FEWER, linear.FEWER + 1, linear.FEW]
    assert linear.FEW <= MOST
    weight._hopper = False
    assert not weight.streams(randn(linear.FEWER + 1, 24, dtype=torch.float32))
    half = Weight(randn(32, 24, dtype=torch.float16))
    assert not half.streams(randn(1, 24, dtype=torch.float16))
