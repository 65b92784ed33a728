"""What adapters of low rank add to products means what each adds to each row by itself."""

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
def free() -> object:
    yield
    dispatch.force("")


@pytest.fixture
def promised(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch rows depend on no other on a CPU alone: cuBLAS takes other kernels for other numbers of rows."""
    if kernels == "reference":
        monkeypatch.setitem(globals(), "DEVICE", "cpu")


class Case:
    """Random adapters of different ranks, some of which leave the weight alone, and rows that go by one or by none."""

    def __init__(self, rng: random.Random, dtype: torch.dtype, rows: int) -> None:
        inputs, outputs, self.count = rng.randint(1, 150), rng.randint(1, 150), rng.choice([1, 2, 5])
        self.pairs: list[Pair | None] = []
        for number in range(self.count):
            rank = rng.choice([1, 3, 8, 16, 33])
            down, up = (
                torch.randn(rank, inputs, device=DEVICE) * inputs**-0.5,
                torch.randn(outputs, rank, device=DEVICE) * rank**-0.5,
            )
            self.pairs.append(None if number and rng.random() < 0.3 else (down.to(dtype), up.to(dtype)))
        self.numbers = torch.tensor([rng.randint(-1, self.count - 1) for _ in range(rows)], dtype=torch.int64, device=DEVICE)
        self.x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        self.before = torch.randn(rows, outputs, device=DEVICE).to(dtype)

    def found(self, kernels: str) -> Tensor:
        dispatch.force(kernels)
        lora, out = lay_out(self.pairs), self.before.clone()
        assert lora is not None
        lora.add(self.x, out, by_adapter(self.numbers, self.count))
        return out

    def expected(self) -> Tensor:
        """In float64, a row at a time."""
        out = self.before.double()
        for row, number in enumerate(self.numbers.tolist()):
            pair = self.pairs[number] if number >= 0 else None
            if pair:
                out[row] += pair[1].double() @ (pair[0].double() @ self.x[row].double())
        return out


@pytest.mark.usefixtures("promised")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_invariant_ones_depend_on_no_other_row(kernels: str, rng: random.Random) -> None:
    case = Case(rng, torch.float32, 150)
    dispatch.force(kernels)
    lora = lay_out(case.pairs, Invariance.INVARIANT)
    assert lora is not None
    out = case.before.clone()
    lora.add(case.x, out, by_adapter(case.numbers, case.count))
    for own in (slice(0, 1), slice(50, 53), slice(10, 140)):
        part = case.before[own].clone()
        lora.add(case.x[own], part, by_adapter(case.numbers[own], case.count))
        assert part.equal(out[own])


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_additions(dtype: torch.dtype, kernels: str, rng: random.Random) -> None:
    for rows in (0, 1, 7, rng.randint(20, 90)):
        case = Case(rng, dtype, rows)
        found, expected = case.found(kernels), case.expected()
        assert found.dtype == dtype
        if rows:
            assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
            assert found[case.numbers < 0].equal(case.before[case.numbers < 0])


@pytest.mark.usefixtures("promised")
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_rows_know_no_neighbours(kernels: str, rng: random.Random) -> None:
    """Not by a bit."""
    case = Case(rng, torch.float32, 30)
    found = case.found(kernels)
    case.x[10:], case.numbers[10:] = case.x[10:].flip(0), case.numbers[10:].flip(0)
    assert case.found(kernels)[:10].equal(found[:10])


def test_some_rows_of_a_choice() -> None:
    chosen = by_adapter(torch.tensor([2, -1, 0, 2, 1], device=DEVICE), 3)
    assert chosen.order.tolist() == [1, 2, 4, 0, 3]
    assert chosen.starts.tolist() == [1, 2, 3, 5]
    some = chosen.select(torch.tensor([3, 0, 1], device=DEVICE))
    assert (some.numbers.tolist(), some.order.tolist(), some.starts.tolist()) == ([2, 2, -1], [2, 0, 1], [1, 1, 1, 3])


def test_nothing_to_add() -> None:
    assert lay_out([None, None]) is None
    assert lay_out([]) is None


def test_a_fault_would_be_seen(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that takes the place of what it should add to."""
    honest = fused_experts._product
    monkeypatch.setattr(fused_experts, "_product", lambda out, *given, **how: honest(out.zero_(), *given, **how))
    with pytest.raises(AssertionError):
        test_additions(torch.float32, "triton", rng)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_one_that_comes_later_leaves_nothing_of_what_was_in_its_place(kernels: str, rng: random.Random) -> None:
    """Ranks up to the largest, into places that were another's, and some that leave the weight alone."""
    case = Case(rng, torch.float32, 60)
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
        lora.add(case.x, out, by_adapter(case.numbers, case.count))
        torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-4)
