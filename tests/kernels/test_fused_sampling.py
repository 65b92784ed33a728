"""Triton's fused sampling compared with the reference sampler: bit-identical noise, and the same tokens, on every path that a row
may take."""

import math
import random
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import dispatch, fused_narrowing, fused_noise, fused_penalties, fused_sampling, logarithm, noise
from penstock.kernels.dispatch import on_nvidia
from penstock.kernels.fused_penalties import change
from penstock.kernels.fused_sampling import Sampled, sample
from penstock.kernels.sampling import Draws, Penalties, allow, draw, filtered, penalize
from penstock.shard.decoding.sampler import Row, pick
from penstock.shard.sequence import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes with numpy, which warns of intended infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes with which rows of a few hundred tokens take every path."""
    monkeypatch.setattr(fused_sampling, "SPLIT", 128)
    monkeypatch.setattr(fused_sampling, "CAPACITY", 64)
    monkeypatch.setattr(fused_sampling, "WANTED", 16)
    monkeypatch.setattr(fused_sampling, "AT_ONCE", 64)
    monkeypatch.setattr(fused_sampling, "FEW", 32)


def change_constant(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: float) -> None:
    """Gives a constant of kernels another value. Only the interpreter accepts that once a kernel was compiled."""
    if getattr(module, name).value != value:
        if DEVICE == "cuda":
            pytest.skip(f"compiled kernels have their {name}")
        monkeypatch.setattr(module, name, tl.constexpr(value))


@triton.jit
def noise_kernel(seeds, choices, positions, words, noise_of_quads, noise_of_ids, count, BLOCK: tl.constexpr, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
    quad = tl.arange(0, BLOCK)
    column = tl.arange(0, 4 * BLOCK)
    random_words = fused_noise.philox(seed, choice, position, quad)
    tl.store(words + row * count + 4 * quad, random_words[0].to(tl.int64), mask=4 * quad < count)
    tl.store(words + row * count + 4 * quad + 1, random_words[1].to(tl.int64), mask=4 * quad + 1 < count)
    tl.store(words + row * count + 4 * quad + 2, random_words[2].to(tl.int64), mask=4 * quad + 2 < count)
    tl.store(words + row * count + 4 * quad + 3, random_words[3].to(tl.int64), mask=4 * quad + 3 < count)
    tl.store(
        noise_of_quads + row * count + column, fused_noise.gumbel_of_quads(seed, choice, position, quad, CUDA), mask=column < count
    )
    tl.store(
        noise_of_ids + row * count + column, fused_noise.gumbel_of_ids(seed, choice, position, column, CUDA), mask=column < count
    )


def as_bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32)


def test_philox_words_and_noise_in_a_kernel_are_bit_identical(rng: random.Random) -> None:
    rows, count = 4, 1021
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,))
    choices, positions = torch.randint(0, 50, (rows,)), torch.randint(0, 1 << 20, (rows,))
    words = torch.full((rows, count), -1, device=DEVICE)
    noise_of_quads, noise_of_ids = torch.full((2, rows, count), torch.nan, device=DEVICE).unbind()
    keys = (x.to(DEVICE) for x in (seeds, choices, positions))
    noise_kernel[(rows,)](
        *keys, words, noise_of_quads, noise_of_ids, count, BLOCK=256, CUDA=on_nvidia(words.device), enable_fp_fusion=False
    )
    ids = torch.arange(count)
    expected = noise.philox(*noise._keyed(seeds, choices, positions, ids.unsqueeze(0) // 4))
    assert words.cpu().equal(torch.stack(torch.broadcast_tensors(*expected)).gather(0, (ids % 4).expand(1, rows, -1))[0])
    assert as_bits(noise_of_quads).equal(as_bits(noise.gumbel_all(seeds, choices, positions, count)))
    assert as_bits(noise_of_ids).equal(as_bits(noise_of_quads))


def test_noise_launches_are_bit_identical_to_the_reference(rng: random.Random) -> None:
    rows, vocabulary = 3, 2 * fused_noise.SIZE + rng.randint(1, 9)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,))
    choices, positions = torch.randint(0, 50, (2 * rows,))[::2], torch.randint(0, 1 << 20, (rows,))
    ids = torch.randint(0, vocabulary, (rows, fused_noise.SIZE + 5))
    keys = [x.to(DEVICE) for x in (seeds, choices, positions)]
    found = fused_noise.gumbel_all(*keys, vocabulary), fused_noise.gumbel(*keys, ids.to(DEVICE))
    assert as_bits(found[0]).equal(as_bits(noise.gumbel_all(seeds, choices, positions, vocabulary)))
    assert as_bits(found[1]).equal(as_bits(noise.gumbel(seeds, choices, positions, ids)))


def test_noise_of_zero_is_bit_identical_to_the_reference() -> None:
    """About one noise in ten million is 0, and zeros have signs."""
    seeds, choices, positions, ids = (torch.tensor([number]) for number in (4162495386135428346, 2, 154, 79422))
    expected = noise.gumbel(seeds, choices, positions, ids[None])
    assert expected.item() == 0.0
    found = fused_noise.gumbel(*(x.to(DEVICE) for x in (seeds, choices, positions, ids[None])))
    assert as_bits(found).equal(as_bits(expected))


def test_logarithm_is_accurate_to_2_units_in_the_last_place(rng: random.Random) -> None:
    """And log(1 - u) to 3."""
    x = torch.cat((torch.rand(100_000), torch.rand(1000) * 1e-30, 1 + (torch.rand(1000) - 0.5) * 1e-3, torch.rand(1000) * 1e30))
    x = x.clamp(min=1e-37)
    exact = x.double().log()
    units = ((logarithm.log(x).double() - exact) / exact.abs().clamp(min=1e-30)).abs().max() * 2**23
    assert units < 2.0  # relative error; half a unit at the upper end of a binade is a whole one at its lower end
    u = torch.cat((torch.rand(100_000), 2.0 ** -torch.randint(1, 34, (1000,)))).clamp(2.0**-33, 1 - 2.0**-24)
    exact = torch.log1p(-u.double())
    assert ((logarithm.log_complement(u).double() - exact) / exact).abs().max() * 2**23 < 3


def test_noise_matches_the_gumbel_formula_with_torchs_logarithms() -> None:
    """Except for the last places; and it is finite at the ends of the range."""
    words = torch.cat((torch.randint(0, 1 << 32, (100_000,)), torch.tensor([0, (1 << 32) - 1])))
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(logarithm.gumbel(words), expected, rtol=5e-7, atol=5e-7)


def make_draws(rows: int, **fields: Any) -> Draws:
    def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        value = fields.get(name, neutral)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype, device=DEVICE)

    neutral = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), device=DEVICE)
    return Draws(
        **{name: column(name, value, torch.float32) for name, value in neutral.items()},
        top_k=column("top_k", 0, torch.int64),
        seeds=fields.get("seeds", seeds),
        choices=torch.arange(rows, device=DEVICE) % 3,
        positions=torch.arange(rows, device=DEVICE) * 7,
    )


def sample_by_reference(logits: Tensor, parameters: Draws) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities in the final distribution, by `sampling.py`."""
    tokens, final = logits.argmax(-1), logits.amax(-1) - logits.logsumexp(-1)
    rows = (parameters.temperature > 0).nonzero().squeeze(1)
    sampled_parameters = parameters.take(rows)
    for part in filtered(logits[rows], sampled_parameters):
        columns = draw(part, sampled_parameters).unsqueeze(1)
        tokens[rows[part.rows]] = (columns if part.ids is None else part.ids.gather(1, columns)).squeeze(1)
        final[rows[part.rows]] = part.scores.log_softmax(-1).gather(1, columns).squeeze(1)
    return tokens, final


