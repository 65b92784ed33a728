"""The reference sampler: tokens follow exactly the distribution that the parameters describe (chi-square), filters match
transformers', and a row's result does not depend on other rows."""

import dataclasses
import random
import sys
from collections import Counter
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
from penstock.shard.decoding.sampler import Pick, Row, draws_of, penalties_of, pick
from penstock.shard.decoding.token_counts import TokenCounts
from penstock.shard.sequence import Sampling

SEEDS = 4000
LARGE = 3 * CANDIDATES + 7


def logits_of(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def make_draws(rows: int, **fields: Any) -> Draws:
    """Neutral values, except for `fields`, each a value for all rows or a list."""

    def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        value = fields.get(name, neutral)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    ints = ("top_k", "seeds", "choices", "positions")
    return Draws(
        **{name: column(name, neutral, torch.float32) for name, neutral in floats.items()},
        **{name: column(name, 0, torch.int64) for name in ints},
    )


def filtered_scores(logits: Tensor, parameters: Draws) -> Tensor:
    """[rows, vocabulary]: the filtered scores of all parts, scattered to their rows and ids."""
    result = torch.full_like(logits, torch.nan)
    for part in filtered(logits, parameters):
        full = torch.full((len(part.rows), logits.shape[1]), -torch.inf)
        ids = part.ids if part.ids is not None else torch.arange(logits.shape[1]).expand(len(part.rows), -1)
        result[part.rows] = full.scatter(1, ids, part.scores)
    assert not result.isnan().any()
    return result


def filtered_by_transformers(
    logits: Tensor, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0, typical_p: float = 1
) -> Tensor:
    """Logits after transformers' processors, in the order in which `generate` applies them."""
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
    {"temperature": 3.0, "top_k": CANDIDATES + 1000, "top_p": 0.3, "min_p": 0.05},  # with min_p alone the candidates would suffice
]


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 500, LARGE])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_filters_keep_the_tokens_that_transformers_keeps(fields: dict[str, Any], vocabulary: int, spread: float) -> None:
    """Both where the first candidates suffice and where filters reach beyond them."""
    logits = logits_of(8, vocabulary, vocabulary, spread)
    found = filtered_scores(logits, make_draws(8, **fields))
    expected = filtered_by_transformers(logits, **fields)
    kept = expected.isfinite()
    # Thousands of float32 are summed in another order: a token within 1e-5 of the mass from the limit may fall on either side.
    differing = (found.isfinite() != kept).sum(1)
    assert differing.max() <= (1 if vocabulary == LARGE else 0)
    kept_by_both = kept & found.isfinite()
    # penstock's scores are relative to the best one.
    best = logits.amax(-1, keepdim=True) / fields.get("temperature", 1)
    torch.testing.assert_close(found[kept_by_both], (expected - best)[kept_by_both], atol=1e-4, rtol=1e-4)


def test_tiny_temperatures_choose_the_most_probable_token() -> None:
    logits = logits_of(8, 500)
    for temperature in (1e-3, 1e-30, 1e-45):
        [part] = filtered(logits, make_draws(8, temperature=temperature))
        assert draw(part, make_draws(8, temperature=temperature)).tolist() == logits.argmax(-1).tolist()


def test_typical_p_keeps_tokens_tied_with_the_last_kept_one() -> None:
    assert filtered_scores(torch.zeros(1, 8), make_draws(1, typical_p=0.3)).isfinite().all()


def test_flat_rows_use_the_whole_vocabulary_and_steep_rows_the_candidates() -> None:
    logits = torch.cat((logits_of(1, LARGE, spread=0.1), logits_of(1, LARGE, spread=8)))
    parts = filtered(logits, make_draws(2, top_p=0.9))
    assert [(part.rows.tolist(), part.scores.shape[1]) for part in parts] == [([1], CANDIDATES), ([0], LARGE)]


