"""Codes of quantized weights converted to numbers within kernels, those of 4 bits in pairs. Knows tensors only.

4-bit integers become 16-bit numbers by `or`, floats are `small_floats`'.
"""

import triton
import triton.language as tl

from .small_floats import fp4_pair, fp4_to_float16, fp8_to_float16


@triton.jit
def pair(codes: tl.tensor, zero: tl.tensor, dtype: tl.constexpr, KIND: tl.constexpr, CUDA: tl.constexpr) -> tl.tensor:
    """The numbers of bytes' low halves, and of their high halves (see `code_values`)."""
    if not CUDA:
        low, high = code_values(codes & 15, zero, KIND).to(dtype), code_values(codes >> 4, zero, KIND).to(dtype)
    elif KIND == "fp4":
        low, high = fp4_pair(codes, dtype)
    else:
        low, high = minus_zero_pair(codes, zero, dtype)
    return low, high


@triton.jit
def code_values(codes: tl.tensor, zero: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Codes as numbers, not scaled yet."""
    return fp4_to_float16(codes) if KIND == "fp4" else fp8_to_float16(codes) if KIND == "fp8" else less(codes, zero)


@triton.jit
def less(codes: tl.tensor, zero: tl.tensor) -> tl.tensor:
    """Codes minus their zero point, as float32: the interpreter can't convert integers to bfloat16."""
    return (codes.to(tl.int32) - zero).to(tl.float32)


def _in_pairs(base: int, one: int, kind: str) -> str:
    """PTX that converts the halves of four bytes to 16-bit numbers, minus what $5 and $6 hold: $0, $1 of low halves, $2, $3 of high
    ones.

    base: a power of two, twice, in whose last bits codes of 1 to 15 fit, so that `or` makes a code a number beside it, without a
    conversion: an integer at a time took seven instructions, and few rows waited for those instead of memory. `lop3` is `and` and
    `or`, which ptxas (of Triton 3.9) does not join by itself if both have constants. one: 1.0, twice.
    """
    made = "".join(
        f"""
        prmt.b32 pair, $4, 0, {places};
        lop3.b32 code, pair, last, {base:#x}, 0xEA;
        fma.rn.{kind} {low}, code, one, {less};
        shr.u32 pair, pair, 4;
        lop3.b32 code, pair, last, {base:#x}, 0xEA;
        fma.rn.{kind} {high}, code, one, {less};"""
        for places, low, high, less in (("0x4140", "$0", "$2", "$5"), ("0x4342", "$1", "$3", "$6"))
    )
    return f"""{{
        .reg .b32 pair, code, one, last;
        mov.b32 one, {one:#x};
        mov.b32 last, 0x000F000F;{made}
    }}"""


IN_BFLOAT16 = tl.constexpr(_in_pairs(0x43004300, 0x3F803F80, "bf16x2"))  # added to 128
IN_FLOAT16 = tl.constexpr(_in_pairs(0x64006400, 0x3C003C00, "f16x2"))  # added to 1024


@triton.jit
def minus_zero_pair(codes: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Numbers of bytes' low halves and of their high halves, minus the zero point, [outputs, 1]. For NVIDIA."""
    BASE: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    ASM: tl.constexpr = IN_BFLOAT16 if dtype == tl.bfloat16 else IN_FLOAT16
    off = (-BASE - zero).to(tl.float32).to(dtype).to(tl.int16, bitcast=True)
    off = tl.broadcast_to(off, codes.shape)
    low, high = tl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r,r,r", [codes, off], (tl.int16, tl.int16), is_pure=True, pack=4)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
