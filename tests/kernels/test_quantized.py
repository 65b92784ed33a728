"""Weights of few bits: cut and joined they stay what they were, and products with them are those with what they stand for."""

import random
from dataclasses import replace
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import dispatch, fused_quantized, packed_experts, small_floats
from penstock.kernels.codes import BITS, QuantizedWeight, alike, dequantized, joined, quantize
from penstock.kernels.fused_quantized import MOST
from penstock.kernels.linear import Invariance, Weight
from penstock.kernels.quantized import Quantized, lay_out

from .low_precision_floats import FP4_VALUES, interpreted_fp4_pair, random_fp8
from .ptx_interpreter import unpack_all_byte_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the largest result. Codes are exact in both types, so what is rounded is the result, and on a CPU scales to bfloat16.
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
ROUTES = [
    (route, kind, dtype)
    for route, dtype in (("triton", torch.float16), ("triton", torch.bfloat16), ("torch", torch.bfloat16))
    for kind in BITS
]
FLOATS = ("fp8", "fp4", "nvfp4")


@pytest.fixture(autouse=True)
def where_it_is(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has its products with codes on CPUs alone."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("route") == "torch":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


def some(kind: str, outputs: int, inputs: int, group: int, zeros: bool = False) -> QuantizedWeight:
    """Random codes of every value there is."""
    codes = torch.randint(0, 1 << BITS[kind], (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    if kind == "fp8":
        codes[codes & 127 == 127] = 0  # not a number
    scales = torch.rand(outputs, inputs // group, device=DEVICE).add_(0.5).mul_(0.01)
    if kind == "fp4":
        scales = torch.exp2(torch.randint_like(scales, -12, 4))
    elif kind == "nvfp4":
        scales = random_fp8(scales.shape, DEVICE)
        return QuantizedWeight(kind, codes, scales, factors=torch.rand(outputs, device=DEVICE).add_(0.5).mul_(1e-3))
    most = min(256, 1 << BITS[kind] + 1)  # one more than the largest code is a zero of GPTQ's
    return QuantizedWeight(
        kind, codes, scales, torch.randint(0, most, scales.shape, dtype=torch.uint8, device=DEVICE) if zeros else None
    )


def meant(codes: QuantizedWeight) -> Tensor:
    """In float64, number by number."""
    values = []
    for row in range(len(codes.codes)):
        for column in range(codes.codes.shape[1]):
            group = column // codes.block
            code = codes.codes[row, column]
            if codes.kind in ("fp4", "nvfp4"):
                number = torch.tensor(FP4_VALUES[int(code)]).double()
            elif codes.kind == "fp8":
                number = code.view(torch.float8_e4m3fn).double()
            else:
                zero = codes.zeros[row, group] if codes.zeros is not None else {"int4": 8, "int8": 128}[codes.kind]
                number = code.double() - float(zero)
            factor = float(codes.factors[row]) if codes.factors is not None else 1.0
            values.append(number * codes.scales[row, group].double() * factor)
    return torch.stack(values).view(codes.codes.shape)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", BITS)
def test_what_codes_mean(kind: str, zeros: bool) -> None:
    codes = some(kind, 5, 24, 8, zeros and kind not in FLOATS)
    torch.testing.assert_close(dequantized(codes, torch.float32).double(), meant(codes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", BITS)
def test_rounding_goes_to_the_nearest(kind: str, rng: random.Random) -> None:
    weight = torch.randn(7, 192, device=DEVICE)
    weight[1] = 0
    weight[2] = weight[2].abs() + 3  # all on one side of 0
    weight[3, :64] = 0
    codes = quantize(weight, kind)
    found = dequantized(codes, torch.float32)
    off = (found - weight).abs().view(7, -1, codes.block)
    if kind in ("fp4", "nvfp4"):  # between 4 and 6 there is nothing
        steps = codes.scales if codes.factors is None else codes.scales * codes.factors[:, None]
        assert (off <= steps.unsqueeze(2) * 1.0001).all()
        assert off.mean() < steps.mean() * 0.3
    elif kind == "fp8":  # three bits behind the first, or those of the least numbers
        assert (off <= (weight.abs() * 2**-4).view_as(off) + codes.scales.unsqueeze(2) * 2**-10).all()
    else:
        assert (off <= codes.scales.unsqueeze(2) * (0.5001 if kind == "int8" else 1.0001)).all()  # 4 bits round zeros, too
        assert off.mean() < codes.scales.mean() * 0.3
    assert not found[1].any()
    assert not found[3, :64].any()


def test_rounding_again_changes_nothing() -> None:
    for kind in BITS:
        once = dequantized(quantize(torch.randn(9, 128, device=DEVICE), kind), torch.float32)
        torch.testing.assert_close(dequantized(quantize(once, kind), torch.float32), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeros", [False, True])
def test_parts_are_parts_of_what_is_meant(zeros: bool, rng: random.Random) -> None:
    codes = some("int4", 12, 48, 16, zeros)
    whole = dequantized(codes, torch.float32)
    for dimension, start, stop in ((0, 3, 9), (1, 0, 16), (1, 24, 48), (1, 4, 12), (1, 5, 8), (0, 0, 12)):
        found = codes.part(dimension, start, stop)
        assert dequantized(found, torch.float32).equal(whole.narrow(dimension, start, stop - start))
        assert all(tensor is None or tensor.is_contiguous() for tensor in (found.codes, found.scales, found.zeros))
    order = torch.tensor([3, 1, 1, 11], device=DEVICE)
    assert dequantized(codes[order], torch.float32).equal(whole[order])
    torch.testing.assert_close(dequantized(codes.scaled(0.3), torch.float32), whole * 0.3)


@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_parts_of_floats_of_4_bits(kind: str) -> None:
    """Whose outputs have factors of their own: one part of these and of inputs, with zeros beyond the end."""
    codes = some(kind, 12, 48, 16)
    if kind == "fp4":
        codes = codes.scaled(0.3)
    whole = dequantized(codes, torch.float32)
    for dimension, start, stop in ((0, 3, 9), (1, 16, 48), (1, 24, 40), (1, 5, 8), (0, 0, 12)):
        assert dequantized(codes.part(dimension, start, stop), torch.float32).equal(whole.narrow(dimension, start, stop - start))
    beyond = dequantized(codes.part(0, 8, 16).part(1, 32, 64), torch.float32)
    assert beyond[:4, :16].equal(whole[8:, 32:])
    assert beyond.count_nonzero() == whole[8:, 32:].count_nonzero()
    order = torch.tensor([3, 1, 1, 11], device=DEVICE)
    assert dequantized(codes[order], torch.float32).equal(whole[order])
    more = some(kind, 5, 48, 8)
    assert dequantized(joined([codes, more]), torch.float32).equal(torch.cat((whole, dequantized(more, torch.float32))))
    scaled = codes.scaled(0.3)
    torch.testing.assert_close(dequantized(scaled, torch.float32), whole * 0.3)
    assert scaled.scales.equal(codes.scales)  # which keep few bits


def test_weights_side_by_side() -> None:
    parts = [some("int8", 3, 48, 16), some("int8", 5, 48, 24, True), some("int8", 2, 48, 48)]
    assert joined(parts).block == gcd(16, 24, 48)
    assert dequantized(joined(parts), torch.float32).equal(torch.cat([dequantized(part, torch.float32) for part in parts]))
    assert joined(parts[::2]).zeros is None


def laid_out(
    route: str, codes: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, exact: Invariance = Invariance.USUAL
) -> Weight:
    dispatch.force("triton" if route == "triton" else "reference")
    try:
        return lay_out(codes, bias, exact, dtype)
    finally:
        dispatch.force("")


def poisoned(*shape: Any, **how: Any) -> Tensor:
    return torch.full(shape, torch.nan, **how)


@pytest.mark.parametrize(("route", "kind", "dtype"), ROUTES)
def test_invariant_products_depend_on_no_other_row(route: str, kind: str, dtype: torch.dtype) -> None:
    codes, x = some(kind, 48, 128, 64, False), torch.randn(MOST + 20, 128, device=DEVICE).to(dtype)
    product = laid_out(route, codes, None, dtype, Invariance.INVARIANT)
    whole = product(x)
    for first, count in ((0, 1), (7, 2), (100, 16), (9, 40), (20, MOST)):
        assert product(x[first : first + count].clone()).equal(whole[first : first + count])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("route", "kind", "dtype"), ROUTES)
def test_products(
    route: str, kind: str, dtype: torch.dtype, zeros: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_quantized.torch, "empty", poisoned)
    for _ in range(3):
        group = rng.choice([32, 64, 128, 256, 96])
        inputs, outputs = group * rng.choice([1, 2, 3]), rng.choice([16, 48, 80, 33 if route == "triton" else 64])
        codes = some(kind, outputs, inputs, group, zeros and kind not in FLOATS)
        bias = torch.randn(outputs, device=DEVICE).to(dtype) if rng.random() < 0.5 else None
        found = laid_out(route, codes, bias, dtype)
        assert isinstance(found, Quantized) == (route == "triton" or kind == "int4")
        assert found.shape == (outputs, inputs)
        for rows in rng.sample([1, 7, 16, 17, 40, 70, MOST, MOST + 1], 2):
            wide = torch.full((rows, inputs + 8), torch.nan, dtype=dtype, device=DEVICE)
            x = wide[:, :inputs].copy_(torch.randn(rows, inputs))
            expected = functional.linear(x.double(), dequantized(codes, torch.float64), bias.double() if bias is not None else None)
            assert (found(x).double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(("route", "kind", "dtype"), [row for row in ROUTES if row[1] in ("int4", "int8")])
def test_products_of_inputs_in_an_order(
    route: str, kind: str, dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and those of a rank, among which there are columns of no input. What these hold means nothing."""
    monkeypatch.setattr(fused_quantized.torch, "empty", poisoned)
    for zeros in (False, True):
        group = rng.choice([32, 64, 128])
        inputs, outputs = group * rng.choice([2, 4]), rng.choice([16, 64])
        even = some(kind, outputs, inputs, group, zeros)
        order = torch.randperm(inputs, dtype=torch.int32, device=DEVICE)
        codes, meaning = replace(even, order=order), torch.empty(outputs, inputs, dtype=torch.float64, device=DEVICE)
        meaning[:, order.long()] = dequantized(even, torch.float64)
        third = inputs // 3
        for start, stop in ((0, inputs), (0, third), (third, inputs)):
            part, expected = (codes, meaning) if stop - start == inputs else (codes.part(1, start, stop), meaning[:, start:stop])
            assert dequantized(part, torch.float64).equal(expected)
            assert dequantized(joined([part, part]), torch.float64).equal(torch.cat((expected, expected)))
            found = laid_out(route, part, None, dtype)
            assert isinstance(found, Quantized) == (route == "triton" or kind == "int4")
            assert found.shape == (outputs, stop - start)
            for rows in (1, 20):
                x = torch.randn(rows, stop - start, device=DEVICE).to(dtype)
                product = x.double() @ expected.T
                assert (found(x).double() - product).abs().max() <= TOLERANCES[dtype] * product.abs().max()
    assert not alike([codes, even])
    assert not alike([codes, replace(codes, order=order.flip(0))])
    assert packed_experts.pack([codes, codes], dtype) is None
    assert packed_experts.pack([even, even], dtype) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_codes_of_four_bits_become_numbers_in_pairs(zero: int, dtype: torch.dtype) -> None:
    base, code = (128, fused_quantized.IN_BFLOAT16) if dtype == torch.bfloat16 else (1024, fused_quantized.IN_FLOAT16)
    off = torch.tensor([-base - zero] * 2).to(dtype).view(torch.int32).item()
    found, held = unpack_all_byte_pairs(code.value, [int(off) & 0xFFFFFFFF] * 2, dtype)
    assert found[0].int().equal((held & 15) - zero)
    assert found[1].int().equal((held >> 4) - zero)


@triton.jit
def one_by_one(codes: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """As `fused_quantized.minus_zero_pair`, which the interpreter can't execute."""
    return fused_quantized.less(codes & 15, zero).to(dtype), fused_quantized.less(codes >> 4, zero).to(dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does it by itself")
@pytest.mark.parametrize("zeros", [False, True])
def test_pairs_are_multiplied(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_quantized, "on_nvidia", lambda device: True)
    monkeypatch.setattr(fused_quantized, "minus_zero_pair", one_by_one)
    codes, x = some("int4", 48, 256, 64, zeros), torch.randn(20, 256).bfloat16()
    expected = x.double() @ dequantized(codes, torch.float64).T
    found = laid_out("triton", codes, None, torch.bfloat16)(x)
    assert (found.double() - expected).abs().max() <= TOLERANCES[torch.bfloat16] * expected.abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU looks up by itself")
@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_what_is_looked_up_is_multiplied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, of which the interpreter knows products."""
    monkeypatch.setattr(fused_quantized, "on_nvidia", lambda device: True)
    for module in (fused_quantized, small_floats):
        monkeypatch.setattr(module, "fp4_pair", interpreted_fp4_pair)
    codes, x = some(kind, 48, 192, 32), torch.randn(20, 192).half()
    expected = x.double() @ dequantized(codes, torch.float64).T
    found = laid_out("triton", codes, None, torch.float16)(x)
    assert (found.double() - expected).abs().max() <= TOLERANCES[torch.float16] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_few_bits_beside_factors(dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output is right by its own measure: what is large doesn't hide what is small. Nothing but results is rounded, the least
    scales included, and those that are 0."""
    monkeypatch.setattr(fused_quantized.torch, "empty", poisoned)
    for inputs in (32, 64, 96, 128, 160, 384):
        outputs, far = rng.choice([1, 7, 33, 100]), 20 if dtype == torch.bfloat16 else 1
        codes = some("nvfp4", outputs, inputs, 16)
        factors = torch.tensor([10.0 ** rng.uniform(-far, far) / 1e3 for _ in range(outputs)], device=DEVICE)
        codes.scales[:, 0], codes.scales[0] = 2.0**-9, 3 * 2.0**-9  # the least there are
        codes.scales[outputs // 2] = 0
        scaled = replace(codes, factors=factors)
        found = laid_out("triton", scaled, None, dtype)
        assert isinstance(found, Quantized)
        exact = dequantized(replace(codes, factors=None), torch.float64) * factors.double()[:, None]
        for rows in (1, 19, MOST + 1):  # of so many the weight is unpacked first, and rounded
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            weight = exact if rows <= MOST else dequantized(scaled, dtype).double()
            bound = TOLERANCES[dtype] * (x.double().abs() @ weight.abs().T).amax(0) + torch.finfo(dtype).smallest_normal * 2**-10
            assert ((found(x).double() - x.double() @ weight.T).abs() <= bound).all()


@pytest.mark.parametrize(("route", "dtype"), [("triton", torch.float16), ("torch", torch.bfloat16)])
def test_rows_know_no_neighbours(route: str, dtype: torch.dtype) -> None:
    """Not by a bit, whatever else is in the tile."""
    found = laid_out(route, some("int4", 48, 256, 64, True), None, dtype)
    x = torch.randn(40, 256, device=DEVICE).to(dtype)
    x[4] = torch.nan
    others = x.clone()
    others[[0, 1, 5, 7, 8]] = torch.randn(5, 256, device=DEVICE).to(dtype)
    first, second = found(x), found(others)
    assert first[[2, 3, 6]].equal(second[[2, 3, 6]])
    assert first.isnan().any(1).tolist() == [row == 4 for row in range(40)]
    if route == "torch":  # nor does their number count
        assert all(found(x[5 : 5 + rows]).equal(first[5 : 5 + rows]) for rows in (1, 2, 3, 9, 33))


def test_no_rows() -> None:
    found = laid_out("triton", some("int8", 16, 64, 64), None, torch.float16)
    assert found(torch.empty(0, 64, dtype=torch.float16, device=DEVICE)).shape == (0, 16)


@pytest.mark.parametrize(
    ("route", "kind", "group", "dtype"),
    [
        ("triton", "int4", 16, torch.float16),  # groups too short
        ("triton", "int8", 64, torch.float32),  # no type for the matrix units
        ("torch", "int4", 16, torch.bfloat16),
        ("torch", "int4", 64, torch.float32),
        ("torch", "fp8", 64, torch.bfloat16),
        ("torch", "nvfp4", 16, torch.bfloat16),
        ("triton", "nvfp4", 8, torch.bfloat16),  # ranks cut within blocks
        ("triton", "nvfp4", 16, torch.float32),
        ("triton", "fp4", 16, torch.bfloat16),
    ],
)
def test_what_has_no_product_is_unpacked(route: str, kind: str, group: int, dtype: torch.dtype) -> None:
    codes = some(kind, 32, 128, group)
    found = laid_out(route, codes, None, dtype)
    assert not isinstance(found, Quantized)
    assert found.bytes == 32 * 128 * dtype.itemsize
    x = torch.randn(3, 128, device=DEVICE).to(dtype)
    torch.testing.assert_close(found(x), functional.linear(x, dequantized(codes, dtype)), rtol=1e-2, atol=1e-2)


def test_bytes() -> None:
    """Codes, scales and zeros; a plain weight is one of few bits for none."""
    codes = some("int4", 32, 128, 64, True)
    assert laid_out("triton", codes, None, torch.float16).bytes == 32 * (64 + 2 * 4 + 2)
    for inputs in (96, 128):
        assert laid_out("triton", some("nvfp4", 32, inputs, 16), None, torch.float16).bytes == 32 * (inputs // 2 + inputs // 16 + 4)
    assert laid_out("triton", some("fp4", 32, 128, 32), None, torch.float16).bytes == 32 * (64 + 4)
    assert type(laid_out("torch", dequantized(codes, torch.float32), None, torch.float32)) is Weight  # type: ignore[arg-type]


@pytest.mark.parametrize("route", ["torch"])
def test_bytes_on_a_cpu(route: str) -> None:
    assert laid_out(route, some("int4", 32, 128, 64, True), None, torch.bfloat16).bytes == 32 * (64 + 2 * 2 * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_without_kernels_has_plain_weights() -> None:
    codes, x = some("int4", 32, 128, 64), torch.randn(3, 128, device=DEVICE).bfloat16()
    found = laid_out("torch", codes, None, torch.bfloat16)
    assert not isinstance(found, Quantized)
    torch.testing.assert_close(found(x), functional.linear(x, dequantized(codes, torch.bfloat16)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "fault"), [("int4", "zeros"), ("int4", "halves"), ("nvfp4", "halves"), ("nvfp4", "blocks"), ("nvfp4", "factors")]
)
def test_a_fault_would_be_seen(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Another middle, halves the other way round, the scale of the block beside, no factors."""
    meaning, paired, words = fused_quantized.format_constants, fused_quantized.paired, fused_quantized.words
    if fault == "zeros":
        monkeypatch.setattr(fused_quantized, "format_constants", lambda *given: meaning(*given) | {"MIDDLE": 7})
    elif fault == "factors":
        monkeypatch.setattr(fused_quantized, "format_constants", lambda *given: meaning(*given) | {"FACTORS": False})
    elif fault == "blocks":
        monkeypatch.setattr(fused_quantized, "words", lambda scales, run: words(scales.roll(1, 1), run))
    else:
        monkeypatch.setattr(fused_quantized, "paired", lambda codes, run: paired(codes.flip(1), run))
    with pytest.raises(AssertionError):
        test_products("triton", kind, torch.float16, False, rng, monkeypatch)
