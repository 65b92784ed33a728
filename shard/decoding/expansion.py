"""The expansion step of beam search: the best continuations of all beams, for many groups at once, on the device. Knows rows, no
sequence.

As in transformers, log-softmax comes first, then penalties, bias and masks, without renormalizing; the result is added to the
beams' scores. With a temperature continuations are sampled without replacement: those with the highest score plus Gumbel noise
(Kool et al. 2019, arXiv:1903.06059).
"""

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels import noise
from ...kernels.beam import best, candidates, normalizers
from ...kernels.sampling import Draws, allow, filtered
from ...kernels.transfer import HostCopy, list_to_device, lists_to_device, to_device
from ..step import DeviceSamples
from .hypotheses import Top
from .sampler import PendingPicks, Pick, Row, Tops, draws_of, penalized


@dataclass(slots=True)
class Candidate(Pick):
    """A continuation of a beam by one token."""

    row: int = 0  # the rank of the beam that it continues
    score: float = 0.0  # sum of log-probabilities


@dataclass(frozen=True, slots=True)
class Beams:
    """The beams of one group, a row of logits each."""

    rows: Listing[Row]
    scores: Listing[float]  # of each row's beam so far: sum of log-probabilities
    count: int  # candidates wanted, at most the vocabulary's size
    width: int  # live beams after the step
    end_ids: frozenset[int]  # tokens that end a beam


@dataclass(frozen=True, slots=True)
class Expansion:
    """The best continuations of several groups, on the device.

    found: [4, sets, candidates] float64: sums, NaN where logits are not finite; rows that are continued; ids; log-probabilities.
    """

    sets: Listing[Beams]
    found: Tensor
    tops: Tops | None = None

    def pending(self) -> PendingPicks[list[list[Pick | None]]]:
        """The candidates of each set, best first, or in the order in which they were drawn; fewer if there are no more, [None] if
        logits are not finite. On the device: the best that don't end, `width` of each set."""
        arrival = HostCopy(self.found, *(self.tops.tensors if self.tops else ()))

        def take() -> list[list[Pick | None]]:
            found, *top = arrival.lists()
            tops = self.tops.listed(*top) if self.tops else {}
            parts = zip(self.sets, _starts(self.sets), *found, strict=False)
            return [_candidates(beams, start, own, tops) for beams, start, *own in parts]

        return PendingPicks(self._heirs, arrival.wait, take)

    def _heirs(self) -> DeviceSamples:
        """The beams that `beam.BeamSearch` will keep alive, in its order. Where there are fewer, the surplus entries are not
        used."""
        sums, (places, ids), device = self.found[0], self.found[1:3].long(), self.found.device
        most = max(len(beams.end_ids) for beams in self.sets)
        ends = [[beams.count, *beams.end_ids, *[-1] * (most - len(beams.end_ids))] for beams in self.sets]
        wanted = [
            (i, rank, start, start + len(beams.rows) - 1)
            for i, (beams, start) in enumerate(zip(self.sets, _starts(self.sets), strict=False))
            for rank in range(beams.width)
        ]
        counts, ending = torch.split(to_device(torch.tensor(ends), device), [1, most], 1)
        own, ranks, first, last = lists_to_device(device, *zip(*wanted, strict=True))
        over = (torch.arange(sums.shape[1], device=device) >= counts) | (ids.unsqueeze(2) == ending.unsqueeze(1)).any(2)
        order = sums.masked_fill(over, -torch.inf).sort(descending=True, stable=True).indices[own, ranks]
        return DeviceSamples(ids[own, order], torch.minimum(places[own, order], last) - first)


def expand(logits: Tensor, sets: Listing[Beams], mask: Tensor | None = None) -> Expansion:
    """Computes the best continuations. logits: [rows, vocabulary] float32, the sets' rows one after the other; mask: see
    `sampler.pick`."""
    rows, starts = [row for beams in sets for row in beams.rows], _starts(sets)
    scores = to_device(torch.tensor([score for beams in sets for score in beams.scores]), logits.device)
    count = max(beams.count for beams in sets)
    plain = mask is None and not any(row.sampling.penalized or row.sampling.temperature for row in rows)
    if plain:
        sums, places, ids, own = candidates(logits, scores, starts, count)
    else:
        own = normalizers(logits)
        sums, places, ids = _processed(logits, own, scores, rows, starts, count, mask)
    logprobs = logits[places, ids] - own[places]
    bad = torch.nn.functional.pad((~own.isfinite()).cumsum(0), (1, 0))[list_to_device(logits.device, starts)].diff() > 0
    found = torch.stack((sums.double().masked_fill(bad.unsqueeze(1), torch.nan), places.double(), ids.double(), logprobs.double()))
    return Expansion(sets, found, Tops(logits, rows, all=True))


def elsewhere(sets: Listing[Beams], device: torch.device) -> Expansion:
    """An empty Expansion, for a rank that receives the result."""
    return Expansion(sets, torch.empty(4, len(sets), max(beams.count for beams in sets), dtype=torch.float64, device=device))


def _starts(sets: Listing[Beams]) -> list[int]:
    """The first row of each set, and the number of all rows."""
    return [0, *accumulate(len(beams.rows) for beams in sets)]


def _candidates(beams: Beams, start: int, found: Listing[Listing[float]], tops: dict[int, Top]) -> list[Pick | None]:
    """A set's candidates on the host. start: its first row; found: its part of `Expansion.found`."""
    if math.isnan(found[0][0]):
        return [None]
    return [
        Candidate(int(token), logprob, tops.get(int(place), ()), False, int(place) - start, total)
        for total, place, token, logprob in list(zip(*found, strict=True))[: beams.count]
        if total > -torch.inf
    ]


def _processed(
    logits: Tensor, own: Tensor, scores: Tensor, rows: Listing[Row], starts: Listing[int], count: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `kernels.beam.candidates`, where some rows have penalties, masks or a temperature."""
    values = penalized(logits - own.unsqueeze(1), rows)
    if mask is not None:
        values = allow(values, mask)
    if drawn := [i for i, row in enumerate(rows) if row.sampling.temperature]:
        lines, draws = list_to_device(logits.device, drawn), draws_of([rows[i] for i in drawn], logits.device)
        values = _warped(values, lines, draws)
    values = order = values + scores.unsqueeze(1)
    if drawn:
        order = values.index_add(0, lines, noise.gumbel_all(draws.seeds, draws.choices, draws.positions, logits.shape[1]))
    found, places, ids = best(order, starts, count)
    return values[places, ids].masked_fill(found == -torch.inf, -torch.inf), places, ids


def _warped(values: Tensor, lines: Tensor, draws: Draws) -> Tensor:
    """Log-probabilities divided by temperature, -inf where filtered out, for the rows that are sampled: `lines`."""
    result = values.clone()
    shift = values[lines].amax(-1) / draws.temperature
    for part in filtered(values[lines], draws):
        warped = part.scores + shift[part.rows].unsqueeze(1)
        if part.ids is not None:
            whole = torch.full((len(part.rows), values.shape[1]), -torch.inf, device=values.device)
            warped = whole.scatter_(1, part.ids, warped)
        result[lines[part.rows]] = warped
    return result.masked_fill_(result.isnan(), -torch.inf)  # of a beam for which the grammar allows nothing
