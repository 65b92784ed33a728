"""Attention of a step in plain torch. Rows that begin with the same pages (beams, samples, a common prompt) read those once.

What a token finds among the keys that it has in common with others and among its own is merged by log-sum-exp, as in Hydragen
(Juravsky et al. 2024, arXiv:2402.05099). Only rows of one query share: others do enough with a key that they have read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from . import attention as plain
from .attention import Block, Row, View
from .indexed import Asked
from .work import Run, runs_of


@dataclass(frozen=True, slots=True)
class Level:
    """Common keys of rows that have no other common keys after the level before."""

    tokens: Tensor  # that read them; the blocks' queries are these
    blocks: list[Block]  # a run of pages is a row of theirs


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, for all layers."""

    blocks: list[Block]  # what each row reads alone
    levels: list[Level]  # what rows read together; each continues the one before


def plan(
    rows: Sequence[Row], page_size: int, windows: Sequence[int], elements: int, device: torch.device, special: bool = False
) -> tuple[list[int], Plan]:
    """The order in which `rows` have to stand in the step, and its plan; arguments as those of `attention.blocks`.

    special: attention has a softcap, or sinks, or an index.
    """
    # torch tells the sums that a merge needs on CPUs only. Behind a window rows see different parts of what they have in common.
    able = device.type == "cpu" and not (special or any(windows))
    levels: list[list[Run]] = []
    depths, own = [0] * len(rows), list(rows)
    for run in runs_of(rows, page_size, 1) if able else ():
        if depths[run.members[0]] == len(levels):
            levels.append([])
        levels[depths[run.members[0]]].append(run)
        for i in run.members:
            depths[i] += 1
            own[i] = Row(1, rows[i].context - run.end * page_size, rows[i].pages[run.end :])
    order = plain.order(own)
    blocks = plain.blocks([own[i] for i in order], page_size, windows, elements, device)
    tokens = {row: token for token, row in enumerate(order)}  # rows of one query come first
    return order, Plan(blocks, [_level(level, rows, tokens, page_size, elements, device) for level in levels])


def _level(
    runs: Sequence[Run], rows: Sequence[Row], tokens: dict[int, int], page_size: int, elements: int, device: torch.device
) -> Level:
    pages = [rows[run.members[0]].pages[run.begin : run.end] for run in runs]
    joint = [Row(len(run.members), len(own) * page_size - len(run.members), own) for run, own in zip(runs, pages, strict=True)]
    order = plain.order(joint)
    blocks, start = [], 0
    for part in plain.split([joint[i] for i in order], elements):
        slots = plain.slots_of(part, page_size)
        lengths = numpy.array([[[row.queries + row.context]] for row in part])
        view = plain.view_of(slots, numpy.arange(slots.shape[1]) < lengths, device)
        blocks.append(Block(start, len(part), part[0].queries, {0: view}, False))
        start += len(part) * part[0].queries
    return Level(torch.tensor([tokens[i] for k in order for i in runs[k].members], device=device), blocks)


def follow(plan: Plan, slots: Tensor) -> Plan | None:
    """The plan of one token more for each row of `plan`, in the same order: it sees what the row's last query saw, and itself. None
    where there are windows. For a few steps: nobody looks for more common keys, or larger blocks.

    slots: [rows] int64, of the new tokens. Keys may stand in any order, so they are the last ones, behind padding, too.
    """
    if any(set(block.views) != {0} for block in plan.blocks):
        return None
    blocks, start = [], 0
    for block in plan.blocks:
        view, own = block.views[0], slots[start : start + block.rows]
        table = torch.cat((view.slots.view(block.rows, -1), own.unsqueeze(1)), 1).flatten()
        mask = functional.pad(view.mask[:, :, -1:], (0, 1)) if view.mask is not None and block.rows > 1 else None
        blocks.append(Block(start, block.rows, 1, {0: View(view.length + 1, table, mask)}, False))
        start += block.rows
    return Plan(blocks, plan.levels)


def attention(
    query: Tensor,
    cache: Tensor,
    plan: Plan,
    window: int,
    scale: float,
    softcap: float = 0.0,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    asked: Asked | None = None,
) -> Tensor:
    """As `attention.attention`."""
    if not plan.levels:
        return plain.attention(query, cache, plan.blocks, window, scale, softcap, scales, sinks, asked)
    assert not softcap
    assert sinks is None
    assert asked is None
    single = [block for block in plan.blocks if block.queries == 1]
    answer, weight = _find(query, cache, single, scale, scales)
    for level in plan.levels:
        _merge(answer, weight, level.tokens, *_find(query[level.tokens], cache, level.blocks, scale, scales))
    others = plan.blocks[len(single) :]
    return torch.cat((answer, plain.attention(query, cache, others, window, scale, scales=scales))) if others else answer


Found = tuple[Tensor, Tensor]
"""Answers [tokens, heads, size], and the logarithms of what their softmaxes divided by, [tokens, heads] float32."""


def _find(query: Tensor, cache: Tensor, blocks: Sequence[Block], scale: float, scales: Tensor | None) -> Found:
    parts = [_attend(query, cache, block, scale, scales) for block in blocks]
    return (torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])) if len(parts) > 1 else parts[0]


def _attend(query: Tensor, cache: Tensor, block: Block, scale: float, scales: Tensor | None) -> Found:
    """Of a block whose queries all see the same."""
    view, heads = block.views[0], query.shape[1]
    keys, values = plain.gather(cache, view.slots, block.rows, query.dtype, scales)
    kv_heads = keys.shape[1]
    asked = query[block.start : block.start + block.rows * block.queries]
    tile = plain.folded(asked, block.rows, kv_heads)
    # What `scaled_dot_product_attention` calls on a CPU and does not pass on: the sums.
    answer, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        tile, keys, values, attn_mask=view.mask if view.mask is None else view.mask.to(query.dtype), scale=scale
    )
    weight = weight.view(block.rows, kv_heads, block.queries, -1).transpose(1, 2).reshape(-1, heads)
    return plain.unfolded(answer, block.queries), weight.float()


def _merge(answer: Tensor, weight: Tensor, tokens: Tensor, other: Tensor, other_weight: Tensor) -> None:
    """Takes what `tokens` found in other keys into the answers and weights of all, in place."""
    own = weight[tokens]
    both = torch.logaddexp(own, other_weight)
    found = answer[tokens] * (own - both).exp().unsqueeze(2) + other * (other_weight - both).exp().unsqueeze(2)
    answer[tokens], weight[tokens] = found.to(answer.dtype), both
