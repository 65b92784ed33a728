"""The fused sampling chooses the tokens that the plain one chooses, from the same noise, by whichever way a row goes."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from penstock.kernels import fused_noise, fused_penalties, fused_sampling, logarithm, noise
from penstock.kernels.dispatch import on_nvidia
from penstock.kernels.fused_penalties import penalize_, restore_
from penstock.kernels.fused_sampling import Sampled, sample
from penstock.kernels.sampling import Draws, Penalties, draw, filtered, penalize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, which the interpreter computes with, warns of infinities that are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few hundred tokens go every way."""
    monkeypatch.setattr(fused_sampling, "SPLIT", 128)
    monkeypatch.setattr(fused_sampling, "CAPACITY", 64)
    monkeypatch.setattr(fused_sampling, "WANTED", 16)
    monkeypatch.setattr(fused_sampling, "AT_ONCE", 64)


@triton.jit
def noise_kernel(seeds, choices, positions, words, noises, of_ids, count, BLOCK: tl.constexpr, CUDA: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
    quad = tl.arange(0, BLOCK)
    column = tl.arange(0, 4 * BLOCK)
    drawn = fused_noise.philox(seed, choice, position, quad)
    tl.store(words + row * count + 4 * quad, drawn[0].to(tl.int64), mask=4 * quad < count)
    tl.store(words + row * count + 4 * quad + 1, drawn[1].to(tl.int64), mask=4 * quad + 1 < count)
    tl.store(words + row * count + 4 * quad + 2, drawn[2].to(tl.int64), mask=4 * quad + 2 < count)
    tl.store(words + row * count + 4 * quad + 3, drawn[3].to(tl.int64), mask=4 * quad + 3 < count)
    tl.store(noises + row * count + column, fused_noise.gumbel_of_quads(seed, choice, position, quad, CUDA), mask=column < count)
    tl.store(of_ids + row * count + column, fused_noise.gumbel_of_ids(seed, choice, position, column, CUDA), mask=column < count)


def bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int32)


def test_noise_is_the_same_to_the_last_bit(rng: random.Random) -> None:
    rows, count = 4, 1021
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,))
    choices, positions = torch.randint(0, 50, (rows,)), torch.randint(0, 1 << 20, (rows,))
    words = torch.full((rows, count), -1, device=DEVICE)
    noises, of_ids = torch.full((2, rows, count), torch.nan, device=DEVICE).unbind()
    keys = (x.to(DEVICE) for x in (seeds, choices, positions))
    noise_kernel[(rows,)](*keys, words, noises, of_ids, count, BLOCK=256, CUDA=on_nvidia(words.device), enable_fp_fusion=False)
    ids = torch.arange(count)
    expected = noise.philox(*noise._keyed(seeds, choices, positions, ids.unsqueeze(0) // 4))
    assert words.cpu().equal(torch.stack(torch.broadcast_tensors(*expected)).gather(0, (ids % 4).expand(1, rows, -1))[0])
    assert bits(noises).equal(bits(noise.gumbel_all(seeds, choices, positions, count)))
    assert bits(of_ids).equal(bits(noises))


def test_noise_by_itself_is_the_same_to_the_last_bit(rng: random.Random) -> None:
    rows, vocabulary = 3, 2 * fused_noise.SIZE + rng.randint(1, 9)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,))
    choices, positions = torch.randint(0, 50, (2 * rows,))[::2], torch.randint(0, 1 << 20, (rows,))
    ids = torch.randint(0, vocabulary, (rows, fused_noise.SIZE + 5))
    keys = [x.to(DEVICE) for x in (seeds, choices, positions)]
    found = fused_noise.gumbel_all(*keys, vocabulary), fused_noise.gumbel(*keys, ids.to(DEVICE))
    assert bits(found[0]).equal(bits(noise.gumbel_all(seeds, choices, positions, vocabulary)))
    assert bits(found[1]).equal(bits(noise.gumbel(seeds, choices, positions, ids)))


