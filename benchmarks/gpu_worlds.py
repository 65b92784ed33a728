"""Synthetic rows over a paged KV cache, as `gpu.py` measures and checks them: shuffled page tables, plans, bytes and operations."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import paged_attention
from penstock.kernels.attention import AttentionOptions, Row, ancestry
from penstock.kernels.layout import LayerKind
from penstock.kernels.paged_attention import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model's attention. The default is Llama 3's with 8 B parameters."""

    kv_heads: int = 8
    ratio: int = 4
    size: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    eight_bits: bool = False  # the cache is float8_e4m3fn

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.ratio

    def kind(self, window: int = 0) -> LayerKind:
        """The kind of its layers with that window."""
        return LayerKind(window, self.kv_heads, self.ratio, self.size)

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.size * (1 if self.eight_bits else self.dtype.itemsize)


class World:
    """The same rows several times over, each time on pages of their own."""

    def __init__(
        self,
        shape: Shape,
        rows: Sequence[Row],
        copies: int,
        device: torch.device,
        shared: int = 0,
        seed: int = 0,
        share: bool = True,
    ) -> None:
        """rows: without pages; shared: leading tokens, in whole pages, that all rows share."""
        self.shape, self.device, self.copies = shape, device, copies
        size = shape.page_size
        widths = [-(-(row.context + row.queries) // size) for row in rows]
        leading = shared // size
        pages = list(range(copies * (leading + sum(width - leading for width in widths))))
        random.Random(seed).shuffle(pages)
        self.slots = len(pages) * size
        common = [[pages.pop() for _ in range(leading)] for _ in range(copies)]
        self.rows = [
            [
                Row(row.queries, row.context, [*first, *(pages.pop() for _ in range(width - leading))], row.parents)
                for row, width in zip(rows, widths, strict=True)
            ]
            for first in common
        ]
        self.tokens = sum(row.queries for row in rows)
        self.cache = _random((self.slots, 2, shape.kv_heads, shape.size), shape, device)
        self.scales = torch.full((2, shape.kv_heads), 0.9, device=device) if shape.eight_bits else None
        self.query = torch.randn(self.tokens, shape.heads, shape.size, device=device).to(shape.dtype)
        self.share = share

    def plans(self) -> list[Plan]:
        """One for each copy."""
        shape = self.shape
        return [
            paged_attention.plan(
                rows, shape.page_size, [shape.kind()], self.device, dtype=shape.dtype, share=self.share, eight_bits=shape.eight_bits
            )
            for rows in self.rows
        ]

    def attend(self, plan: Plan) -> Tensor:
        """[tokens, heads, size], by our kernels."""
        return paged_attention.attention(
            self.query, self.cache, plan, AttentionOptions(0, self.shape.size**-0.5, scales=self.scales)
        )

    @property
    def bytes(self) -> int:
        """Bytes to be read and written: each page once, however many rows hold it, queries and outputs."""
        rows = self.rows[0]
        size = self.shape.page_size
        keys = len({page for row in rows for page in row.pages}) * size
        keys -= sum(len(row.pages) * size - row.context - row.queries for row in rows)
        return keys * self.shape.key_bytes + 2 * self.query.nbytes

    @property
    def operations(self) -> int:
        """FLOP for the keys that are attended to, and no more."""
        seen = sum(row.queries * row.context + _seen(row) for row in self.rows[0])
        return 4 * self.shape.heads * self.shape.size * seen


def _seen(row: Row) -> int:
    """Attended pairs among the new tokens of a row."""
    if row.parents is None:
        return row.queries * (row.queries + 1) // 2
    return sum(depth + 1 for depth in ancestry(row.parents)[1])


def _random(size: tuple[int, ...], shape: Shape, device: torch.device) -> Tensor:
    """Normal numbers, generated in parts, since they are made as float32."""
    dtype = torch.float8_e4m3fn if shape.eight_bits else shape.dtype
    result = torch.empty(size, dtype=dtype, device=device)
    step = max(1, (1 << 26) // (size[1] * size[2] * size[3]))
    for start in range(0, size[0], step):
        part = result[start : start + step]
        part.copy_(torch.randn(part.shape, device=device))
    return result


def tree(nodes: int, branches: int = 4) -> list[int]:
    """Parents of a tree in which every node has so many children."""
    return [(i - 1) // branches if i else -1 for i in range(nodes)]
