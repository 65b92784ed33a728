"""Batch-invariance check: whether a token's results depend on the rest of the batch, by a single bit. Run before the first request,
on this machine, with these weights: the order of a library's sums is its own affair, and may differ on the next processor.
"""

import torch

from .engine import Engine
from .models.shape import Unsupported
from .sequence import Sequence, sequences
from .step import Span

# Tokens that are computed at once, and again in parts. Attention to more of them is the same code; a CPU would take long.
TOKENS = 80
MANY = 600  # on an accelerator
PARTS = (1, 2, 13)  # and the rest


@torch.inference_mode()
def check(engine: Engine) -> None:
    """Raises Unsupported if results depend on the batch. Leaves the engine with a pool of its own."""
    shape = engine.decoder.shape
    count = min(MANY if engine.device.type == "cuda" else TOKENS, shape.max_positions)
    engine.resize(4 * -(-count // engine.page_size))
    alone, apart, neighbour = (
        _sequence(engine, [place * stride % shape.vocabulary for place in range(count)]) for stride in (7919, 7919, 104729)
    )
    together = _logits(engine, [Span(alone, 0, alone.tokens, wanted=count)])
    found, start = [], 0
    for size in (*PARTS, count):
        end = min(start + size, count)
        if end > start:
            beside = Span(neighbour, start, neighbour.tokens[start:end], wanted=1)
            found.append(_logits(engine, [beside, Span(apart, start, apart.tokens[start:end], wanted=end - start)])[1:])
        start = end
    parts = torch.cat(found)
    worst = (parts - together).abs().max().item()
    if worst or not parts.equal(together):
        raise Unsupported(
            f"--batch-invariant: here a token's logits depend on what else is in the batch (by {worst:.2g}): leave it out, or try "
            "another --dtype"
        )


def _sequence(engine: Engine, tokens: list[int]) -> Sequence:
    [sequence], _ = sequences(tokens, 1)
    engine.pool.extend(sequence.pages, len(tokens))
    return sequence


def _logits(engine: Engine, spans: list[Span]) -> torch.Tensor:
    """Logits of the wanted rows; on ranks other than 0, the hidden states they follow from."""
    hidden = engine.forward(spans).clone()
    logits = engine.decoder.logits(hidden)
    return hidden if logits is None else logits.clone()