def check_against_reference(found: Sampled, logits: Tensor, allowed: Tensor, parameters: Draws) -> None:
    """Compares with the reference. logits: as given; allowed: after penalties and mask."""
    tokens, final = sample_by_reference(allowed, parameters)
    assert found.tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(found.final, final, rtol=1e-5, atol=2e-5)
    expected = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=2e-5)


MIXED_FILTERS = {
    "temperature": [0.0, 1.0, 0.6, 1.0, 1.5, 1.0, 0.3, 0.9, 1.0, 0.8, 1.0],
    "top_k": [0, 0, 5, 0, 0, 20, 0, 1, 8, 10, 0],
    "top_p": [1.0, 1.0, 1.0, 0.5, 1.0, 0.8, 0.9, 1.0, 0.01, 0.95, 1.0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.3, 0.01, 0.1, 0.0, 0.2, 0.0, 0.0],
    "typical_p": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4],
}


@pytest.mark.parametrize("vocabulary", [1, 7, 61, 259])
def test_greedy_plain_and_filtered_rows_choose_the_reference_tokens(vocabulary: int, rng: random.Random) -> None:
    """One row of each kind, in a view with NaN around it."""
    rows = len(MIXED_FILTERS["top_k"])
    parent = torch.full((rows, vocabulary + 3), torch.nan, device=DEVICE)
    logits = parent[:, 1 : vocabulary + 1]
    logits.copy_(torch.randn(rows, vocabulary) * 3)
    before, parameters = logits.clone(), make_draws(rows, **MIXED_FILTERS)
    check_against_reference(sample(logits, parameters, None, None), before, before, parameters)
    assert logits.equal(before)


