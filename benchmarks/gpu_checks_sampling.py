"""Checks of noise, sampling, beam candidates and the most probable tokens, against the CPU."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.benchmarks.gpu_comparisons import Check, error, poisoned
from penstock.benchmarks.gpu_measure import Bench
from penstock.kernels import (
    beam,
    dispatch,
    noise,
    sampling,
)
from penstock.kernels.fused_sampling import sample
from penstock.kernels.sampling import Draws, Penalties

DIFFERENT = 1e-3  # share of rows for which a different token may be sampled: sums are rounded differently on another device


def checks(bench: Bench) -> dict[str, Check]:
    """All of these, by name."""
    return {
        "noise, to the last bit, of a CPU's": noises,
        "sampling: share of rows that differ from a CPU's": tokens,
        "beam candidates and the most probable": best,
    }


def noises(bench: Bench, chance: random.Random) -> float:
    """Gumbel noise: numbers that differ in any bit, of all tokens and of each by its id."""
    rows, vocabulary = (2, 100) if bench.tiny else (16, 128256)
    keys = torch.stack([torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)), torch.arange(rows) % 5, torch.arange(rows) * 77])
    seeds, choices, positions = keys.to(bench.device)
    ids = torch.arange(vocabulary, device=bench.device).repeat(rows, 1)
    with poisoned():
        found = noise.gumbel_all(seeds, choices, positions, vocabulary), noise.gumbel(seeds, choices, positions, ids)
    with dispatch.forced("reference"):
        expected = noise.gumbel_all(keys[0], keys[1], keys[2], vocabulary)
    return float(sum((one.cpu().view(torch.int32) != expected.view(torch.int32)).sum() for one in found))


def tokens(bench: Bench, chance: random.Random) -> float:
    """Rows for which another token is sampled than on a CPU, as a share of the tolerance; infinite for a wrong probability, or for
    one that changes."""
    rows, vocabulary = (6, 300) if bench.tiny else (384, 32000)
    logits = torch.randn(rows, vocabulary) * 3
    draws, penalties, mask = _asked(rows, vocabulary, chance)
    penalized = sampling.allow(sampling.penalize(logits, penalties), mask)
    with dispatch.forced("reference"):
        expected, final = _drawn(penalized, draws)
    device = bench.device
    own, asked = logits.to(device), (_moved(draws, device), _moved(penalties, device), mask.to(device))
    found = sample(own, *asked)
    # Without `weigh`, before which all is over, `filter` begins early after penalties; and what races differs from time to time.
    others = ((draws.temperature > 0) & ((draws.top_k > 0) | (draws.top_p == 1))).to(device)
    for _ in range(1 if bench.tiny else 20):
        again = sample(own, *asked, weighed=False)
        if not all(getattr(again, name)[others].equal(getattr(found, name)[others]) for name in ("tokens", "logprobs", "final")):
            return float("inf")
    same = found.tokens.cpu() == expected
    logprobs = logits.log_softmax(-1).gather(1, expected.unsqueeze(1)).squeeze(1)
    off = max(error(found.logprobs.cpu()[same], logprobs[same], 1e-4), error(found.final.cpu()[same], final[same], 1e-4))
    if off > 1 or not own.cpu().equal(logits):
        return float("inf")
    return float((~same).sum()) / max(1.0, DIFFERENT * rows)


def _moved(columns: Any, device: torch.device) -> Any:
    return replace(columns, **{name: getattr(columns, name).to(device) for name in columns.__dataclass_fields__})


def _asked(rows: int, vocabulary: int, chance: random.Random) -> tuple[Draws, Penalties, Tensor]:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor([chance.choice(values) for _ in range(rows)])

    draws = Draws(
        temperature=column([0.0, 0.5, 1.0, 1.3]),
        top_k=column([0, 0, 1, 20, 200]).long(),
        top_p=column([1.0, 1.0, 0.5, 0.9, 0.99]),
        min_p=column([0.0, 0.0, 0.01, 0.2]),
        typical_p=column([1.0, 1.0, 0.3, 0.95]),
        seeds=torch.randint(-(1 << 63), (1 << 63) - 1, (rows,)),
        choices=torch.arange(rows) % 3,
        positions=torch.arange(rows) * 7,
    )
    own = [torch.randperm(vocabulary)[: chance.choice([0, 1, 20, 3000])] for _ in range(rows)]
    ids = torch.cat(own).int()
    penalties = Penalties(
        starts=torch.tensor([0, *accumulate(map(len, own))], dtype=torch.int32),
        ids=ids,
        counts=torch.randint(-1, 3, ids.shape, dtype=torch.int32),
        biases=torch.randn(len(ids)) * 5 * (torch.rand(len(ids)) < 0.05),
        repetition=torch.rand(rows) + 0.7,
        frequency=torch.randn(rows),
        presence=torch.randn(rows),
    )
    mask = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32))).int()
    mask[:, 0] |= 1  # every row allows at least one token
    return draws, penalties, mask


def _drawn(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Tokens, and log-probabilities in the distribution that was sampled from, by plain torch."""
    chosen, final = logits.argmax(-1), logits.amax(-1) - logits.logsumexp(-1)
    rows = (draws.temperature > 0).nonzero().squeeze(1)
    own = draws.take(rows)
    for part in sampling.filtered(logits[rows], own):
        columns = sampling.draw(part, own).unsqueeze(1)
        chosen[rows[part.rows]] = (columns if part.ids is None else part.ids.gather(1, columns)).squeeze(1)
        final[rows[part.rows]] = part.scores.log_softmax(-1).gather(1, columns).squeeze(1)
    return chosen, final


def best(bench: Bench, chance: random.Random) -> float:
    """Scores, rows and tokens of the best continuations; without ties they have one order."""
    count, vocabulary = (5, 200) if bench.tiny else (40, 128256)
    logits, scores = torch.randn(count, vocabulary) * 2, torch.randn(count)
    starts = [0, *sorted(chance.sample(range(1, count), 3)), count]
    own = beam.candidates(logits.to(bench.device), scores.to(bench.device), starts, 8)
    top = beam.most_probable(logits.to(bench.device), 5)
    with dispatch.forced("reference"):
        expected, plain = beam.candidates(logits, scores, starts, 8), beam.most_probable(logits, 5)
    worst = max(error(own[0].cpu(), expected[0], 1e-4), error(top[0].cpu(), plain[0], 1e-4))
    ids = sum(
        int((mine.cpu() != theirs).sum()) for mine, theirs in [(own[1], expected[1]), (own[2], expected[2]), (top[1], plain[1])]
    )
    return worst if ids <= 2 else float("inf")  # two sums may round to one number, and then swap places