def test_a_noise_of_nothing_is_the_same_to_the_last_bit() -> None:
    """One of some ten million is, and zeros have signs."""
    seeds, choices, positions, ids = (torch.tensor([number]) for number in (4162495386135428346, 2, 154, 79422))
    expected = noise.gumbel(seeds, choices, positions, ids[None])
    assert expected.item() == 0.0
    found = fused_noise.gumbel(*(x.to(DEVICE) for x in (seeds, choices, positions, ids[None])))
    assert bits(found).equal(bits(expected))


def test_the_logarithm_is_one(rng: random.Random) -> None:
    x = torch.cat((torch.rand(100_000), torch.rand(1000) * 1e-30, 1 + (torch.rand(1000) - 0.5) * 1e-3, torch.rand(1000) * 1e30))
    x = x.clamp(min=1e-37)
    exact = x.double().log()
    units = ((logarithm.log(x).double() - exact) / exact.abs().clamp(min=1e-30)).abs().max() * 2**23
    assert units < 2.0  # of relative error; half a unit of an interval's upper end is one of its lower end
    u = torch.cat((torch.rand(100_000), 2.0 ** -torch.randint(1, 34, (1000,)))).clamp(2.0**-33, 1 - 2.0**-24)
    exact = torch.log1p(-u.double())
    assert ((logarithm.log_complement(u).double() - exact) / exact).abs().max() * 2**23 < 3


def test_noise_is_what_the_formula_says() -> None:
    """torch's own logarithms give the same but for the last places; and the ends of the range are finite."""
    words = torch.cat((torch.randint(0, 1 << 32, (100_000,)), torch.tensor([0, (1 << 32) - 1])))
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    expected = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(logarithm.gumbel(words), expected, rtol=5e-7, atol=5e-7)


def draws(rows: int, **fields: Any) -> Draws:
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


