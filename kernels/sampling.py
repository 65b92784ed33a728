"""Sampling in plain torch: from logits to tokens by penalties, logit bias, filters, a draw by stateless Gumbel noise, and
log-probabilities. `fused_sampling` is Triton's.

Knows tensors only. Rows are independent of each other: every function gives a row the same result among any neighbours. Neutral
parameter values do nothing. The order is transformers': penalties and bias, temperature, top-k, top-p, min-p, typical.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import noise

# Candidates that are looked at first when a row has a filter: a top-k of so many costs a fifth of a full sort of 32,000 logits.
# Rows whose filters may keep more get the full sort.
CANDIDATES = 1024
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties and logit biases of rows, in entries: one for each distinct token that they concern in a row."""

    starts: Tensor  # [rows + 1] int32: the first entry of each row, and the number of all
    ids: Tensor  # [entries] int32
    counts: Tensor  # [entries] int32: how often it is in the output; 0: in the prompt alone; -1: in neither
    biases: Tensor  # [entries] float32: added to the logit; empty: there are none
    repetition: Tensor  # [rows] float32; 1 is off
    frequency: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """New logits [rows, vocabulary] after the repetition penalty over prompt and output (Keskar et al. 2019, arXiv:1909.05858),
    then frequency and presence penalties over the output (OpenAI's API reference), then logit bias.

    Penalized logits stay finite: the difference of two infinite ones would be NaN, which nothing can be drawn from.
    """
    ids, counts = penalties.ids.long(), penalties.counts
    rows = torch.arange(len(logits), device=logits.device)
    rows = rows.repeat_interleave(penalties.starts.diff(), output_size=len(ids))
    values, repetition = logits[rows, ids], penalties.repetition[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition).clamp_(-LARGEST, LARGEST)
    values = torch.where(counts >= 0, repeated, values)
    values -= counts.clamp(min=0) * penalties.frequency[rows]
    values -= (counts > 0) * penalties.presence[rows]
    if len(penalties.biases):
        values += penalties.biases
    return logits.index_put((rows, ids), values)


