"""Products with weights of few bits, by Triton. Knows tensors only.

Codes are multiplied as they are, integers less what means 0 or floats of 8 bits, which bfloat16 and float16 hold exactly; sums of a
block are scaled in float32. Up to MOST rows every program unpacks its outputs' codes as it reads them; for more rows the whole
weight is unpacked first, for torch's own product. Where that begins is a guess: it was not measured yet.

Two codes of 4 bits share a byte, those of a run's first half with those of its second, so that each half is a product of its own
and nothing has to be interleaved. Floats of 8 bits are moved into float16, which has the same numbers 2**8 times smaller: every
accelerator can do that, also where it knows no such floats.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .choose import on_nvidia
from .codes import BITS, MIDDLES, Codes
from .compilation import AMD, NVIDIA, Compilation
from .fused_product import INTERPRET, dot
from .linear import Product

MOST = 256  # rows
TYPES = {torch.bfloat16, torch.float16}  # of rows
RUN = 128  # inputs at a time, at most; they share a scale
LEAST_RUN = 32
FP8_FACTOR = 256.0  # of a float of 8 bits to that float16
PROGRAMS = 128  # below which they are made of fewer outputs, so that more processors have one
UNPACKED = 32  # outputs of a program that unpacks
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def quantized_kernel(
    out: tl.tensor,  # [rows, OUTPUTS], dense
    x: tl.tensor,  # [rows, INPUTS]
    codes: tl.tensor,  # [OUTPUTS, INPUTS] bytes, or half as many
    scales: tl.tensor,  # [INPUTS / BLOCK, OUTPUTS] float32
    zeros: tl.tensor,  # the same, bytes; unused without ZEROS
    bias: tl.tensor,  # [OUTPUTS]; unused without BIASED
    rows: tl.tensor,
    x_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    CUDA: tl.constexpr,
) -> None:
    """One program: COLUMNS outputs of ROWS rows."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    asked, wanted = row < rows, output < OUTPUTS
    WIDTH: tl.constexpr = RUN * BITS // 8  # bytes of a run
    place = tl.arange(0, WIDTH)
    from_x = x + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    from_codes = codes + output.to(tl.int64)[:, None] * (INPUTS * BITS // 8) + place[None, :]
    result = tl.zeros([ROWS, COLUMNS], tl.float32)
    for run in tl.range(0, INPUTS // RUN, num_stages=STAGES):
        held = tl.load(from_codes + run * WIDTH, mask=wanted[:, None], other=0)
        block = run * RUN // BLOCK * OUTPUTS + output
        zero = zeros_at(zeros + block, wanted, ZEROS, MIDDLE)
        part = tl.zeros([ROWS, COLUMNS], tl.float32)
        first = tl.load(from_x + run * RUN, mask=asked[:, None], other=0.0)
        if BITS == 4:
            second = tl.load(from_x + run * RUN + WIDTH, mask=asked[:, None], other=0.0)
            if CUDA:
                low, high = less_pair(held, zero, first.dtype)
            else:
                low, high = less(held & 15, zero).to(first.dtype), less(held >> 4, zero).to(first.dtype)
            part = dot(first, low, part, WIDEN)
            part = dot(second, high, part, WIDEN)
        elif FLOATS:
            part = dot(first, smaller(held).to(first.dtype), part, WIDEN)
        else:
            part = dot(first, less(held, zero).to(first.dtype), part, WIDEN)
        result += part * tl.load(scales + block, mask=wanted, other=0.0)[None, :]
    if BIASED:
        result += tl.load(bias + output, mask=wanted, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & wanted[None, :])


@triton.jit
def zeros_at(place: tl.tensor, wanted: tl.tensor, ZEROS: tl.constexpr, MIDDLE: tl.constexpr) -> tl.tensor:
    """The integers that mean 0 for some outputs: [outputs, 1]."""
    return (tl.load(place, mask=wanted, other=0).to(tl.int32) if ZEROS else tl.where(wanted, MIDDLE, 0))[:, None]


@triton.jit
def less(codes: tl.tensor, zero: tl.tensor) -> tl.tensor:
    """Codes less what means 0, as float32: the interpreter makes no bfloat16 of integers."""
    return (codes.to(tl.int32) - zero).to(tl.float32)


def _in_pairs(base: int, one: int, kind: str) -> str:
    """PTX that makes numbers of 16 bits of four bytes' halves, less what $5 and $6 hold: $0, $1 of low halves, $2, $3 of high ones.

    base: a power of two whose last bits are those of 1 to 15, so that a code becomes a number beside it, with no conversion: an
    integer at a time took seven instructions, and few rows waited for those instead of memory. one: 1.0, twice.
    """
    made = "".join(
        f"""
        prmt.b32 pair, $4, 0, {places};
        and.b32 code, pair, 0x000F000F;
        or.b32 code, code, {base:#x};
        fma.rn.{kind} {low}, code, one, {less};
        shr.u32 pair, pair, 4;
        and.b32 code, pair, 0x000F000F;
        or.b32 code, code, {base:#x};
        fma.rn.{kind} {high}, code, one, {less};"""
        for places, low, high, less in (("0x4140", "$0", "$2", "$5"), ("0x4342", "$1", "$3", "$6"))
    )
    return f"""{{
        .reg .b32 pair, code, one;
        mov.b32 one, {one:#x};{made}
    }}"""


IN_BFLOAT16 = tl.constexpr(_in_pairs(0x43004300, 0x3F803F80, "bf16x2"))  # beside 128
IN_FLOAT16 = tl.constexpr(_in_pairs(0x64006400, 0x3C003C00, "f16x2"))  # beside 1024


@triton.jit
def less_pair(codes: tl.tensor, zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Of bytes' low halves and of their high ones, less what means 0, [outputs, 1]. For NVIDIA's."""
    BASE: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    ASM: tl.constexpr = IN_BFLOAT16 if dtype == tl.bfloat16 else IN_FLOAT16
    off = (-BASE - zero).to(tl.float32).to(dtype).to(tl.int16, bitcast=True)
    off = tl.broadcast_to(off, codes.shape)
    low, high = tl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r,r,r", [codes, off], (tl.int16, tl.int16), is_pure=True, pack=4)
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@triton.jit
def smaller(bits: tl.tensor) -> tl.tensor:
    """float8_e4m3fn, 2**8 times smaller, as float16: both have a sign, then the exponent, and the one's range holds the other's."""
    wide = bits.to(tl.uint16)
    return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_kernel(
    out: tl.tensor,  # [outputs, INPUTS]
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    outputs: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program: a run of COLUMNS outputs."""
    run = tl.program_id(1)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = output < outputs
    WIDTH: tl.constexpr = RUN * BITS // 8
    place = tl.arange(0, WIDTH)
    line = output.to(tl.int64)[:, None]
    held = tl.load(codes + line * (INPUTS * BITS // 8) + run * WIDTH + place[None, :], mask=wanted[:, None], other=0)
    block = run * RUN // BLOCK * outputs + output
    scale = tl.load(scales + block, mask=wanted, other=0.0)[:, None]
    zero = zeros_at(zeros + block, wanted, ZEROS, MIDDLE)
    to = out + line * INPUTS + run * RUN + place[None, :]
    if BITS == 4:
        first, second = less(held & 15, zero) * scale, less(held >> 4, zero) * scale
        tl.store(to, first.to(out.dtype.element_ty), mask=wanted[:, None])
        tl.store(to + WIDTH, second.to(out.dtype.element_ty), mask=wanted[:, None])
    elif FLOATS:
        tl.store(to, (smaller(held).to(tl.float32) * scale).to(out.dtype.element_ty), mask=wanted[:, None])
    else:
        tl.store(to, (less(held, zero) * scale).to(out.dtype.element_ty), mask=wanted[:, None])


def by_triton(
    codes: Codes, bias: Tensor | None, dtype: torch.dtype, steady: bool = False
) -> tuple[Product, Sequence[Tensor | None]] | None:
    """The product with rows of `dtype`, and what it reads. None: blocks are too short, rows are not for the matrix units, or codes
    are none of a layer's one MLP. steady: by one tile for all numbers of rows, so that none depends on others."""
    run = _run(codes.block)
    if run < LEAST_RUN or dtype not in TYPES or codes.kind not in BITS:
        return None
    outputs, inputs = codes.codes.shape
    held = paired(codes.codes, run) if codes.kind == "int4" else codes.codes.contiguous()
    scales = (codes.scales.t() * (FP8_FACTOR if codes.kind == "fp8" else 1)).contiguous()
    zeros = codes.zeros.t().contiguous() if codes.zeros is not None else None
    constants = _meaning(codes.kind, inputs, codes.block, zeros is not None)

    def unpacked() -> Tensor:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=held.device)
        grid = triton.cdiv(outputs, UNPACKED), inputs // run
        unpack_kernel[grid](
            weight, held, scales, zeros if zeros is not None else held, outputs, **constants, COLUMNS=UNPACKED, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        return weight

    def product(x: Tensor) -> Tensor:
        rows = len(x)
        if rows > MOST and not steady:
            return functional.linear(x, unpacked(), bias)
        assert x.stride(1) == 1
        out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        tile = _tile(MOST if steady else rows, outputs, torch.version.hip is not None)
        if rows:
            grid = triton.cdiv(outputs, tile["COLUMNS"]), triton.cdiv(rows, tile["ROWS"])
            quantized_kernel[grid](
                out,
                x,
                held,
                scales,
                zeros if zeros is not None else held,
                bias if bias is not None else out,
                rows,
                x.stride(0),
                **constants,
                OUTPUTS=outputs,
                BIASED=bias is not None,
                **tile,
                WIDEN=INTERPRET,
                CUDA=on_nvidia(x.device),
                num_warps=WARPS,
                num_stages=tile["STAGES"],
                enable_fp_fusion=True,
            )
        return out

    return product, (held, scales, zeros, bias)


def _run(block: int) -> int:
    """The largest power of two up to RUN that divides it."""
    return min(RUN, block & -block)


def paired(codes: Tensor, run: int) -> Tensor:
    """Codes of 4 bits [out, in] as bytes [out, in / 2]: in each the same place of a run's first and of its second half."""
    low, high = codes.view(len(codes), -1, 2, run // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def _meaning(kind: str, inputs: int, block: int, zeros: bool) -> dict[str, Any]:
    """The constants that say what codes mean."""
    return {
        "INPUTS": inputs,
        "BLOCK": block,
        "RUN": _run(block),
        "BITS": 4 if kind == "int4" else 8,
        "FLOATS": kind == "fp8",
        "ZEROS": zeros,
        "MIDDLE": MIDDLES.get(kind, 0),
    }


def _tile(rows: int, outputs: int, amd: bool) -> dict[str, int]:
    """Few rows cost what reading the codes costs: small tiles, of which many are under way."""
    high = 16 if rows <= 16 else 64
    wide = 64
    while wide > 16 and high == 16 and outputs < wide * PROGRAMS:
        wide //= 2
    return {"ROWS": high, "COLUMNS": wide, "STAGES": 2 if amd else 4 if high == 16 else 3}


def compilations() -> list[Compilation]:
    """Matrices of an 8 B model, for one row and for many, with what the formats of checkpoints have."""
    cases = {  # kind, block, zeros, inputs, outputs, type of rows
        "int4": ("int4", 128, False, 4096, 6144, "bf16"),
        "int4, zeros": ("int4", 64, True, 4096, 6144, "fp16"),
        "int4, short blocks": ("int4", 32, True, 2048, 1000, "bf16"),
        "int8": ("int8", 14336, False, 14336, 4096, "bf16"),
        "fp8": ("fp8", 4096, False, 4096, 28672, "bf16"),
        "fp8, blocks": ("fp8", 128, False, 14336, 4096, "bf16"),
    }
    kinds = {"": NVIDIA, "amd": AMD}
    found = []
    for (name, (kind, block, zeros, inputs, outputs, dtype)), (kindred, targets) in itertools.product(cases.items(), kinds.items()):
        meaning = _meaning(kind, inputs, block, zeros)
        pointers = {"out": f"*{dtype}", "codes": "*u8", "scales": "*fp32", "zeros": "*u8"}
        unpacking = {**meaning, "COLUMNS": UNPACKED}
        found.append(
            Compilation(
                kernel=unpack_kernel,
                name=f"unpack {name} {kindred}".rstrip(),
                signature=pointers | {"outputs": "i32:16"},
                constants=dict(unpacking),
                warps=WARPS,
                targets=targets,
            )
        )
        for rows in (1, MOST):
            tile = _tile(rows, outputs, kindred == "amd")
            constants = {**meaning, "OUTPUTS": outputs, "BIASED": zeros, **tile, "WIDEN": False, "CUDA": kindred != "amd"}
            numbers = {"rows": "i32", "x_stride": "i32:16"}
            found.append(
                Compilation(
                    kernel=quantized_kernel,
                    name=f"quantized {name} {rows} {kindred}".rstrip(),
                    signature=pointers | {"x": f"*{dtype}", "bias": f"*{dtype}"} | numbers,
                    constants=dict(constants),
                    warps=WARPS,
                    stages=tile["STAGES"],
                    fuse=True,
                    hot=True,
                    targets=targets,
                )
            )
    return found
