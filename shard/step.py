"""From spans of ints to the tensors of one step. The only place where lists become tensors for the forward."""

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import attention
from .sequence import Group, Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """Some tokens of a sequence, to be computed on top of those before: a prompt's chunk, the last sampled token, a token with its
    drafts. Pages for all of them are there. What is before them is computed, or is in another span of the same step."""

    sequence: Sequence
    start: int  # tokens before them
    tokens: Listing[int]
    parents: Listing[int] | None = None  # per token: index of its parent in `tokens`, -1: the token before; None: a chain
    wanted: int = 1  # of how many of the last tokens the logits are wanted


@dataclass(slots=True)
class Run:
    """A group's part of a step."""

    group: Group
    spans: list[Span]
    sampled: bool  # its last wanted rows become tokens
    found: int = 0  # tokens that were cached and are not in `spans`
    problem: str = ""  # why the group can't go on; what is in `spans` is computed all the same, since others may rely on it
    first: int = 0  # of its wanted rows among those of the step

    @property
    def tokens(self) -> int:
        """Query tokens."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def keys(self) -> int:
        """Keys that they see, without windows: each itself and all before it."""
        return sum(len(span.tokens) * (2 * span.start + len(span.tokens) + 1) // 2 for span in self.spans)

    @property
    def wanted(self) -> int:
        """Rows whose logits it wants."""
        return sum(span.wanted for span in self.spans)


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
    rows = [attention.Row(len(s.tokens), s.start, s.sequence.pages, s.parents) for s in spans]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0] * len(spans)
    order = attention.order(rows)
    for i in order:
        span, start, pages = spans[i], spans[i].start, spans[i].sequence.pages
        starts[i] = len(tokens)
        tokens += span.tokens
        places = range(start, start + len(span.tokens))
        positions += places if span.parents is None else [start + depth for depth in attention.ancestry(span.parents)[1]]
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
