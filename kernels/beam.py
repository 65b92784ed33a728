"""Beam search candidates: the best continuations of beams, and the most probable tokens of a row. Knows tensors and ints, no beam
and no hypothesis.

In Triton in one pass over the logits where `dispatch.triton_for` says so; the torch branch is the reference. Of equal ones the
first come first, however many are asked for: what one row gets must not depend on how many its neighbours want.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .dispatch import triton_for
from .transfer import list_to_device, lists_to_device, to_device


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the `count` most probable tokens, best first: [rows, count] float32 and int64.

    logits: [rows, vocabulary] float32; count: at most the vocabulary.
    """
    if triton_for(logits):
        from .fused_top import top

        values, ids, totals = top(logits, count)
        values, order = largest(values, count)
        return values - totals.unsqueeze(1), ids.gather(1, order)
    values, ids = largest(logits, count)
    return values - logits.logsumexp(-1, keepdim=True), ids


def largest(values: Tensor, count: int, any_impossible: bool = False) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of every row, descending, and their columns; of equal ones the first. Both [rows, count].

    values: [rows, n] float32; count: at most n; any_impossible: which of several -inf are found doesn't matter.
    """
    if values.device.type != "cpu":  # there, to learn whether there are ties would mean to wait for the device
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return ordered.values[:, :count], ordered.indices[:, :count]
    found, columns = values.topk(min(count + 1, values.shape[1]))
    equal = found[:, 1:] == found[:, :-1]
    if any_impossible:
        equal &= found[:, 1:] > -torch.inf
    if not equal.any():
        return found[:, :count], columns[:, :count]
    # A row's last number may tie with others that were not found: search for which of these come first.
    for row in equal[:, count - 1 :].any(1).nonzero().flatten().tolist():
        above = columns[row][found[row] > found[row, count - 1]]
        last = (values[row] == found[row, count - 1]).nonzero().flatten()[: count - len(above)]
        columns[row, :count] = torch.cat((above, last))
    columns = columns[:, :count].sort(-1).values
    ordered = values.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered.values, columns.gather(1, ordered.indices)


def normalizers(logits: Tensor) -> Tensor:
    """What is subtracted from a row's logits to get log-probabilities, with the same last bits as in `candidates`: [rows] float32.

    logits: [rows, vocabulary] float32.
    """
    if triton_for(logits):
        from .fused_top import top

        return top(logits, 0)[2]
    return logits.logsumexp(-1)


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of one beam search, a beam each, whose continuations compete with each other."""

    start: int  # its first row
    rows: int
    count: int  # continuations that are considered, at most the vocabulary
    width: int  # beams that live on
    ends: Sequence[int] = ()  # tokens that end a beam


@dataclass(frozen=True, slots=True)
class Continuations:
    """The best continuations of several beam searches, as many of each as of the one that considers most.

    found: [4, sets, count] float64, best first: sums of log-probability and the beam's score, NaN where the logits of any of the
    set's rows are not finite; rows that are continued; ids; log-probabilities. alive: see `living`; None: not computed.
    """

    found: Tensor
    alive: tuple[Tensor, Tensor] | None = None


def continuations(logits: Tensor, scores: Sequence[float], sets: Sequence[RowSet]) -> Continuations:
    """The best continuations of `sets`, whose rows stand one set after the other.

    logits: [rows, vocabulary] float32; scores: of each row's beam so far.
    """
    count = max(one.count for one in sets)
    if triton_for(logits):
        from . import fused_top

        if all(fused_top.mergeable(logits, one.rows) for one in sets):
            numbers = [(one.start, one.rows, one.count, one.width) for one in sets]
            found, alive = fused_top.expand(logits, scores, numbers, [one.ends for one in sets], count)
            return Continuations(found, (alive[0], alive[1]))
    starts = [*(one.start for one in sets), sets[-1].start + sets[-1].rows]
    sums, rows, ids, own = candidates(logits, to_device(torch.tensor(scores), logits.device), starts, count)
    return Continuations(joined(sums, rows, ids, logits[rows, ids] - own[rows], own, starts))


