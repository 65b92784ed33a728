"""Prefill attention on Hopper: work items of `paged_attention` with many rows, by a warp-specialized kernel (`hopper_kernels`).

Measured on an H200, 2026-11-26 (torch 2.11, Triton 3.6.0), 32 query heads, 8 key heads of 128 features, bfloat16, pages of 16: a
prompt of 8,192 tokens in 931 us, 590 TFLOP/s, 0.760 of what a product of 8,192^3 does, where `paged_kernels.attend` takes 1,435 us;
512 tokens behind 7,680 in 108 us, 0.796 (192 us), if items are not cut.

It takes no part in `dependent_launch`: it begins when all kernels before it are over. It may be captured in a CUDA graph, since
TMA's descriptor of the cache is an argument, which a graph keeps by value.
"""

import logging
from functools import cache as remembered

import torch
import triton
from torch import Tensor
from triton import knobs

from .attention import AttentionOptions
from .compilation import Compilation
from .layout import LayerKind
from .work_list import Tile

logger = logging.getLogger(__name__)
INTERPRET = bool(knobs.runtime.interpret)  # the interpreter knows no Gluon
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Gluon is an experiment of Triton's, and changes: the kernel compiles with all of these versions, and has run with the first.
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))
MISSING = ""  # why the kernel is unavailable
try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper_kernels import attend_many

    LAYOUT = NVMMASharedLayout(128, 16, 2)  # of keys and values in shared memory: bytes of a swizzle, bits of a number, dimensions
except (ImportError, AttributeError) as problem:
    MISSING = str(problem)

TILE = Tile(128, 128, 8, 4)  # the tile whose items it takes: the largest of `paged_attention.tiles_of` for 128 features
SIZE = 128
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Page sizes it can take. A tile of keys is whole pages. TMA's 128-byte swizzle has a period of 8 rows, so that a box of fewer would
# begin within one (CUDA C++ Programming Guide, "Tensor Memory Access"); in PTX boxes of 8 rows begin at multiples of 1,024 bytes of
# a tile.
PAGES = (8, 16, 32, 64, 128)
CONSUMERS = 2
STAGES = 3  # tiles of keys, and of values, in shared memory: 224 KiB with queries
WARPS = 4  # warps of the first consumer; the second has as many, and the producer one
REGISTERS = 240  # registers of a thread of the second consumer; the first one's are what is left of 64 Ki
FEW = 24  # registers of a thread of the producer


def able(query: Tensor, cache: Tensor, kind: LayerKind, tile: Tile, page_size: int, how: AttentionOptions) -> bool:
    """Whether items of that tile may be given to `attend`. query, cache: as those of `paged_attention.attention`."""
    return (
        tile == TILE
        and kind.size == SIZE
        and page_size in PAGES
        and query.dtype in TYPES
        and cache.dtype == query.dtype
        and not (kind.latent or how.latent or how.turned or kind.window or how.window or how.softcap)
        and how.scales is None
        and how.sinks is None
        and _there(query.device)
        and _aligned(cache)
    )


def _aligned(cache: Tensor) -> bool:
    """Whether the cache meets TMA's alignment: it reads from multiples of 16 bytes."""
    return cache.data_ptr() % 16 == 0 and cache.stride(0) % 8 == 0 and cache.stride(1) % 8 == 0


@remembered
def _there(device: torch.device) -> bool:
    if device.type != "cuda" or INTERPRET or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if MISSING or VERSION not in VERSIONS:
        why = MISSING or "a version that it has not been compiled by"
        logger.info("Triton %s: prompts go without the attention that is made for Hopper (%s)", triton.__version__, why)
        return False
    return True


