"""Prompt log-probabilities, for groups that want them."""

from collections.abc import Sequence as Listing
from functools import partial

import torch
from torch import Tensor

from ..kernels.beam import most_probable
from .models.decoder import Decoder
from .out_of_memory import ALONE, MemoryFallback
from .sequence import Group
from .step import Run

# Rows whose logits are held at once: 64 x 128k float32 are 33 MB.
SCORED_ROWS = 64


def score_prompts(decoder: Decoder, runs: Listing[Run], hidden: Tensor, memory_fallback: MemoryFallback) -> None:
    """Log-probabilities of the prompt tokens that this step's rows predict, and of the most probable tokens in their places, for
    groups that want them."""
    for run in runs:
        if run.group.prompt_logprobs and run.spans and not memory_fallback.attempt(partial(_score_run, decoder, run, hidden)):
            run.problem = ALONE


def _score_run(decoder: Decoder, run: Run, hidden: Tensor) -> bool:
    [span] = run.spans
    targets = span.sequence.tokens[span.start + 1 : min(span.start + 1 + len(span.tokens), span.sequence.prompt_length)]
    for start in range(0, len(targets), SCORED_ROWS):
        part = targets[start : start + SCORED_ROWS].tolist()
        logits = decoder.logits(hidden[run.first + start : run.first + start + len(part)])
        if logits is not None:
            _score(run.group, logits, torch.tensor(part, device=logits.device))
    return True


def _score(group: Group, logits: Tensor, targets: Tensor) -> None:
    """logits: [rows, vocabulary]; targets: [rows], the prompt's own tokens."""
    normalizer = logits.logsumexp(-1, keepdim=True)
    group.prompt_scores += (logits.gather(1, targets.unsqueeze(1)) - normalizer).squeeze(1).tolist()
    if group.prompt_top_n:
        values, ids = most_probable(logits, min(group.prompt_top_n, logits.shape[1]))
        group.prompt_tops += zip(ids.flatten().tolist(), values.flatten().tolist(), strict=True)
