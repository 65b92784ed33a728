"""Mixture of experts, by the reference and by Triton's kernels, compared with the experts' MLPs computed one by one in float64:
routing, products with plain and quantized weights, and batch invariance."""

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
from penstock.kernels.experts import Activation, lay_out, route
from penstock.kernels.linear import Invariance

from .low_precision_floats import interpreted_fp4_pair
from .ptx_interpreter import unpack_all_byte_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def automatic_dispatch() -> object:
    yield
    dispatch.force("")


@pytest.fixture
def reference_on_cpu_only(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference results of a token are independent of other tokens on a CPU only: cuBLAS chooses kernels by the number of rows."""
    if kernels == "reference":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


def quantized_weight(weight: Tensor, kind: str, block: int) -> QuantizedWeight:
    """The weight, quantized by rounding to nearest, with blocks of that size where the size fits, or of the format's own size."""
    if kind in FP4_BLOCKS:
        return quantize(weight, kind)
    found = quantize(weight.reshape(-1, block) if weight.shape[1] % block == 0 else weight, kind)
    zeros = found.zeros.view(len(weight), -1) if found.zeros is not None else None
    return QuantizedWeight(kind, found.codes.view(weight.shape), found.scales.view(len(weight), -1), zeros)


def in_float64(weight: Tensor | QuantizedWeight) -> Tensor:
    return (dequantized(weight, torch.float64) if isinstance(weight, QuantizedWeight) else weight).double()


class ExpertsCase:
    """Random weights of experts, and tokens with a random routing."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, tokens: int, number: int, kind: str = "") -> None:
        hidden, size, self.count = rng.randint(1, 150), rng.randint(1, 90), rng.randint(1, min(number, 4))
        if kind:
            hidden, size = rng.choice([32, 96, 128, 160]), rng.choice([32, 64, 96, 192])
        self.x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        squared = rng.random() < 0.3
        inner_size = (2 - squared) * size
        self.gate_ups = [(torch.randn(inner_size, hidden, device=DEVICE) * hidden**-0.5).to(dtype) for _ in range(number)]
        self.downs = [(torch.randn(hidden, size, device=DEVICE) * size**-0.5).to(dtype) for _ in range(number)]
        if kind:
            block = rng.choice([32, 64, 128])
            self.gate_ups, self.downs = (
                [quantized_weight(weight, kind, block) for weight in weights] for weights in (self.gate_ups, self.downs)
            )
        logits = torch.randn(tokens, number, device=DEVICE) * 2
        logits[: tokens // 2, 0] += 9  # many tokens choose one expert, and none choose some of the others
        self.shares, self.chosen = route(logits, self.count, rng.random() < 0.5)
        self.gates = (
            Activation(squared=True)
            if squared
            else Activation(rng.random() < 0.5, rng.choice([0.0, 0.0, 0.7]), rng.choice(["steep", "before", "behind"]))
        )
        self.biases = None
        if rng.random() < 0.5:
            self.biases = tuple(torch.randn(number, width, device=DEVICE).to(dtype) for width in (inner_size, hidden))

    def compute(self, kernels: str) -> Tensor:
        dispatch.force(kernels)
        experts = lay_out(self.gate_ups, self.downs, self.x.dtype, self.biases, self.gates)
        return experts(self.x, self.shares, self.chosen)

    def expected(self) -> Tensor:
        """In float64, one pair of a token and an expert at a time."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for token, (shares, chosen) in enumerate(zip(self.shares.tolist(), self.chosen.tolist(), strict=True)):
            for share, expert in zip(shares, chosen, strict=True):
                first, second = (bias[expert].double() for bias in self.biases) if self.biases else (0, 0)
                inner = self.x[token : token + 1].double() @ in_float64(self.gate_ups[expert]).T + first
                inner = inner.clamp(min=0.0) ** 2 if self.gates.squared else self.gates(inner)
                out[token] += share * (inner @ in_float64(self.downs[expert]).T + second)[0]
        return out


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_match_float64(dtype: torch.dtype, kernels: str, rng: random.Random) -> None:
    for tokens in (0, 1, 5, rng.randint(20, 60)):
        case = ExpertsCase(rng, dtype, tokens, rng.choice([1, 3, 8]))
        found, expected = case.compute(kernels), case.expected()
        assert found.dtype == dtype
        assert found.shape == expected.shape
        if tokens:
            magnitude = max(1.0, expected.abs().max().item())
            assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * magnitude


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", BITS)
def test_quantized_experts_match_float64(kind: str, kernels: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks that are longer and shorter than what is read at once."""
    for tokens, dtype in ((0, torch.bfloat16), (1, torch.float16), (5, torch.bfloat16), (rng.randint(20, 60), torch.bfloat16)):
        case = ExpertsCase(rng, dtype, tokens, rng.choice([1, 3, 8]), kind)
        monkeypatch.setattr(packed_experts, "RUN", rng.choice([64, 128]))
        found, expected = case.compute(kernels), case.expected()
        if tokens:
            magnitude = max(1.0, expected.abs().max().item())
            assert (found.double() - expected).abs().max() <= 2e-2 * magnitude


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["", "int8"])
def test_idle_choices_contribute_nothing_whatever_memory_holds(
    kind: str, kernels: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle choices are those of zero-computation experts (LongCat). Outputs are NaN before they are written."""
    original = torch.empty
    fill_values = {torch.bfloat16: torch.nan}
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **options: original(*shape, **options).fill_(fill_values.get(options.get("dtype"), 0))
    )
    for tokens, idle_share in ((1, 1.0), (5, 0.5), (rng.randint(20, 60), rng.random()), (7, 1.0)):
        case = ExpertsCase(rng, torch.bfloat16, tokens, rng.choice([1, 3, 8]), kind)
        idle = torch.rand(case.chosen.shape, device=DEVICE) < idle_share
        dispatch.force(kernels)
        laid_out = lay_out(case.gate_ups, case.downs, case.x.dtype, case.biases, case.gates)
        found = laid_out(case.x, case.shares, case.chosen.masked_fill(idle, 10), idle)
        case.shares = case.shares.masked_fill(idle, 0)
        expected = case.expected()
        assert (found.double() - expected).abs().max() <= 2e-2 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ptx_looks_up_pairs_of_fp4_codes(dtype: torch.dtype) -> None:
    """All pairs of bytes, in both halves of a word."""
    code = small_floats.IN_BFLOAT16 if dtype == torch.bfloat16 else small_floats.IN_FLOAT16
    found, code_bytes = unpack_all_byte_pairs(code.value, [], dtype)
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((positive, -positive)).to(dtype)
    for half, codes in enumerate((code_bytes & 15, code_bytes >> 4)):
        assert torch.equal(found[half].view(torch.int16), table[codes].view(torch.int16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU all products use the lookup")
@pytest.mark.parametrize("kind", FP4_BLOCKS)
def test_experts_with_the_nvidia_path_of_fp4_match_float64(kind: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4, whose codes are scaled before the product, in float16 only: the interpreter supports no products of bfloat16."""
    monkeypatch.setattr(packed_experts, "on_nvidia", lambda device: True)
    for module in (packed_experts, small_floats):
        monkeypatch.setattr(module, "fp4_pair", interpreted_fp4_pair)
    for tokens, dtype in ((1, torch.float16), (30, torch.bfloat16 if kind == "fp4" else torch.float16)):
        case = ExpertsCase(rng, dtype, tokens, 3, kind)
        found, expected = case.compute("triton"), case.expected()
        assert (found.double() - expected).abs().max() <= 2e-2 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("kind", FP4_BLOCKS)
def test_output_factors_of_quantized_experts_are_accurate_for_each_output(
    kind: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are measured for each output by itself. Some scales are 0 or the smallest ones."""
    original = torch.empty
    fill_values = {torch.bfloat16: torch.nan}
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **options: original(*shape, **options).fill_(fill_values.get(options.get("dtype"), 0))
    )
    for tokens in (12, 40):
        case = ExpertsCase(rng, torch.bfloat16, tokens, 3, kind)
        for weights, exponent_range in ((case.gate_ups, 0), (case.downs, 12)):
            common = [10.0 ** rng.uniform(-exponent_range, exponent_range) for _ in weights[0].scales]
            for i, weight in enumerate(weights):
                scales = weight.scales.clone()
                scales[0], scales[1:3] = 0, 2.0**-9
                factors = torch.tensor([one * rng.uniform(0.5, 1.5) for one in common], device=DEVICE)
                held = weight.factors if weight.factors is not None else 1
                weights[i] = replace(weight, scales=scales, factors=held * factors)
        if case.biases:
            case.biases = case.biases[0], case.biases[1] * 0
        found, expected = case.compute("triton").double(), case.expected()
        assert lay_out(case.gate_ups, case.downs, torch.bfloat16).weights[0].dtype == torch.uint8
        assert ((found - expected).abs().amax(0) <= 3e-2 * expected.abs().amax(0)).all()


@pytest.mark.parametrize(("kind", "bits", "factors"), [("fp4", 4 + 8 / 32, 0), ("nvfp4", 4 + 8 / 16, 32)])
def test_quantized_experts_keep_codes_packed_or_fall_back_to_plain_weights(
    kind: str, bits: float, factors: int, rng: random.Random
) -> None:
    """They stay packed where blocks allow it, and take no more memory than codes, scales and factors need."""
    dispatch.force("triton")
    case = ExpertsCase(rng, torch.bfloat16, 1, 3, kind)
    laid_out = lay_out(case.gate_ups, case.downs, torch.bfloat16)
    assert laid_out.weights[0].dtype == torch.uint8
    weights = [*case.gate_ups, *case.downs]
    expected = sum(weight.codes.numel() * bits + len(weight.codes) * factors for weight in weights)
    assert 8 * sum(tensor.nbytes for tensor in laid_out.weights) == expected
    assert [weight.dtype for weight in lay_out(case.gate_ups, case.downs, torch.float32).weights] == [torch.float32] * 2
    other = quantized_weight(in_float64(case.downs[0]).float(), "int8", 32)
    assert lay_out(case.gate_ups, [other, *case.downs[1:]], torch.bfloat16).weights[0].dtype == torch.bfloat16


@pytest.mark.usefixtures("reference_on_cpu_only")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("kind", ["", *BITS])
def test_invariant_experts_are_bit_identical_for_any_subset_of_tokens(kind: str, kernels: str, rng: random.Random) -> None:
    """However many tokens choose the same experts."""
    case = ExpertsCase(rng, torch.bfloat16 if kind else torch.float32, 60, 2, kind)
    dispatch.force(kernels)
    laid_out = lay_out(case.gate_ups, case.downs, case.x.dtype, case.biases, case.gates, Invariance.INVARIANT)
    whole = laid_out(case.x, case.shares, case.chosen)
    for tokens in (slice(0, 1), slice(29, 31), slice(3, 50)):
        assert laid_out(case.x[tokens], case.shares[tokens], case.chosen[tokens]).equal(whole[tokens])


def test_invariant_experts_use_one_tile_for_all_numbers_of_pairs(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """With a tile that depends on the number of pairs, sums would be in another order, and the test above would fail."""
    depths = {True: 16, False: 32}
    original = fused_experts._constants
    monkeypatch.setattr(
        fused_experts,
        "_constants",
        lambda quantized_weight, *given: original(quantized_weight, *given) | {"DEPTH": depths[quantized_weight]},
    )
    case = ExpertsCase(rng, torch.float32, 60, 2)
    while case.x.shape[1] <= depths[False]:  # so few inputs are summed in one step with either tile
        case = ExpertsCase(rng, torch.float32, 60, 2)
    dispatch.force("triton")
    whole, first = [], []
    for invariance in (Invariance.USUAL, Invariance.INVARIANT):
        laid_out = lay_out(case.gate_ups, case.downs, torch.float32, case.biases, case.gates, invariance)
        whole.append(laid_out(case.x, case.shares, case.chosen)[:4])
        first.append(laid_out(case.x[:4], case.shares[:4], case.chosen[:4]))
    assert whole[1].equal(first[1])
    assert not whole[0].equal(first[0]) or case.count == 1


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_of_few_and_many_rows_match_float64(rows: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full, partial and empty tiles."""
    original = fused_experts._constants
    monkeypatch.setattr(fused_experts, "_constants", lambda *given: original(*given) | {"ROWS": rows})
    case = ExpertsCase(rng, torch.float32, 70, 3)
    torch.testing.assert_close(case.compute("triton").double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("reference_on_cpu_only")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_tokens_are_bit_identical_whatever_the_other_tokens_are(kernels: str, rng: random.Random) -> None:
    """Also those that chose the same experts."""
    case = ExpertsCase(rng, torch.float32, 9, 4)
    whole = case.compute(kernels)
    case.x[[0, 1, 2, 5]] = torch.nan
    assert case.compute(kernels)[[3, 4, 6, 7, 8]].equal(whole[[3, 4, 6, 7, 8]])


def test_check_detects_tiles_that_are_not_launched(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused_experts.experts_kernel

    class ShortGrid:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return original[(grid[0], max(1, grid[1] - 3))]

    monkeypatch.setattr(fused_experts, "experts_kernel", ShortGrid())
    case = ExpertsCase(rng, torch.float32, 70, 3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(case.compute("triton").double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_softmax_routing_weights_are_normalized_on_request(rng: random.Random) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    whole = logits.softmax(-1)[0]
    shares, chosen = route(logits, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], whole[[1, 2]])
    torch.testing.assert_close(route(logits, 2, True)[0].sum(), torch.tensor(1.0))


def test_score_correction_affects_the_choice_but_not_the_weights(rng: random.Random) -> None:
    """Compared with a loop over tokens; groups are chosen by their best two experts, or by the best one."""
    logits, correction = torch.randn(20, 12), torch.randn(12) * 0.3
    cases = ((1, 1, 2, True), (4, 2, 2, True), (4, 2, 1, True), (3, 1, 2, False), (6, 6, 2, True))
    for groups, within, first, normalized in cases:
        sets = groups, within, first
        shares, chosen = route(logits, 3, normalized, sigmoid=True, correction=correction, sets=sets, factor=2.5)
        for row, token_shares, numbers in zip(logits.tolist(), shares.tolist(), chosen.tolist(), strict=True):
            scores = [1 / (1 + math.exp(-logit)) for logit in row]
            corrected = [score + more for score, more in zip(scores, correction.tolist(), strict=True)]
            size = 12 // groups
            parts = [range(first, first + size) for first in range(0, 12, size)]
            best = sorted(parts, key=lambda part: -sum(sorted(corrected[i] for i in part)[-first:]))[:within]
            expected = sorted((i for part in best for i in part), key=lambda i: -corrected[i])[:3]
            assert numbers == expected
            total = sum(scores[i] for i in expected) if normalized else 1.0
            assert token_shares == pytest.approx([2.5 * scores[i] / total for i in expected], rel=1e-5)


def random_routing(rng: random.Random) -> tuple[Tensor, dict[str, Any]]:
    """Logits and routing options; often some logits are equal."""
    sets = rng.choice([1, 1, 2, 3, 4])
    experts, best = sets * rng.randint(2, 20), rng.randint(1, sets)
    logits = torch.randn(rng.choice([0, 1, 7, 40]), experts, device=DEVICE).to(rng.choice(DTYPES))
    if rng.random() < 0.5:
        logits = logits.round()
    correction = torch.randn(experts, device=DEVICE) if rng.random() < 0.5 else None
    by_logits = rng.random() < 0.3
    if correction is not None and not by_logits:  # otherwise equal sums would be of different scores
        correction = correction.round()
    count = rng.randint(1, min(8, experts * best // sets))
    options = {"normalized": rng.random() < 0.5, "sigmoid": rng.random() < 0.5, "correction": correction}
    options["least"], options["by_logits"], options["zeroed"] = rng.choice([1e-20, 0.1]), by_logits, rng.random() < 0.3
    return logits, options | {"count": count, "sets": (sets, best, rng.choice([1, 2])), "factor": rng.choice([1.0, 2.5])}


@pytest.mark.parametrize("seed", range(20))
def test_triton_routing_matches_the_reference_and_breaks_ties_by_index(seed: int) -> None:
    """The weights may differ where experts with equal corrected scores have different scores."""
    logits, options = random_routing(random.Random(seed))
    dispatch.force("triton")
    shares, chosen = route(logits, **options)
    dispatch.force("reference")
    expected, _ = route(logits, **options)
    if not options["zeroed"]:
        torch.testing.assert_close(shares.sort(-1).values, expected.sort(-1).values, rtol=1e-5, atol=1e-6)
    one_by_one = [route_one_token(row, chosen.shape[1], options) for row in logits.float()]
    assert chosen.tolist() == one_by_one


def route_one_token(logits: Tensor, count: int, options: dict[str, Any]) -> list[int]:
    """By sorting pairs of a score and an expert's index."""
    scores = logits.sigmoid() if options["sigmoid"] else logits.softmax(0)
    corrected = logits if options["by_logits"] else scores
    corrected = (corrected if options["correction"] is None else corrected + options["correction"]).tolist()
    sets, best, first = options["sets"]
    size = len(corrected) // sets
    sums = [sum(sorted(corrected[start : start + size])[-first:]) for start in range(0, len(corrected), size)]
    chosen_groups = sorted(range(sets), key=lambda one: (-sums[one], one))[:best]
    if options["zeroed"]:
        corrected = [value if i // size in chosen_groups else 0.0 for i, value in enumerate(corrected)]
        return sorted(range(len(corrected)), key=lambda i: (-corrected[i], i))[:count]
    return sorted((i for one in chosen_groups for i in range(one * size, one * size + size)), key=lambda i: (-corrected[i], i))[
        :count
    ]


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize(("zeroed", "expected"), [(False, [1, 0]), (True, [1, 2])])
def test_experts_outside_the_chosen_groups_are_excluded_or_score_0(kernels: str, zeroed: bool, expected: list[int]) -> None:
    """A score of 0 is more than one that is corrected to less than 0."""
    dispatch.force(kernels)
    logits, correction = torch.zeros(1, 4, device=DEVICE), torch.tensor([-0.9, 1.0, -0.6, -1.0], device=DEVICE)
    _, chosen = route(logits, 2, True, sigmoid=True, correction=correction, sets=(2, 1, 2), zeroed=zeroed)
    assert chosen.tolist() in ([expected], [[1, 3]] if zeroed else [expected])


def test_nan_logits_choose_valid_experts() -> None:
    dispatch.force("triton")
    _, chosen = route(torch.full((3, 5), math.nan, device=DEVICE), 4, True, sigmoid=True)
    assert chosen.max() < 5
    assert chosen.min() >= 0


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("highest", [4.0, -5.0, -15.0, -60.0])
def test_roots_of_softplus_are_accurate_however_small(kernels: str, highest: float) -> None:
    """1 + exp(logit) has few digits of exp(logit), or none."""
    logits = torch.linspace(highest - 9, highest, 24, device=DEVICE)[torch.randperm(24)].repeat(3, 1)
    dispatch.force(kernels)
    shares, chosen = route(logits, 5, True, rooted=True)
    assert chosen.equal(logits.topk(5).indices)
    scores = torch.log1p(logits.double().gather(1, chosen).exp()).sqrt()
    torch.testing.assert_close(shares.double(), scores / scores.sum(1, keepdim=True), rtol=2e-6, atol=0)


@pytest.mark.parametrize("pairs", [1, 31, 32, 33, 200, 256])
def test_single_launch_sort_of_few_pairs_matches_torch(pairs: int, rng: random.Random) -> None:
    experts = rng.randint(1, 70)
    numbers = torch.tensor([rng.randrange(experts) for _ in range(pairs)], device=DEVICE)
    order, starts = fused_routing.sort(numbers.view(1, -1), experts)
    expected, places = numbers.sort(stable=True)
    assert order.equal(places)
    assert starts.equal(torch.searchsorted(expected, torch.arange(experts + 1, device=DEVICE)))


def test_normalizing_scores_that_underflow_gives_0_not_nan() -> None:
    shares, _ = route(torch.full((1, 4), -300.0), 2, True, sigmoid=True)
    assert shares.tolist() == [[0.0, 0.0]]
