"""Executes the inline PTX that unpacks 4-bit codes, a few simple instructions, on the CPU with numpy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

Words = Any  # an array of uint32, or one number


def unpack_all_byte_pairs(code: str, operands: Sequence[int], dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Executes the code on all pairs of bytes, in both halves of a 32-bit word. Returns the numbers of the low and of the high
    nibbles, each [words, 4], and the bytes, [words, 4]. operands: those from $5 on."""
    pairs = numpy.arange(1 << 16, dtype=numpy.uint32)
    word = pairs | pairs[::-1] << numpy.uint32(16)
    found = numpy.stack(execute(code, [word, *map(numpy.uint32, operands)]), 1).view(numpy.int16)
    low, high = torch.from_numpy(found).view(dtype).view(-1, 2, 4).unbind(1)
    return (low.contiguous(), high.contiguous()), torch.from_numpy(word.view(numpy.uint8).reshape(-1, 4).copy()).int()


def execute(code: str, inputs: Sequence[Words], outputs: int = 4) -> list[Words]:
    """Returns the registers $0 and so on, which are `outputs`. inputs: those behind."""
    registers: dict[str, Words] = {f"${i}": words for i, words in enumerate(inputs, outputs)}
    for line in code.replace("{", "").replace("}", "").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *names = (name.strip() for name in rest.split(","))
        operands = [registers[name] if name in registers else numpy.uint32(int(name, 0)) for name in names]
        registers[target] = OPERATIONS[operation](*operands)
    return [registers[f"${i}"] for i in range(outputs)]


def permute_bytes(low: Any, high: Any, selectors: Any) -> Any:
    """prmt.b32: each byte of the result is one of the operands' eight bytes, selected by a nibble of `selectors`, whose highest bit
    (sign replication) must not be set."""
    source_bytes, result = low.astype(numpy.uint64) | high.astype(numpy.uint64) << numpy.uint64(32), numpy.uint32(0)
    for i in range(4):
        selector = selectors >> numpy.uint32(4 * i) & numpy.uint32(15)
        assert (selector < 8).all()
        result = result | ((source_bytes >> (selector * numpy.uint32(8)).astype(numpy.uint64)) & numpy.uint64(255)).astype(
            numpy.uint32
        ) << numpy.uint32(8 * i)
    return result


def fused_multiply_add(dtype: torch.dtype, left: Words, right: Words, addend: Words) -> Words:
    """fma.rn on both 16-bit halves."""
    shape = numpy.broadcast_shapes(numpy.shape(left), numpy.shape(right), numpy.shape(addend))
    a, b, c = (
        torch.from_numpy(numpy.broadcast_to(words, shape).astype(numpy.uint32).reshape(-1).view(numpy.int16)).view(dtype).double()
        for words in (left, right, addend)
    )
    return (a * b + c).to(dtype).view(torch.int16).numpy().view(numpy.uint32).reshape(shape)


def look_up_bits(first: Words, second: Words, third: Words, table: Words) -> Words:
    """lop3.b32: each bit of the result is the table's at the place that the operands' bits make, the first of them its highest."""
    result = numpy.uint32(0)
    for place in range(8):
        if table >> numpy.uint32(place) & numpy.uint32(1):
            chosen = [word if place >> bit & 1 else ~word for bit, word in ((2, first), (1, second), (0, third))]
            result = result | (chosen[0] & chosen[1] & chosen[2])
    return result


OPERATIONS = {
    "mov.b32": lambda word: word,
    "shl.b32": numpy.left_shift,
    "shr.u32": numpy.right_shift,
    "and.b32": numpy.bitwise_and,
    "or.b32": numpy.bitwise_or,
    "lop3.b32": look_up_bits,
    "prmt.b32": permute_bytes,
    "fma.rn.bf16x2": partial(fused_multiply_add, torch.bfloat16),
    "fma.rn.f16x2": partial(fused_multiply_add, torch.float16),
}