def plain(logits: Tensor, parameters: Draws) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of the distribution drawn from, by `sampling.py`."""
    tokens, final = logits.argmax(-1), torch.zeros(len(logits), device=DEVICE)
    rows = (parameters.temperature > 0).nonzero().squeeze(1)
    own = parameters.take(rows)
    for part in filtered(logits[rows], own):
        columns = draw(part, own).unsqueeze(1)
        tokens[rows[part.rows]] = (columns if part.ids is None else part.ids.gather(1, columns)).squeeze(1)
        final[rows[part.rows]] = part.scores.log_softmax(-1).gather(1, columns).squeeze(1)
    return tokens, final


def check(found: Sampled, logits: Tensor, allowed: Tensor, parameters: Draws) -> None:
    """logits: as they came; allowed: after penalties and mask."""
    tokens, final = plain(allowed, parameters)
    assert found.tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(found.final, final, rtol=1e-5, atol=2e-5)
    expected = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=2e-5)


NEAR = {
    "temperature": [0.0, 1.0, 0.6, 1.0, 1.5, 1.0, 0.3, 0.9, 1.0],
    "top_k": [0, 0, 5, 0, 0, 20, 0, 1, 8],
    "top_p": [1.0, 1.0, 1.0, 0.5, 1.0, 0.8, 0.9, 1.0, 0.01],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.3, 0.01, 0.1, 0.0, 0.2],
}


@pytest.mark.parametrize("vocabulary", [1, 7, 61, 259])
def test_the_same_tokens(vocabulary: int, rng: random.Random) -> None:
    """Greedy, plain and filtered rows, one of each kind, in a view with NaN around it."""
    rows = len(NEAR["top_k"])
    whole = torch.full((rows, vocabulary + 3), torch.nan, device=DEVICE)
    logits = whole[:, 1 : vocabulary + 1]
    logits.copy_(torch.randn(rows, vocabulary) * 3)
    before, parameters = logits.clone(), draws(rows, **NEAR)
    check(sample(logits, parameters, None, None), before, before, parameters)
    assert logits.equal(before)


@pytest.mark.parametrize(
    "filters", [{"top_k": 120}, {"top_p": 0.999}, {"min_p": 1e-4}, {"top_k": 90, "top_p": 0.95, "min_p": 1e-3}]
)
def test_filters_that_reach_far(filters: dict[str, float], rng: random.Random) -> None:
    """Flat rows, of which more stays than is gathered."""
    logits = torch.randn(2, 190, device=DEVICE)
    parameters = draws(2, **filters, temperature=[1.0, 0.8])
    check(sample(logits, parameters, None, None), logits, logits, parameters)


def test_what_is_gathered_may_have_too_little_mass(rng: random.Random) -> None:
    """There is room for all that is not below the pivot, and still top-p reaches further."""
    logits = torch.randn(1, 500, device=DEVICE) / 3
    parameters = draws(1, top_p=0.5)
    check(sample(logits, parameters, None, None), logits, logits, parameters)


def test_what_is_gathered_lies_in_few_buckets(rng: random.Random) -> None:
    """Of many; and some hold more of it than others."""
    rows, vocabulary = len(NEAR["top_k"]), 2500
    logits = torch.randn(rows, vocabulary, device=DEVICE)
    for start in rng.sample(range(0, 2400, 32), 3):
        logits[:, start : start + 30] += 3 * torch.rand(rows, 30, device=DEVICE)
    parameters = draws(rows, **NEAR)
    check(sample(logits, parameters, None, None), logits, logits, parameters)


def test_what_is_not_listed_may_count(rng: random.Random) -> None:
    """One token of each bucket is allowed, so that none that is listed is below the pivot; filters reach further."""
    logits = torch.randn(3, 32 * 24, device=DEVICE)
    allowed = logits.clone()
    words = torch.tensor([[1 << rng.randrange(31) for _ in range(24)] for _ in range(3)], device=DEVICE).int()
    ids = torch.arange(32 * 24, device=DEVICE)
    allowed[(words[:, ids // 32] >> (ids % 32).int()) & 1 == 0] = -torch.inf
    parameters = draws(3, top_p=[0.97, 1.0, 1.0], top_k=[0, 22, 0], min_p=[0.0, 0.0, 1e-3])
    check(sample(logits, parameters, None, words), logits, allowed, parameters)


def test_a_row_that_was_not_weighed_is_right_all_the_same(rng: random.Random) -> None:
    logits = torch.randn(3, 50, device=DEVICE) * 2
    parameters = draws(3, top_p=[0.8, 0.5, 1.0], top_k=[0, 9, 4])
    check(sample(logits, parameters, None, None, weighed=False), logits, logits, parameters)


def test_ties_stay(rng: random.Random) -> None:
    """At the edge of top-k and of top-p: the mass that is left says what stays."""
    values = torch.arange(8.0, device=DEVICE).repeat(6)[torch.randperm(48, device=DEVICE)]
    values = torch.cat((values, torch.full((100,), -40.0, device=DEVICE)))
    logits = values.repeat(3, 1)
    masses = logits[0].double().exp()
    # Six tokens each of 7, 6, 5: top-k 8 is within the sixes, and so is the share of the sevens and a half of the sixes.
    share = ((masses[values == 7].sum() + masses[values == 6].sum() / 2) / masses.sum()).item()
    found = sample(logits, draws(3, top_k=[8, 0, 60], top_p=[1.0, share, share]), None, None)
    kept = masses[values >= 6].sum()
    for token, final in zip(found.tokens.tolist(), found.final.tolist(), strict=True):
        assert values[token] >= 6
        assert final == pytest.approx(math.log(masses[token] / kept), abs=1e-5)


def penalties_of(rows: int, vocabulary: int, rng: random.Random) -> Penalties:
    """With tokens that come again and again, and rows that have none."""
    entries = rng.randint(1, 400)
    output = torch.rand(entries, device=DEVICE) < 0.6
    biases = [divmod(place, vocabulary) for place in rng.sample(range(rows * vocabulary), min(rows * vocabulary, 9))]
    return Penalties(
        rows=torch.randint(0, rows, (entries,), device=DEVICE).clamp(max=rows - 2),
        ids=(torch.randn(entries, device=DEVICE).abs() * vocabulary / 4).long().clamp(max=vocabulary - 1),
        output=output.float(),
        repetition=torch.rand(rows, device=DEVICE) + 0.7,
        frequency=torch.randn(rows, device=DEVICE),
        presence=torch.randn(rows, device=DEVICE),
        bias_rows=torch.tensor([row for row, _ in biases], device=DEVICE),
        bias_ids=torch.tensor([token for _, token in biases], device=DEVICE),
        bias_values=torch.randn(len(biases), device=DEVICE) * 5,
    )


def test_penalties_come_and_go(rng: random.Random) -> None:
    logits = torch.randn(4, 50, device=DEVICE)
    before, penalties = logits.clone(), penalties_of(4, 50, rng)
    saved = penalize_(logits, penalties)
    torch.testing.assert_close(logits, penalize(before, penalties), rtol=1e-6, atol=2e-6)
    assert not any(tallies.any() for tallies in fused_penalties._tallies.values())
    restore_(logits, penalties, saved)
    assert logits.equal(before)


def test_penalties_that_broke_off_leave_nothing(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory to launch a kernel: what was counted until then is nobody's."""

    class Full:
        def __getitem__(self, grid: object) -> Any:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    logits = torch.randn(4, 50, device=DEVICE)
    first, penalties = penalties_of(4, 50, rng), penalties_of(4, 50, rng)
    with monkeypatch.context() as patch:
        patch.setattr(fused_penalties, "penalize_kernel", Full())
        with pytest.raises(RuntimeError, match="out of memory"):
            penalize_(logits, first)
    expected = logits.clone()
    penalize_(logits, penalties)
    torch.testing.assert_close(logits, penalize(expected, penalties), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocabulary", [40, 203])
def test_penalties_and_masks(vocabulary: int, rng: random.Random) -> None:
    rows = len(NEAR["top_k"])
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
    words = torch.randint(-(1 << 31), 1 << 31, (rows, -(-vocabulary // 32)), device=DEVICE).int()
    words[:, 0] |= 1  # of every row something is allowed
    penalties, parameters = penalties_of(rows, vocabulary, rng), draws(rows, **NEAR)
    before = logits.clone()
    ids = torch.arange(vocabulary, device=DEVICE)
    hidden = (words[:, ids // 32] >> (ids % 32).int()) & 1 == 0
    allowed = before.clone()
    penalize_(allowed, penalties)
    found = sample(logits, parameters, penalties, words)
    check(found, before, allowed.masked_fill(hidden, -torch.inf), parameters)
    assert logits.equal(before)


def test_rows_do_not_know_their_neighbours(rng: random.Random) -> None:
    """To the last bit, and some of the neighbours are broken: those say so."""
    rows, vocabulary = len(NEAR["top_k"]), 150
    logits, parameters = torch.randn(rows, vocabulary, device=DEVICE) * 2, draws(rows, **NEAR)
    logits[1, 7], logits[4, 3] = torch.nan, torch.inf
    among = sample(logits, parameters, None, None)
    for row in (0, 3, 6):
        alone = sample(logits[row : row + 1], parameters.take(torch.tensor([row], device=DEVICE)), None, None)
        assert alone.tokens[0] == among.tokens[row]
        assert alone.logprobs[0] == among.logprobs[row]
        assert alone.final[0] == among.final[row]
    assert among.logprobs.isnan().nonzero().flatten().tolist() == [1, 4]
    assert (among.tokens == -1).nonzero().flatten().tolist() == [1, 4]
    assert bool(((among.tokens >= -1) & (among.tokens < vocabulary)).all())
