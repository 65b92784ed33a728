"""Token sampling: penalties, grammar masks, temperature and filters (top-k, top-p, min-p, typical-p), then one token for each row
of logits, a batch at once. Knows rows of logits and their parameters, not the sequences that they belong to.

Everything runs on rank 0: the other ranks receive the tokens.
"""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch import Tensor

from ...kernels import noise
from ...kernels.beam import RowSet, continuations, largest, most_probable
from ...kernels.dispatch import triton_for
from ...kernels.sampling import Draws, Filtered, Penalties, allow, filtered, first_largest, penalize, perturbed
from ...kernels.transfer import HostCopy, list_to_device, lists_to_device, to_device
from ..sequence import Sampling
from ..step import DeviceSamples
from .hypotheses import Top
from .token_counts import Entries, TokenCounts

NO_ENTRIES = Entries(array("i"), array("i"), array("f"), {})


@dataclass(frozen=True, slots=True)
class KeptDraws:
    """What `draws_of` has made of rows with these parameters."""

    samplings: list[Sampling]
    choices: list[int]
    device: torch.device
    draws: Draws


_kept: KeptDraws | None = None


@dataclass(slots=True)  # created many times a step: frozen ones take three times as long
class Row:
    """One row of logits to sample from: its sampling parameters, and the tokens that precede it."""

    sampling: Sampling
    tokens: Listing[int]  # prompt and output so far, which penalties count
    prompt_length: int
    choice: int  # index among the request's choices: part of the noise's key
    top_n: int = 0  # most probable tokens to report, with their log-probabilities
    bound: bool = False  # by a grammar: a mask is applied
    counts: TokenCounts | None = None  # of its sequence, where penalties need them; None: counted for this step alone
    drafts: int = 0  # how many of the last tokens are not the sequence's yet

    @property
    def final(self) -> bool:
        """Whether log-probabilities are reported of the distribution that was sampled from, where that differs from the model's
        own."""
        return self.sampling.final_logprobs and (self.sampling.temperature > 0 or self.sampling.penalized or self.bound)

    @property
    def unusual(self) -> bool:
        """Whether it needs the plain sampler, because the fused one lacks what it asks for."""
        return self.top_n > 0 and self.final

    @property
    def far(self) -> bool:
        """Whether it has a top-p that no top-k limits, which may reach far into the vocabulary."""
        own = self.sampling
        return own.temperature > 0 and own.top_p < 1 and not own.top_k


@dataclass(slots=True)  # created many times a step: frozen ones take three times as long
class Pick:
    """The token sampled for a row."""

    token: int
    logprob: float
    top: Top = ()  # (id, logprob) of the most probable tokens, best first
    complete: bool = False  # the sequence ends with it, though it is no end token (by a grammar or a stop string)


Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class PendingPicks(Generic[Taken]):
    """A batch of sampling decisions under way: available on the device at once, and on the host after waiting."""

    picked: Callable[[], DeviceSamples] | None  # the tokens as tensors on the device; None: only the host knows them
    wait: Callable[[], None]  # blocks until `take` need not wait; may run on any thread
    take: Callable[[], Taken]


def pick(logits: Tensor, rows: Listing[Row], mask: Tensor | None = None) -> list[Pick | None]:
    """Samples one token for each row of `logits` [rows, vocabulary] float32; None where logits are NaN or infinite.

    mask: [rows, words] int32, tokens that the rows' grammars allow: bit i of word w allows token 32 w + i; None: no row is
    constrained.
    """
    return begin(logits, rows, mask).take()


def begin(logits: Tensor, rows: Listing[Row], mask: Tensor | None = None) -> PendingPicks[list[Pick | None]]:
    """`pick` without waiting: the device samples while the host goes on, unless a row needs the plain sampler."""
    if not triton_for(logits):
        return known(_pick_plainly(logits, rows, mask), logits.device)
    plain = [i for i, row in enumerate(rows) if row.unusual]
    if not plain:
        return _begin_fused(logits, rows, mask)
    fused = [i for i, row in enumerate(rows) if not row.unusual]
    picks: list[Pick | None] = [None] * len(rows)
    for indices, way in ((plain, _pick_plainly), (fused, lambda *some: _begin_fused(*some).take())):
        if indices:
            own = list_to_device(logits.device, indices)
            some = way(logits[own], [rows[i] for i in indices], mask[own] if mask is not None else None)
            for i, one in zip(indices, some, strict=True):
                picks[i] = one
    return known(picks, logits.device)


