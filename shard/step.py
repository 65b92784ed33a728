"""From spans of ints to the tensors of one step. The only place where lists become tensors for the forward."""

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import attention
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """Some next tokens of a sequence, to be computed on top of what is computed: a prompt's chunk, the last sampled token, a
    token with its drafts. Pages for all of them are there."""

    sequence: Sequence
    tokens: Listing[int]
    parents: Listing[int] | None = None  # per token: index of its parent in `tokens`, -1: the last computed token; None: a chain
    wanted: int = 1  # of how many of the last tokens the logits are wanted


@dataclass(frozen=True, slots=True)
class Step:
    """A forward's input: all spans' tokens one after the other."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, for rotary
    slots: Tensor  # [tokens] int64: where each token's key and value go
    blocks: list[attention.Block]
    rows: Tensor  # [rows] int64: the tokens whose logits are wanted, in the order of the spans


def plan(spans: Listing[Span], page_size: int, windows: Listing[int], elements: int, device: torch.device) -> Step:
    """The step that computes `spans`.

    windows: the distinct ones of the model's layers; elements: keys' and values' per token and layer, on this rank.
    """
    rows = [attention.Row(len(s.tokens), s.sequence.computed, s.sequence.pages, s.parents) for s in spans]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0] * len(spans)
    order = attention.order(rows)
    for i in order:
        span, computed, pages = spans[i], spans[i].sequence.computed, spans[i].sequence.pages
        starts[i] = len(tokens)
        tokens += span.tokens
        places = range(computed, computed + len(span.tokens))
        positions += places if span.parents is None else [computed + depth for depth in attention.ancestry(span.parents)[1]]
        slots += [pages[place // page_size] * page_size + place % page_size for place in places]
    return Step(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        blocks=attention.blocks([rows[i] for i in order], page_size, windows, elements, device),
        rows=torch.tensor(_rows(spans, starts), dtype=torch.int64, device=device),
    )


def _rows(spans: Listing[Span], starts: Listing[int]) -> list[int]:
    ends = [start + len(span.tokens) for span, start in zip(spans, starts, strict=True)]
    return [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.wanted, end)]
