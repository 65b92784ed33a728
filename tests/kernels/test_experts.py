"""A mixture of experts means what its MLPs mean one by one, however many tokens choose each of them."""

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from penstock.kernels import choose, fused_experts, reference
from penstock.kernels.experts import Gates, lay_out, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def free() -> object:
    yield
    choose.force("")


class Mixture:
    """Random weights of experts, and tokens that go through some of them."""

    def __init__(self, chance: random.Random, dtype: torch.dtype, tokens: int, number: int) -> None:
        hidden, size, self.count = chance.randint(1, 150), chance.randint(1, 90), chance.randint(1, min(number, 4))
        self.x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        self.gate_ups = [(torch.randn(2 * size, hidden, device=DEVICE) * hidden**-0.5).to(dtype) for _ in range(number)]
        self.downs = [(torch.randn(hidden, size, device=DEVICE) * size**-0.5).to(dtype) for _ in range(number)]
        logits = torch.randn(tokens, number, device=DEVICE) * 2
        logits[: tokens // 2, 0] += 9  # one expert that many choose, and others that nobody does
        self.shares, self.chosen = route(logits, self.count, chance.random() < 0.5)
        self.gates = Gates(chance.random() < 0.5, chance.choice([0.0, 0.0, 0.7]))
        self.biases = None
        if chance.random() < 0.5:
            self.biases = tuple(torch.randn(number, width, device=DEVICE).to(dtype) for width in (2 * size, hidden))

    def found(self, kernels: str) -> Tensor:
        choose.force(kernels)
        return lay_out(self.gate_ups, self.downs, self.biases, self.gates)(self.x, self.shares, self.chosen)

    def expected(self) -> Tensor:
        """In float64, a pair at a time."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for token, (shares, chosen) in enumerate(zip(self.shares.tolist(), self.chosen.tolist(), strict=True)):
            for share, expert in zip(shares, chosen, strict=True):
                first, second = (bias[expert].double() for bias in self.biases) if self.biases else (0, 0)
                inner = self.x[token : token + 1].double() @ self.gate_ups[expert].double().T + first
                inner = reference.gated(inner, self.gates.gelu, self.gates.limit)
                out[token] += share * (inner @ self.downs[expert].double().T + second)[0]
        return out


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, kernels: str, chance: random.Random) -> None:
    for tokens in (0, 1, 5, chance.randint(20, 60)):
        mixture = Mixture(chance, dtype, tokens, chance.choice([1, 3, 8]))
        found, expected = mixture.found(kernels), mixture.expected()
        assert found.dtype == dtype
        assert found.shape == expected.shape
        if tokens:
            size = max(1.0, expected.abs().max().item())
            assert (found.double() - expected).abs().max() <= TOLERANCES[dtype] * size


@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_of_many_and_of_few(rows: int, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are full, that are not, and that are not there."""
    honest = fused_experts._constants
    monkeypatch.setattr(fused_experts, "_constants", lambda *given: honest(*given) | {"ROWS": rows})
    mixture = Mixture(chance, torch.float32, 70, 3)
    torch.testing.assert_close(mixture.found("triton").double(), mixture.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_token_knows_no_neighbours(kernels: str, chance: random.Random) -> None:
    """Not by a bit, whoever else chose the same experts."""
    mixture = Mixture(chance, torch.float32, 9, 4)
    whole = mixture.found(kernels)
    mixture.x[[0, 1, 2, 5]] = torch.nan
    assert mixture.found(kernels)[[3, 4, 6, 7, 8]].equal(whole[[3, 4, 6, 7, 8]])


def test_a_fault_would_be_seen(chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a last tile that isn't launched."""
    honest = fused_experts.experts_kernel

    class Short:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return honest[(grid[0], max(1, grid[1] - 3))]

    monkeypatch.setattr(fused_experts, "experts_kernel", Short())
    mixture = Mixture(chance, torch.float32, 70, 3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(mixture.found("triton").double(), mixture.expected(), rtol=1e-4, atol=1e-4)


def test_shares(chance: random.Random) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    whole = logits.softmax(-1)[0]
    shares, chosen = route(logits, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(shares[0], whole[[1, 2]])
    torch.testing.assert_close(route(logits, 2, True)[0].sum(), torch.tensor(1.0))
