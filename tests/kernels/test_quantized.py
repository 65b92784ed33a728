"""Quantized weights (4 and 8 bits): quantization, slicing and joining, and matrix products by torch and by Triton's kernels,
compared with the dequantized weights in float64."""

import random
from dataclasses import replace
from math import gcd
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import dispatch, fused_quantized, fused_quantized_gemv, packed_experts, small_floats, small_integers
from penstock.kernels.codes import BITS, QuantizedWeight, alike, dequantized, joined, quantize
from penstock.kernels.fused_quantized import MOST
from penstock.kernels.linear import Invariance, Weight
from penstock.kernels.quantized import Quantized, lay_out

from .low_precision_floats import FP4_VALUES, interpreted_fp4_pair, random_fp8
from .ptx_interpreter import execute, unpack_all_byte_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest result. Codes are exact in both types, so only results are rounded, and on a CPU weights to bfloat16.
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
ROUTES = [
    (route, kind, dtype)
    for route, dtype in (("triton", torch.float16), ("triton", torch.bfloat16), ("torch", torch.bfloat16))
    for kind in BITS
]
FLOATS = ("fp8", "fp4", "nvfp4")


@pytest.fixture(autouse=True)
def torch_products_on_cpu_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has products with quantized weights on CPUs only."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("route") == "torch":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


