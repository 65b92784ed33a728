"""What PTX of a few simple instructions does, where there is no GPU to execute it: that of kernels that unpack codes of 4 bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

Words = Any  # an array of uint32, or one number


def unpacked_by(code: str, others: Sequence[int], dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """What it makes of all pairs of bytes, in both halves of a word: low halves' numbers and high halves', each [words, 4]; and the
    bytes, [words, 4]. others: operands from $5 on."""
    pairs = numpy.arange(1 << 16, dtype=numpy.uint32)
    word = pairs | pairs[::-1] << numpy.uint32(16)
    found = numpy.stack(execute(code, [word, *map(numpy.uint32, others)]), 1).view(numpy.int16)
    low, high = torch.from_numpy(found).view(dtype).view(-1, 2, 4).unbind(1)
    return (low.contiguous(), high.contiguous()), torch.from_numpy(word.view(numpy.uint8).reshape(-1, 4).copy()).int()


def execute(code: str, given: Sequence[Words]) -> list[Words]:
    """$0 to $3. given: $4 and so on."""
    held: dict[str, Words] = {f"${i}": words for i, words in enumerate(given, 4)}
    for line in code.replace("{", "").replace("}", "").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *names = (name.strip() for name in rest.split(","))
        operands = [held[name] if name in held else numpy.uint32(int(name, 0)) for name in names]
        held[target] = OPERATIONS[operation](*operands)
    return [held[f"${i}"] for i in range(4)]


def permuted(low: Any, high: Any, places: Any) -> Any:
    """Each of the result's bytes is one of the operands' eight, which four bits say; the last of these must not be set."""
    eight, result = low.astype(numpy.uint64) | high.astype(numpy.uint64) << numpy.uint64(32), numpy.uint32(0)
    for i in range(4):
        place = places >> numpy.uint32(4 * i) & numpy.uint32(15)
        assert (place < 8).all()
        result = result | ((eight >> (place * numpy.uint32(8)).astype(numpy.uint64)) & numpy.uint64(255)).astype(
            numpy.uint32
        ) << numpy.uint32(8 * i)
    return result


def multiplied_and_added(dtype: torch.dtype, left: Words, right: Words, more: Words) -> Words:
    """Of both halves."""
    shape = numpy.broadcast_shapes(numpy.shape(left), numpy.shape(right), numpy.shape(more))
    a, b, c = (
        torch.from_numpy(numpy.broadcast_to(words, shape).astype(numpy.uint32).reshape(-1).view(numpy.int16)).view(dtype).double()
        for words in (left, right, more)
    )
    return (a * b + c).to(dtype).view(torch.int16).numpy().view(numpy.uint32).reshape(shape)


OPERATIONS = {
    "mov.b32": lambda word: word,
    "shl.b32": numpy.left_shift,
    "shr.u32": numpy.right_shift,
    "and.b32": numpy.bitwise_and,
    "or.b32": numpy.bitwise_or,
    "prmt.b32": permuted,
    "fma.rn.bf16x2": partial(multiplied_and_added, torch.bfloat16),
    "fma.rn.f16x2": partial(multiplied_and_added, torch.float16),
}
