"""4-bit and 8-bit floats converted to 16 bits within kernels. Knows tensors only.

8-bit floats are moved into float16, which has the same numbers 2**8 times smaller: every accelerator can do that, even if it
doesn't support FP8. 4-bit floats are moved in the same way, or looked up on NVIDIA.

A 4-bit float times an 8-bit one has six significant bits at most, and its size is 0 or 2**-10 to 2688: bfloat16 and float16 hold it
exactly, and 2**8 times smaller as well. So NVFP4 weights are scaled before they are multiplied with. Scaled afterwards, each block
would be a product of its own, of 16 inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_FACTOR = 256.0  # an 8-bit float divided by the float16 that it is moved to
WORDS = {128: torch.int32, 64: torch.int16, 32: torch.uint8}  # integers that hold the scales of half a run of so many inputs


def words(scales: Tensor, run: int) -> Tensor:
    """float8_e4m3fn scales [out, in / 16] as words [2 * in / run, out]: those of half a run are a word, the first in its lowest
    bits. Single bytes would be too small for asynchronous copies."""
    held = scales.to(torch.float8_e4m3fn).view(torch.uint8).contiguous()
    return held.view(WORDS[run]).t().contiguous()


def _looked_up(upper: tuple[int, int], lower: tuple[int, int]) -> str:
    """PTX that converts four bytes to eight 16-bit numbers: $0 and $1 of their low halves, $2 and $3 of their high ones.

    upper, lower: tables of the upper and the lower byte of a 4-bit float without its sign, for codes 0 to 3 and 4 to 7.

    One `prmt` looks up a byte of four numbers; with pairing and signs it takes some three instructions for each. One number after
    the other took ten, and experts waited for those instead of memory.
    """
    looked_up = "".join(
        f"""
        prmt.b32 upper, {upper[0]:#x}, {upper[1]:#x}, {places};
        prmt.b32 lower, {lower[0]:#x}, {lower[1]:#x}, {places};
        prmt.b32 {low}, lower, upper, 0x6240;
        prmt.b32 {high}, lower, upper, 0x7351;
        prmt.b32 signs, $4, 0, {pair};
        and.b32 sign, signs, 0x80008000;
        or.b32 {high}, {high}, sign;
        shl.b32 signs, signs, 4;
        and.b32 sign, signs, 0x80008000;
        or.b32 {low}, {low}, sign;"""
        for places, pair, low, high in (("first", "0x1404", "$0", "$2"), ("second", "0x3424", "$1", "$3"))
    )
    return f"""{{
        .reg .b32 first, second, upper, lower, signs, sign;
        and.b32 first, $4, 0x77777777;
        shr.u32 second, first, 16;{looked_up}
    }}"""


IN_BFLOAT16 = tl.constexpr(_looked_up((0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)))
IN_FLOAT16 = tl.constexpr(_looked_up((0x3E3C3800, 0x46444240), (0, 0)))


@triton.jit
def fp4_pair(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """4-bit floats: those of bytes' low halves, and of their high ones. For NVIDIA."""
    ASM: tl.constexpr = IN_BFLOAT16 if dtype == tl.bfloat16 else IN_FLOAT16
    low, high = tl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r", [codes], (tl.int16, tl.int16), is_pure=True, pack=4)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def fp4_to_float16(bits: tl.tensor) -> tl.tensor:
    """4-bit floats as float16, 2**14 times smaller: their bits become its sign, the exponent's last bits and the mantissa's
    first."""
    wide = bits.to(tl.uint16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def fp8_to_float16(bits: tl.tensor) -> tl.tensor:
    """float8_e4m3fn as float16, 2**8 times smaller: both have a sign, then the exponent, and float16's range contains the
    other's."""
    wide = bits.to(tl.uint16)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)


def _moved() -> str:
    """PTX that moves the bits of eight 4-bit floats in four bytes into float16 (see `fp4_to_float16`): $0 and $1 of low halves, $2
    and $3 of high ones. Where a product hides no conversion, one that looks nothing up is shorter, by a fifth."""
    made = "".join(
        f"""
        prmt.b32 twice, $4, 0, {places};
        shl.b32 size, twice, 1;
        and.b32 size, size, 0x0E000E00;
        shl.b32 sign, twice, 4;
        lop3.b32 {low}, sign, signs, size, 0xEA;
        shr.u32 size, twice, 3;
        and.b32 size, size, 0x0E000E00;
        lop3.b32 {high}, twice, signs, size, 0xEA;"""
        for places, low, high in (("0x1100", "$0", "$2"), ("0x3322", "$1", "$3"))
    )
    return f"""{{
        .reg .b32 twice, size, sign, signs;
        mov.b32 signs, 0x80008000;{made}
    }}"""


FP4_IN_FLOAT16 = tl.constexpr(_moved())


@triton.jit
def fp4_pair_to_float16(codes: tl.tensor) -> tl.tensor:
    """`fp4_to_float16` of bytes' low halves, and of their high ones. For NVIDIA."""
    low, high = tl.inline_asm_elementwise(FP4_IN_FLOAT16, "=&r,=&r,=&r,=&r,r", [codes], (tl.int16, tl.int16), is_pure=True, pack=4)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


def _as_float16() -> str:
    """PTX that converts four 8-bit floats to float16, 2**8 times smaller, two at a time: $0 and $1."""
    made = "".join(
        f"""
        prmt.b32 wide, $2, 0, {places};
        shr.u32 size, wide, 1;
        and.b32 size, size, 0x3F803F80;
        lop3.b32 {found}, wide, signs, size, 0xEA;"""
        for places, found in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    return f"""{{
        .reg .b32 wide, size, signs;
        mov.b32 signs, 0x80008000;{made}
    }}"""


FP8_IN_FLOAT16 = tl.constexpr(_as_float16())


@triton.jit
def fp8_pair(codes: tl.tensor) -> tl.tensor:
    """`fp8_to_float16` of two numbers at a time. For NVIDIA."""
    found = tl.inline_asm_elementwise(FP8_IN_FLOAT16, "=&r,=&r,r", [codes], tl.int16, is_pure=True, pack=4)
    return found.to(tl.float16, bitcast=True)


@triton.jit
def scale_at(place: tl.tensor, wanted: tl.tensor, KIND: tl.constexpr, CUDA: tl.constexpr) -> tl.tensor:
    """Scales of some outputs, [outputs]."""
    return as_scale(tl.load(place, mask=wanted, other=0), KIND, CUDA)


@triton.jit
def as_scale(held: tl.tensor, KIND: tl.constexpr, CUDA: tl.constexpr) -> tl.tensor:
    """Scales in float32. Those of MXFP4 are exponents, and undo the factor of `fp4_to_float16`."""
    if KIND == "fp4":
        held = (held.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        if not CUDA:
            held *= 16384.0
    return held


@triton.jit
def scaled_nvfp4(
    codes: tl.tensor, scales: tl.tensor, wanted: tl.tensor, OUTPUTS: tl.constexpr, dtype: tl.constexpr, CUDA: tl.constexpr
) -> tl.tensor:
    """NVFP4 codes times the scales of their blocks of 16, 2**8 times smaller: those of bytes' low halves, and of their high ones.
    scales: pointers to the `words` of some outputs for the first half of a run; those of the second are OUTPUTS further."""
    bit = (tl.arange(0, codes.shape[1]) // 16 * 8)[None, :]
    first = fp8_to_float16(tl.load(scales, mask=wanted, other=0).to(tl.int32)[:, None] >> bit & 255)
    second = fp8_to_float16(tl.load(scales + OUTPUTS, mask=wanted, other=0).to(tl.int32)[:, None] >> bit & 255)
    if CUDA:
        low, high = scaled_fp4_pair(codes, first, second, dtype)
    else:  # `fp4_to_float16` numbers are 2**14 times smaller
        low = (fp4_to_float16(codes & 15) * (first * 16384.0)).to(dtype)
        high = (fp4_to_float16(codes >> 4) * (second * 16384.0)).to(dtype)
    return low, high


@triton.jit
def scaled_fp4_pair(codes: tl.tensor, first: tl.tensor, second: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`fp4_pair`, times a factor for each number."""
    low, high = fp4_pair(codes, dtype)
    return low * first.to(dtype), high * second.to(dtype)
