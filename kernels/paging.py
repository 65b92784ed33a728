"""Copies within the paged KV cache, over all layers at once: pages (forks) and slots (commits of accepted tree drafts). Knows
tensors only.

One Triton launch where `dispatch.triton_for` says so; the torch branch is the reference.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .dispatch import triton_for


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor, filled: Tensor) -> None:
    """Copies the first `filled[i]` slots of page `sources[i]` to page `targets[i]`, in every layer; the rest of a target stays.

    pages: [layers, pages, page_size, width], dense but for the layers; sources, targets, filled: [copies] int64 on its device.
    Targets are distinct, and none is a source.
    """
    if triton_for(pages):
        from .fused_paging import copy_pages as fused

        fused(pages, sources, targets, filled)
        return
    copy_each(held(pages), zip(sources.tolist(), targets.tolist(), filled.tolist(), strict=True))


def copy_each(pages: Any, copies: Iterable[tuple[int, int, int]]) -> None:
    """`copy_pages` for numpy arrays or tensors. copies: source, target, and number of filled slots of each."""
    for source, target, count in copies:
        pages[:, target, :count] = pages[:, source, :count]


def move_slots(slots: Tensor, sources: Tensor, targets: Tensor, starts: Tensor) -> None:
    """Moves slot `sources[i]` to slot `targets[i]` in every layer. Moves of a row, `starts[r]` to `starts[r + 1]`, are done one
    after the other, so that a slot may be moved away and then be moved to; rows have no slot in common.

    slots: [layers, slots, width], dense but for the layers; sources, targets: [moves], starts: [rows + 1], int64 on its device.
    """
    if triton_for(slots):
        from .fused_paging import move_slots as fused

        fused(slots, sources, targets, starts)
        return
    slots_held = held(slots)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        slots_held[:, target] = slots_held[:, source]


def held(x: Tensor) -> Any:
    """A view of the same memory, on CPUs as numpy bytes: numpy copies small pieces in a quarter of torch's time."""
    return x.view(torch.uint8).numpy() if x.device.type == "cpu" else x
