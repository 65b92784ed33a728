"""The expansion step of beam search: the best continuations of all beams, for many groups at once, on the device. Knows rows, no
sequence.

As in transformers, log-softmax comes first, then penalties, bias and masks, without renormalizing; the result is added to the
beams' scores. With a temperature continuations are sampled without replacement: those with the highest score plus Gumbel noise
(Kool et al. 2019, arXiv:1903.06059).
"""

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ...kernels import noise
from ...kernels.beam import Continuations, RowSet, best, continuations, joined, living, normalizers
from ...kernels.sampling import Draws, allow, filtered
from ...kernels.transfer import HostCopy, list_to_device, to_device
from ..step import DeviceSamples
from .hypotheses import Top
from .sampler import PendingPicks, Pick, Row, Tops, draws_of, penalized

IMPOSSIBLE = -math.inf


@dataclass(slots=True)
class Candidate(Pick):
    """A continuation of a beam by one token."""

    row: int = 0  # the rank of the beam that it continues
    score: float = 0.0  # sum of log-probabilities


@dataclass(slots=True)  # many per step: frozen ones take three times as long to make
class Beams:
    """The beams of one group, a row of logits each."""

    rows: Listing[Row]
    scores: Listing[float]  # of each row's beam so far: sum of log-probabilities
    count: int  # candidates wanted, at most the vocabulary's size
    width: int  # live beams after the step
    end_ids: frozenset[int]  # tokens that end a beam


@dataclass(frozen=True, slots=True)
class Expansion:
    """The best continuations of several groups, on the device."""

    sets: Listing[Beams]
    best: Continuations
    tops: Tops | None = None

    @property
    def found(self) -> Tensor:
        """See `Continuations`."""
        return self.best.found

    def received(self) -> "Expansion":
        """As a rank has it that was sent `found`."""
        return replace(self, best=Continuations(self.found))

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
        return DeviceSamples(*(self.best.alive or living(self.found, _row_sets(self.sets))))


def expand(logits: Tensor, sets: Listing[Beams], mask: Tensor | None = None) -> Expansion:
    """Computes the best continuations. logits: [rows, vocabulary] float32, the sets' rows one after the other; mask: see
    `sampler.pick`."""
    rows = [row for beams in sets for row in beams.rows]
    scores = [score for beams in sets for score in beams.scores]
    if mask is None and not any(row.sampling.penalized or row.sampling.temperature for row in rows):
        best = continuations(logits, scores, _row_sets(sets))
    else:
        count = max(beams.count for beams in sets)
        best = _processed(logits, to_device(torch.tensor(scores), logits.device), rows, _starts(sets), count, mask)
    return Expansion(sets, best, Tops(logits, rows, all=True))


def elsewhere(sets: Listing[Beams], device: torch.device) -> Expansion:
    """An empty Expansion, for a rank that receives the result."""
    count = max(beams.count for beams in sets)
    return Expansion(sets, Continuations(torch.empty(4, len(sets), count, dtype=torch.float64, device=device)))


def _row_sets(sets: Listing[Beams]) -> list[RowSet]:
    """The sets without their sampling parameters."""
    return [
        RowSet(start, len(beams.rows), beams.count, beams.width, [*beams.end_ids])
        for beams, start in zip(sets, _starts(sets), strict=False)
    ]


def _starts(sets: Listing[Beams]) -> list[int]:
    """The first row of each set, and the number of all rows."""
    return [0, *accumulate(len(beams.rows) for beams in sets)]


def _candidates(beams: Beams, start: int, found: Listing[Listing[float]], tops: dict[int, Top]) -> list[Pick | None]:
    """A set's candidates on the host. start: its first row; found: its part of `Expansion.found`."""
    if math.isnan(found[0][0]):
        return [None]
    return [
        Candidate(int(token), logprob, tops.get(int(place), ()) if tops else (), False, int(place) - start, total)
        for total, place, token, logprob in list(zip(*found, strict=True))[: beams.count]
        if total > IMPOSSIBLE
    ]


def _processed(
    logits: Tensor, scores: Tensor, rows: Listing[Row], starts: Listing[int], count: int, mask: Tensor | None
) -> Continuations:
    """Like `kernels.beam.continuations`, where some rows have penalties, masks or a temperature."""
    own = normalizers(logits)
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
    sums = values[places, ids].masked_fill(found == -torch.inf, -torch.inf)
    return Continuations(joined(sums, places, ids, logits[places, ids] - own[places], own, starts))


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