@pytest.mark.parametrize(
    "filters", [{"top_k": 120}, {"top_p": 0.999}, {"min_p": 1e-4}, {"top_k": 90, "top_p": 0.95, "min_p": 1e-3}]
)
def test_filters_that_keep_more_tokens_than_are_gathered(filters: dict[str, float], rng: random.Random) -> None:
    """Of flat rows."""
    logits = torch.randn(2, 190, device=DEVICE)
    parameters = make_draws(2, **filters, temperature=[1.0, 0.8])
    check_against_reference(sample(logits, parameters, None, None), logits, logits, parameters)


def test_top_p_that_needs_more_mass_than_the_gathered_tokens_have(rng: random.Random) -> None:
    """All tokens from the pivot up are gathered, and top-p still reaches further."""
    logits = torch.randn(1, 500, device=DEVICE) / 3
    parameters = make_draws(1, top_p=0.5)
    check_against_reference(sample(logits, parameters, None, None), logits, logits, parameters)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flat", [1.0, 3.0])
def test_typical_p_keeps_the_tokens_nearest_to_the_entropy(flat: float, masked: bool, rng: random.Random) -> None:
    """Alone, and of what other filters keep: of a few tokens, of many, and of more than are gathered."""
    fields = {
        "typical_p": [0.2, 0.9, 0.5, 0.95, 0.6, 0.3, 0.5, 0.8, 0.9, 0.99],
        "top_k": [0, 0, 8, 10, 40, 40, 200, 200, 0, 0],
        "top_p": [1.0, 1.0, 1.0, 0.95, 1.0, 0.9, 1.0, 0.99, 0.97, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.1],
        "temperature": [1.0, 0.5, 1.0, 0.1, 2.0, 1.0, 1.0, 0.7, 1.0, 1.0],
    }
    rows, vocabulary = 10, 700
    logits, parameters = torch.randn(rows, vocabulary, device=DEVICE) * flat, make_draws(rows, **fields)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32)), device=DEVICE).int() if masked else None
    allowed = allow(logits, words) if words is not None else logits
    check_against_reference(sample(logits, parameters, None, words), logits, allowed, parameters)


def test_typical_p_keeps_all_of_equal_logits(rng: random.Random) -> None:
    """At the edge of what it keeps, and everywhere; more of them than are gathered."""
    logits = torch.tensor([0.0] * 300 + [-3.0] * 100 + [-9.0] * 50, device=DEVICE).repeat(3, 1)
    logits[1:] = 0.25
    parameters = make_draws(3, typical_p=[0.999, 0.3, 0.3], top_k=[0, 0, 7])
    found = sample(logits, parameters, None, None)
    assert found.final.tolist() == pytest.approx([logits[0, :400].log_softmax(-1)[found.tokens[0]].item(), *[-math.log(450)] * 2])