def random_weight(kind: str, outputs: int, inputs: int, group: int, zeros: bool = False) -> QuantizedWeight:
    """Random codes, of all values that the format has."""
    codes = torch.randint(0, 1 << BITS[kind], (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    if kind == "fp8":
        codes[codes & 127 == 127] = 0  # not a number
    scales = torch.rand(outputs, inputs // group, device=DEVICE).add_(0.5).mul_(0.01)
    if kind == "fp4":
        scales = torch.exp2(torch.randint_like(scales, -12, 4))
    elif kind == "nvfp4":
        scales = random_fp8(scales.shape, DEVICE)
        return QuantizedWeight(kind, codes, scales, factors=torch.rand(outputs, device=DEVICE).add_(0.5).mul_(1e-3))
    zero_limit = min(256, 1 << BITS[kind] + 1)  # GPTQ's zero points may be one more than the largest code
    return QuantizedWeight(
        kind, codes, scales, torch.randint(0, zero_limit, scales.shape, dtype=torch.uint8, device=DEVICE) if zeros else None
    )


def dequantized_one_by_one(codes: QuantizedWeight) -> Tensor:
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
def test_dequantized_weights_match_a_plain_loop(kind: str, zeros: bool) -> None:
    codes = random_weight(kind, 5, 24, 8, zeros and kind not in FLOATS)
    torch.testing.assert_close(dequantized(codes, torch.float32).double(), dequantized_one_by_one(codes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", BITS)
def test_quantize_rounds_to_the_nearest_code(kind: str, rng: random.Random) -> None:
    weight = torch.randn(7, 192, device=DEVICE)
    weight[1] = 0
    weight[2] = weight[2].abs() + 3  # all on one side of 0
    weight[3, :64] = 0
    codes = quantize(weight, kind)
    found = dequantized(codes, torch.float32)
    errors = (found - weight).abs().view(7, -1, codes.block)
    if kind in ("fp4", "nvfp4"):  # FP4 has no number between 4 and 6
        steps = codes.scales if codes.factors is None else codes.scales * codes.factors[:, None]
        assert (errors <= steps.unsqueeze(2) * 1.0001).all()
        assert errors.mean() < steps.mean() * 0.3
    elif kind == "fp8":  # 3 bits of mantissa, or the step of subnormal numbers
        assert (errors <= (weight.abs() * 2**-4).view_as(errors) + codes.scales.unsqueeze(2) * 2**-10).all()
    else:
        assert (
            errors <= codes.scales.unsqueeze(2) * (0.5001 if kind == "int8" else 1.0001)
        ).all()  # with 4 bits, zero points are rounded, too
        assert errors.mean() < codes.scales.mean() * 0.3
    assert not found[1].any()
    assert not found[3, :64].any()


def test_quantizing_a_dequantized_weight_changes_nothing() -> None:
    for kind in BITS:
        once = dequantized(quantize(torch.randn(9, 128, device=DEVICE), kind), torch.float32)
        torch.testing.assert_close(dequantized(quantize(once, kind), torch.float32), once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeros", [False, True])
def test_slices_of_quantized_weights_dequantize_to_slices(zeros: bool, rng: random.Random) -> None:
    codes = random_weight("int4", 12, 48, 16, zeros)
    whole = dequantized(codes, torch.float32)
    for dimension, start, stop in ((0, 3, 9), (1, 0, 16), (1, 24, 48), (1, 4, 12), (1, 5, 8), (0, 0, 12)):
        found = codes.part(dimension, start, stop)
        assert dequantized(found, torch.float32).equal(whole.narrow(dimension, start, stop - start))
        assert all(tensor is None or tensor.is_contiguous() for tensor in (found.codes, found.scales, found.zeros))
    order = torch.tensor([3, 1, 1, 11], device=DEVICE)
    assert dequantized(codes[order], torch.float32).equal(whole[order])
    torch.testing.assert_close(dequantized(codes.scaled(0.3), torch.float32), whole * 0.3)


@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_slices_and_joins_of_fp4_weights_with_output_factors(kind: str) -> None:
    """Slices of outputs and of inputs, with zeros beyond the end, and joined weights."""
    codes = random_weight(kind, 12, 48, 16)
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
    more = random_weight(kind, 5, 48, 8)
    assert dequantized(joined([codes, more]), torch.float32).equal(torch.cat((whole, dequantized(more, torch.float32))))
    scaled = codes.scaled(0.3)
    torch.testing.assert_close(dequantized(scaled, torch.float32), whole * 0.3)
    assert scaled.scales.equal(codes.scales)  # the block scales keep their few bits; the factors change


def test_joined_weights_dequantize_to_concatenated_ones() -> None:
    parts = [random_weight("int8", 3, 48, 16), random_weight("int8", 5, 48, 24, True), random_weight("int8", 2, 48, 48)]
    assert joined(parts).block == gcd(16, 24, 48)
    assert dequantized(joined(parts), torch.float32).equal(torch.cat([dequantized(part, torch.float32) for part in parts]))
    assert joined(parts[::2]).zeros is None


def laid_out_by(
    route: str, codes: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, exact: Invariance = Invariance.USUAL
) -> Weight:
    dispatch.force("triton" if route == "triton" else "reference")
    try:
        return lay_out(codes, bias, exact, dtype)
    finally:
        dispatch.force("")


def magnitude(x: Tensor, weight: Tensor, expected: Tensor) -> Tensor:
    """The largest result, or what it would be if no products cancelled each other (of float64): rounded weights err by as much."""
    return torch.maximum(expected.abs().max(), (x.double().square() @ weight.square().T).max().sqrt())


def nan_tensor(*shape: Any, **how: Any) -> Tensor:
    return torch.full(shape, torch.nan, **how)


@pytest.mark.parametrize(("route", "kind", "dtype"), ROUTES)
def test_invariant_quantized_products_are_bit_identical_for_any_subset_of_rows(route: str, kind: str, dtype: torch.dtype) -> None:
    codes, x = random_weight(kind, 48, 128, 64, False), torch.randn(MOST + 20, 128, device=DEVICE).to(dtype)
    product = laid_out_by(route, codes, None, dtype, Invariance.INVARIANT)
    whole = product(x)
    for first, count in ((0, 1), (7, 2), (60, 16), (9, 40), (20, MOST)):
        assert product(x[first : first + count].clone()).equal(whole[first : first + count])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("route", "kind", "dtype"), ROUTES)
def test_quantized_products_match_float64(
    route: str, kind: str, dtype: torch.dtype, zeros: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_quantized.torch, "empty", nan_tensor)
    for _ in range(3):
        group = rng.choice([32, 64, 128, 256, 96])
        inputs, outputs = group * rng.choice([1, 2, 3]), rng.choice([16, 48, 80, 33 if route == "triton" else 64])
        codes = random_weight(kind, outputs, inputs, group, zeros and kind not in FLOATS)
        bias = torch.randn(outputs, device=DEVICE).to(dtype) if rng.random() < 0.5 else None
        weight = laid_out_by(route, codes, bias, dtype)
        assert isinstance(weight, Quantized) == (route == "triton" or kind == "int4")
        assert weight.shape == (outputs, inputs)
        for rows in rng.sample([1, 7, 16, 17, 40, 70, MOST, MOST + 1], 2):
            parent = torch.full((rows, inputs + 8), torch.nan, dtype=dtype, device=DEVICE)
            x = parent[:, :inputs].copy_(torch.randn(rows, inputs))
            exact = dequantized(codes, torch.float64)
            expected = functional.linear(x.double(), exact, bias.double() if bias is not None else None)
            assert (weight(x).double() - expected).abs().max() <= TOLERANCES[dtype] * magnitude(x, exact, expected)


@pytest.mark.parametrize(("route", "kind", "dtype"), [row for row in ROUTES if row[1] in ("int4", "int8")])
def test_products_of_act_ordered_weights_match_float64(
    route: str, kind: str, dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole weights and the slices of a rank, which are padded with columns of no input, whose codes mean nothing."""
    monkeypatch.setattr(fused_quantized.torch, "empty", nan_tensor)
    for zeros in (False, True):
        group = rng.choice([32, 64, 128])
        inputs, outputs = group * rng.choice([2, 4]), rng.choice([16, 64])
        unordered = random_weight(kind, outputs, inputs, group, zeros)
        order = torch.randperm(inputs, dtype=torch.int32, device=DEVICE)
        codes, dequantized_weight = (
            replace(unordered, order=order),
            torch.empty(outputs, inputs, dtype=torch.float64, device=DEVICE),
        )
        dequantized_weight[:, order.long()] = dequantized(unordered, torch.float64)
        third = inputs // 3
        for start, stop in ((0, inputs), (0, third), (third, inputs)):
            part, expected = (
                (codes, dequantized_weight)
                if stop - start == inputs
                else (codes.part(1, start, stop), dequantized_weight[:, start:stop])
            )
            assert dequantized(part, torch.float64).equal(expected)
            assert dequantized(joined([part, part]), torch.float64).equal(torch.cat((expected, expected)))
            found = laid_out_by(route, part, None, dtype)
            assert isinstance(found, Quantized) == (route == "triton" or kind == "int4")
            assert found.shape == (outputs, stop - start)
            for rows in (1, 20):
                x = torch.randn(rows, stop - start, device=DEVICE).to(dtype)
                product = x.double() @ expected.T
                assert (found(x).double() - product).abs().max() <= TOLERANCES[dtype] * magnitude(x, expected, product)
    assert not alike([codes, unordered])
    assert not alike([codes, replace(codes, order=order.flip(0))])
    assert packed_experts.pack([codes, codes], dtype) is None
    assert packed_experts.pack([unordered, unordered], dtype) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_ptx_converts_pairs_of_4_bit_integer_codes(zero: int, dtype: torch.dtype) -> None:
    base, code = (128, small_integers.IN_BFLOAT16) if dtype == torch.bfloat16 else (1024, small_integers.IN_FLOAT16)
    offset = torch.tensor([-base - zero] * 2).to(dtype).view(torch.int32).item()
    found, code_bytes = unpack_all_byte_pairs(code.value, [int(offset) & 0xFFFFFFFF] * 2, dtype)
    assert found[0].int().equal((code_bytes & 15) - zero)
    assert found[1].int().equal((code_bytes >> 4) - zero)


@triton.jit
def interpreted_minus_zero_pair(codes: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Replaces `small_integers.minus_zero_pair`, whose inline PTX the interpreter cannot execute."""
    return small_integers.less(codes & 15, zero).to(dtype), small_integers.less(codes >> 4, zero).to(dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all products use the pairs")
@pytest.mark.parametrize("zeros", [False, True])
def test_products_with_the_nvidia_path_of_4_bit_integers_match_float64(zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_quantized, "on_nvidia", lambda device: True)
    monkeypatch.setattr(small_integers, "minus_zero_pair", interpreted_minus_zero_pair)
    codes, x = random_weight("int4", 48, 256, 64, zeros), torch.randn(20, 256).bfloat16()
    expected = x.double() @ dequantized(codes, torch.float64).T
    found = laid_out_by("triton", codes, None, torch.bfloat16)(x)
    assert (found.double() - expected).abs().max() <= TOLERANCES[torch.bfloat16] * expected.abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all products use the lookup")
@pytest.mark.parametrize("kind", ["fp4", "nvfp4"])
def test_products_with_the_nvidia_path_of_fp4_match_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16: the interpreter supports no products of bfloat16."""
    monkeypatch.setattr(fused_quantized, "on_nvidia", lambda device: True)
    for module in (small_integers, small_floats):
        monkeypatch.setattr(module, "fp4_pair", interpreted_fp4_pair)
    codes, x = random_weight(kind, 48, 192, 32), torch.randn(20, 192).half()
    expected = x.double() @ dequantized(codes, torch.float64).T
    found = laid_out_by("triton", codes, None, torch.float16)(x)
    assert (found.double() - expected).abs().max() <= TOLERANCES[torch.float16] * expected.abs().max()


def test_ptx_moves_pairs_of_4_bit_floats_into_float16() -> None:
    found, code_bytes = unpack_all_byte_pairs(small_floats.FP4_IN_FLOAT16.value, [], torch.float16)
    for values, codes in zip(found, (code_bytes & 15, code_bytes >> 4), strict=True):
        assert (values.float() * 2.0**14).equal(torch.tensor(FP4_VALUES)[codes])


def test_ptx_converts_8_bit_floats_to_float16() -> None:
    words = numpy.arange(1 << 16, dtype=numpy.uint32)
    words |= words[::-1] << numpy.uint32(16)
    found = torch.from_numpy(numpy.stack(execute(small_floats.FP8_IN_FLOAT16.value, [words], 2), 1).view(numpy.int16))
    codes = torch.from_numpy(words.view(numpy.uint8).copy())
    expected, values = codes.view(torch.float8_e4m3fn).float(), found.view(torch.float16).flatten().float() * 256
    assert values[codes & 127 != 127].equal(expected[codes & 127 != 127])


@triton.jit
def interpreted_fp4_pair_to_float16(codes: tl.tensor) -> tl.tensor:
    """Replaces `small_floats.fp4_pair_to_float16`, whose inline PTX the interpreter cannot execute."""
    return small_floats.fp4_to_float16(codes & 15), small_floats.fp4_to_float16(codes >> 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all products of few rows use it")
@pytest.mark.parametrize("kind", BITS)
def test_products_of_few_rows_with_the_nvidia_path_match_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_quantized_gemv, "on_nvidia", lambda device: True)
    monkeypatch.setattr(small_integers, "minus_zero_pair", interpreted_minus_zero_pair)
    monkeypatch.setattr(fused_quantized_gemv, "fp4_pair_to_float16", interpreted_fp4_pair_to_float16)
    monkeypatch.setattr(fused_quantized_gemv, "fp8_pair", small_floats.fp8_to_float16)
    check_few_rows(kind, 14, 192, 64, kind.startswith("int"), torch.bfloat16)


def check_few_rows(kind: str, outputs: int, inputs: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """Compares products of few rows with float64; rows whose numbers are not beside the last row's, and a bias."""
    codes, bias = random_weight(kind, outputs, inputs, group, zeros), torch.randn(outputs, device=DEVICE).to(dtype)
    product = laid_out_by("triton", codes, bias, dtype)
    for rows in range(1, fused_quantized_gemv.MOST + 1):
        x = torch.randn(rows, inputs + 16, device=DEVICE).to(dtype)[:, :inputs]
        expected = x.double() @ dequantized(codes, torch.float64).T + bias.double()
        assert (product(x).double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", BITS)
def test_products_of_few_rows_match_float64(
    kind: str, dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs shorter than a tile, several tiles long, whole and not, with one scale each and with many."""
    monkeypatch.setattr(fused_quantized.torch, "empty", nan_tensor)
    monkeypatch.setattr(fused_quantized_gemv, "SHAPE", fused_quantized_gemv.Shape(4, 64, 4, 1))
    for inputs in (32, 160, 256, 512):
        group = rng.choice([size for size in (32, 64, 96, 128, 256, 512) if inputs % size == 0])
        check_few_rows(kind, rng.choice([1, 8, 14, 33]), inputs, group, rng.random() < 0.5 and kind not in FLOATS, dtype)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("kind", BITS)
def test_products_whose_inputs_are_divided_match_float64(kind: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last part is shorter, or has nothing."""
    monkeypatch.setattr(fused_quantized.torch, "empty", nan_tensor)
    monkeypatch.setattr(fused_quantized_gemv, "MOST", 0)
    monkeypatch.setattr(fused_quantized, "PARTS", (parts,))
    monkeypatch.setattr(fused_quantized, "SHORTEST", 1)
    for inputs in (parts * 128, 320):
        codes, bias = random_weight(kind, 33, inputs, 64), torch.randn(33, device=DEVICE).half()
        product = laid_out_by("triton", codes, bias, torch.float16)
        for rows in (1, 7, 20):
            x = torch.randn(rows, inputs, device=DEVICE).half()
            expected = x.double() @ dequantized(codes, torch.float64).T + bias.double()
            assert (product(x).double() - expected).abs().max() <= TOLERANCES[torch.float16] * expected.abs().max()


@pytest.mark.parametrize(("kind", "fault"), [("nvfp4", "scales"), ("int8", "scales"), ("int4", "places"), ("fp8", "factor")])
def test_check_of_few_rows_detects_planted_faults(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of the outputs beside, inputs of the other half of a run, 8-bit floats twice as large."""
    product = fused_quantized_gemv.product

    def faulty(x: Tensor, codes: Tensor, scales: Tensor, *others: Any) -> Tensor:
        if fault == "places":
            return product(x.roll(32, 1), codes, scales, *others)
        return product(x, codes, scales.roll(1, 1) if fault == "scales" else scales * 2, *others)

    monkeypatch.setattr(fused_quantized_gemv, "product", faulty)
    with pytest.raises(AssertionError):
        check_few_rows(kind, 14, 256, 64, False, torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_scales_and_output_factors_are_accurate_for_each_output(
    dtype: torch.dtype, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are measured for each output by itself, so that large outputs don't hide those of small ones. Only results are
    rounded, also with the smallest scales and with scales of 0."""
    monkeypatch.setattr(fused_quantized.torch, "empty", nan_tensor)
    for inputs in (32, 64, 96, 128, 160, 384):
        outputs, exponent_range = rng.choice([1, 7, 33, 100]), 20 if dtype == torch.bfloat16 else 1
        codes = random_weight("nvfp4", outputs, inputs, 16)
        factors = torch.tensor([10.0 ** rng.uniform(-exponent_range, exponent_range) / 1e3 for _ in range(outputs)], device=DEVICE)
        codes.scales[:, 0], codes.scales[0] = 2.0**-9, 3 * 2.0**-9  # the smallest ones
        codes.scales[outputs // 2] = 0
        scaled = replace(codes, factors=factors)
        found = laid_out_by("triton", scaled, None, dtype)
        assert isinstance(found, Quantized)
        exact_weight = dequantized(replace(codes, factors=None), torch.float64) * factors.double()[:, None]
        for rows in (1, 19, MOST + 1):  # for so many rows the weight is dequantized first, and rounded
            x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
            weight = exact_weight if rows <= MOST else dequantized(scaled, dtype).double()
            bound = TOLERANCES[dtype] * (x.double().abs() @ weight.abs().T).amax(0) + torch.finfo(dtype).smallest_normal * 2**-10
            assert ((found(x).double() - x.double() @ weight.T).abs() <= bound).all()


@pytest.mark.parametrize(("route", "dtype"), [("triton", torch.float16), ("torch", torch.bfloat16)])
def test_rows_are_bit_identical_whatever_the_other_rows_are(route: str, dtype: torch.dtype) -> None:
    product = laid_out_by(route, random_weight("int4", 48, 256, 64, True), None, dtype)
    x = torch.randn(40, 256, device=DEVICE).to(dtype)
    x[4] = torch.nan
    others = x.clone()
    others[[0, 1, 5, 7, 8]] = torch.randn(5, 256, device=DEVICE).to(dtype)
    first, second = product(x), product(others)
    assert first[[2, 3, 6]].equal(second[[2, 3, 6]])
    assert first.isnan().any(1).tolist() == [row == 4 for row in range(40)]
    if route == "torch":  # also for any number of rows
        assert all(product(x[5 : 5 + rows]).equal(first[5 : 5 + rows]) for rows in (1, 2, 3, 9, 33))


def test_product_of_no_rows_is_empty() -> None:
    found = laid_out_by("triton", random_weight("int8", 16, 64, 64), None, torch.float16)
    assert found(torch.empty(0, 64, dtype=torch.float16, device=DEVICE)).shape == (0, 16)


@pytest.mark.parametrize(
    ("route", "kind", "group", "dtype"),
    [
        ("triton", "int4", 16, torch.float16),  # blocks are too short
        ("triton", "int8", 64, torch.float32),  # tensor cores don't support the type
        ("torch", "int4", 16, torch.bfloat16),
        ("torch", "int4", 64, torch.float32),
        ("torch", "fp8", 64, torch.bfloat16),
        ("torch", "nvfp4", 16, torch.bfloat16),
        ("triton", "nvfp4", 8, torch.bfloat16),  # ranks' slices end within blocks
        ("triton", "nvfp4", 16, torch.float32),
        ("triton", "fp4", 16, torch.bfloat16),
    ],
)
def test_unsupported_formats_are_dequantized_when_loaded(route: str, kind: str, group: int, dtype: torch.dtype) -> None:
    codes = random_weight(kind, 32, 128, group)
    found = laid_out_by(route, codes, None, dtype)
    assert not isinstance(found, Quantized)
    assert found.bytes == 32 * 128 * dtype.itemsize
    x = torch.randn(3, 128, device=DEVICE).to(dtype)
    torch.testing.assert_close(found(x), functional.linear(x, dequantized(codes, dtype)), rtol=1e-2, atol=1e-2)


def test_bytes_count_codes_scales_zeros_and_factors() -> None:
    """And an unquantized weight is laid out as a plain `Weight`."""
    codes = random_weight("int4", 32, 128, 64, True)
    assert laid_out_by("triton", codes, None, torch.float16).bytes == 32 * (64 + 2 * 4 + 2)
    for inputs in (96, 128):
        assert laid_out_by("triton", random_weight("nvfp4", 32, inputs, 16), None, torch.float16).bytes == 32 * (
            inputs // 2 + inputs // 16 + 4
        )
    assert laid_out_by("triton", random_weight("fp4", 32, 128, 32), None, torch.float16).bytes == 32 * (64 + 4)
    assert type(laid_out_by("torch", dequantized(codes, torch.float32), None, torch.float32)) is Weight  # type: ignore[arg-type]


@pytest.mark.parametrize("route", ["torch"])
def test_bytes_on_a_cpu_count_16_bit_scales_and_zeros(route: str) -> None:
    assert laid_out_by(route, random_weight("int4", 32, 128, 64, True), None, torch.bfloat16).bytes == 32 * (64 + 2 * 2 * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_gpu_with_reference_kernels_uses_dequantized_weights() -> None:
    codes, x = random_weight("int4", 32, 128, 64), torch.randn(3, 128, device=DEVICE).bfloat16()
    found = laid_out_by("torch", codes, None, torch.bfloat16)
    assert not isinstance(found, Quantized)
    torch.testing.assert_close(found(x), functional.linear(x, dequantized(codes, torch.bfloat16)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "fault"), [("int4", "zeros"), ("int4", "halves"), ("nvfp4", "halves"), ("nvfp4", "blocks"), ("nvfp4", "factors")]
)
def test_check_detects_planted_format_faults(kind: str, fault: str, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Another zero point, swapped halves of bytes, the scale of the neighbouring block, no factors."""
    constants, paired, words = fused_quantized.format_constants, fused_quantized.paired, fused_quantized.words
    if fault == "zeros":
        monkeypatch.setattr(fused_quantized, "format_constants", lambda *given: constants(*given) | {"MIDDLE": 7})
    elif fault == "factors":
        monkeypatch.setattr(fused_quantized, "format_constants", lambda *given: constants(*given) | {"FACTORS": False})
    elif fault == "blocks":
        monkeypatch.setattr(fused_quantized, "words", lambda scales, run: words(scales.roll(1, 1), run))
    else:
        monkeypatch.setattr(fused_quantized, "paired", lambda codes, run: paired(codes.flip(1), run))
    with pytest.raises(AssertionError):
        test_quantized_products_match_float64("triton", kind, torch.float16, False, rng, monkeypatch)
