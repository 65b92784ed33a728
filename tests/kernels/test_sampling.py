"""Tokens are drawn from exactly the distribution that the parameters describe, filters are transformers', and no row knows of its
neighbours."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
import transformers
from scipy import stats
from torch import Tensor

from penstock.kernels import dispatch, noise
from penstock.kernels import sampling as kernel
from penstock.kernels.sampling import CANDIDATES, Draws, allow, draw, filtered
from penstock.shard.decoding.sampler import Pick, Row, _penalties, pick
from penstock.shard.sequence import Sampling

SEEDS = 4000
LARGE = 3 * CANDIDATES + 7


def logits_of(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def draws(rows: int, **fields: Any) -> Draws:
    """Neutral but for `fields`, each a value for all rows or a list."""

    def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        value = fields.get(name, neutral)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    ints = ("top_k", "seeds", "choices", "positions")
    return Draws(
        **{name: column(name, neutral, torch.float32) for name, neutral in floats.items()},
        **{name: column(name, 0, torch.int64) for name in ints},
    )


def distribution(logits: Tensor, parameters: Draws) -> Tensor:
    """[rows, vocabulary]: the filtered scores of all parts, put back in their places."""
    result = torch.full_like(logits, torch.nan)
    for part in filtered(logits, parameters):
        full = torch.full((len(part.rows), logits.shape[1]), -torch.inf)
        ids = part.ids if part.ids is not None else torch.arange(logits.shape[1]).expand(len(part.rows), -1)
        result[part.rows] = full.scatter(1, ids, part.scores)
    assert not result.isnan().any()
    return result


def warped(
    logits: Tensor, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0, typical_p: float = 1
) -> Tensor:
    """What transformers' processors leave, in the order in which `generate` has them."""
    processors = [transformers.TemperatureLogitsWarper(float(temperature))] if temperature != 1 else []
    processors += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    processors += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    processors += [transformers.TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    for processor in processors:
        logits = processor(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
    return logits


# Filters

FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10_000_000},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9},
    {"temperature": 1.8, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 3.0, "top_k": CANDIDATES + 500, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 3.0, "top_k": CANDIDATES, "top_p": 0.7},
    {"temperature": 3.0, "top_k": CANDIDATES + 1000, "top_p": 0.3, "min_p": 0.05},  # min_p alone would be covered by the candidates
]


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 500, LARGE])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(fields: dict[str, Any], vocabulary: int, spread: float) -> None:
    """Near and far: what is among the first candidates, and what reaches beyond them."""
    logits = logits_of(8, vocabulary, vocabulary, spread)
    found = distribution(logits, draws(8, **fields))
    expected = warped(logits, **fields)
    kept = expected.isfinite()
    # Sums of thousands of float32 in another order: a token that lies on the border to 1e-5 of the mass may fall on either side.
    differing = (found.isfinite() != kept).sum(1)
    assert differing.max() <= (1 if vocabulary == LARGE else 0)
    both = kept & found.isfinite()
    # Ours are relative to the best.
    best = logits.amax(-1, keepdim=True) / fields.get("temperature", 1)
    torch.testing.assert_close(found[both], (expected - best)[both], atol=1e-4, rtol=1e-4)


def test_no_temperature_is_too_low() -> None:
    logits = logits_of(8, 500)
    for temperature in (1e-3, 1e-30, 1e-45):
        [part] = filtered(logits, draws(8, temperature=temperature))
        assert draw(part, draws(8, temperature=temperature)).tolist() == logits.argmax(-1).tolist()


def test_typical_keeps_what_ties_with_the_last() -> None:
    assert distribution(torch.zeros(1, 8), draws(1, typical_p=0.3)).isfinite().all()


def test_both_ways_are_taken() -> None:
    """A flat row reaches beyond the candidates, a steep one doesn't."""
    logits = torch.cat((logits_of(1, LARGE, spread=0.1), logits_of(1, LARGE, spread=8)))
    parts = filtered(logits, draws(2, top_p=0.9))
    assert [(part.rows.tolist(), part.scores.shape[1]) for part in parts] == [([1], CANDIDATES), ([0], LARGE)]


