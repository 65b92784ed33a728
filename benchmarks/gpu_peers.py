"""Other implementations of attention, for `gpu.py` to compare with. Each is optional: a missing one is reported.

A peer gets keys and values in the layout that it prefers, beside ours. Its outputs are compared with ours before it is timed.
Kernels of vLLM and SGLang are single files; to have them without the engines, unpack these files of their wheels into one folder,
at the paths that they have there, and name it by --peers:

    vllm/v1/attention/ops/triton_unified_attention.py (and the modules of helpers beside it that newer ones import)
    sglang/srt/layers/attention/triton_ops/decode_attention.py

Whatever they import beside torch and Triton is then replaced by stubs that only say "this is CUDA".
"""

import enum
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.benchmarks.gpu_worlds import World
from penstock.kernels.attention import Row

Answer = Callable[[], Tensor]  # [tokens, heads, size], or what can be viewed as it
Peer = Callable[[World], list[Answer]]  # one for each of the world's copies


class Missing(Exception):
    """The peer isn't installed, or does not support the case."""


def _import(name: str, stand_ins: Callable[[], None] | None = None) -> Any:
    """A module; of an engine that isn't installed as a whole, with stubs for the rest."""
    root = name.partition(".")[0]
    found = importlib.util.find_spec(root)
    if found is None or found.submodule_search_locations is None:
        raise Missing("not installed")
    if stand_ins is not None and found.origin is None:  # a folder of single files has no __init__
        stand_ins()
    return importlib.import_module(name)


def _invented(name: str, **members: Any) -> None:
    """Adds a stub module with these members, unless the module exists."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules.setdefault(name, module)


def _answer(function: Callable[..., object], out: Tensor, arguments: dict[str, Any]) -> Answer:
    """A kernel that writes to `out`, given those arguments that this version of it has."""
    known = inspect.signature(function).parameters
    chosen = {name: value for name, value in arguments.items() if name in known}

    def answer() -> Tensor:
        function(**chosen)
        return out

    return answer


def _tensors(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _starts(counts: Sequence[int], device: torch.device) -> Tensor:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return _tensors(sums, device)


def _lengths(rows: Sequence[Row]) -> list[int]:
    return [row.context + row.queries for row in rows]


def _apart(world: World) -> tuple[Tensor, Tensor]:
    """Keys and values, each [pages, page_size, kv_heads, size] and dense."""
    keys, values = world.cache.view(-1, world.shape.page_size, 2, world.shape.kv_heads, world.shape.size).unbind(2)
    return keys.contiguous(), values.contiguous()


def _no_trees(world: World) -> None:
    if any(row.parents is not None for row in world.rows[0]):
        raise Missing("has no trees")


def sdpa(backend: SDPBackend) -> Peer:
    """torch's SDPA over contiguous keys and values: rows of equal length only, no pages."""

    def prepare(world: World) -> list[Answer]:
        _no_trees(world)
        rows = world.rows[0]
        if len({(row.queries, row.context) for row in rows}) > 1 or (rows[0].queries > 1 and rows[0].context):
            raise Missing("rows of one shape only")
        queries, length, shape = rows[0].queries, rows[0].context + rows[0].queries, world.shape
        asked = world.query.view(len(rows), queries, shape.heads, shape.size).transpose(1, 2)

        def once(some: Sequence[Row]) -> Answer:
            keys, values = _gathered(world, some, length)

            def answer() -> Tensor:
                with sdpa_kernel(backend):
                    found = functional.scaled_dot_product_attention(asked, keys, values, is_causal=queries > 1, enable_gqa=True)
                return found.transpose(1, 2)

            return answer

        return [once(some) for some in world.rows]

    return prepare


