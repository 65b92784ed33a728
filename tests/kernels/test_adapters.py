"""LoRA products of rows with different adapters, by the reference and by Triton's kernels, compared with float64, one row at a
time."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import dispatch, fused_experts
from penstock.kernels.adapters import choose as by_adapter
from penstock.kernels.linear import Invariance
from penstock.kernels.low_rank import Pair, lay_out

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def automatic_dispatch() -> object:
    yield
    dispatch.force("")


@pytest.fixture
def reference_on_cpu_only(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference results of a row are independent of other rows on a CPU only: cuBLAS chooses kernels by the number of rows."""
    if kernels == "reference":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


class LoraCase:
    """Random adapters of different ranks, some of which do not change the weight, and rows that use one adapter or none."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, rows: int) -> None:
        inputs, outputs, self.count = rng.randint(1, 150), rng.randint(1, 150), rng.choice([1, 2, 5])
        self.pairs: list[Pair | None] = []
        for adapter in range(self.count):
            rank = rng.choice([1, 3, 8, 16, 33])
            down, up = (
                torch.randn(rank, inputs, device=DEVICE) * inputs**-0.5,
                torch.randn(outputs, rank, device=DEVICE) * rank**-0.5,
            )
            self.pairs.append(None if adapter and rng.random() < 0.3 else (down.to(dtype), up.to(dtype)))
        self.adapters = torch.tensor([rng.randint(-1, self.count - 1) for _ in range(rows)], dtype=torch.int64, device=DEVICE)
        self.x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        self.before = torch.randn(rows, outputs, device=DEVICE).to(dtype)

    def apply(self, kernels: str) -> Tensor:
        dispatch.force(kernels)
        lora, out = lay_out(self.pairs), self.before.clone()
        assert lora is not None
        lora.add(self.x, out, by_adapter(self.adapters, self.count))
        return out

    def expected(self) -> Tensor:
        """In float64, one row at a time."""
        out = self.before.double()
        for row, adapter in enumerate(self.adapters.tolist()):
            pair = self.pairs[adapter] if adapter >= 0 else None
            if pair:
                out[row] += pair[1].double() @ (pair[0].double() @ self.x[row].double())
        return out


@pytest.mark.usefixtures("reference_on_cpu_only")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_invariant_lora_results_are_bit_identical_for_any_subset_of_rows(kernels: str, rng: random.Random) -> None:
    case = LoraCase(rng, torch.float32, 150)
    dispatch.force(kernels)
    lora = lay_out(case.pairs, Invariance.INVARIANT)
    assert lora is not None
    out = case.before.clone()
    lora.add(case.x, out, by_adapter(case.adapters, case.count))
    for rows in (slice(0, 1), slice(50, 53), slice(10, 140)):
        part = case.before[rows].clone()
        lora.add(case.x[rows], part, by_adapter(case.adapters[rows], case.count))
        assert part.equal(out[rows])


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_lora_products_match_float64(dtype: torch.dtype, kernels: str, rng: random.Random) -> None:
    for rows in (0, 1, 7, rng.randint(20, 90)):
        case = LoraCase(rng, dtype, rows)
        found, expected = case.apply(kernels), case.expected()
        assert found.dtype == dtype
        if rows:
            assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
            assert found[case.adapters < 0].equal(case.before[case.adapters < 0])


@pytest.mark.usefixtures("reference_on_cpu_only")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_rows_are_bit_identical_whatever_the_other_rows_are(kernels: str, rng: random.Random) -> None:
    case = LoraCase(rng, torch.float32, 30)
    found = case.apply(kernels)
    case.x[10:], case.adapters[10:] = case.x[10:].flip(0), case.adapters[10:].flip(0)
    assert case.apply(kernels)[:10].equal(found[:10])


def test_selecting_rows_keeps_their_adapters_sorted() -> None:
    chosen = by_adapter(torch.tensor([2, -1, 0, 2, 1], device=DEVICE), 3)
    assert chosen.order.tolist() == [1, 2, 4, 0, 3]
    assert chosen.starts.tolist() == [1, 2, 3, 5]
    some = chosen.select(torch.tensor([3, 0, 1], device=DEVICE))
    assert (some.numbers.tolist(), some.order.tolist(), some.starts.tolist()) == ([2, 2, -1], [2, 0, 1], [1, 1, 1, 3])


def test_lay_out_without_any_adapter_returns_none() -> None:
    assert lay_out([None, None]) is None
    assert lay_out([]) is None


def test_check_detects_a_kernel_that_overwrites_instead_of_adding(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fused_experts._product
    monkeypatch.setattr(fused_experts, "_product", lambda out, *given, **how: original(out.zero_(), *given, **how))
    with pytest.raises(AssertionError):
        test_lora_products_match_float64(torch.float32, "triton", rng)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_adapter_loaded_into_a_used_number_leaves_nothing_of_the_previous_one(kernels: str, rng: random.Random) -> None:
    """With ranks up to the largest, and adapters that do not change the weight."""
    case = LoraCase(rng, torch.float32, 60)
    dispatch.force(kernels)
    first = case.pairs[0]
    assert first is not None
    largest = first[0].new_zeros(40, first[0].shape[1]), first[1].new_zeros(len(first[1]), 40)
    lora = lay_out([None] * case.count, largest=largest)
    assert lora is not None
    assert bool(lora.later) is (kernels == "reference")
    for turn in range(3):
        for number in rng.sample(range(case.count), case.count):
            rank = rng.choice([1, 8, 40])
            pair = torch.randn(rank, largest[0].shape[1]), torch.randn(len(largest[1]), rank) * 0.1
            case.pairs[number] = None if turn and rng.random() < 0.4 else (pair[0].to(DEVICE), pair[1].to(DEVICE))
            lora.put(number, lora.prepared(pair) if case.pairs[number] else None)
        out = case.before.clone()
        lora.add(case.x, out, by_adapter(case.adapters, case.count))
        torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-4)
