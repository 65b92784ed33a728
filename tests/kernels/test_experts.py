"""A mixture of experts means what its MLPs mean one by one, however many tokens choose each of them."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_experts, fused_routing, packed_experts, small_floats
from penstock.kernels.codes import BITS, FP4_BLOCKS, QuantizedWeight, dequantized, quantize
from penstock.kernels.experts import Activation, FusedExperts, FusedQuantizedExperts, lay_out, route
from penstock.kernels.linear import Invariance

from .low_precision_floats import interpreted_fp4_pair
from .ptx_interpreter import unpack_all_byte_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def free() -> object:
    yield
    dispatch.force("")


@pytest.fixture
def promised(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch tokens depend on no other on a CPU alone: cuBLAS takes other kernels for other numbers of rows."""
    if kernels == "reference":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


def few(weight: Tensor, kind: str, block: int) -> QuantizedWeight:
    """The nearest of few bits; blocks are of that size if there are several, or as the kind has them."""
    if kind in FP4_BLOCKS:
        return quantize(weight, kind)
    found = quantize(weight.reshape(-1, block) if weight.shape[1] % block == 0 else weight, kind)
    zeros = found.zeros.view(len(weight), -1) if found.zeros is not None else None
    return QuantizedWeight(kind, found.codes.view(weight.shape), found.scales.view(len(weight), -1), zeros)


def exact(weight: Tensor | QuantizedWeight) -> Tensor:
    return (dequantized(weight, torch.float64) if isinstance(weight, QuantizedWeight) else weight).double()


