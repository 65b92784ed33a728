"""From hidden states to tokens: the logits of the rows that a step wants, and what is made of them.

All ranks walk through it, since logits are joined; only rank 0 sees them, and tells the others the tokens.
"""

from collections.abc import Sequence as Listing

import torch
from torch import Tensor

from .decoding.sampler import Pick, Row, pick
from .decoding.strategy import Strategy
from .masks import Pending
from .models.decoder import Decoder
from .sequence import Group
from .step import Run

# Rows whose logits are held at once for prompt log-probabilities: 64 x 128k float32 are 33 MB.
SCORED_ROWS = 64


def score_prompts(decoder: Decoder, runs: Listing[Run], hidden: Tensor) -> None:
    """Log-probabilities of the prompt tokens that this step's rows predict, and of the most probable tokens in their places, for
    groups that want them."""
    for run in runs:
        if not run.group.prompt_logprobs or not run.spans:
            continue
        [span] = run.spans
        targets = span.sequence.tokens[span.start + 1 : min(span.start + 1 + len(span.tokens), span.sequence.prompt_length)]
        for start in range(0, len(targets), SCORED_ROWS):
            part = targets[start : start + SCORED_ROWS].tolist()
            logits = decoder.logits(hidden[run.first + start : run.first + start + len(part)])
            if logits is not None:
                _score(run.group, logits, torch.tensor(part, device=logits.device))


def _score(group: Group, logits: Tensor, targets: Tensor) -> None:
    """logits: [rows, vocabulary]; targets: [rows], the prompt's own tokens."""
    normalizer = logits.logsumexp(-1, keepdim=True)
    group.prompt_scores += (logits.gather(1, targets.unsqueeze(1)) - normalizer).squeeze(1).tolist()
    if group.prompt_top_n:
        values, ids = logits.topk(min(group.prompt_top_n, logits.shape[1]))
        group.prompt_tops += zip(ids.flatten().tolist(), (values - normalizer).flatten().tolist(), strict=True)


def choose(
    decoder: Decoder, strategy: Strategy, runs: Listing[Run], hidden: Tensor, masks: Pending | None = None
) -> dict[int, list[Pick | None]]:
    """Per group that is sampled: its picks; None for what can't be chosen. The same tokens on every rank."""
    sampled = [run for run in runs if run.sampled]
    if not sampled:
        return {}
    rows = [strategy.rows(run.group) for run in sampled]
    picks = _picks(decoder, sampled, [row for some in rows for row in some], hidden, masks)
    result, start = {}, 0
    for run, some in zip(sampled, rows, strict=True):
        result[run.group.uid] = picks[start : start + len(some)]
        start += len(some)
    return result


def _picks(decoder: Decoder, sampled: Listing[Run], rows: Listing[Row], hidden: Tensor, masks: Pending | None) -> list[Pick | None]:
    """Of `rows`, which come in the order of the runs. All choices of a prompt draw from the same logits, computed once."""
    places: list[int] = []  # of the rows wanted, each once
    copies: list[int] = []  # of each of them
    for run in sampled:
        count = 1 if run.group.waiting else len(run.group.sequences)
        places += range(run.first + run.wanted - count, run.first + run.wanted)
        copies += [len(run.group.waiting) or 1] * count
    logits = decoder.logits(hidden if len(places) == len(hidden) else hidden[places])
    if logits is not None and len(rows) > len(places):
        logits = logits.repeat_interleave(torch.tensor(copies, device=logits.device), 0)
    mask = masks.join(hidden.device) if masks is not None else None
    picks: list[Pick | None] = pick(logits, rows, mask) if logits is not None else [None] * len(rows)
    if masks is not None:
        picks = masks.settle(picks)
    if decoder.ranks.size > 1:
        codes = [-1 if choice is None else 2 * choice.token + choice.complete for choice in picks]
        told = decoder.ranks.tell(torch.tensor(codes, device=hidden.device)).tolist()
        if logits is None:
            picks = [None if token < 0 else Pick(token // 2, 0.0, complete=bool(token % 2)) for token in told]
    return picks
