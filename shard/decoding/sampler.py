"""Chooses the next token of many rows at once. Rows are ints and logits; which sequence a row is of is not known here.

Everything runs on rank 0: the other ranks are told the tokens.
"""

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...kernels.sampling import Candidates, Draws, Penalties, allow, candidates, draw, penalize
from ..sequence import Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """What the logits of one row are to be turned into."""

    sampling: Sampling
    tokens: Listing[int]  # prompt and output so far: what penalties look at
    prompt_length: int
    choice: int
    top_n: int = 0

    @property
    def final(self) -> bool:
        """Reports log-probabilities of another distribution than the model's own."""
        return self.sampling.final_logprobs and (self.sampling.temperature > 0 or self.sampling.penalized)


@dataclass(frozen=True, slots=True)
class Pick:
    """A row's next token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the most probable tokens, best first


def pick(logits: Tensor, rows: Listing[Row], mask: Tensor | None = None) -> list[Pick | None]:
    """One pick per row of `logits` [rows, vocabulary] float32; None where logits are NaN or infinite, so that none can be made.

    mask: [rows, words] int32, of rows that a grammar binds: bit i of word w allows token 32 w + i; None: all are free.
    """
    own = logits.logsumexp(-1)
    scores = _penalized(logits, rows)
    if mask is not None:
        scores = allow(scores, mask)
    picked = _choose(scores, rows)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for part, columns in picked:
        tokens[part.rows] = columns if part.ids is None else part.ids.gather(1, columns.unsqueeze(1)).squeeze(1)
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - own
    tops = _own_tops(logits, own, rows)
    for part, columns in picked:
        _report_final(part, columns, rows, logprobs, tops)
    return [
        Pick(token, logprob, tops.get(i, ())) if finite else None
        for i, (token, logprob, finite) in enumerate(zip(tokens.tolist(), logprobs.tolist(), own.isfinite().tolist(), strict=True))
    ]


def _penalized(logits: Tensor, rows: Listing[Row]) -> Tensor:
    """Logits after penalties and bias; a new tensor if there are any."""
    indices = [i for i, row in enumerate(rows) if row.sampling.penalized]
    if not indices:
        return logits
    own = [rows[i] for i in indices]
    device = logits.device
    lengths = torch.tensor([len(row.tokens) for row in own], device=device)
    starts = lengths.cumsum(0) - lengths
    prompts = torch.tensor([row.prompt_length for row in own], device=device)
    places = torch.arange(int(lengths.sum()), device=device) - starts.repeat_interleave(lengths)  # of tokens in their sequences
    bias = [(k, token, value) for k, row in enumerate(own) for token, value in row.sampling.bias]
    penalties = Penalties(
        rows=torch.arange(len(own), device=device).repeat_interleave(lengths),
        ids=torch.tensor(list(chain.from_iterable(row.tokens for row in own)), device=device),
        output=(places >= prompts.repeat_interleave(lengths)).float(),
        repetition=torch.tensor([row.sampling.repetition_penalty for row in own], device=device),
        frequency=torch.tensor([row.sampling.frequency_penalty for row in own], device=device),
        presence=torch.tensor([row.sampling.presence_penalty for row in own], device=device),
        bias_rows=torch.tensor([entry[0] for entry in bias], dtype=torch.int64, device=device),
        bias_ids=torch.tensor([entry[1] for entry in bias], dtype=torch.int64, device=device),
        bias_values=torch.tensor([entry[2] for entry in bias], dtype=torch.float32, device=device),
    )
    result = logits.clone()
    result[indices] = penalize(logits[indices], penalties)
    return result


def _choose(scores: Tensor, rows: Listing[Row]) -> list[tuple[Candidates, Tensor]]:
    """(distribution, chosen columns) in parts; every row is in one of them."""
    device = scores.device
    everything = torch.arange(len(rows), device=device)
    sampled = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if not sampled:
        return [(Candidates(everything, scores, None), scores.argmax(-1))]
    picked = []
    if len(sampled) < len(rows):
        greedy = everything[[i for i, row in enumerate(rows) if not row.sampling.temperature > 0]]
        picked.append((Candidates(greedy, scores[greedy], None), scores[greedy].argmax(-1)))
    indices = everything[sampled]
    draws = _draws([rows[i] for i in sampled], device)
    parts = candidates(scores[indices], draws)
    return picked + [(Candidates(indices[part.rows], part.scores, part.ids), draw(part, draws)) for part in parts]


def _draws(rows: Listing[Row], device: torch.device) -> Draws:
    def floats(name: str) -> Tensor:
        return torch.tensor([getattr(row.sampling, name) for row in rows], dtype=torch.float32, device=device)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Draws(
        temperature=floats("temperature"),
        top_k=ints([row.sampling.top_k for row in rows]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        typical_p=floats("typical_p"),
        seeds=ints([row.sampling.seed - (row.sampling.seed >> 63 << 64) for row in rows]),  # the same bits, signed
        choices=ints([row.choice for row in rows]),
        positions=ints([len(row.tokens) - row.prompt_length for row in rows]),
    )


def _own_tops(logits: Tensor, own: Tensor, rows: Listing[Row]) -> dict[int, tuple[tuple[int, float], ...]]:
    indices = [i for i, row in enumerate(rows) if row.top_n and not row.final]
    if not indices:
        return {}
    values, ids = logits[indices].topk(min(max(rows[i].top_n for i in indices), logits.shape[1]))
    return _listed(indices, ids, values - own[indices].unsqueeze(1), rows)


def _report_final(
    part: Candidates, columns: Tensor, rows: Listing[Row], logprobs: Tensor, tops: dict[int, tuple[tuple[int, float], ...]]
) -> None:
    """Overwrites `logprobs` and `tops` of the rows that report the distribution they were drawn from."""
    indices = part.rows.tolist()
    places = [k for k, i in enumerate(indices) if rows[i].final]
    if not places:
        return
    final = part.scores[places].log_softmax(-1)
    logprobs[part.rows[places]] = final.gather(1, columns[places].unsqueeze(1)).squeeze(1)
    wide = max(rows[indices[k]].top_n for k in places)
    if wide:
        values, places_of_top = final.topk(min(wide, final.shape[1]))
        ids = places_of_top if part.ids is None else part.ids[places].gather(1, places_of_top)
        tops.update(_listed([indices[k] for k in places], ids, values, rows))


def _listed(indices: Listing[int], ids: Tensor, values: Tensor, rows: Listing[Row]) -> dict[int, tuple[tuple[int, float], ...]]:
    pairs = zip(indices, ids.tolist(), values.tolist(), strict=True)
    return {i: tuple(zip(some, logprobs, strict=True))[: rows[i].top_n] for i, some, logprobs in pairs}