@pytest.mark.parametrize("vocabulary", [20, LARGE])
def test_top_k_keeps_tokens_tied_with_the_kth(vocabulary: int) -> None:
    logits = torch.full((1, vocabulary), -5.0)
    logits[0, [3, 5, 7, 11]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    found = filtered_scores(logits, make_draws(1, top_k=2))
    assert (
        found.isfinite().nonzero()[:, 1].tolist()
        == filtered_by_transformers(logits, top_k=2).isfinite().nonzero()[:, 1].tolist()
        == [3, 5, 7, 11]
    )


def test_min_p_keeps_tokens_at_its_limit_beyond_the_candidates() -> None:
    logits = torch.full((1, LARGE), float(torch.tensor(0.5).log()))
    logits[0, LARGE - 1] = 0.0
    assert filtered_scores(logits, make_draws(1, min_p=0.5)).isfinite().all()
    logits[0, 7] -= 1e-6
    assert filtered_scores(logits, make_draws(1, min_p=0.5)).isfinite().sum() == LARGE - 1


def test_top_k_and_top_p_keep_ties_beyond_the_candidates() -> None:
    found = filtered_scores(torch.zeros(1, LARGE), make_draws(1, top_k=5, top_p=0.5))
    assert found.isfinite().sum().item() == pytest.approx(LARGE / 2, abs=2)


# Penalties


def penalties_by_loop(logits: Sequence[float], row: Row) -> list[float]:
    sampling, result = row.sampling, list(logits)
    for token in set(row.tokens):
        result[token] = (
            result[token] / sampling.repetition_penalty if result[token] > 0 else result[token] * sampling.repetition_penalty
        )
    output = row.tokens[row.prompt_length :]
    for token in set(output):
        result[token] -= sampling.frequency_penalty * list(output).count(token) + sampling.presence_penalty
    for token, value in sampling.bias:
        result[token] += value
    return result


def random_row(rng: random.Random, vocabulary: int) -> Row:
    tokens = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 30))]
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 2000]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        typical_p=rng.choice([1.0, 1.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.5, -0.5]),
        presence_penalty=rng.choice([0.0, 1.0]),
        bias=rng.choice([(), ((2, 3.0), (0, -100.0), (2, 1.5))]),
        seed=rng.getrandbits(64),
        final_logprobs=rng.random() < 0.5,
    )
    return Row(sampling, tokens, rng.randint(1, len(tokens)), choice=rng.randint(0, 3), top_n=rng.choice([0, 1, 5]))