@pytest.mark.parametrize("few", [4, 64])
def test_typical_p_compares_only_what_other_filters_keep(few: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that top-k leaves out are nearer to the mean than the best one."""
    monkeypatch.setattr(fused_sampling, "FEW", few)
    values = torch.full((33 * 32,), -50.0, device=DEVICE)
    values[::32] = torch.tensor([0.0, *[-1.0] * 6, *[-1.2] * 6, *[-3.0] * 20], device=DEVICE)
    for seed in range(6):
        parameters = make_draws(1, typical_p=0.8, top_k=7, seeds=torch.tensor([seed], device=DEVICE))
        found = sample(values.unsqueeze(0), parameters, None, None)
        assert found.final.item() == pytest.approx((values[found.tokens] - values[: 7 * 32].logsumexp(0)).item(), abs=1e-5)


@pytest.mark.parametrize("few", [1, 64])
def test_typical_p_beside_a_logit_whose_score_overflows(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a repetition penalty makes one of -inf: the mean was NaN, and all tokens stayed."""
    monkeypatch.setattr(fused_sampling, "FEW", few)
    logits = torch.full((1, 96), -math.inf, device=DEVICE)
    logits[0, ::32] = torch.tensor([1.0, 0.5, torch.finfo(torch.float32).min], device=DEVICE)
    found = sample(logits, make_draws(1, typical_p=0.5, temperature=0.5), None, None)
    assert (found.tokens.item(), found.final.item()) == (0, pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("slots", [128, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_top_p_that_reaches_far_into_a_row(slots: int, tied: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many parts, beside rows that are soon done; with equal logits, and where more are left in the end than are listed."""
    change_constant(monkeypatch, fused_narrowing, "SLOTS", slots)
    fields = {
        "top_p": [0.9, 0.99, 0.6, 1.0, 0.9999999, 0.95],
        "min_p": [0.0, 1e-3, 0.0, 0.0, 0.0, 0.0],
        "temperature": [1.0, 0.7, 2.0, 1.0, 1.0, 0.1],
    }
    rows, vocabulary = 6, 1300
    logits = torch.randn(rows, vocabulary, device=DEVICE) * torch.tensor([[1.0], [2.0], [0.3], [1.0], [1.0], [1.0]], device=DEVICE)
    if tied:
        logits = (logits * 8).round() / 8
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32)), device=DEVICE).int()
    penalties, parameters, ids = (
        random_penalties(rows, vocabulary, rng),
        make_draws(rows, **fields),
        torch.arange(vocabulary, device=DEVICE),
    )
    for mask, own in ((None, None), (words, penalties)):
        allowed = logits if own is None else penalize(logits, own)
        if mask is not None:
            allowed = allowed.masked_fill((mask[:, ids // 32] >> (ids % 32).int()) & 1 == 0, -torch.inf)
        found = sample(logits, parameters, own, mask)
        if not tied:
            check_against_reference(found, logits, allowed, parameters)
            continue
        for row, (token, final) in enumerate(zip(found.tokens.tolist(), found.final.tolist(), strict=True)):
            kept = kept_with_ties(allowed[row], parameters, row)
            noisy = kept + noise.gumbel_all(parameters.seeds, parameters.choices, parameters.positions, vocabulary)[row]
            assert token == noisy.argmax().item()
            assert final == pytest.approx(kept.log_softmax(-1)[token].item(), abs=2e-5)


def test_top_p_that_is_reached_only_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens above those that are listed in the end have all that is wanted, by the last bit: one of 672 was left."""
    seed = 1639721696
    torch.manual_seed(seed)
    test_top_p_that_reaches_far_into_a_row(128, True, random.Random(seed), monkeypatch)


def kept_with_ties(logits: Tensor, parameters: Draws, row: int) -> Tensor:
    """Scores of a row, -inf for those that top-p and min-p leave out; all that tie at the edge of top-p stay."""
    scores = (logits - logits.max()) / parameters.temperature[row]
    ordered = scores.sort(descending=True).values
    share = ordered.double().softmax(-1).cumsum(-1)
    last = ordered[(share < parameters.top_p[row].double()).sum().clamp(max=len(ordered) - 1)]
    last = last if parameters.top_p[row] < 1 else -torch.inf
    return scores.masked_fill((scores < last) | (scores < parameters.min_p[row].log()), -torch.inf)


@triton.jit
def nearly_kernel(words, nearly, exactly, BLOCK: tl.constexpr, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(words + place).to(tl.uint32)
    tl.store(nearly + place, fused_noise.nearly_gumbel(own, CUDA))
    tl.store(exactly + place, fused_noise.gumbel_of_words(own, CUDA))


def test_noise_of_few_instructions_is_as_near_as_is_said(rng: random.Random) -> None:
    """A third of the tolerance is left for scores."""
    words = torch.cat((torch.arange(512), (1 << 32) - 1 - torch.arange(512), (1 << 28) - 512 + torch.arange(1024)))
    words = torch.cat((words, torch.randint(0, 1 << 32, (14 * 1024,)), torch.randint(0, 1 << 20, (16 * 1024,)))).to(DEVICE)
    nearly, exactly = torch.empty(2, len(words), device=DEVICE).unbind()
    nearly_kernel[(32,)](words, nearly, exactly, BLOCK=1024, CUDA=on_nvidia(words.device), enable_fp_fusion=False)
    assert (nearly - exactly).abs().max() < fused_noise.NEARLY.value * 2 / 3


@pytest.mark.parametrize("filters", [{}, {"top_k": 300}, {"min_p": 1e-4}])
def test_tokens_whose_noise_is_not_known_well_enough_are_compared_exactly(
    filters: dict[str, float], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the noise that all tokens get were off by 1: then most parts have several that may be the largest."""
    rows, vocabulary = 12, 700
    logits, parameters = torch.randn(rows, vocabulary, device=DEVICE), make_draws(rows, **filters)
    logits[:, rng.randrange(vocabulary)] += 2
    expected = sample(logits, parameters, None, None)
    change_constant(monkeypatch, fused_sampling, "NEARLY", 1.0)
    found = sample(logits, parameters, None, None)
    assert found.tokens.equal(expected.tokens)
    check_against_reference(found, logits, logits, parameters)


def test_gathered_tokens_concentrated_in_few_buckets(rng: random.Random) -> None:
    """Of many buckets, some hold more of the gathered tokens than others."""
    rows, vocabulary = len(MIXED_FILTERS["top_k"]), 2500
    logits = torch.randn(rows, vocabulary, device=DEVICE)
    for start in rng.sample(range(0, 2400, 32), 3):
        logits[:, start : start + 30] += 3 * torch.rand(rows, 30, device=DEVICE)
    parameters = make_draws(rows, **MIXED_FILTERS)
    check_against_reference(sample(logits, parameters, None, None), logits, logits, parameters)


def test_filters_that_reach_tokens_below_the_listed_ones(rng: random.Random) -> None:
    """One token of each bucket is allowed, so that no listed token is below the pivot."""
    logits = torch.randn(3, 32 * 24, device=DEVICE)
    allowed = logits.clone()
    words = torch.tensor([[1 << rng.randrange(31) for _ in range(24)] for _ in range(3)], device=DEVICE).int()
    ids = torch.arange(32 * 24, device=DEVICE)
    allowed[(words[:, ids // 32] >> (ids % 32).int()) & 1 == 0] = -torch.inf
    parameters = make_draws(3, top_p=[0.97, 1.0, 1.0], top_k=[0, 22, 0], min_p=[0.0, 0.0, 1e-3])
    check_against_reference(sample(logits, parameters, None, words), logits, allowed, parameters)


def test_rows_without_the_weighing_launch_choose_the_reference_tokens(rng: random.Random) -> None:
    logits = torch.randn(3, 50, device=DEVICE) * 2
    parameters = make_draws(3, top_p=[0.8, 0.5, 1.0], top_k=[0, 9, 4])
    check_against_reference(sample(logits, parameters, None, None, weighed=False), logits, logits, parameters)


def test_ties_at_the_limits_of_top_k_and_top_p_are_kept(rng: random.Random) -> None:
    """The log-probability shows which tokens were kept."""
    values = torch.arange(8.0, device=DEVICE).repeat(6)[torch.randperm(48, device=DEVICE)]
    values = torch.cat((values, torch.full((100,), -40.0, device=DEVICE)))
    logits = values.repeat(3, 1)
    masses = logits[0].double().exp()
    # Six tokens each have logit 7, 6 and 5. top-k 8 ends within the sixes, and so does top-p: the mass of the sevens and half the
    # sixes.
    share = ((masses[values == 7].sum() + masses[values == 6].sum() / 2) / masses.sum()).item()
    found = sample(logits, make_draws(3, top_k=[8, 0, 60], top_p=[1.0, share, share]), None, None)
    kept = masses[values >= 6].sum()
    for token, final in zip(found.tokens.tolist(), found.final.tolist(), strict=True):
        assert values[token] >= 6
        assert final == pytest.approx(math.log(masses[token] / kept), abs=1e-5)


def random_penalties(rows: int, vocabulary: int, rng: random.Random) -> Penalties:
    """Of the outputs, of prompts, and biases alone; and rows without any."""
    own = [rng.sample(range(vocabulary), rng.choice([0, 1, 9, vocabulary // 3, vocabulary])) for _ in range(rows - 1)]
    lengths = [*map(len, own), 0]
    entries = sum(lengths)
    return Penalties(
        starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE),
        ids=torch.tensor([*chain(*own)], dtype=torch.int32, device=DEVICE),
        counts=torch.randint(-1, 4, (entries,), dtype=torch.int32, device=DEVICE),
        biases=torch.randn(entries if rng.random() < 0.5 else 0, device=DEVICE) * 5,
        repetition=torch.rand(rows, device=DEVICE) + 0.7,
        frequency=torch.randn(rows, device=DEVICE),
        presence=torch.randn(rows, device=DEVICE),
    )


def survey_of(logits: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, buckets]: the largest of each 32 logits that are allowed."""
    shown = logits if mask is None else allow(logits, mask)
    return torch.nn.functional.pad(shown, (0, -logits.shape[1] % 32), value=-torch.inf).unflatten(1, (-1, 32)).amax(-1)


@pytest.mark.parametrize("at_once", [512, 1024])
def test_penalties_match_the_reference(at_once: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows with more entries than are worked on at once, and with equal logits."""
    monkeypatch.setattr(fused_penalties, "ENTRIES", at_once)
    monkeypatch.setattr(fused_penalties, "BUCKETS", at_once // 32)
    for vocabulary in (50, 1300):
        logits = torch.randn(4, vocabulary, device=DEVICE).round(decimals=rng.choice([0, 9]))
        before, penalties = logits.clone(), random_penalties(4, vocabulary, rng)
        mask = torch.randint(-(1 << 31), 1 << 31, (4, -(-vocabulary // 32)), device=DEVICE).int() if rng.random() < 0.5 else None
        maxima = survey_of(logits, mask)
        olds = change(logits, penalties, mask, maxima)
        torch.testing.assert_close(logits, penalize(before, penalties), rtol=1e-6, atol=2e-6)
        assert maxima.equal(survey_of(logits, mask))
        rows = torch.arange(4, device=DEVICE).repeat_interleave(penalties.starts.diff())
        assert logits.index_put((rows, penalties.ids.long()), olds).equal(before)


@pytest.mark.parametrize("vocabulary", [40, 203])
def test_penalties_with_grammar_masks_choose_the_reference_tokens(vocabulary: int, rng: random.Random) -> None:
    rows = len(MIXED_FILTERS["top_k"])
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32)), device=DEVICE).int()
    words[:, 0] |= 1  # at least one token is allowed in every row
    penalties, parameters = random_penalties(rows, vocabulary, rng), make_draws(rows, **MIXED_FILTERS)
    before = logits.clone()
    ids = torch.arange(vocabulary, device=DEVICE)
    forbidden = (words[:, ids // 32] >> (ids % 32).int()) & 1 == 0
    allowed = penalize(logits, penalties)
    found = sample(logits, parameters, penalties, words)
    check_against_reference(found, before, allowed.masked_fill(forbidden, -torch.inf), parameters)
    assert logits.equal(before)


def test_rows_are_bit_identical_whatever_the_other_rows_are(rng: random.Random) -> None:
    """Also beside rows with NaN or infinity, which get token -1 and a log-probability of NaN."""
    rows, vocabulary = len(MIXED_FILTERS["top_k"]), 150
    logits, parameters = torch.randn(rows, vocabulary, device=DEVICE) * 2, make_draws(rows, **MIXED_FILTERS)
    logits[1, 7], logits[4, 3] = torch.nan, torch.inf
    together = sample(logits, parameters, None, None)
    for row in (0, 3, 6):
        alone = sample(logits[row : row + 1], parameters.take(torch.tensor([row], device=DEVICE)), None, None)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert alone.final[0] == together.final[row]
    assert together.logprobs.isnan().nonzero().flatten().tolist() == [1, 4]
    assert (together.tokens == -1).nonzero().flatten().tolist() == [1, 4]
    assert bool(((together.tokens >= -1) & (together.tokens < vocabulary)).all())


@pytest.mark.parametrize(("factor", "allowed", "drawn"), [(1.2e-38, 0b01010, {1}), (3.4e38, 0b01100, {2, 3})])
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_penalties_that_overflow_leave_finite_logits_to_draw_from(
    kernels: str, factor: float, allowed: int, drawn: set[int]
) -> None:
    """The grammar allows two tokens alone, and both were there before. Infinite logits would have no differences, and so neither
    scores nor a token that is allowed."""
    logits = torch.tensor([[2.0, 6.0, -3.0, -6.0, 1.0]], device=DEVICE)
    words = torch.tensor([[allowed]], dtype=torch.int32, device=DEVICE)
    sampling = Sampling(temperature=1.0, repetition_penalty=factor, final_logprobs=True)
    with dispatch.forced(kernels):
        [found] = pick(logits, [Row(sampling, [1, 2, 3], 3, 0, bound=True)], words)
    assert found is not None
    assert found.token in drawn
    assert found.logprob == pytest.approx(-math.log(len(drawn)), abs=1e-6)
