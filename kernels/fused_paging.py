"""Page copies and slot moves in Triton, in all layers at once. `paging.py` has the reference.

    pages[layer, targets[i], :filled[i]] = pages[layer, sources[i], :filled[i]]         for all i at once
    slots[layer, targets[i]] = slots[layer, sources[i]]                                 for the i of a row one after the other

A program copies BLOCK_SIZE elements of one page in one layer, or moves as many of each slot of one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compilation import Compilation

BLOCK_SIZE = 2048  # elements per program; of two bytes in 4 warps they are two loads of 16 bytes a thread
WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "filled"])
def copy_kernel(
    pages: tl.tensor,  # [layers, pages, page_size * width]
    sources: tl.tensor,  # [copies]
    targets: tl.tensor,
    filled: tl.tensor,
    layer_stride: tl.tensor,
    page_elements: tl.tensor,  # page_size * width
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copies BLOCK elements of one page in one layer."""
    copy = tl.program_id(0)
    layer = pages + tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wanted = element < tl.load(filled + copy) * width
    source = tl.load(sources + copy).to(tl.int64) * page_elements
    target = tl.load(targets + copy).to(tl.int64) * page_elements
    tl.store(layer + target + element, tl.load(layer + source + element, mask=wanted), mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "starts"])
def move_kernel(
    slots: tl.tensor,  # [layers, slots, width]
    sources: tl.tensor,  # [moves]
    targets: tl.tensor,
    starts: tl.tensor,  # [rows + 1]
    layer_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Moves BLOCK elements of every slot of one row, in one layer."""
    row = tl.program_id(0)
    layer = slots + tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = element < width
    for move in range(tl.load(starts + row).to(tl.int32), tl.load(starts + row + 1).to(tl.int32)):
        source, target = tl.load(sources + move).to(tl.int64), tl.load(targets + move).to(tl.int64)
        values = tl.load(layer + source * width + element, mask=inside)
        tl.debug_barrier()  # a later target may be an earlier source: no thread writes before all have read
        tl.store(layer + target * width + element, values, mask=inside)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor, filled: Tensor) -> None:
    """`paging.copy_pages`."""
    pages = bytes_if_small(pages)
    layers, count, page_size, width = pages.shape
    assert pages.stride()[1:] == (page_size * width, width, 1) or count == 1
    if len(sources) and layers:
        grid = (len(sources), layers, triton.cdiv(page_size * width, BLOCK_SIZE))
        copy_kernel[grid](
            pages, sources, targets, filled, pages.stride(0), page_size * width, width, BLOCK=BLOCK_SIZE, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


def move_slots(slots: Tensor, sources: Tensor, targets: Tensor, starts: Tensor) -> None:
    """`paging.move_slots`."""
    slots = bytes_if_small(slots)
    layers, _, width = slots.shape
    assert slots.stride()[1:] == (width, 1)
    if len(sources) and layers:
        grid = (len(starts) - 1, layers, triton.cdiv(width, BLOCK_SIZE))
        move_kernel[grid](
            slots, sources, targets, starts, slots.stride(0), width, BLOCK=BLOCK_SIZE, num_warps=WARPS, enable_fp_fusion=False
        )


def bytes_if_small(x: Tensor) -> Tensor:
    """8-bit floats viewed as integers: some accelerators can't load them as floats."""
    return x.view(torch.int8) if x.element_size() == 1 else x


def compilations() -> list[Compilation]:
    """Both kernels, for elements of two bytes and of one."""
    found = []
    for dtype in ("bf16", "i8"):
        pointers = {"sources": "*i64", "targets": "*i64"}
        sizes = {"layer_stride": "i64:16", "width": "i32:16"}
        copies = {"pages": f"*{dtype}", **pointers, "filled": "*i64", **sizes, "page_elements": "i32:16"}
        moves = {"slots": f"*{dtype}", **pointers, "starts": "*i64", **sizes}
        for name, kernel, signature in (("page copy", copy_kernel, copies), ("slot move", move_kernel, moves)):
            found.append(
                Compilation(
                    kernel=kernel,
                    name=f"{name} {dtype}",
                    types=signature,
                    constants={"BLOCK": BLOCK_SIZE},
                    warps=WARPS,
                    hot=True,
                )
            )
    return found