class Mixture:
    """Random weights of experts, and tokens that go through some of them."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, tokens: int, number: int, kind: str = "") -> None:
        hidden, size, self.count = rng.randint(1, 150), rng.randint(1, 90), rng.randint(1, min(number, 4))
        if kind:
            hidden, size = rng.choice([32, 96, 128, 160]), rng.choice([32, 64, 96, 192])
        self.x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        squared = rng.random() < 0.3
        inner = (2 - squared) * size
        self.gate_ups = [(torch.randn(inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype) for _ in range(number)]
        self.downs = [(torch.randn(hidden, size, device=DEVICE) * size**-0.5).to(dtype) for _ in range(number)]
        if kind:
            block = rng.choice([32, 64, 128])
            self.gate_ups, self.downs = (
                [few(weight, kind, block) for weight in weights] for weights in (self.gate_ups, self.downs)
            )
        logits = torch.randn(tokens, number, device=DEVICE) * 2
        logits[: tokens // 2, 0] += 9  # one expert that many choose, and others that nobody does
        self.shares, self.chosen = route(logits, self.count, rng.random() < 0.5)
        self.gates = (
            Activation(squared=True)
            if squared
            else Activation(rng.random() < 0.5, rng.choice([0.0, 0.0, 0.7]), rng.choice(["steep", "before", "behind"]))
        )
        self.biases = None
        if rng.random() < 0.5:
            self.biases = tuple(torch.randn(number, width, device=DEVICE).to(dtype) for width in (inner, hidden))

    def found(self, kernels: str) -> Tensor:
        dispatch.force(kernels)
        laid_out = lay_out(self.gate_ups, self.downs, self.x.dtype, self.biases, self.gates)
        return laid_out(self.x, self.shares, self.chosen)

    def expected(self) -> Tensor:
        """In float64, a pair at a time."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for token, (shares, chosen) in enumerate(zip(self.shares.tolist(), self.chosen.tolist(), strict=True)):
            for share, expert in zip(shares, chosen, strict=True):
                first, second = (bias[expert].double() for bias in self.biases) if self.biases else (0, 0)
                inner = self.x[token : token + 1].double() @ exact(self.gate_ups[expert]).T + first
                inner = inner.clamp(min=0.0) ** 2 if self.gates.squared else self.gates(inner)
                out[token] += share * (inner @ exact(self.downs[expert]).T + second)[0]
        return out


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, kernels: str, rng: random.Random) -> None:
    for tokens in (0, 1, 5, rng.randint(20, 60)):
        mixture = Mixture(rng, dtype, tokens, rng.choice([1, 3, 8]))
        found, expected = mixture.found(kernels), mixture.expected()
        assert found.dtype == dtype
        assert found.shape == expected.shape
        if tokens:
            size = max(1.0, expected.abs().max().item())
            assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * size


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", BITS)
def test_experts_of_few_bits(kind: str, kernels: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """From codes, whose blocks are longer and shorter than what is read at once."""
    for tokens, dtype in ((0, torch.bfloat16), (1, torch.float16), (5, torch.bfloat16), (rng.randint(20, 60), torch.bfloat16)):
        mixture = Mixture(rng, dtype, tokens, rng.choice([1, 3, 8]), kind)
        monkeypatch.setattr(packed_experts, "RUN", rng.choice([64, 128]))
        found, expected = mixture.found(kernels), mixture.expected()
        if tokens:
            size = max(1.0, expected.abs().max().item())
            assert (found.double() - expected).abs().max() <= 2e-2 * size


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["", "int8"])
def test_some_go_through_none(kind: str, kernels: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands where nobody has written, and where nobody goes through any."""
    honest = torch.empty
    poison = {torch.bfloat16: torch.nan}
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: honest(*shape, **how).fill_(poison.get(how.get("dtype"), 0)))
    for tokens, part in ((1, 1.0), (5, 0.5), (rng.randint(20, 60), rng.random()), (7, 1.0)):
        mixture = Mixture(rng, torch.bfloat16, tokens, rng.choice([1, 3, 8]), kind)
        idle = torch.rand(mixture.chosen.shape, device=DEVICE) < part
        dispatch.force(kernels)
        laid_out = lay_out(mixture.gate_ups, mixture.downs, mixture.x.dtype, mixture.biases, mixture.gates)
        found = laid_out(mixture.x, mixture.shares, mixture.chosen.masked_fill(idle, 10), idle)
        mixture.shares = mixture.shares.masked_fill(idle, 0)
        expected = mixture.expected()
        assert (found.double() - expected).abs().max() <= 2e-2 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_of_four_bits_are_looked_up(dtype: torch.dtype) -> None:
    """All pairs of bytes in both halves of a word."""
    code = small_floats.IN_BFLOAT16 if dtype == torch.bfloat16 else small_floats.IN_FLOAT16
    found, held = unpack_all_byte_pairs(code.value, [], dtype)
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((positive, -positive)).to(dtype)
    for half, codes in enumerate((held & 15, held >> 4)):
        assert torch.equal(found[half].view(torch.int16), table[codes].view(torch.int16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU looks up by itself")
@pytest.mark.parametrize("kind", FP4_BLOCKS)
def test_what_is_looked_up_is_multiplied(kind: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scaled first in float16 alone: of bfloat16 the interpreter knows no products."""
    monkeypatch.setattr(packed_experts, "on_nvidia", lambda device: True)
    for module in (packed_experts, small_floats):
        monkeypatch.setattr(module, "fp4_pair", interpreted_fp4_pair)
    for tokens, dtype in ((1, torch.float16), (30, torch.bfloat16 if kind == "fp4" else torch.float16)):
        mixture = Mixture(rng, dtype, tokens, 3, kind)
        found, expected = mixture.found("triton"), mixture.expected()
        assert (found.double() - expected).abs().max() <= 2e-2 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("kind", FP4_BLOCKS)
def test_outputs_have_factors_of_their_own(kind: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right by its own measure, and some scales are 0, or the least there are."""
    honest = torch.empty
    poison = {torch.bfloat16: torch.nan}
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: honest(*shape, **how).fill_(poison.get(how.get("dtype"), 0)))
    for tokens in (12, 40):
        mixture = Mixture(rng, torch.bfloat16, tokens, 3, kind)
        for weights, far in ((mixture.gate_ups, 0), (mixture.downs, 12)):
            common = [10.0 ** rng.uniform(-far, far) for _ in weights[0].scales]
            for i, weight in enumerate(weights):
                scales = weight.scales.clone()
                scales[0], scales[1:3] = 0, 2.0**-9
                factors = torch.tensor([one * rng.uniform(0.5, 1.5) for one in common], device=DEVICE)
                held = weight.factors if weight.factors is not None else 1
                weights[i] = replace(weight, scales=scales, factors=held * factors)
        if mixture.biases:
            mixture.biases = mixture.biases[0], mixture.biases[1] * 0
        found, expected = mixture.found("triton").double(), mixture.expected()
        assert isinstance(lay_out(mixture.gate_ups, mixture.downs, torch.bfloat16), FusedQuantizedExperts)
        assert ((found - expected).abs().amax(0) <= 3e-2 * expected.abs().amax(0)).all()


@pytest.mark.parametrize(("kind", "bits", "factors"), [("fp4", 4 + 8 / 32, 0), ("nvfp4", 4 + 8 / 16, 32)])
def test_codes_are_multiplied_with_as_they_are(kind: str, bits: float, factors: int, rng: random.Random) -> None:
    """Where blocks allow it; and they take no more memory than they have to."""
    dispatch.force("triton")
    mixture = Mixture(rng, torch.bfloat16, 1, 3, kind)
    laid_out = lay_out(mixture.gate_ups, mixture.downs, torch.bfloat16)
    assert type(laid_out) is FusedQuantizedExperts
    weights = [*mixture.gate_ups, *mixture.downs]
    expected = sum(weight.codes.numel() * bits + len(weight.codes) * factors for weight in weights)
    assert 8 * sum(tensor.nbytes for tensor in laid_out.weights) == expected
    assert type(lay_out(mixture.gate_ups, mixture.downs, torch.float32)) is FusedExperts
    other = few(exact(mixture.downs[0]).float(), "int8", 32)
    assert type(lay_out(mixture.gate_ups, [other, *mixture.downs[1:]], torch.bfloat16)) is FusedExperts


@pytest.mark.usefixtures("promised")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["", *BITS])
def test_invariant_ones_depend_on_no_other_token(kind: str, kernels: str, rng: random.Random) -> None:
    """Not by a bit: on how many choose the same experts, and whether these are few."""
    mixture = Mixture(rng, torch.bfloat16 if kind else torch.float32, 60, 2, kind)
    dispatch.force(kernels)
    laid_out = lay_out(mixture.gate_ups, mixture.downs, mixture.x.dtype, mixture.biases, mixture.gates, Invariance.INVARIANT)
    whole = laid_out(mixture.x, mixture.shares, mixture.chosen)
    for own in (slice(0, 1), slice(29, 31), slice(3, 50)):
        assert laid_out(mixture.x[own], mixture.shares[own], mixture.chosen[own]).equal(whole[own])


def test_invariant_ones_have_one_tile(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Or the test above would fail: with tiles by the number of pairs numbers are added up in other steps."""
    depths = {True: 16, False: 32}
    honest = fused_experts._constants
    monkeypatch.setattr(fused_experts, "_constants", lambda few, *given: honest(few, *given) | {"DEPTH": depths[few]})
    mixture = Mixture(rng, torch.float32, 60, 2)
    while mixture.x.shape[1] <= depths[False]:  # few numbers are added up in one step, whatever it holds
        mixture = Mixture(rng, torch.float32, 60, 2)
    dispatch.force("triton")
    whole, first = [], []
    for exact in (Invariance.USUAL, Invariance.INVARIANT):
        laid_out = lay_out(mixture.gate_ups, mixture.downs, torch.float32, mixture.biases, mixture.gates, exact)
        whole.append(laid_out(mixture.x, mixture.shares, mixture.chosen)[:4])
        first.append(laid_out(mixture.x[:4], mixture.shares[:4], mixture.chosen[:4]))
    assert whole[1].equal(first[1])
    assert not whole[0].equal(first[0]) or mixture.count == 1


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_of_many_and_of_few(rows: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are full, that are not, and that are not there."""
    honest = fused_experts._constants
    monkeypatch.setattr(fused_experts, "_constants", lambda *given: honest(*given) | {"ROWS": rows})
    mixture = Mixture(rng, torch.float32, 70, 3)
    torch.testing.assert_close(mixture.found("triton").double(), mixture.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("promised")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_token_knows_no_neighbours(kernels: str, rng: random.Random) -> None:
    """Not by a bit, whoever else chose the same experts."""
    mixture = Mixture(rng, torch.float32, 9, 4)
    whole = mixture.found(kernels)
    mixture.x[[0, 1, 2, 5]] = torch.nan
    assert mixture.found(kernels)[[3, 4, 6, 7, 8]].equal(whole[[3, 4, 6, 7, 8]])


def test_a_fault_would_be_seen(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a last tile that isn't launched."""
    honest = fused_experts.experts_kernel

    class Short:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return honest[(grid[0], max(1, grid[1] - 3))]

    monkeypatch.setattr(fused_experts, "experts_kernel", Short())
    mixture = Mixture(rng, torch.float32, 70, 3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(mixture.found("triton").double(), mixture.expected(), rtol=1e-4, atol=1e-4)


def test_shares(rng: random.Random) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    whole = logits.softmax(-1)[0]
    shares, chosen = route(logits, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], whole[[1, 2]])
    torch.testing.assert_close(route(logits, 2, True)[0].sum(), torch.tensor(1.0))


def test_corrected_scores_choose_and_scores_are_shares(rng: random.Random) -> None:
    """By each token's numbers, one at a time; groups are chosen by their best two, or by the best."""
    logits, correction = torch.randn(20, 12), torch.randn(12) * 0.3
    cases = ((1, 1, 2, True), (4, 2, 2, True), (4, 2, 1, True), (3, 1, 2, False), (6, 6, 2, True))
    for groups, within, first, normalized in cases:
        sets = groups, within, first
        shares, chosen = route(logits, 3, normalized, sigmoid=True, correction=correction, sets=sets, factor=2.5)
        for row, own, numbers in zip(logits.tolist(), shares.tolist(), chosen.tolist(), strict=True):
            scores = [1 / (1 + math.exp(-logit)) for logit in row]
            judged = [score + more for score, more in zip(scores, correction.tolist(), strict=True)]
            size = 12 // groups
            parts = [range(first, first + size) for first in range(0, 12, size)]
            best = sorted(parts, key=lambda part: -sum(sorted(judged[i] for i in part)[-first:]))[:within]
            expected = sorted((i for part in best for i in part), key=lambda i: -judged[i])[:3]
            assert numbers == expected
            total = sum(scores[i] for i in expected) if normalized else 1.0
            assert own == pytest.approx([2.5 * scores[i] / total for i in expected], rel=1e-5)


def random_routing(rng: random.Random) -> tuple[Tensor, dict[str, Any]]:
    """Logits and how experts are chosen by them; often some are equal."""
    sets = rng.choice([1, 1, 2, 3, 4])
    experts, best = sets * rng.randint(2, 20), rng.randint(1, sets)
    logits = torch.randn(rng.choice([0, 1, 7, 40]), experts, device=DEVICE).to(rng.choice(DTYPES))
    if rng.random() < 0.5:
        logits = logits.round()
    correction = torch.randn(experts, device=DEVICE) if rng.random() < 0.5 else None
    by_logits = rng.random() < 0.3
    if correction is not None and not by_logits:  # then equal sums would be of other scores
        correction = correction.round()
    count = rng.randint(1, min(8, experts * best // sets))
    how = {"normalized": rng.random() < 0.5, "sigmoid": rng.random() < 0.5, "correction": correction}
    how["least"], how["by_logits"], how["zeroed"] = rng.choice([1e-20, 0.1]), by_logits, rng.random() < 0.3
    return logits, how | {"count": count, "sets": (sets, best, rng.choice([1, 2])), "factor": rng.choice([1.0, 2.5])}


@pytest.mark.parametrize("seed", range(20))
def test_routes_by_triton(seed: int) -> None:
    """Shares are those of the reference, but for those of equal scores that are different ones; of these the first are taken."""
    logits, how = random_routing(random.Random(seed))
    dispatch.force("triton")
    shares, chosen = route(logits, **how)
    dispatch.force("reference")
    expected, _ = route(logits, **how)
    if not how["zeroed"]:
        torch.testing.assert_close(shares.sort(-1).values, expected.sort(-1).values, rtol=1e-5, atol=1e-6)
    alone = [route_alone(row, chosen.shape[1], how) for row in logits.float()]
    assert chosen.tolist() == alone


def route_alone(logits: Tensor, count: int, how: dict[str, Any]) -> list[int]:
    """By sorting pairs of a score and a number."""
    scores = logits.sigmoid() if how["sigmoid"] else logits.softmax(0)
    judged = logits if how["by_logits"] else scores
    judged = (judged if how["correction"] is None else judged + how["correction"]).tolist()
    sets, best, first = how["sets"]
    size = len(judged) // sets
    sums = [sum(sorted(judged[start : start + size])[-first:]) for start in range(0, len(judged), size)]
    opened = sorted(range(sets), key=lambda one: (-sums[one], one))[:best]
    if how["zeroed"]:
        judged = [value if i // size in opened else 0.0 for i, value in enumerate(judged)]
        return sorted(range(len(judged)), key=lambda i: (-judged[i], i))[:count]
    return sorted((i for one in opened for i in range(one * size, one * size + size)), key=lambda i: (-judged[i], i))[:count]


@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize(("zeroed", "expected"), [(False, [1, 0]), (True, [1, 2])])
def test_experts_of_other_sets_may_count_as_0(kind: str, zeroed: bool, expected: list[int]) -> None:
    """Which is more than what is corrected to less."""
    dispatch.force(kind)
    logits, correction = torch.zeros(1, 4, device=DEVICE), torch.tensor([-0.9, 1.0, -0.6, -1.0], device=DEVICE)
    _, chosen = route(logits, 2, True, sigmoid=True, correction=correction, sets=(2, 1, 2), zeroed=zeroed)
    assert chosen.tolist() in ([expected], [[1, 3]] if zeroed else [expected])


def test_what_is_no_number_goes_somewhere() -> None:
    """No expert is beyond the last."""
    dispatch.force("triton")
    _, chosen = route(torch.full((3, 5), math.nan, device=DEVICE), 4, True, sigmoid=True)
    assert chosen.max() < 5
    assert chosen.min() >= 0


@pytest.mark.parametrize("pairs", [1, 31, 32, 33, 200, 256])
def test_few_pairs_are_sorted_in_one_launch(pairs: int, rng: random.Random) -> None:
    experts = rng.randint(1, 70)
    numbers = torch.tensor([rng.randrange(experts) for _ in range(pairs)], device=DEVICE)
    order, starts = fused_routing.sort(numbers.view(1, -1), experts)
    expected, places = numbers.sort(stable=True)
    assert order.equal(places)
    assert starts.equal(torch.searchsorted(expected, torch.arange(experts + 1, device=DEVICE)))


def test_scores_that_vanish_are_no_shares_of_nothing() -> None:
    shares, _ = route(torch.full((1, 4), -300.0), 2, True, sigmoid=True)
    assert shares.tolist() == [[0.0, 0.0]]