def allow(logits: Tensor, mask: Tensor) -> Tensor:
    """New logits with the grammar mask applied: -inf for every token that a row may not take.

    logits: [rows, vocabulary]; mask: [rows, words] int32: bit i of word w allows token 32 w + i.
    """
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = (mask.unsqueeze(-1) >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters, [rows] each, of rows that are sampled rather than greedy."""

    temperature: Tensor  # float32, > 0
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float32; 1 is off
    min_p: Tensor  # float32; 0 is off
    typical_p: Tensor  # float32; 1 is off
    seeds: Tensor  # int64: the bits of an unsigned 64-bit seed
    choices: Tensor  # int64: index of the choice (`n`) within its request
    positions: Tensor  # int64: output position, 0 for the first new token

    def take(self, rows: Tensor) -> "Draws":
        """The parameters of some rows."""
        return Draws(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Filtered:
    """The filtered distribution of some rows, without the tokens that have probability 0 in all of them."""

    rows: Tensor  # [rows] int64: which rows these are
    scores: Tensor  # [rows, n] float32: (logit - the row's largest) / temperature, -inf where filtered out
    ids: Tensor | None  # [rows, n] int64; None: n is the vocabulary and ids are 0, 1, ...


def filtered(logits: Tensor, draws: Draws) -> list[Filtered]:
    """The distribution that each row is drawn from, in up to three parts by the work they need; every row is in one of them.

    logits: [rows, vocabulary] float32.
    """
    # Relative to the best, so that nothing overflows whatever the temperature.
    scores = (logits - logits.amax(-1, keepdim=True)) / draws.temperature.unsqueeze(1)
    rows = torch.arange(len(scores), device=scores.device)
    any_filter = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0) | (draws.typical_p < 1)
    parts = []
    plain = rows[~any_filter]
    if len(plain):
        parts.append(Filtered(plain, scores[plain], None))
    rows = rows[any_filter]
    if not len(rows):
        return parts
    scores, draws = scores[rows], draws.take(rows)
    values, ids = scores.topk(min(CANDIDATES, scores.shape[1]))
    covered = _covered(values, scores, draws)
    near, far = covered.nonzero().squeeze(1), (~covered).nonzero().squeeze(1)
    if len(near):
        parts.append(Filtered(rows[near], _filter(values[near], scores[near].logsumexp(-1), draws.take(near)), ids[near]))
    if len(far):
        values, ids = scores[far].sort(descending=True)
        parts.append(Filtered(rows[far], _filter(values, values.logsumexp(-1), draws.take(far)), ids))
    return parts


def _covered(values: Tensor, scores: Tensor, draws: Draws) -> Tensor:
    """[rows] bool: whether all that the row's filters may keep, ties included, is among its largest `values`."""
    width = values.shape[1]
    if width == scores.shape[1]:
        return torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    lowest = values[:, -1]
    kth = values.gather(1, draws.top_k.clamp(1, width).sub(1).unsqueeze(1)).squeeze(1)
    by_k = (draws.top_k > 0) & (kth > lowest)
    mass = (values.logsumexp(-1) - scores.logsumexp(-1)).exp()
    by_p = (draws.top_k == 0) & (draws.top_p < 1) & (mass > draws.top_p)
    # With a top-k that isn't covered, the mass that top-p refers to isn't known either.
    by_min = (draws.top_k == 0) & (draws.min_p > 0) & (lowest < values[:, 0] + draws.min_p.log())
    return by_k | by_p | by_min | (lowest == -torch.inf)


def _filter(values: Tensor, total: Tensor, draws: Draws) -> Tensor:
    """Applies all filters: scores [rows, n] with -inf for what they remove.

    values: [rows, n] scores, descending; total: [rows], log-sum-exp of all scores of the row, those that are not here included.
    """
    limited = (draws.top_k > 0).unsqueeze(1)
    kth = values.gather(1, draws.top_k.clamp(1, values.shape[1]).sub(1).unsqueeze(1))
    scores = values.masked_fill(limited & (values < kth), -torch.inf)  # ties with the k-th stay
    total = torch.where(limited.squeeze(1), scores.logsumexp(-1), total)
    probabilities = (scores - total.unsqueeze(1)).exp()
    # A token stays while the mass before it is less than top_p, which is above 0: so at least one stays.
    before = probabilities.cumsum(-1) - probabilities
    scores = scores.masked_fill((before >= draws.top_p.unsqueeze(1)) & (draws.top_p < 1).unsqueeze(1), -torch.inf)
    scores = scores.masked_fill(scores < values[:, :1] + draws.min_p.log().unsqueeze(1), -torch.inf)
    typical = (draws.typical_p < 1).nonzero().squeeze(1)
    if len(typical):
        scores[typical] = _typical(scores[typical], draws.typical_p[typical])
    return scores


def _typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Typical sampling: keeps the tokens whose information content is nearest to the entropy, until they have `mass` (Meister et
    al. 2022, arXiv:2202.00666)."""
    logprobs = scores.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).nansum(-1, keepdim=True)
    distances = (-logprobs - entropy).abs()
    sorted_distances, order = torch.sort(distances, dim=-1, stable=True)
    probabilities = logprobs.exp().gather(1, order)
    before = probabilities.cumsum(-1) - probabilities
    last = (before < mass.unsqueeze(1)).sum(-1, keepdim=True).sub(1).clamp(min=0)
    return scores.masked_fill(distances > sorted_distances.gather(1, last), -torch.inf)  # ties with the last stay


def first_largest(scores: Tensor) -> Tensor:
    """[rows] int64: the first column that holds a row's largest number, or a NaN, if there is one. scores: [rows, n] float32."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # torch's own takes ten times as long: 214 us against 20, 160 rows of 2,048, one thread; measured 2026-11-22 on a shared EPYC.
    return torch.from_numpy(scores.numpy().argmax(-1))


def draw(part: Filtered, draws: Draws) -> Tensor:
    """[rows] int64: the column of `part` that is drawn for each of its rows; `draws` has the parameters of all rows.

    It is the argmax of score + Gumbel noise, which has the distribution softmax(scores) (Maddison et al. 2014, arXiv:1411.0030).
    """
    return first_largest(perturbed(part, draws))


def perturbed(part: Filtered, draws: Draws) -> Tensor:
    """[rows, n] float32: scores plus the Gumbel noise that tokens are drawn with."""
    own = draws.take(part.rows)
    if part.ids is None:
        return part.scores + noise.gumbel_all(own.seeds, own.choices, own.positions, part.scores.shape[1])
    return part.scores + noise.gumbel(own.seeds, own.choices, own.positions, part.ids)