def _gathered(world: World, rows: Sequence[Row], length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of rows of one length: each [rows, kv_heads, length, size], a token's heads side by side."""
    pages = torch.tensor([list(row.pages) for row in rows], device=world.device)
    slots = (pages[:, :, None] * world.shape.page_size + torch.arange(world.shape.page_size, device=world.device)).flatten(1)
    part = world.cache[slots[:, :length].flatten()].view(len(rows), length, 2, world.shape.kv_heads, world.shape.size)
    return part[:, :, 0].contiguous().transpose(1, 2), part[:, :, 1].contiguous().transpose(1, 2)


@cache
def _flex() -> Any:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(module.flex_attention, dynamic=False)


def flex(world: World) -> list[Answer]:
    """torch's FlexAttention, compiled; for single queries over pages, through a block mask that leads to them."""
    _no_trees(world)
    if world.device.type != "cuda":
        raise Missing("measured on CUDA only")
    module = importlib.import_module("torch.nn.attention.flex_attention")
    rows, shape = world.rows[0], world.shape
    if rows[0].queries > 1:
        return _flex_causal(world, module)
    if shape.page_size < 128:
        raise Missing("pages of 128 tokens or more")
    paged = importlib.import_module("torch.nn.attention.experimental._paged_attention").PagedAttention
    longest = max(_lengths(rows))
    longest += -longest % shape.page_size
    keys, values = (part.reshape(1, -1, shape.kv_heads, shape.size).transpose(1, 2).contiguous() for part in _apart(world))
    asked = world.query.unsqueeze(2)  # [rows, heads, 1, size]

    def once(some: Sequence[Row]) -> Answer:
        table = paged(world.slots // shape.page_size, shape.page_size, len(some), device=world.device)
        for i, row in enumerate(some):
            wanted = torch.tensor(row.pages, device=world.device)
            table.page_table[i, : len(wanted)] = wanted
            table.physical_to_logical[i, wanted] = torch.arange(len(wanted), device=world.device)
            if hasattr(table, "seq_lens"):  # by which some versions of torch mask what is beyond
                table.seq_lens[i] = row.context + row.queries
        ends = torch.tensor(_lengths(some), device=world.device)
        mask = module.create_block_mask(
            lambda b, h, q, k: k < ends[b], len(some), 1, 1, longest, device=world.device, BLOCK_SIZE=(128, shape.page_size)
        )
        converted = table.convert_logical_block_mask(mask)
        return lambda: _flex()(asked, keys, values, block_mask=converted, enable_gqa=True).squeeze(2)

    return [once(some) for some in world.rows]


def _flex_causal(world: World, module: Any) -> list[Answer]:
    rows, shape = world.rows[0], world.shape
    if len(rows) > 1 or rows[0].context:
        raise Missing("compared with one whole prompt only")
    queries = rows[0].queries
    mask = module.create_block_mask(lambda b, h, q, k: q >= k, None, None, queries, queries, device=world.device)
    asked = world.query.view(1, queries, shape.heads, shape.size).transpose(1, 2)

    def once(some: Sequence[Row]) -> Answer:
        keys, values = _gathered(world, some, queries)
        return lambda: _flex()(asked, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return [once(some) for some in world.rows]


def flashinfer(world: World) -> list[Answer]:
    """FlashInfer's wrappers for paged decode and prefill (written for 0.5). The first use compiles, for minutes."""
    _no_trees(world)
    module = _import("flashinfer")
    keys, values = _apart(world)
    decode = all(row.queries == 1 for row in world.rows[0])
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=world.device)

    def once(some: Sequence[Row]) -> Answer:
        shape, device = world.shape, world.device
        starts = _starts([len(row.pages) for row in some], device)
        pages = _tensors([page for row in some for page in row.pages], device)
        last = _tensors([(length - 1) % shape.page_size + 1 for length in _lengths(some)], device)
        sizes = (shape.heads, shape.kv_heads, shape.size, shape.page_size)
        types = {"q_data_type": shape.dtype, "kv_data_type": world.cache.dtype}
        if decode:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(starts, pages, last, *sizes, **types)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(_starts([row.queries for row in some], device), starts, pages, last, *sizes, causal=True, **types)
        return lambda: wrapper.run(world.query, (keys, values))

    return [once(some) for some in world.rows]


def _vllm_stand_ins() -> None:
    class Mode(enum.IntEnum):
        NONE = 0
        FP8_PER_TENSOR = 1
        INT8_PER_TOKEN_HEAD = 2
        FP8_PER_TOKEN_HEAD = 3
        INT4_PER_TOKEN_HEAD = 4
        INT2_PER_TOKEN_HEAD = 5

    class Platform:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_, **__: torch.float8_e4m3fn if name == "fp8_dtype" else name in ("is_cuda", "is_cuda_alike")

    triton = importlib.import_module("triton")
    _invented("vllm.envs", VLLM_BATCH_INVARIANT=False)
    _invented("vllm.logger", init_logger=logging.getLogger)
    _invented("vllm.platforms", current_platform=Platform())
    _invented("vllm.triton_utils", triton=triton, tl=triton.language, HAS_TRITON=True)
    _invented("vllm.v1.kv_cache_interface", KVQuantMode=Mode)
    _invented("vllm.model_executor.layers.batch_invariant", vllm_is_batch_invariant=lambda: False)
    # `from vllm import envs` looks for an attribute of the package.
    package = importlib.import_module("vllm")
    vars(package).setdefault("envs", sys.modules["vllm.envs"])


SEGMENTS, LEAST_GRID = 16, 128  # as in vLLM's TritonAttentionMetadataBuilder


def vllm(world: World) -> list[Answer]:
    """vLLM's unified Triton kernel, with room for its splits."""
    _no_trees(world)
    function = _import("vllm.v1.attention.ops.triton_unified_attention", _vllm_stand_ins).unified_attention
    keys, values = _apart(world)
    shape, device = world.shape, world.device
    threshold = LEAST_GRID // shape.kv_heads
    room = (threshold, shape.heads, SEGMENTS)

    def once(some: Sequence[Row]) -> Answer:
        widest = max(len(row.pages) for row in some)
        table = [[*row.pages, *(0,) * (widest - len(row.pages))] for row in some]
        out = torch.empty_like(world.query)
        arguments: dict[str, Any] = {
            "q": world.query,
            "k": keys,
            "v": values,
            "out": out,
            "cu_seqlens_q": _starts([row.queries for row in some], device),
            "max_seqlen_q": max(row.queries for row in some),
            "seqused_k": _tensors(_lengths(some), device),
            "max_seqlen_k": max(_lengths(some)),
            "softmax_scale": shape.size**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": torch.tensor(table, dtype=torch.int32, device=device),
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": torch.empty(*room, shape.size, device=device),
            "softmax_segm_max": torch.empty(room, device=device),
            "softmax_segm_expsum": torch.empty(room, device=device),
        }
        return _answer(function, out, arguments)

    return [once(some) for some in world.rows]


def _sglang_stand_ins() -> None:
    members = {name: (lambda: False) for name in ("is_hip", "is_xpu", "is_npu", "is_cpu", "is_musa", "is_gfx95_supported")}
    _invented("sglang.srt.utils", is_cuda=lambda: True, **members)


SPLITS = 8  # SGLang's --triton-attention-num-kv-splits


def sglang(world: World) -> list[Answer]:
    """SGLang's Triton decode kernel, with the most splits that its own heuristic takes."""
    _no_trees(world)
    if any(row.queries > 1 for row in world.rows[0]):
        raise Missing("its decode kernel has one query a row")
    function = _import("sglang.srt.layers.attention.triton_ops.decode_attention", _sglang_stand_ins).decode_attention_fwd
    shape, device, size = world.shape, world.device, world.shape.page_size
    keys, values = (part.view(-1, shape.kv_heads, shape.size) for part in _apart(world))

    def once(some: Sequence[Row]) -> Answer:
        slots = [row.pages[i // size] * size + i % size for row in some for i in range(row.context + row.queries)]
        out = torch.empty_like(world.query)
        arguments: dict[str, Any] = {
            "q": world.query,
            "k_buffer": keys,
            "v_buffer": values,
            "o": out,
            "kv_indptr": _starts(_lengths(some), device),
            "kv_indices": torch.tensor(slots, dtype=torch.int64, device=device),
            "attn_logits": torch.empty(len(some), shape.heads, SPLITS, shape.size, device=device),
            "attn_lse": torch.empty(len(some), shape.heads, SPLITS, device=device),
            "num_kv_splits": torch.full((len(some),), SPLITS, dtype=torch.int32, device=device),
            "max_kv_splits": SPLITS,
            "sm_scale": shape.size**-0.5,
            "k_scale": 1.0,
            "v_scale": 1.0,
        }
        return _answer(function, out, arguments)

    return [once(some) for some in world.rows]


PEERS: dict[str, Peer] = {
    "FlashInfer": flashinfer,
    "vLLM's Triton": vllm,
    "SGLang's Triton": sglang,
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": flex,
}