def compile_kernels(vocabulary: int, device: torch.device) -> None:
    """Compiles the Triton kernels that `pick` may need, and those of the noise alone, for drafts and beams: the first request would
    otherwise wait seconds for them."""
    logits = torch.zeros(1, vocabulary, device=device)
    mask = torch.full((1, -(-vocabulary // 32)), -1, dtype=torch.int32, device=device)
    plain = Sampling(temperature=1.0, top_p=0.9)
    for sampling in (plain, replace(plain, repetition_penalty=1.1, bias=((0, 1.0),))):
        for own in (None, mask):
            pick(logits, [Row(sampling, [0], 1, 0, top_n=1)], own)
    continuations(logits, [0.0], [RowSet(0, 1, 2, 2)])
    key = (torch.zeros(1, dtype=torch.int64, device=device),) * 3
    noise.gumbel_all(*key, vocabulary)
    noise.gumbel(*key, key[0].unsqueeze(1))


def known(picks: list[Pick | None], device: torch.device) -> PendingPicks[list[Pick | None]]:
    """A `PendingPicks` whose tokens the host already has."""

    def picked() -> DeviceSamples:
        return DeviceSamples(list_to_device(device, [one.token if one else -1 for one in picks]))

    return PendingPicks(picked, lambda: None, lambda: picks)


def _begin_fused(logits: Tensor, rows: Listing[Row], mask: Tensor | None) -> PendingPicks[list[Pick | None]]:
    """Samples with the fused Triton kernels, in few passes over the logits."""
    from ...kernels.fused_sampling import sample

    penalties = penalties_of(rows, logits) if any(row.sampling.penalized for row in rows) else None
    far, wanted = any(row.far for row in rows), [row.final for row in rows]
    told = any(final and not row.sampling.temperature for row, final in zip(rows, wanted, strict=True))
    found = sample(logits, draws_of(rows, logits.device), penalties, mask, far or told, far)
    logprobs = found.logprobs
    if any(wanted):
        final = to_device(torch.tensor(wanted), logits.device)
        logprobs = torch.where(final & logprobs.isfinite(), found.final, logprobs)
    tops = Tops(logits, rows)
    arrival = HostCopy(found.tokens, logprobs, *tops.tensors)

    def take() -> list[Pick | None]:
        tokens, told, *top = arrival.lists()
        own = tops.listed(*top)
        return [
            None if token < 0 else Pick(token, logprob, own.get(i, ()))
            for i, (token, logprob) in enumerate(zip(tokens, told, strict=True))
        ]

    return PendingPicks(lambda: DeviceSamples(found.tokens), arrival.wait, take)


def _pick_plainly(logits: Tensor, rows: Listing[Row], mask: Tensor | None) -> list[Pick | None]:
    own = logits.logsumexp(-1)
    scores = penalized(logits, rows)
    if mask is not None:
        scores = allow(scores, mask)
    picked = [(part, first_largest(noisy)) for part, noisy in noised(scores, rows)]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for part, columns in picked:
        tokens[part.rows] = columns if part.ids is None else part.ids.gather(1, columns.unsqueeze(1)).squeeze(1)
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - own
    own_tops = Tops(logits, rows)
    tops = own_tops.listed(*(tensor.tolist() for tensor in own_tops.tensors))
    for part, columns in picked:
        _report_final(part, columns, rows, logprobs, tops)
    return [
        Pick(token, logprob, tops.get(i, ())) if finite else None
        for i, (token, logprob, finite) in enumerate(zip(tokens.tolist(), logprobs.tolist(), own.isfinite().tolist(), strict=True))
    ]


def penalized(logits: Tensor, rows: Listing[Row]) -> Tensor:
    """Logits after penalties and logit bias; a new tensor if any row has some."""
    indices = [i for i, row in enumerate(rows) if row.sampling.penalized]
    if not indices:
        return logits
    own = list_to_device(logits.device, indices)  # indexing with a Python list would synchronize with the device
    penalties = penalties_of([rows[i] for i in indices], logits)
    return logits.index_copy(0, own, penalize(logits.index_select(0, own), penalties))


def penalties_of(rows: Listing[Row], logits: Tensor) -> Penalties:
    """The rows' penalties and biases as tensors, by two copies to the device. Rows without any have no entries."""
    device, asked, size = logits.device, [row.sampling for row in rows], len(rows)
    entries = [_entries(row, logits.shape[1]) for row in rows]
    ids, biases = [one.ids for one in entries], [one.biases for one in entries]
    starts = array("i", accumulate(map(len, ids), initial=0))
    if any(biases):
        biases = [own or array("f", bytes(4 * len(some))) for own, some in zip(biases, ids, strict=True)]
    ints = _joined(starts, *ids, *[one.counts for one in entries])
    floats = _joined(
        array("f", [one.repetition_penalty for one in asked]),
        array("f", [one.frequency_penalty for one in asked]),
        array("f", [one.presence_penalty for one in asked]),
        *biases,
    )
    first, tokens, counted = torch.split(to_device(ints, device), [size + 1, starts[-1], starts[-1]])
    repetition, frequency, presence, added = torch.split(to_device(floats, device), [*[size] * 3, len(floats) - 3 * size])
    return Penalties(first, tokens, counted, added, repetition, frequency, presence)


def _joined(*parts: "array[Any]") -> Tensor:
    """Arrays of one type as a tensor, one after the other: a third of the time that numpy takes for so many."""
    return torch.frombuffer(bytearray().join(parts), dtype=torch.float32 if parts[0].typecode == "f" else torch.int32)


def _entries(row: Row, vocabulary: int) -> Entries:
    """The tokens that a row's penalties and biases concern."""
    own = row.sampling
    if not own.penalized:
        return NO_ENTRIES
    return (row.counts or own.counts(row.prompt_length, vocabulary)).entries(row.tokens, row.drafts, own.bias)


def noised(scores: Tensor, rows: Listing[Row]) -> Iterator[tuple[Filtered, Tensor]]:
    """The distributions of all rows, in parts, each row in one of them; and their scores with noise, of which the largest are
    drawn. Rows without a temperature have neither filters nor noise."""
    everything = torch.arange(len(rows), device=scores.device)
    sampled = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(sampled) < len(rows):
        greedy = everything[[i for i, row in enumerate(rows) if not row.sampling.temperature > 0]] if sampled else everything
        own = scores[greedy] if sampled else scores
        yield Filtered(greedy, own, None), own
    if sampled:
        indices, draws = everything[sampled], draws_of([rows[i] for i in sampled], scores.device)
        for part in filtered(scores[indices], draws):
            yield Filtered(indices[part.rows], part.scores, part.ids), perturbed(part, draws)


def draws_of(rows: Listing[Row], device: torch.device) -> Draws:
    """The rows' sampling parameters as tensors. Those of the last call are kept: from step to step only positions change, and
    greedy rows have no noise that depends on them. Else two copies to the device, however many parameters there are."""
    global _kept
    samplings, choices, kept = [row.sampling for row in rows], [row.choice for row in rows], _kept
    if kept is not None and kept.choices == choices and kept.samplings == samplings and kept.device == device:
        if not any(one.temperature for one in samplings):
            return kept.draws
        return replace(kept.draws, positions=list_to_device(device, [len(row.tokens) - row.prompt_length for row in rows]))
    floats = numpy.array([(one.temperature, one.top_p, one.min_p, one.typical_p) for one in samplings], numpy.float32)
    ints = [
        # the seed's 64 bits as a signed integer
        (one.top_k, one.seed - (one.seed >> 63 << 64), row.choice, len(row.tokens) - row.prompt_length)
        for one, row in zip(samplings, rows, strict=True)
    ]
    temperature, top_p, min_p, typical_p = to_device(torch.from_numpy(floats.T.copy()), device).unbind()
    top_k, seeds, own_choices, positions = lists_to_device(device, *zip(*ints, strict=True))
    draws = Draws(temperature, top_k, top_p, min_p, typical_p, seeds, own_choices, positions)
    _kept = KeptDraws(samplings, choices, device, draws)
    return draws


class Tops:
    """The top log-probabilities of the model's own distribution, for the rows that report them."""

    def __init__(self, logits: Tensor, rows: Listing[Row], all: bool = False) -> None:
        """all: also for rows that report the final distribution where it is known."""
        self._rows = rows
        self._wanting = [i for i, row in enumerate(rows) if row.top_n and (all or not row.final)]
        # on the device: ids and log-probabilities, as many columns as the largest `top_n`; empty if no row wants any
        self.tensors: tuple[Tensor, ...] = ()
        if self._wanting:
            some = logits if len(self._wanting) == len(logits) else logits[list_to_device(logits.device, self._wanting)]
            values, ids = most_probable(some, min(max(rows[i].top_n for i in self._wanting), logits.shape[1]))
            self.tensors = ids, values

    def listed(self, *found: Listing[Any]) -> dict[int, Top]:
        """By row index. found: the tensors as Python lists."""
        return _listed(self._wanting, found[0], found[1], self._rows) if found else {}


def _report_final(part: Filtered, columns: Tensor, rows: Listing[Row], logprobs: Tensor, tops: dict[int, Top]) -> None:
    """Overwrites `logprobs` and `tops` for the rows that report the distribution they were sampled from."""
    indices = part.rows.tolist()
    places = [k for k, i in enumerate(indices) if rows[i].final]
    if not places:
        return
    final = part.scores[places].log_softmax(-1)
    logprobs[part.rows[places]] = final.gather(1, columns[places].unsqueeze(1)).squeeze(1)
    wide = max(rows[indices[k]].top_n for k in places)
    if wide:
        values, places_of_top = largest(final, min(wide, final.shape[1]))
        ids = places_of_top if part.ids is None else part.ids[places].gather(1, places_of_top)
        tops.update(_listed([indices[k] for k in places], ids.tolist(), values.tolist(), rows))


def _listed(
    indices: Listing[int], ids: Listing[Listing[int]], values: Listing[Listing[float]], rows: Listing[Row]
) -> dict[int, Top]:
    pairs = zip(indices, ids, values, strict=True)
    return {i: tuple(zip(some, logprobs, strict=True))[: rows[i].top_n] for i, some, logprobs in pairs}