def attend(
    output: Tensor,
    partials: Tensor,
    weights: Tensor,
    query: Tensor,
    cache: Tensor,
    items: Tensor,
    listed: Tensor,
    positions: Tensor,
    masks: Tensor,
    pages: Tensor,
    kind: LayerKind,
    page_size: int,
    scale: float,
    trees: bool,
    processors: int,
) -> None:
    """Computes `items`, at least one, if it is `able`: writes outputs and partials as `paged_kernels.attend` does.

    output: [tokens, heads, 128]; partials: [pieces, heads, 128] float32; weights: [pieces, heads] float32; query: [tokens, heads,
    128], with any stride between tokens; cache: [slots, 2, kv_heads, 128]; items: [items, 8] int32, sorted by length, of draft
    trees only if `trees`; the rest is from a plan.
    """
    places = len(items) * kind.kv_heads
    programs = min(places, processors)  # one fills a processor's shared memory
    attend_many[(programs,)](
        output,
        partials,
        weights,
        query,
        descriptor(cache, page_size),
        items,
        listed,
        positions,
        masks,
        pages,
        query.stride(0),
        scale,
        places,
        -(-places // programs),
        **constants(kind.kv_heads, kind.ratio, cache.stride(1), page_size, trees),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def descriptor(cache: Tensor, page_size: int) -> "TensorDescriptor":
    """TMA's descriptor of a cache: rows of features, from the first key to the last value. Where the cache is some of a slot's
    heads, rows are further apart than they are long. Boxes are a page and a head.

    It is made anew with each launch, in 5 us; the device gets what Triton makes of it at that time.
    """
    features = cache.stride(1) + cache.shape[2] * cache.shape[3]
    return TensorDescriptor(cache, [cache.shape[0], features], [cache.stride(0), 1], [page_size, SIZE], LAYOUT)


def constants(kv_heads: int, ratio: int, apart: int, page_size: int, trees: bool) -> dict[str, object]:
    """Compile-time constants of a launch. apart: elements between a slot's keys and its values."""
    return {
        "KV_HEADS": kv_heads,
        "RATIO": ratio,
        "SIZE": SIZE,
        "APART": apart,
        "PAGE": page_size,
        "ROWS": TILE.rows // CONSUMERS,
        "KEYS": TILE.keys,
        "STAGES": STAGES,
        "TREES": trees,
        "REGISTERS": REGISTERS,
        "FEW": FEW,
    }


def compilations() -> list[Compilation]:
    """Every page size, other dtypes and other ratios of heads."""
    if MISSING:
        return []
    return [
        *(_compilation(page_size, hot=page_size > 8) for page_size in PAGES),
        _compilation(16, dtype=torch.float16, hot=True),
        *(_compilation(16, ratio=ratio, hot=True) for ratio in (1, 2, 8)),
        _compilation(128, ratio=1, hot=True),  # expanded latents of Mistral Small 4
        *(_compilation(16, ratio=ratio) for ratio in (5, 7, 16)),
        *(_compilation(page_size, trees=True) for page_size in (16, 64)),
    ]


def _compilation(
    page_size: int, *, ratio: int = 4, dtype: torch.dtype = torch.bfloat16, trees: bool = False, hot: bool = False
) -> Compilation:
    """hot: nothing may be spilled. In the unmasked loop, which is most of an item, nothing ever is. But 8 to 40 bytes of the rows'
    attributes are, if rows are not divided by a small power of 2; with pages of 8 the page numbers are, by the producer; with
    trees, in the masks, 40 bytes; and from Triton 3.8 on key indices of a tile, which only masks need: 16 bytes, with 3.9 168."""
    short = TYPES[dtype]
    signature = {
        "output": f"*{short}",
        "partials": "*fp32",
        "weights": "*fp32",
        "query": f"*{short}",
        "descriptor": f"tensordesc<{short}[{page_size}, {SIZE}],{LAYOUT!r}>",
        **dict.fromkeys(("items", "listed", "positions", "masks", "pages"), "*i32"),
        "query_stride": "i32:16",
        "scale": "fp32",
        "places": "i32",
        "rounds": "i32",
    }
    return Compilation(
        kernel=attend_many,
        name=f"hopper attend many {SIZE} {short} ratio {ratio} page {page_size}{' trees' * trees}",
        types=signature,
        constants=constants(8, ratio, 8 * SIZE, page_size, trees),
        warps=WARPS,
        fuse=True,
        hot=hot and VERSION < (3, 8),
        targets=("sm_90",),
    )