def joined(sums: Tensor, rows: Tensor, ids: Tensor, logprobs: Tensor, own: Tensor, starts: Sequence[int]) -> Tensor:
    """`Continuations.found`. sums, rows, ids, logprobs: [sets, count] each; own: the rows' `normalizers`; starts: as for
    `candidates`."""
    bad = torch.nn.functional.pad((~own.isfinite()).cumsum(0), (1, 0))[list_to_device(own.device, starts)].diff() > 0
    sums = sums.double().masked_fill(bad.unsqueeze(1), torch.nan)
    return torch.stack((sums, rows.double(), ids.double(), logprobs.double()))


def living(found: Tensor, sets: Sequence[RowSet]) -> tuple[Tensor, Tensor]:
    """The continuations that live on, as a search chooses them: of the best `RowSet.count` those that don't end, at most
    `RowSet.width`. Tokens, and indexes of the beams that they continue within the set: `width` of each set, one set after the
    other, int64. Where there are fewer, the surplus entries are some token and some beam.

    found: `Continuations.found`.
    """
    sums, (rows, ids), device = found[0], found[1:3].long(), found.device
    most = max(len(one.ends) for one in sets)
    ends = [[one.count, *one.ends, *[-1] * (most - len(one.ends))] for one in sets]
    wanted = [(i, rank, one.start, one.start + one.rows - 1) for i, one in enumerate(sets) for rank in range(one.width)]
    counts, ending = torch.split(to_device(torch.tensor(ends), device), [1, most], 1)
    own, ranks, first, last = lists_to_device(device, *zip(*wanted, strict=True))
    over = (torch.arange(sums.shape[1], device=device) >= counts) | (ids.unsqueeze(2) == ending.unsqueeze(1)).any(2)
    order = sums.masked_fill(over, -torch.inf).sort(descending=True, stable=True).indices[own, ranks]
    return ids[own, order], torch.minimum(rows[own, order], last) - first


def candidates(logits: Tensor, scores: Tensor, starts: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best continuations of several beam searches: log-probability plus the score of the row (beam) that is continued.

    logits: [rows, vocabulary] float32; scores: [rows] float32; starts: set i is of rows starts[i] to starts[i + 1], at least one;
    count: at most the vocabulary. Result: best first, sums [sets, count] float32, rows and ids [sets, count] int64; then the rows'
    `normalizers`.
    """
    if triton_for(logits):
        from .fused_top import top

        values, ids, totals = top(logits, count)
        return *_of_sets(values - totals.unsqueeze(1) + scores.unsqueeze(1), ids, starts, count), totals
    totals = normalizers(logits)
    # Not log_softmax, whose last bits differ: scores must not depend on whether, say, sampled beams are in the same step.
    return *best((logits - totals.unsqueeze(1)) + scores.unsqueeze(1), starts, count), totals


def best(order: Tensor, starts: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest numbers of each set of rows of `order`, [rows, vocabulary] float32, with their rows and ids."""
    if triton_for(order):
        from .fused_top import top

        values, ids, _ = top(order, count)
    elif _alike(starts):
        count_of_sets, (rows, vocabulary) = len(starts) - 1, order.shape
        found, places = largest(order.reshape(count_of_sets, -1), count, any_impossible=True)
        first = torch.arange(0, rows, rows // count_of_sets, device=order.device).unsqueeze(1)
        return found, places // vocabulary + first, places % vocabulary
    else:
        values, ids = largest(order, count, any_impossible=True)
    return _of_sets(values, ids, starts, count)


def _alike(starts: Sequence[int]) -> bool:
    """Whether all sets have equally many rows."""
    return len({end - start for start, end in pairwise(starts)}) == 1


def _of_sets(values: Tensor, ids: Tensor, starts: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `best`. values, ids: [rows, n], the largest of each row."""
    count_of_sets = len(starts) - 1
    if not _alike(starts):
        # Padded with a row of -inf, which is reported as the last row: nobody uses what is found there.
        width = max(end - start for start, end in pairwise(starts))
        table = [[*range(start, end), *(len(values),) * (width - end + start)] for start, end in pairwise(starts)]
        members = to_device(torch.tensor(table), values.device)
        values = torch.cat((values, values.new_full((1, values.shape[1]), -torch.inf)))[members]
        ids = torch.cat((ids, ids.new_zeros(1, ids.shape[1])))[members]
    found, places = largest(values.reshape(count_of_sets, -1), count, any_impossible=True)
    first = list_to_device(values.device, starts[:-1]).unsqueeze(1)
    rows = (places // values.shape[-1] + first).clamp(max=starts[-1] - 1)
    return found, rows, ids.reshape(count_of_sets, -1).gather(1, places)
