"""What only the device knows of a step's inputs, in Triton. `lookahead.py` has the reference.

    tokens[token] = max(picked[source], 0)
    pages[place + i] = tables[first + parents[source] * (count + 1) + i]                    for i below count
    cache[layer, target] = cache[layer, tables[... + count]], as far as filled, else 0

A program fills in one entry, or copies BLOCK elements of one page in one layer.
"""

import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation
from .fused_paging import bytes_if_small

BLOCK_SIZE = 2048  # elements of a page per program
PAGES = 64  # pages of a table that are filled in at once
WARPS = 4
FIELDS = tl.constexpr(8)
# Arguments whose alignment doesn't matter.
LOOSE = ["entries", "tables", "picked", "parents", "tokens", "pages"]


@triton.jit
def _begin(entry, tables, parents):  # type: ignore[no-untyped-def]
    """Where the table of the beam that an entry continues begins."""
    parent = tl.load(parents + tl.load(entry)).to(tl.int32)
    return tables + tl.load(entry + 3) + parent * (tl.load(entry + 4) + 1)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def fill_kernel(
    entries: tl.tensor,  # [entries, FIELDS] int32
    tables: tl.tensor,  # int32
    picked: tl.tensor,  # [rows] int64
    parents: tl.tensor,  # [rows] int64; unused without BEAMS
    tokens: tl.tensor,  # [tokens] int64, out
    pages: tl.tensor,  # int32, out; unused without BEAMS
    BEAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Fills in one entry's token, and its pages."""
    entry = entries + tl.program_id(0) * FIELDS
    tl.store(tokens + tl.load(entry + 1), tl.maximum(tl.load(picked + tl.load(entry)), 0))
    if BEAMS:
        begin, place, count = _begin(entry, tables, parents), tl.load(entry + 2), tl.load(entry + 4)
        for start in range(0, count, BLOCK):  # none without a beam
            page = start + tl.arange(0, BLOCK)
            tl.store(pages + place + page, tl.load(begin + page, mask=page < count), mask=page < count)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def inherit_kernel(
    cache: tl.tensor,  # [layers, pages, page_size * width]
    entries: tl.tensor,  # [entries, FIELDS] int32
    tables: tl.tensor,  # int32
    parents: tl.tensor,  # [rows] int64
    layer_stride: tl.tensor,
    page_elements: tl.tensor,  # page_size * width
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copies BLOCK elements of one beam's last page in one layer."""
    entry = entries + tl.program_id(0) * FIELDS
    target = tl.load(entry + 5)
    if target >= 0:
        layer = cache + tl.program_id(1).to(tl.int64) * layer_stride
        element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        filled = tl.load(entry + 6)
        source = tl.load(_begin(entry, tables, parents) + tl.load(entry + 4), mask=filled > 0, other=0)
        values = tl.load(layer + source.to(tl.int64) * page_elements + element, mask=element < filled * width, other=0)
        tl.store(layer + target.to(tl.int64) * page_elements + element, values, mask=element < page_elements)


def fill(tokens: Tensor, pages: Tensor | None, entries: Tensor, tables: Tensor, picked: Tensor, parents: Tensor | None) -> None:
    """`lookahead.fill`; without pages or parents no entry continues a beam."""
    beams = pages is not None and parents is not None
    fill_kernel[(len(entries),)](
        entries, tables if beams else entries, picked, parents if beams else picked, tokens,
        pages if beams else tokens, BEAMS=beams, BLOCK=PAGES, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def inherit(pages: Tensor, entries: Tensor, tables: Tensor, parents: Tensor) -> None:
    """`lookahead.inherit`."""
    pages = bytes_if_small(pages)
    layers, count, page_size, width = pages.shape
    assert pages.stride()[1:] == (page_size * width, width, 1) or count == 1
    if layers:
        grid = (len(entries), layers, triton.cdiv(page_size * width, BLOCK_SIZE))
        inherit_kernel[grid](
            pages, entries, tables, parents, pages.stride(0), page_size * width, width, BLOCK=BLOCK_SIZE,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def compilations() -> list[Compilation]:
    """Both kernels, the copy for elements of two bytes and of one."""
    lists = {"entries": "*i32", "tables": "*i32", "picked": "*i64", "parents": "*i64", "tokens": "*i64", "pages": "*i32"}
    sizes = {"layer_stride": "i64:16", "page_elements": "i32:16", "width": "i32:16"}
    found = [
        Compilation(
            kernel=fill_kernel,
            name=f"fill in {'beams' if beams else 'tokens'}",
            types=lists,
            constants={"BEAMS": beams, "BLOCK": PAGES},
            warps=1,
        )
        for beams in (False, True)
    ]
    for dtype in ("bf16", "i8"):
        types = lists | sizes | {"cache": f"*{dtype}"}
        constants: dict[str, object] = {"BLOCK": BLOCK_SIZE}
        found.append(
            Compilation(kernel=inherit_kernel, name=f"inherit {dtype}", types=types, constants=constants, warps=WARPS, hot=True)
        )
    return found