@pytest.mark.parametrize("vocabulary", [20, LARGE])
def test_what_ties_with_the_kth_stays(vocabulary: int) -> None:
    logits = torch.full((1, vocabulary), -5.0)
    logits[0, [3, 5, 7, 11]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    found = distribution(logits, draws(1, top_k=2))
    assert found.isfinite().nonzero()[:, 1].tolist() == warped(logits, top_k=2).isfinite().nonzero()[:, 1].tolist() == [3, 5, 7, 11]


def test_what_is_just_as_probable_as_min_p_wants_stays_beyond_the_candidates() -> None:
    logits = torch.full((1, LARGE), float(torch.tensor(0.5).log()))
    logits[0, LARGE - 1] = 0.0
    assert distribution(logits, draws(1, min_p=0.5)).isfinite().all()
    logits[0, 7] -= 1e-6
    assert distribution(logits, draws(1, min_p=0.5)).isfinite().sum() == LARGE - 1


def test_ties_beyond_the_candidates_stay() -> None:
    found = distribution(torch.zeros(1, LARGE), draws(1, top_k=5, top_p=0.5))
    assert found.isfinite().sum().item() == pytest.approx(LARGE / 2, abs=2)


# Penalties


def naive_penalties(logits: Sequence[float], row: Row) -> list[float]:
    asked, result = row.sampling, list(logits)
    for token in set(row.tokens):
        result[token] = result[token] / asked.repetition_penalty if result[token] > 0 else result[token] * asked.repetition_penalty
    output = row.tokens[row.prompt_length :]
    for token in set(output):
        result[token] -= asked.frequency_penalty * list(output).count(token) + asked.presence_penalty
    for token, value in asked.bias:
        result[token] += value
    return result


def random_row(chance: random.Random, vocabulary: int) -> Row:
    tokens = [chance.randrange(vocabulary) for _ in range(chance.randint(1, 30))]
    sampling = Sampling(
        temperature=chance.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=chance.choice([0, 0, 1, 5, 2000]),
        top_p=chance.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=chance.choice([0.0, 0.0, 0.1]),
        typical_p=chance.choice([1.0, 1.0, 0.7]),
        repetition_penalty=chance.choice([1.0, 1.3, 0.8]),
        frequency_penalty=chance.choice([0.0, 0.5, -0.5]),
        presence_penalty=chance.choice([0.0, 1.0]),
        bias=chance.choice([(), ((2, 3.0), (0, -100.0), (2, 1.5))]),
        seed=chance.getrandbits(64),
        final_logprobs=chance.random() < 0.5,
    )
    return Row(sampling, tokens, chance.randint(1, len(tokens)), choice=chance.randint(0, 3), top_n=chance.choice([0, 1, 5]))


def random_rows(count: int, vocabulary: int, seed: int = 0) -> list[Row]:
    chance = random.Random(seed)
    return [random_row(chance, vocabulary) for _ in range(count)]


def final_scores(logits: Tensor, row: Row) -> Tensor:
    """[vocabulary]: the distribution that a row is drawn from, by naive penalties and transformers' filters."""
    asked = row.sampling
    scores = torch.tensor([naive_penalties(logits.tolist(), row)])
    if not asked.temperature:
        return scores[0]
    return warped(scores, asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.typical_p)[0]


@pytest.mark.parametrize("seed", range(3))
def test_penalties_are_those_of_a_plain_loop(seed: int) -> None:
    """Seen through greedy choice and its log-probability over the final distribution."""
    rows = [
        dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, temperature=0.0, final_logprobs=True), top_n=7)
        for row in random_rows(60, 40, seed)
    ]
    logits = logits_of(60, 40, seed, spread=1.0)
    for own, row, choice in zip(logits, rows, pick(logits, rows), strict=True):
        expected = torch.tensor(naive_penalties(own.tolist(), row)).log_softmax(-1)
        assert choice is not None
        assert choice.token == expected.argmax()
        assert choice.logprob == pytest.approx(expected.max().item(), abs=1e-5)
        assert [value for _, value in choice.top] == pytest.approx(expected.topk(7).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"bias": ((2, 3.0),)}, []),
        ({"repetition_penalty": 1.2}, [(5, 0), (6, 0), (5, 1), (7, 1)]),
        ({"presence_penalty": 0.5}, [(5, 1), (7, 1)]),
        ({"frequency_penalty": 0.5, "bias": ((2, 3.0),)}, [(5, 1), (7, 1)]),
    ],
)
def test_tokens_are_listed_only_where_they_count(asked: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    """A bias concerns no token of the text, and a prompt may be long. 50 stands for an image."""
    rows = [Row(Sampling(bias=((1, 1.0),)), [9], 1, 0), Row(Sampling(**asked), [5, 50, 6, 5, 7], 3, 0)]
    found = _penalties(rows, torch.zeros(2, 40))
    assert list(zip(found.ids.tolist(), found.output.tolist(), strict=True)) == expected
    assert set(found.rows.tolist()) <= {1}


# Distribution


def chi_square(row: Row, vocabulary: int, logits: Tensor) -> float:
    """The p value of the tokens that SEEDS seeds draw, against the exact distribution."""
    exact = final_scores(logits, row).double().softmax(-1)
    chance = random.Random(7)
    rows = [dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, seed=chance.getrandbits(64))) for _ in range(SEEDS)]
    picks = pick(logits.expand(SEEDS, -1), rows)
    counts = torch.tensor([choice.token for choice in picks if choice is not None]).bincount(minlength=vocabulary)
    assert int(counts.sum()) == SEEDS
    assert not counts[exact == 0].any()
    expected = exact * SEEDS
    rare = expected < 5  # too few for the test: one class of their own
    observed = torch.cat((counts[~rare].double(), counts[rare].double().sum().view(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    if expected[-1] < 1:  # nothing to speak of
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(observed.numpy(), expected.numpy() * observed.sum().item() / expected.sum().item()).pvalue)


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 1.0, "bias": ((3, 2.0), (4, -1.0))},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("fields", PARAMETERS, ids=str)
def test_seeds_draw_the_exact_distribution(fields: dict[str, Any]) -> None:
    row = Row(Sampling(**fields), [1, 2, 2, 3, 5, 5, 5], prompt_length=3, choice=0)
    assert chi_square(row, 60, logits_of(1, 60, seed=3)[0]) > 0.001


def test_the_check_finds_a_slightly_wrong_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel.filtered
    monkeypatch.setattr(
        "penstock.shard.decoding.sampler.filtered",
        lambda logits, parameters: right(logits, dataclasses.replace(parameters, temperature=parameters.temperature * 1.1)),
    )
    row = Row(Sampling(temperature=1.0), [1], prompt_length=1, choice=0)
    assert chi_square(row, 60, logits_of(1, 60, seed=3)[0]) < 0.001


def test_first_tokens_of_choices_and_positions_are_independent_draws() -> None:
    """One seed: choices of one request, and positions of one choice, are distributed as seeds are."""
    logits = logits_of(1, 30, seed=5)[0]
    exact = logits.double().softmax(-1)
    keys = [(choice, position) for choice in range(50) for position in range(100)]
    sampling = Sampling(temperature=1.0, seed=99)
    rows = [Row(sampling, [0] * (position + 1), 1, choice) for choice, position in keys]
    tokens = torch.tensor([choice.token for choice in pick(logits.expand(len(rows), -1), rows) if choice is not None])
    usual = exact * len(rows) >= 5
    counts = tokens.bincount(minlength=30)[usual].double()
    expected = exact[usual] / exact[usual].sum() * counts.sum()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001
    following = torch.stack((tokens.view(50, 100)[:, :-1].flatten(), tokens.view(50, 100)[:, 1:].flatten()))
    assert torch.corrcoef(following.double())[0, 1].abs() < 0.05


def test_a_draw_is_the_argmax_of_scores_and_noise() -> None:
    """The same token whether all ids are looked at or only candidates."""
    logits = logits_of(50, LARGE, seed=1)
    parameters = draws(50, top_k=[0, 50] * 25, seeds=list(range(50)))
    everything = noise.gumbel_all(parameters.seeds, parameters.choices, parameters.positions, LARGE)
    expected = (distribution(logits, parameters) + everything).argmax(-1)
    for part in filtered(logits, parameters):
        columns = draw(part, parameters)
        tokens = columns if part.ids is None else part.ids.gather(1, columns.unsqueeze(1)).squeeze(1)
        assert tokens.equal(expected[part.rows])


# Rows


@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_a_row_is_the_same_alone_and_among_others(vocabulary: int) -> None:
    """To the bit."""
    count = 64 if vocabulary < LARGE else 20
    rows = random_rows(count, vocabulary, seed=vocabulary)
    logits = logits_of(count, vocabulary)
    together = pick(logits, rows)
    assert together == [pick(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    shuffled = random.Random(0).sample(range(count), count)
    assert pick(logits[shuffled], [rows[i] for i in shuffled]) == [together[i] for i in shuffled]


def test_the_check_for_neighbours_finds_noise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.gumbel

    def by_row(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return right(seeds, torch.arange(len(choices)), positions, ids)

    monkeypatch.setattr(noise, "gumbel", by_row)
    with pytest.raises(AssertionError):
        test_a_row_is_the_same_alone_and_among_others(40)


@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_log_probabilities_are_of_the_distribution_asked_for(vocabulary: int) -> None:
    rows = random_rows(60, vocabulary, seed=1)
    logits = logits_of(60, vocabulary, seed=2)
    for own, row, choice in zip(logits, rows, pick(logits, rows), strict=True):
        expected = (final_scores(own, row) if row.sampling.final_logprobs else own).log_softmax(-1)
        assert choice is not None
        assert choice.logprob == pytest.approx(expected[choice.token].item(), abs=1e-4)
        assert len(choice.top) == row.top_n
        values, ids = expected.topk(row.top_n)
        assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-4)
        kept = [i for i, value in enumerate(values.tolist()) if value > -1e30]
        assert [choice.top[i][0] for i in kept] == [ids.tolist()[i] for i in kept]


def test_greedy_and_sampled_rows_mix() -> None:
    logits = logits_of(6, 50)
    rows = [Row(Sampling(temperature=1.0 * (i % 2), seed=i), [1], 1, 0) for i in range(6)]
    tokens = [choice.token for choice in pick(logits, rows) if choice is not None]
    assert tokens[::2] == logits.argmax(-1).tolist()[::2]
    assert tokens[1::2] == [choice.token for choice in pick(logits[1::2], rows[1::2]) if choice is not None]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_a_row_that_is_not_finite_has_no_pick_and_others_theirs(value: float, vocabulary: int) -> None:
    rows = random_rows(20, vocabulary, seed=3)
    logits = logits_of(20, vocabulary)
    expected = pick(logits, rows)
    logits[[0, 7, 19]] = value
    logits[11, 3] = value
    found = pick(logits, rows)
    assert [i for i, choice in enumerate(found) if choice is None] == [0, 7, 11, 19]
    assert all(choice in (None, expected[i]) for i, choice in enumerate(found))


def test_alternatives_are_no_more_than_the_vocabulary() -> None:
    rows = [Row(Sampling(temperature=i, final_logprobs=final), [1], 1, 0, top_n=9) for i in (0, 1) for final in (False, True)]
    found = pick(logits_of(4, 5), rows)
    assert [len(choice.top) for choice in found if choice is not None] == [5, 5, 5, 5]


def test_neutral_values_do_nothing() -> None:
    """A plain row's scores are its logits, relative to the best, and nothing is left out."""
    logits = logits_of(3, 50)
    [part] = filtered(logits, draws(3))
    assert part.ids is None
    torch.testing.assert_close(part.scores, logits - logits.amax(-1, keepdim=True))
    plain = [Pick(int(own.argmax()), pytest.approx(own.log_softmax(-1).max().item(), abs=1e-5)) for own in logits]
    assert pick(logits, [Row(Sampling(), [1], 1, 0)] * 3) == plain


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("top_n", [0, 3])
def test_who_is_bound_reports_what_was_allowed(monkeypatch: pytest.MonkeyPatch, way: str, top_n: int) -> None:
    """As text-generation-inference does: the most probable token of all, the model's own log-probabilities, are for who asks so."""
    if way == "triton":
        pytest.importorskip("triton")
    logits = logits_of(3, 70)
    allowed = torch.zeros(3, 96, dtype=torch.bool)
    allowed[:, 5:70:7] = True
    mask = torch.from_numpy(numpy.packbits(allowed.numpy(), axis=1, bitorder="little").view(numpy.int32))
    rows = [Row(Sampling(final_logprobs=final), [1], 1, 0, top_n, bound=True) for final in (True, False, True)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with dispatch.forced(way):
        found = pick(logits.to(device), rows, mask.to(device))
    within = logits.masked_fill(~allowed[:, :70], -torch.inf)
    tokens = within.argmax(-1)
    for i, one in enumerate(found):
        assert one is not None
        expected = (within if rows[i].sampling.final_logprobs else logits)[i].log_softmax(-1)
        assert (one.token, one.logprob) == (int(tokens[i]), pytest.approx(float(expected[tokens[i]]), abs=1e-5))
        values, ids = expected.topk(top_n)
        assert [id for id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_mask_allows_its_bits_and_filters_look_at_what_it_leaves() -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 5000)
    allowed = torch.zeros(3, 5024, dtype=torch.bool)
    allowed[0, [7, 31, 32, 4999]], allowed[1], allowed[2, 64] = True, True, True
    words = (allowed.view(3, -1, 32).long() << torch.arange(32)).sum(-1)
    mask = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    masked = allow(logits, mask)
    assert masked.isfinite()[0].nonzero().flatten().tolist() == [7, 31, 32, 4999]
    assert torch.equal(masked[1], logits[1])
    assert masked.argmax(-1)[2] == 64
