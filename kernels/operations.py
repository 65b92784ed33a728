"""Elementwise operations of a decoder layer (norms, activations, rotary embedding, KV cache writes), as models call them: in Triton
where `dispatch.triton_for` says so, else in plain torch.

Single operations are defined in `reference.py`; fused ones are defined here, by their torch branch. Triton is imported in the
branches that use it, since a machine without an accelerator may lack it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from . import reference
from .dispatch import triton_for
from .indexed import EPSILON
from .reference import PLAIN, Activation


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`reference.rms_norm` of x [rows, size] or [tokens, heads, size]; a new tensor."""
    if triton_for(x):
        from .fused_norm import rms_norm as fused

        return fused(x, weight, epsilon, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return reference.rms_norm(x, weight, epsilon)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of residual + x; `residual` becomes that sum, in place. All [rows, size]; the result may be x, overwritten.

    x may instead be split-K partial products, [parts, rows, size] float32: they are added up first, and rounded only with the
    residual.
    """
    if triton_for(x):
        from .fused_norm import rms_norm as fused

        return fused(x, weight, epsilon, x if x.dim() == 2 else torch.empty_like(residual), residual)
    return reference.rms_norm(residual.add_(x if x.dim() == 2 else x.sum(0)), weight, epsilon)


def layer_norm(x: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """Layer norm of x [rows, size] (Ba et al. 2016, arXiv:1607.06450), by torch; weights: [2, size], gains and biases."""
    return functional.layer_norm(x, weights.shape[1:], weights[0], weights[1], epsilon)


def gated(gate_up: Tensor, how: Activation = PLAIN) -> Tensor:
    """`reference.gated`; a new tensor."""
    if triton_for(gate_up):
        from .fused_activation import gated as fused

        tokens, twice = gate_up.shape
        return fused(gate_up, torch.empty(tokens, twice // 2, dtype=gate_up.dtype, device=gate_up.device), how)
    return reference.gated(gate_up, how)


def rotate_and_write(
    joint: Tensor,
    table: Tensor,
    slots: Tensor,
    cache: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    scales: Tensor | None = None,
    normal_values: bool = False,
    shared: bool = False,
) -> Tensor:
    """Query and key norms, rotary embedding, and the write of keys and values to the KV cache, in one pass.

    joint: [tokens, (heads + 2 * kv_heads) * size], queries, keys, values side by side; its queries are overwritten, and the content
    of its keys afterwards is undefined; table: of `reference.rotary_table`; slots: [tokens], distinct; where negative (padding)
    nothing is written; cache: a layer [slots, 2, kv_heads, size], or [slots, 1, kv_heads, size] without values, which joint then
    lacks, too; weights: of the norms of queries and keys, [size], both or neither; scales: [2, kv_heads] float32, by which keys and
    values are divided before they are written to an 8-bit cache; normal_values: values have an RMS norm without weights as well;
    shared: joint has no values: they are its keys before norm and rotation. Result: [tokens, heads, size], the rotated queries, a
    view of joint.
    """
    if triton_for(joint):
        from .fused_rotary import rotate_and_write as fused

        return fused(joint, table, slots, cache, query_weight, key_weight, epsilon, scales, normal_values, shared)
    kinds, kv_heads, size = cache.shape[1:]
    if shared:
        joint = torch.cat((joint, joint[:, -kv_heads * size :]), 1)
    every = joint.view(len(joint), joint.shape[1] // size, size)
    heads = every.shape[1] - kinds * kv_heads
    turned = every[:, : heads + kv_heads]
    if query_weight is not None and key_weight is not None:
        turned[:, :heads] = reference.rms_norm(turned[:, :heads], query_weight, epsilon)
        turned[:, heads:] = reference.rms_norm(turned[:, heads:], key_weight, epsilon)
    if normal_values:
        values = every[:, heads + kv_heads :]
        values[:] = reference.rms_norm(values, values.new_ones(size), epsilon)
    reference.rotate(turned, table)
    write(slots, joint[:, heads * size :], cache, scales)
    return every[:, :heads]


def rotate(queries: Tensor, table: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """The norm and rotary embedding of queries alone, in place: [tokens, heads * size]. Result: [tokens, heads, size]."""
    size = table.shape[-1]
    if triton_for(queries):
        from .fused_rotary import rotate as fused

        return fused(queries, table, weight, epsilon)
    every = queries.view(len(queries), -1, size)
    if weight is not None:
        every[:] = reference.rms_norm(every, weight, epsilon)
    return reference.rotate(every, table)


def rotate_and_write_latents(
    query: Tensor, latents: Tensor, gains: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float
) -> None:
    """The same for MLA latents, where keys and values are one (DeepSeek-AI 2024, arXiv:2405.04434): RMS norm of the latent, rotary
    embedding of the features behind it and behind queries, and the cache write.

    query: [tokens, heads, any + turned], whose last `turned` features are rotated in place; latents: [tokens, size + turned],
    their content afterwards is undefined; gains: [size]; table: of `reference.rotary_table`, for `turned` features; slots: as
    above; cache: a layer [slots, 1, 1, size + turned].
    """
    if triton_for(query):
        from .fused_latents import rotate_and_write_latents as fused

        return fused(query, latents, gains, table, slots, cache, epsilon)
    size = len(gains)
    reference.rotate(query[..., query.shape[2] - latents.shape[1] + size :], table)
    turned = reference.rotate(latents[:, size:].unsqueeze(1), table).squeeze(1)
    write(slots, torch.cat((reference.rms_norm(latents[:, :size], gains, epsilon), turned), 1), cache)
    return None


def rotate_and_write_index(
    queries: Tensor, keys: Tensor, norm: Tensor, table: Tensor, slots: Tensor, cache: Tensor, epsilon: float = EPSILON
) -> None:
    """The same for a sparse attention indexer (`indexed`): layer norm of its keys, rotary embedding of queries and keys, and the
    cache write.

    queries: [tokens, heads, size], whose first features, as many as `table` has, are rotated in place; keys: [tokens, size]; norm:
    [2, size], gains and biases; cache: the part of a layer behind the latents, [slots, 1, 1, size].
    """
    if triton_for(queries):
        from .fused_index import rotate_and_write_index as fused

        return fused(queries, keys, norm, table, slots, cache, epsilon)
    turned = table.shape[-1]
    reference.rotate(queries[..., :turned], table)
    keys = layer_norm(keys, norm, epsilon)
    reference.rotate(keys[:, :turned].unsqueeze(1), table)
    write(slots, keys, cache)
    return None


def write(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None = None) -> None:
    """Writes rows, [tokens, all that a slot holds], keys first, to `slots` of a layer; skips negative slots. For an 8-bit cache,
    values are divided by `scales` and clamped."""
    if len(slots) and int(slots.min()) < 0:
        kept = slots >= 0
        slots, rows = slots[kept], rows[kept]
    flat = cache.view(len(cache), -1)
    if cache.dtype == rows.dtype:
        flat.index_copy_(0, slots, rows)
        return
    if scales is not None:
        rows = (rows.float().view(-1, *cache.shape[1:]) / scales[..., None]).flatten(1)
    most = torch.finfo(cache.dtype).max  # larger numbers would become NaN
    stored = rows.float().clamp(-most, most).to(cache.dtype)
    flat.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))  # torch cannot copy 8-bit floats by index