def random_rows(count: int, vocabulary: int, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    return [random_row(rng, vocabulary) for _ in range(count)]


def final_scores(logits: Tensor, row: Row) -> Tensor:
    """[vocabulary]: the scores that a row is sampled from, by the loop of penalties and transformers' filters."""
    sampling = row.sampling
    scores = torch.tensor([penalties_by_loop(logits.tolist(), row)])
    if not sampling.temperature:
        return scores[0]
    return filtered_by_transformers(
        scores, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p
    )[0]


@pytest.mark.parametrize("seed", range(3))
def test_penalties_match_a_plain_loop(seed: int) -> None:
    """Observed through the greedy token and its log-probability in the final distribution."""
    rows = [
        dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, temperature=0.0, final_logprobs=True), top_n=7)
        for row in random_rows(60, 40, seed)
    ]
    logits = logits_of(60, 40, seed, spread=1.0)
    for row_logits, row, choice in zip(logits, rows, pick(logits, rows), strict=True):
        expected = torch.tensor(penalties_by_loop(row_logits.tolist(), row)).log_softmax(-1)
        assert choice is not None
        assert choice.token == expected.argmax()
        assert choice.logprob == pytest.approx(expected.max().item(), abs=1e-5)
        assert [value for _, value in choice.top] == pytest.approx(expected.topk(7).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"bias": ((2, 3.0),)}, [(2, -1)]),
        ({"repetition_penalty": 1.2}, [(5, 1), (6, 0), (7, 1)]),
        ({"presence_penalty": 0.5}, [(5, 1), (7, 1)]),
        ({"frequency_penalty": 0.5, "bias": ((2, 3.0), (7, 1.0), (2, -1.0))}, [(2, -1), (7, 1), (5, 1)]),
    ],
)
def test_tokens_are_listed_once_and_only_where_they_count(asked: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    """A bias concerns no token of the text, and a prompt may be long. 50 stands for an image."""
    rows = [Row(Sampling(), [4], 1, 0), Row(Sampling(bias=((1, 1.0),)), [9], 1, 0), Row(Sampling(**asked), [5, 50, 6, 5, 7], 3, 0)]
    found = penalties_of(rows, torch.zeros(3, 40))
    assert found.starts.tolist() == [0, 0, 1, 1 + len(expected)]
    assert list(zip(found.ids.tolist(), found.counts.tolist(), strict=True)) == [(1, -1), *expected]
    assert found.biases.tolist() == [
        1.0,
        *(sum(value for one, value in rows[2].sampling.bias if one == token) for token, _ in expected),
    ]


def test_counts_that_grow_with_a_sequence_are_those_of_its_text() -> None:
    """With drafts that don't stay, biases of its own and of single steps, and forks. 10 and 11 stand for images."""
    rng = random.Random(4)
    for first in (*[0, 20, sys.maxsize] * 3,):
        text = [rng.randrange(12) for _ in range(20)]
        usual = rng.choice([(), ((3, 0.5), (4, 1.0), (3, -2.0))])
        grown = [(text, TokenCounts(first, 20, 10, usual))]
        for _ in range(60):
            own, counts = rng.choice(grown)
            if rng.random() < 0.2:
                grown.append((own[:], counts.copy()))
            own += [rng.randrange(10) for _ in range(rng.choice([0, 1, 1, 3]))]
            drafts = [rng.randrange(10) for _ in range(rng.choice([0, 0, 2, 5]))]
            bias = rng.choice([usual, usual, ((rng.randrange(10), 0.5), (rng.randrange(10), -1.0))])
            found = counts.entries(own + drafts, len(drafts), bias)
            output = Counter(own[20:] + drafts if first <= 20 else ())
            expected = {token: output[token] for token in {*output, *(own[:20] if first == 0 else ())} if token < 10}
            added = dict[int, float]()
            for token, value in bias:
                added[token] = added.get(token, 0.0) + value
            others = {token: -1 for token, _ in (*usual, *bias) if token not in expected}
            assert dict(zip(found.ids, found.counts, strict=True)) == expected | others
            assert len(found.ids) == len(expected | others)
            assert list(found.biases) == ([added.get(token, 0.0) for token in found.ids] if bias else [])


# Distribution


def chi_square(row: Row, vocabulary: int, logits: Tensor) -> float:
    """The p-value of the tokens that SEEDS seeds draw, against the exact distribution."""
    exact = final_scores(logits, row).double().softmax(-1)
    rng = random.Random(7)
    rows = [dataclasses.replace(row, sampling=dataclasses.replace(row.sampling, seed=rng.getrandbits(64))) for _ in range(SEEDS)]
    picks = pick(logits.expand(SEEDS, -1), rows)
    counts = torch.tensor([choice.token for choice in picks if choice is not None]).bincount(minlength=vocabulary)
    assert int(counts.sum()) == SEEDS
    assert not counts[exact == 0].any()
    expected = exact * SEEDS
    rare = expected < 5  # too few for the test: one class for all of them
    observed = torch.cat((counts[~rare].double(), counts[rare].double().sum().view(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    if expected[-1] < 1:  # negligible
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
def test_tokens_over_many_seeds_follow_the_exact_distribution(fields: dict[str, Any]) -> None:
    row = Row(Sampling(**fields), [1, 2, 2, 3, 5, 5, 5], prompt_length=3, choice=0)
    assert chi_square(row, 60, logits_of(1, 60, seed=3)[0]) > 0.001


def test_chi_square_detects_a_temperature_off_by_10_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernel.filtered
    monkeypatch.setattr(
        "penstock.shard.decoding.sampler.filtered",
        lambda logits, parameters: original(logits, dataclasses.replace(parameters, temperature=parameters.temperature * 1.1)),
    )
    row = Row(Sampling(temperature=1.0), [1], prompt_length=1, choice=0)
    assert chi_square(row, 60, logits_of(1, 60, seed=3)[0]) < 0.001


def test_choices_and_positions_of_one_seed_are_independent_draws() -> None:
    """Over the choices of one request, and over the positions of one choice, tokens are distributed as over seeds."""
    logits = logits_of(1, 30, seed=5)[0]
    exact = logits.double().softmax(-1)
    keys = [(choice, position) for choice in range(50) for position in range(100)]
    sampling = Sampling(temperature=1.0, seed=99)
    rows = [Row(sampling, [0] * (position + 1), 1, choice) for choice, position in keys]
    tokens = torch.tensor([choice.token for choice in pick(logits.expand(len(rows), -1), rows) if choice is not None])
    frequent = exact * len(rows) >= 5
    counts = tokens.bincount(minlength=30)[frequent].double()
    expected = exact[frequent] / exact[frequent].sum() * counts.sum()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001
    successive = torch.stack((tokens.view(50, 100)[:, :-1].flatten(), tokens.view(50, 100)[:, 1:].flatten()))
    assert torch.corrcoef(successive.double())[0, 1].abs() < 0.05


def test_drawn_token_is_the_argmax_of_scores_plus_gumbel_noise() -> None:
    """The same token whether the whole vocabulary or only candidates are considered."""
    logits = logits_of(50, LARGE, seed=1)
    parameters = make_draws(50, top_k=[0, 50] * 25, seeds=list(range(50)))
    noise_of_all_ids = noise.gumbel_all(parameters.seeds, parameters.choices, parameters.positions, LARGE)
    expected = (filtered_scores(logits, parameters) + noise_of_all_ids).argmax(-1)
    for part in filtered(logits, parameters):
        columns = draw(part, parameters)
        tokens = columns if part.ids is None else part.ids.gather(1, columns.unsqueeze(1)).squeeze(1)
        assert tokens.equal(expected[part.rows])


# Rows


@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_row_is_bit_identical_alone_and_in_any_batch(vocabulary: int) -> None:
    count = 64 if vocabulary < LARGE else 20
    rows = random_rows(count, vocabulary, seed=vocabulary)
    logits = logits_of(count, vocabulary)
    together = pick(logits, rows)
    assert together == [pick(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    shuffled = random.Random(0).sample(range(count), count)
    assert pick(logits[shuffled], [rows[i] for i in shuffled]) == [together[i] for i in shuffled]


def test_batch_check_detects_noise_that_depends_on_the_row_index(monkeypatch: pytest.MonkeyPatch) -> None:
    original = noise.gumbel

    def by_row(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        return original(seeds, torch.arange(len(choices)), positions, ids)

    monkeypatch.setattr(noise, "gumbel", by_row)
    with pytest.raises(AssertionError):
        test_row_is_bit_identical_alone_and_in_any_batch(40)


@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_logprobs_are_of_the_raw_or_final_distribution_as_requested(vocabulary: int) -> None:
    rows = random_rows(60, vocabulary, seed=1)
    logits = logits_of(60, vocabulary, seed=2)
    for row_logits, row, choice in zip(logits, rows, pick(logits, rows), strict=True):
        expected = (final_scores(row_logits, row) if row.sampling.final_logprobs else row_logits).log_softmax(-1)
        assert choice is not None
        assert choice.logprob == pytest.approx(expected[choice.token].item(), abs=1e-4)
        assert len(choice.top) == row.top_n
        values, ids = expected.topk(row.top_n)
        assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-4)
        kept = [i for i, value in enumerate(values.tolist()) if value > -1e30]
        assert [choice.top[i][0] for i in kept] == [ids.tolist()[i] for i in kept]


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    logits = logits_of(6, 50)
    rows = [Row(Sampling(temperature=1.0 * (i % 2), seed=i), [1], 1, 0) for i in range(6)]
    tokens = [choice.token for choice in pick(logits, rows) if choice is not None]
    assert tokens[::2] == logits.argmax(-1).tolist()[::2]
    assert tokens[1::2] == [choice.token for choice in pick(logits[1::2], rows[1::2]) if choice is not None]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_rows_with_nan_or_infinity_get_no_token_and_other_rows_are_unchanged(value: float, vocabulary: int) -> None:
    rows = random_rows(20, vocabulary, seed=3)
    logits = logits_of(20, vocabulary)
    expected = pick(logits, rows)
    logits[[0, 7, 19]] = value
    logits[11, 3] = value
    found = pick(logits, rows)
    assert [i for i, choice in enumerate(found) if choice is None] == [0, 7, 11, 19]
    assert all(choice in (None, expected[i]) for i, choice in enumerate(found))


def test_top_logprobs_are_limited_to_the_vocabulary() -> None:
    rows = [Row(Sampling(temperature=i, final_logprobs=final), [1], 1, 0, top_n=9) for i in (0, 1) for final in (False, True)]
    found = pick(logits_of(4, 5), rows)
    assert [len(choice.top) for choice in found if choice is not None] == [5, 5, 5, 5]


def test_neutral_parameters_filter_nothing() -> None:
    """Scores are the logits relative to the best one."""
    logits = logits_of(3, 50)
    [part] = filtered(logits, make_draws(3))
    assert part.ids is None
    torch.testing.assert_close(part.scores, logits - logits.amax(-1, keepdim=True))
    plain = [
        Pick(int(row_logits.argmax()), pytest.approx(row_logits.log_softmax(-1).max().item(), abs=1e-5)) for row_logits in logits
    ]
    assert pick(logits, [Row(Sampling(), [1], 1, 0)] * 3) == plain


@pytest.mark.parametrize("route", ["reference", "triton"])
@pytest.mark.parametrize("top_n", [0, 3])
def test_final_logprobs_respect_the_grammar_mask_and_raw_logprobs_do_not(
    monkeypatch: pytest.MonkeyPatch, route: str, top_n: int
) -> None:
    """As in text-generation-inference with final_logprobs; otherwise log-probabilities and top tokens are the model's own, without
    the mask and penalties."""
    if route == "triton":
        pytest.importorskip("triton")
    logits, penalized = logits_of(5, 70), Sampling(repetition_penalty=1.7, presence_penalty=0.5, final_logprobs=True)
    allowed = torch.zeros(5, 96, dtype=torch.bool)
    allowed[:, 5:70:7] = True
    allowed[4, :70] = True
    mask = torch.from_numpy(numpy.packbits(allowed.numpy(), axis=1, bitorder="little").view(numpy.int32))
    rows = [Row(Sampling(final_logprobs=final), [1], 1, 0, top_n, bound=True) for final in (True, False, True)]
    best = logits.masked_fill(~allowed[:, :70], -torch.inf).argmax(-1).tolist()
    rows += [Row(penalized, [12, best[3]], 1, 0, top_n, bound=True), Row(penalized, [best[4]], 1, 0, top_n)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with dispatch.forced(route):
        found = pick(logits.to(device), rows, mask.to(device))
    scores = torch.tensor([penalties_by_loop(one.tolist(), row) for one, row in zip(logits, rows, strict=True)])
    masked_logits = scores.masked_fill(~allowed[:, :70], -torch.inf)
    tokens = masked_logits.argmax(-1)
    for i, one in enumerate(found):
        assert one is not None
        expected = (masked_logits if rows[i].sampling.final_logprobs else logits)[i].log_softmax(-1)
        assert (one.token, one.logprob) == (int(tokens[i]), pytest.approx(float(expected[tokens[i]]), abs=1e-5))
        values, ids = expected.topk(top_n)
        assert [id for id, _ in one.top] == ids.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_grammar_mask_allows_exactly_the_tokens_of_its_bits() -> None:
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


def test_parameters_kept_from_the_last_call_are_those_of_the_rows() -> None:
    """Whatever changes from one call to the next: of `draws_of`, which copies only what has."""
    device, sampling = torch.device("cpu"), Sampling(temperature=0.7, top_p=0.9, seed=1 << 63)
    others = [dataclasses.replace(sampling, **{name: 0.5}) for name in ("temperature", "top_p", "min_p", "typical_p")]
    others += [dataclasses.replace(sampling, **{name: 3}) for name in ("top_k", "seed")]
    first = Row(sampling, [1, 2, 3], 1, 0)
    changed = [*(dataclasses.replace(first, sampling=one) for one in others), dataclasses.replace(first, choice=1)]
    changed += [dataclasses.replace(first, tokens=[1, 2, 3, 4]), Row(Sampling(), [1], 1, 0)]
    for rows in [[one] for one in changed] + [[first, one] for one in changed] + [[first]]:
        for _ in range(2):
            for own in ([first, first], rows, rows):
                draws = draws_of(own, device)
                assert draws.positions.tolist() == [len(row.tokens) - row.prompt_length for row in own]
                assert draws.choices.tolist() == [row.choice for row in own]
                assert draws.seeds.tolist() == [numpy.uint64(row.sampling.seed).astype(numpy.int64) for row in own]
                for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
                    values = getattr(draws, name)
                    assert values.equal(torch.tensor([getattr(row.sampling, name) for row in own], dtype=values.dtype))
